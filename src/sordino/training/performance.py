"""What changes speed and memory and never the guarantee or the result (floor 3)."""

from dataclasses import dataclass
from typing import Literal, get_args

from sordino import checks

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
            gradient checkpointing, or where memory is short. It takes half as long again.
    """

    microbatch_size: int | None = None
    device: str | None = None
    compile: bool = False
    memory: Memory = "fast"

    def __post_init__(self) -> None:
        if self.microbatch_size is not None:
            checks.integer(1, microbatch_size=self.microbatch_size)
        checks.one_of(get_args(Memory), memory=self.memory)
