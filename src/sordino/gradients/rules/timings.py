"""Which exact kernel is fastest here, by the clock (floor 1, gradients).

The cost model of `cost` knows one processor; this measures. For every shape of a layer each kernel takes the norms and
the weighted sum of a few made-up records, a few times, once and for all: choices are kept in a file. All kernels are
exact, so a choice changes rounding and speed alone. No record of the user's is timed: a choice tells nothing of any.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from sordino.gradients.rules.cost import Kernel, cheapest
from sordino.gradients.usual import is_recorded

__all__ = ["KernelTimings", "TIMED_RECORDS"]

# Made-up records that kernels are timed on.
TIMED_RECORDS = 8
# A kernel that the cost model holds this much slower than the best is not tried.
_HOPELESS = 6.0
_ROUNDS = 3


class KernelTimings:
    """The fastest kernels that were measured on this machine.

    Args:
        file: where choices are kept between processes; None for the user's cache folder.
    """

    def __init__(self, file: Path | None = None) -> None:
        from platformdirs import user_cache_path

        self._file = file or user_cache_path("sordino") / "kernels.json"
        self._chosen = _read(self._file)

    def fastest(
        self,
        layer: str,
        sizes: Mapping[str, int],
        costs: Mapping[Kernel, float],
        attempt: Callable[[Kernel], object],
        *,
        like: torch.Tensor,
    ) -> Kernel:
        """The kernel that took the least time for this shape.

        Args:
            layer: the kind of layer.
            sizes: what describes the shape, the number of records left out.
            costs: the kernels that may be taken, and what the cost model thinks of them.
            attempt: takes the norms and the weighted sum of `TIMED_RECORDS` made-up records by a kernel.
            like: a tensor of the computing type, where the work is done.
        """
        expected = cheapest(costs)
        if len(costs) == 1 or is_recorded() or torch._C._len_torch_dispatch_stack():  # pyright: ignore[reportPrivateUsage]
            return expected
        name = _name(layer, sizes, costs, like)
        known: Kernel | None = next((kernel for kernel in costs if kernel == self._chosen.get(name)), None)
        if known is None:
            tried: list[Kernel] = [kernel for kernel, cost in costs.items() if cost <= _HOPELESS * costs[expected]]
            seconds: dict[Kernel, float] = {kernel: _seconds(attempt, kernel, like.device) for kernel in tried}
            known = self._chosen[name] = cheapest(seconds)
            self._keep()
        return known

    def _keep(self) -> None:
        """Another process may have kept choices meanwhile; a cache that can't be written is done without."""
        together = _read(self._file) | self._chosen
        beside = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(together, indent=0, sort_keys=True))
            beside.replace(self._file)
        except OSError:
            with suppress(OSError):
                beside.unlink()


def _read(file: Path) -> dict[str, str]:
    try:
        kept = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return {name: kernel for name, kernel in kept.items() if isinstance(kernel, str)} if isinstance(kept, dict) else {}


def _name(layer: str, sizes: Mapping[str, int], costs: Collection[Kernel], like: torch.Tensor) -> str:
    where = torch.cuda.get_device_name(like.device) if like.is_cuda else torch.backends.cpu.get_cpu_capability()
    facts = [
        torch.__version__,
        where,
        f"{torch.get_num_threads()} threads",
        str(like.dtype).removeprefix("torch."),
        layer,
    ]
    return " ".join([*facts, *(f"{name}={size}" for name, size in sizes.items()), "of", *sorted(costs)])


def _seconds(attempt: Callable[[Kernel], object], kernel: Kernel, device: torch.device) -> float:
    """The least time of a few rounds: what others do on the machine only adds."""
    attempt(kernel)
    best = float("inf")
    for _ in range(_ROUNDS):
        _wait(device)
        started = time.perf_counter()
        attempt(kernel)
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
