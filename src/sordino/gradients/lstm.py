"""The loops of an LSTM: gates i, f, g, o (floor 1, gradients).

With c the cell, s = tanh(c) and u = o·s the output, the gradients at the gates are products of what arrives at u and at
c with six numbers that the forward pass knows: ``du·u(1 − o)`` at o and, with ``dc + du·(o − u·s)`` as the new dc,
``dc·ig(1 − i)`` at i, ``dc·fc(1 − f)`` at f, ``dc·i(1 − g²)`` at g; ``dc·f`` goes on. The forward pass keeps these six,
each apart in memory. Legend: `cells`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from sordino.gradients.cells import Cell, Result, Steps, carry, first, space_for, with_ended
from sordino.gradients.elementwise import Elementwise, elementwise
from sordino.gradients.products import affine_map

__all__ = ["lstm_backward", "lstm_forward"]


class _Work:
    """What one step works in: parts of `space` [10, B, h], cut to the active records."""

    def __init__(self, space: Tensor, n: int, ops: Elementwise) -> None:
        cut = space[:, :n]
        arrays = ops.of(cut)
        self.records = n
        # i, f, g, o as records have them, all squashed as i, f, o are; that of g isn't read.
        self.squashed = cut[:4].transpose(0, 1)
        self.i_f, self.i, self.f, self.o = arrays[:2], arrays[0], arrays[1], arrays[3]
        self.g_c, self.g, self.c = arrays[4:6], arrays[4], arrays[5]
        self.ig_fc, self.ig, self.fc = arrays[6:8], arrays[6], arrays[7]
        self.s, self.u, self.unprojected = arrays[8], arrays[9], cut[9]


def lstm_forward(cell: Cell, steps: Steps, joined: Tensor, states: Tensor, c: Tensor) -> tuple[list[Tensor], Tensor]:
    """The states, written into their places, what the backward pass needs, and the last cell state."""
    count, records, h = len(steps.active), joined.shape[1], cell.weight_hh.shape[0] // 4
    gates_of = affine_map(records, *cell.rows(0, 4 * h))
    project = None if cell.weight_hr is None else affine_map(records, cell.weight_hr)
    ops = elementwise(joined, records * h)
    multiply, add, tanh, less_product = ops.multiply, ops.add, ops.tanh, ops.less_product
    slopes, space = joined.new_empty(count, 6, records, h), joined.new_empty(10, records, h)
    space[5] = c
    unprojected = joined.new_empty(0) if project is None else space_for(steps, joined, h)
    every, state_of = joined.unbind(0), states.unbind(0)
    slopes_of, places, work = ops.of(slopes), ops.of(states), _Work(space, records, ops)
    for t, before, behind, n in steps.forwards():
        if n != work.records:
            work = _Work(space, n, ops)
        gates = gates_of(first(every[before], n))
        torch.sigmoid(gates.view(n, 4, h), out=work.squashed)
        tanh(ops.of(gates)[:, 2 * h : 3 * h], work.g)
        multiply(work.i_f, work.g_c, work.ig_fc)
        add(work.ig, work.fc, work.c)
        tanh(work.c, work.s)
        multiply(work.o, work.s, work.u)
        if project is None:
            places[behind][:n] = work.u
        else:
            unprojected[t, :n] = work.unprojected
            state_of[behind][:n] = project(work.unprojected)
        slope = slopes_of[t][:, :n]
        less_product(work.ig_fc, work.ig_fc, work.i_f, slope[:2])
        less_product(work.i, work.ig, work.g, slope[2])
        less_product(work.u, work.u, work.o, slope[3])
        less_product(work.o, work.u, work.s, slope[4])
        slope[5] = work.f
        carry(state_of, before, behind, n)
    return [slopes, unprojected], space[5]


def lstm_backward(
    cell: Cell, steps: Steps, states: Tensor, kept: list[Tensor], grads: Tensor, dh: Tensor, dc: Tensor | None
) -> Result:
    """The gradients at the gates and at the first states."""
    slopes, unprojected = kept
    records, h, r = states.shape[1], cell.weight_hh.shape[0] // 4, states.shape[2]
    back = affine_map(records, cell.weight_hh.t().contiguous())
    unproject = None if cell.weight_hr is None else affine_map(records, cell.weight_hr.t().contiguous())
    ops = elementwise(states, records * h)
    of, multiply, add, plus_product = ops.of, ops.multiply, ops.add, ops.plus_product
    d_gates = space_for(steps, states, 4 * h)
    d_outputs = None if unproject is None else space_for(steps, states, r)
    dc = states.new_zeros(records, h) if dc is None else dc.clone()
    arriving = states.new_empty(records, r)
    rows, slopes_of, arrived = d_gates.unbind(0), of(slopes), of(grads)
    d_gates_of, d_cells, d_states = of(d_gates), of(dc), of(arriving)
    for t, _, _, n in reversed(steps.forwards()):
        slope, d_gate, d_cell, du = slopes_of[t][:, :n], d_gates_of[t][:n], d_cells[:n], d_states[:n]
        add(of(dh)[:n], arrived[t][:n], du)
        if d_outputs is not None and unproject is not None:
            d_outputs[t, :n] = arriving[:n]
            du = of(unproject(arriving[:n]))
        plus_product(d_cell, du, slope[4], d_cell)
        for gate in range(3):
            multiply(d_cell, slope[gate], d_gate[:, gate * h : (gate + 1) * h])
        multiply(du, slope[3], d_gate[:, 3 * h :])
        multiply(d_cell, slope[5], d_cell)
        dh = with_ended(back(first(rows[t], n)), dh)
    result = Result(input_gates=d_gates, state_gates=d_gates, dh=dh, dc=dc)
    return result if d_outputs is None else replace(result, unprojected=unprojected, outputs=d_outputs)
