"""Commands under torch's launcher: `train` is one run of all processes, every other command needs a single one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sordino.errors import InvalidArgument

if TYPE_CHECKING:
    from sordino.training.distributed import DistributedContext

__all__ = ["check_single_process_command", "check_single_process_options", "init_distributed", "is_rank_zero"]

_TOGETHER = ("train",)


def _several() -> bool:
    """Whether a launcher started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_rank_zero() -> bool:
    """Whether this process prints the command's last word: the first one, or the only one."""
    return not _several() or os.environ["RANK"] == "0"


def check_single_process_command(command: str | None) -> None:
    """Refuse a command that every process would carry out by itself, each with its own noise and its own charges.

    Raises:
        InvalidArgument: names the command.
    """
    if _several() and command not in _TOGETHER:
        raise InvalidArgument(
            f"command must be train in several processes, got {command}, which each of them would carry out again. "
            "Start it in one process."
        )


def check_single_process_options(**given: object) -> None:
    """Refuse options that work in a single process only.

    Raises:
        InvalidArgument: names those that were given.
    """
    names = [name for name, value in given.items() if value]
    if _several() and names:
        raise InvalidArgument(
            f"{', '.join(names)} must be left out in several processes, got a value. Start the command in one process."
        )


@contextmanager
def init_distributed() -> "Iterator[DistributedContext]":
    """The processes that the launcher started, joined into a process group; just this one where it is alone.

    The group is that of gloo: the command trains on processors. After a failure no process waits for the others; the
    launcher ends them.
    """
    from sordino.training.distributed import DistributedContext, get_distributed_context

    if not _several():
        yield DistributedContext()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    yield get_distributed_context()
    dist.barrier()
    dist.destroy_process_group()
