"""What changes speed and memory and never the guarantee or the result (floor 3)."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from sordino import checks
from sordino.gradients import GradientCapture, KernelTimings
from sordino.training.kept_memory import kept_memory

__all__ = ["Memory", "Performance"]

Memory = Literal["fast", "lean", "block", "two-pass"]


@dataclass(frozen=True, kw_only=True)
class Performance:
    """What changes speed and memory and never the guarantee or the result.

    Args:
        microbatch_size: most records in one forward and backward; None takes the logical batch whole.
        device: where the model and the batches live; None leaves them where the model is.
        compile: run the steps of `fit` as compiled graphs; it refuses what can't be compiled. Needs a C++ compiler.
            With diagnostics, which show losses, steps stay as they are.
        memory: "lean" keeps per-record gradients only where they are smaller than what is freed for them; it is slower.
            "block" clips each group of a `GroupedClipping` while the backward pass runs, and frees its layers then.
            "two-pass" runs the backward pass twice, for norms and then for sums, and keeps nothing of a layer: with
            gradient checkpointing, or where memory is short. A step takes 1.9 times a plain checkpointed one.
        autotune: take the kernels that are fastest by the clock instead of the cost model's. Each shape of a layer is
            timed when it first comes, and remembered in the user's cache folder. Runs then repeat up to rounding only.
    """

    microbatch_size: int | None = None
    device: str | None = None
    compile: bool = False
    memory: Memory = "fast"
    autotune: bool = False

    def __post_init__(self) -> None:
        if self.microbatch_size is not None:
            checks.integer(1, microbatch_size=self.microbatch_size)
        checks.one_of(get_args(Memory), memory=self.memory)

    def capture(self, model: nn.Module, parameters: Iterable[nn.Parameter]) -> GradientCapture:
        """What measures and adds up the gradients, with the kernels that are wanted."""
        timings = KernelTimings() if self.autotune else None
        return GradientCapture(model, parameters, lean=self.memory != "fast", timings=timings)

    def keeping(self) -> AbstractContextManager[None]:
        """A block in which freed memory is kept, unless memory is to be spared."""
        return kept_memory() if self.memory == "fast" else nullcontext()
