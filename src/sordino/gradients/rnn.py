"""The loops of a plain recurrent layer with tanh or relu (floor 1, gradients)."""

import torch
from torch import Tensor

from sordino.gradients.cells import Cell, Result, Steps, carry, first, space_for, with_ended
from sordino.gradients.products import affine_map

__all__ = ["rnn_backward", "rnn_forward"]

# ``factor · (1 − y²)``, the slope of y = tanh(·), in one pass.
_tanh_slope = torch.ops.aten.tanh_backward.grad_input


def rnn_forward(cell: Cell, steps: Steps, joined: Tensor, states: Tensor, c: Tensor) -> tuple[list[Tensor], Tensor]:
    """The states, written into their places; they are all that the backward pass needs."""
    weight, bias = cell.rows(0, cell.weight_hh.shape[0])
    every, state_of = joined.unbind(0), states.unbind(0)
    new_state = affine_map(joined.shape[1], weight, bias, "tanh" if cell.kind == "tanh" else "relu")
    for _, before, behind, n in steps.forwards():
        first(state_of[behind], n).copy_(new_state(first(every[before], n)))
        carry(state_of, before, behind, n)
    return [], c


def rnn_backward(
    cell: Cell, steps: Steps, states: Tensor, kept: list[Tensor], grads: Tensor, dh: Tensor, dc: Tensor | None
) -> Result:
    """The gradients at the gates and at the first state."""
    del dc, kept
    d_gates = space_for(steps, states, states.shape[2])
    back = affine_map(states.shape[1], cell.weight_hh.t().contiguous())
    rows, arrived = d_gates.unbind(0), grads.unbind(0)
    for t, _, behind, n in reversed(steps.forwards()):
        new = first(states[behind], n)
        d_now = first(dh, n) + first(arrived[t], n)
        row = first(rows[t], n)
        if cell.kind == "tanh":
            _tanh_slope(d_now, new, grad_input=row)
        else:
            torch.mul(d_now, new > 0, out=row)
        dh = with_ended(back(row), dh)
    return Result(input_gates=d_gates, state_gates=d_gates, dh=dh)
