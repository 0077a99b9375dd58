"""Several processes under other libraries' launchers (floor 4): batches of them all, no wrapping."""

import math
import os

import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from sordino.errors import InvalidArgument

__all__ = ["check_count", "steps_an_epoch"]


def steps_an_epoch(loader: "DataLoader[object]", *, processes: int, accumulated: int = 1) -> int:
    """Logical batches an epoch: one has as many records on average as all processes would take between two steps.

    Args:
        loader: the user's; its batches are those of one process, as they are elsewhere.
        processes: that train together, ≥ 1.
        accumulated: batches of one process between two steps, ≥ 1.
    """
    # Where the user has shared the records out already, the loader's length is that of one process.
    shared_out = 1 if isinstance(getattr(loader, "sampler", None), DistributedSampler) else processes
    return max(1, math.ceil(len(loader) / (accumulated * shared_out)))


def check_count(owner: str, found: int, hint: str) -> None:
    """Refuse a trainer that knows of fewer processes than there are: each would write and evaluate as if it were alone.

    Args:
        owner: the setting that says how many there are.
        found: what it says.
        hint: what to do.

    Raises:
        InvalidArgument: torch's process group, or the launcher's environment, says otherwise.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else launched
    if count != found:
        raise InvalidArgument(f"{owner} must be the {count} that were started, got {found}. {hint}")
