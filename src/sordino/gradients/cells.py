"""What the loops over the time steps of a recurrent layer share (floor 1, gradients).

Legend: T steps, B records, d inputs, h units, r outputs (r = h unless projected). Batches of unequal length have
``active[t]`` records at step t, the first ones; the others keep their state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "Cell",
    "Kind",
    "Result",
    "Steps",
    "carry",
    "first",
    "space_for",
    "with_ended",
    "without_ended",
]

Kind = Literal["lstm", "gru", "tanh", "relu"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The weights of one direction of one layer, detached: torch's `weight_ih`, `weight_hh`, biases, `weight_hr`."""

    kind: Kind
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    weight_hr: Tensor | None = None

    def rows(self, first: int, last: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a stretch of the gates, for inputs and states side by side."""
        weight = torch.cat([self.weight_ih[first:last], self.weight_hh[first:last]], dim=1)
        if self.bias_ih is None or self.bias_hh is None:
            return weight, None
        return weight, self.bias_ih[first:last] + self.bias_hh[first:last]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The order of the time steps: number of active records at each, and whether the last comes first."""

    active: Sequence[int]
    reverse: bool

    def forwards(self) -> list[tuple[int, int, int, int]]:
        """(step, position of the state before it, of the state behind it, active records), in the order of time."""
        count = len(self.active)
        if self.reverse:
            return [(t, t + 1, t, self.active[t]) for t in reversed(range(count))]
        return [(t, t, t + 1, self.active[t]) for t in range(count)]


@dataclass(eq=False, kw_only=True)
class Result:
    """What a loop backward in time brings.

    Args:
        input_gates: gradients at the gates, as far as they come from inputs [T, B, …].
        state_gates: the same as far as they come from states.
        dh: gradient at the first state.
        dc: gradient at the first cell state.
        unprojected: outputs before their projection [T, B, h].
        outputs: gradients behind it [T, B, r].
    """

    input_gates: Tensor
    state_gates: Tensor
    dh: Tensor
    dc: Tensor | None = None
    unprojected: Tensor | None = None
    outputs: Tensor | None = None


def without_ended(x: Tensor, steps: Steps) -> Tensor:
    """`x` [T, B, …] with the rows of ended records set to zero."""
    records = x.shape[1]
    if min(steps.active, default=records) == records:
        return x
    active = torch.tensor(steps.active, device=x.device)[:, None] > torch.arange(records, device=x.device)
    return torch.where(active[:, :, None], x, 0)


def first(tensor: Tensor, n: int) -> Tensor:
    """The rows of the active records."""
    return tensor if tensor.shape[0] == n else tensor[:n]


def with_ended(now: Tensor, before: Tensor) -> Tensor:
    """The active records' rows of `now`, the others' of `before`."""
    n = now.shape[0]
    return now if n == before.shape[0] else torch.cat([now, before[n:]])


def carry(states: Sequence[Tensor], before: int, behind: int, n: int) -> None:
    """The ended records' state stays."""
    if n < states[behind].shape[0]:
        states[behind][n:] = states[before][n:]


def space_for(steps: Steps, like: Tensor, width: int) -> Tensor:
    """Space for gradients [T, B, width], zero where a record has ended."""
    count, records = len(steps.active), like.shape[1]
    ended = min(steps.active, default=0) < records
    return (like.new_zeros if ended else like.new_empty)(count, records, width)
