"""The loops of a GRU: gates r, z, n (floor 1, gradients)."""

import torch
from torch import Tensor

from sordino.gradients.cells import Cell, Result, Steps, carry, first, space_for, split_gates, with_ended
from sordino.gradients.elementwise import elementwise
from sordino.gradients.products import affine, affine_map

__all__ = ["gru_backward", "gru_forward"]

# ``factor · y(1 − y)`` and ``factor · (1 − y²)``, the slopes of y = σ(·) and y = tanh(·), in one pass.
_sigmoid_slope = torch.ops.aten.sigmoid_backward.grad_input
_tanh_slope = torch.ops.aten.tanh_backward.grad_input


def gru_forward(cell: Cell, steps: Steps, joined: Tensor, states: Tensor, c: Tensor) -> tuple[list[Tensor], Tensor]:
    """The states, written into their places, and what the backward pass needs."""
    h, inputs = states.shape[2], joined.shape[2] - states.shape[2]
    weight, bias = cell.rows(0, 2 * h)
    shifts = [None if shift is None else shift[2 * h :] for shift in (cell.bias_ih, cell.bias_hh)]
    of_input = affine(joined[:, :, :inputs].flatten(0, 1), cell.weight_ih[2 * h :], shifts[0])
    from_input = of_input.unflatten(0, joined.shape[:2]).unbind(0)
    every, state_of = joined.unbind(0), states.unbind(0)
    kept: list[Tensor] = []
    squashed = affine_map(joined.shape[1], weight, bias, "sigmoid")
    ops = elementwise(joined, joined.shape[1] * h)
    of_state = affine_map(joined.shape[1], cell.weight_hh[2 * h :], shifts[1])
    for _, before, behind, n in steps.forwards():
        r_z = squashed(first(every[before], n))
        r, z = r_z.chunk(2, dim=1)
        state = first(state_of[before], n)
        hidden = of_state(state)
        new = torch.addcmul(first(from_input[before], n), r, hidden)
        ops.tanh(ops.of(new), ops.of(new))
        torch.lerp(new, state, z, out=first(state_of[behind], n))
        carry(state_of, before, behind, n)
        kept += [r_z, hidden, new]
    return kept, c


def gru_backward(
    cell: Cell, steps: Steps, states: Tensor, kept: list[Tensor], grads: Tensor, dh: Tensor, dc: Tensor | None
) -> Result:
    """The gradients at the gates and at the first state."""
    del dc
    h = states.shape[2]
    d_state, d_new = space_for(steps, states, 3 * h), space_for(steps, states, h)
    rows, (d_r, d_z, d_hidden) = d_state.unbind(0), split_gates(d_state, 3)
    back, arrived = affine_map(states.shape[1], cell.weight_hh.t().contiguous()), grads.unbind(0)
    order = steps.forwards()
    for place in reversed(range(len(order))):
        t, before, _, n = order[place]
        r_z, hidden, new = kept[3 * place : 3 * place + 3]
        r, z = r_z.chunk(2, dim=1)
        d_now = first(dh, n) + first(arrived[t], n)
        slope = _tanh_slope(torch.addcmul(d_now, d_now, z, value=-1), new, grad_input=first(d_new[t], n))
        torch.mul(slope, r, out=first(d_hidden[t], n))
        _sigmoid_slope(slope * hidden, r, grad_input=first(d_r[t], n))
        _sigmoid_slope((first(states[before], n) - new).mul_(d_now), z, grad_input=first(d_z[t], n))
        dh = with_ended(back(first(rows[t], n)).addcmul_(d_now, z), dh)
    return Result(input_gates=torch.cat([d_state[..., : 2 * h], d_new], dim=2), state_gates=d_state, dh=dh)
