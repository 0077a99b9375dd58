"""The loops of a GRU: gates r, z, n (floor 1, gradients).

With m what the state sends to n, the new state is ``n + z(h − n)``, n being ``tanh(x + r·m)``. The gradients at the
gates are what arrives at the new state times numbers that the forward pass knows: ``a = (1 − z)(1 − n²)`` at n and x,
``a·r`` at m, and that times ``m(1 − r)`` at r; ``z(h − n)(1 − z)`` at z. The forward pass keeps these and z, each apart
in memory. Legend: `cells`.
"""

import torch
from torch import Tensor

from sordino.gradients.cells import Cell, Result, Steps, carry, first, space_for, with_ended
from sordino.gradients.elementwise import Elementwise, elementwise
from sordino.gradients.products import affine, affine_map

__all__ = ["gru_backward", "gru_forward"]


class _Work:
    """What one step works in: parts of `space` [6, B, h], cut to the active records."""

    def __init__(self, space: Tensor, n: int, ops: Elementwise) -> None:
        cut = space[:, :n]
        self.records = n
        # r and z as records have them.
        self.squashed = cut[:2].transpose(0, 1)
        self.r, self.z, self.new, self.kept, self.flat, self.one = ops.of(cut)


def gru_forward(cell: Cell, steps: Steps, joined: Tensor, states: Tensor, c: Tensor) -> tuple[list[Tensor], Tensor]:
    """The states, written into their places, and what the backward pass needs."""
    records, h = states.shape[1:]
    inputs = joined.shape[2] - h
    shifts = [None if shift is None else shift[2 * h :] for shift in (cell.bias_ih, cell.bias_hh)]
    of_input = affine(joined[:, :, :inputs].flatten(0, 1), cell.weight_ih[2 * h :], shifts[0])
    gates_of = affine_map(records, *cell.rows(0, 2 * h))
    of_state = affine_map(records, cell.weight_hh[2 * h :], shifts[1])
    ops = elementwise(joined, records * h)
    of, multiply, less_product = ops.of, ops.multiply, ops.less_product
    slopes, space = joined.new_empty(len(steps.active), 5, records, h), joined.new_empty(6, records, h)
    space[5] = 1
    every, state_of = joined.unbind(0), states.unbind(0)
    from_input, slopes_of, places = of(of_input.unflatten(0, joined.shape[:2])), of(slopes), of(states)
    work = _Work(space, records, ops)
    for t, before, behind, n in steps.forwards():
        if n != work.records:
            work = _Work(space, n, ops)
        torch.sigmoid(gates_of(first(every[before], n)).view(n, 2, h), out=work.squashed)
        sent = of(of_state(first(state_of[before], n)))
        ops.plus_product(from_input[before][:n], work.r, sent, work.new)
        ops.tanh(work.new, work.new)
        ops.subtract(places[before][:n], work.new, work.kept)
        multiply(work.z, work.kept, work.kept)
        ops.add(work.new, work.kept, places[behind][:n])
        at_r, at_z, at_sent, at_new, z = slopes_of[t][:, :n]
        less_product(work.one, work.new, work.new, work.flat)
        less_product(work.flat, work.flat, work.z, at_new)
        multiply(at_new, work.r, at_sent)
        less_product(sent, sent, work.r, at_r)
        less_product(work.kept, work.kept, work.z, at_z)
        z[:] = work.z
        carry(state_of, before, behind, n)
    return [slopes], c


def gru_backward(
    cell: Cell, steps: Steps, states: Tensor, kept: list[Tensor], grads: Tensor, dh: Tensor, dc: Tensor | None
) -> Result:
    """The gradients at the gates and at the first state."""
    del dc
    (slopes,) = kept
    records, h = states.shape[1:]
    back = affine_map(records, cell.weight_hh.t().contiguous())
    ops = elementwise(states, records * h)
    of, multiply = ops.of, ops.multiply
    d_state, d_new, arriving = (
        space_for(steps, states, 3 * h),
        space_for(steps, states, h),
        states.new_empty(records, h),
    )
    rows, slopes_of, arrived = d_state.unbind(0), of(slopes), of(grads)
    d_state_of, d_new_of, d_states = of(d_state), of(d_new), of(arriving)
    for t, _, _, n in reversed(steps.forwards()):
        slope, d_gate, du = slopes_of[t][:, :n], d_state_of[t][:n], d_states[:n]
        ops.add(of(dh)[:n], arrived[t][:n], du)
        for gate in (1, 2):
            multiply(du, slope[gate], d_gate[:, gate * h : (gate + 1) * h])
        multiply(d_gate[:, 2 * h :], slope[0], d_gate[:, :h])
        multiply(du, slope[3], d_new_of[t][:n])
        now = back(first(rows[t], n))
        ops.plus_product(of(now), du, slope[4], of(now))
        dh = with_ended(now, dh)
    return Result(input_gates=torch.cat([d_state[..., : 2 * h], d_new], dim=2), state_gates=d_state, dh=dh)
