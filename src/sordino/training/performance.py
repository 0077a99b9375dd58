"""What changes speed and memory and never the guarantee or the result (floor 3)."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.gradients import GradientCapture, KernelTimings, OneByOne, Recorder
from sordino.training.kept_memory import kept_memory

__all__ = ["Gradients", "Memory", "Performance"]

Memory = Literal["fast", "lean", "block", "two-pass"]
Gradients = Literal["auto", "captured", "one-by-one"]


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
        gradients: "captured" has all records of a chunk in one forward and backward pass, with a rule for each layer.
            "one-by-one" runs plain autograd on one record at a time: for every model that runs on one record, whatever
            its layers do; `microbatch_size` is then 1. "auto" is "captured", and in `fit` "one-by-one" where made-up
            records show that the model can't be captured and has the gradients in a batch that its records have alone.
    """

    microbatch_size: int | None = None
    device: str | None = None
    compile: bool = False
    memory: Memory = "fast"
    autotune: bool = False
    gradients: Gradients = "auto"

    def __post_init__(self) -> None:
        if self.microbatch_size is not None:
            checks.integer(1, microbatch_size=self.microbatch_size)
        checks.one_of(get_args(Memory), memory=self.memory)
        checks.one_of(get_args(Gradients), gradients=self.gradients)
        if self.is_one_by_one:
            self._check_plain()

    def _check_plain(self) -> None:
        """Refuse settings of a capture where there is none."""
        given = {"memory": (self.memory, "fast"), "compile": (self.compile, False), "autotune": (self.autotune, False)}
        for name, (value, usual) in given.items():
            if value != usual:
                raise InvalidArgument(
                    f'{name} must be {usual!r} with gradients="one-by-one", got {value!r}: there is nothing to spare, '
                    "to compile or to choose where plain autograd runs. Leave it out."
                )

    @property
    def is_one_by_one(self) -> bool:
        """Whether plain autograd runs on one record at a time."""
        return self.gradients == "one-by-one"

    @property
    def chunk_size(self) -> int | None:
        """Most records in one forward and backward; None takes the logical batch whole."""
        return 1 if self.is_one_by_one else self.microbatch_size

    @property
    def may_change(self) -> bool:
        """Whether one record at a time may be taken where the model can't be captured."""
        return self.gradients == "auto" and self.memory == "fast" and not self.compile and not self.autotune

    def recorder(self, model: nn.Module, parameters: Iterable[nn.Parameter], *, own_loop: bool = False) -> Recorder:
        """What measures and adds up the gradients, with the kernels that are wanted."""
        if self.is_one_by_one:
            return OneByOne(model, parameters, only_backward=own_loop)
        timings = KernelTimings() if self.autotune else None
        return GradientCapture(model, parameters, lean=self.memory != "fast", timings=timings)

    def keeping(self) -> AbstractContextManager[None]:
        """A block in which freed memory is kept, unless memory is to be spared."""
        return kept_memory() if self.memory == "fast" else nullcontext()
