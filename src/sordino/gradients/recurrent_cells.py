"""What the loops over the time steps of a recurrent layer share.

Legend: T steps, B records, d inputs, h units, r outputs (r = h unless projected). Batches of unequal length have
``active[t]`` records at step t, the first ones; the others keep their state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sordino.gradients.numerics import affine, affine_map, is_tracing_graph

Kind = Literal["lstm", "gru", "tanh", "relu"]


@dataclass(frozen=True, kw_only=True)
class CellWeights:
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
class TimeSteps:
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


def without_ended(x: Tensor, steps: TimeSteps) -> Tensor:
    """`x` [T, B, …] with the rows of ended records set to zero."""
    records = x.shape[1]
    if min(steps.active, default=records) == records:
        return x
    active = torch.tensor(steps.active, device=x.device)[:, None] > torch.arange(records, device=x.device)
    return torch.where(active[:, :, None], x, 0)


def first(tensor: Tensor, n: int) -> Tensor:
    """The rows of the active records."""
    return tensor if tensor.shape[0] == n else tensor[:n]


def carry(states: Sequence[Tensor], before: int, behind: int, n: int) -> None:
    """The ended records' state stays."""
    if n < states[behind].shape[0]:
        states[behind][n:] = states[before][n:]


def space_for(steps: TimeSteps, like: Tensor, width: int) -> Tensor:
    """Space for gradients [T, B, width], zero where a record has ended."""
    count, records = len(steps.active), like.shape[1]
    ended = min(steps.active, default=0) < records
    return (like.new_zeros if ended else like.new_empty)(count, records, width)


# ----------------------------------------------------------------------------------------------------------------------
# Operations on the entries of small arrays, by torch or by numpy.
#
# A loop over time steps calls many operations on a few thousand numbers each. There numpy's way in is shorter than
# torch's, and its tanh has kernels for wide registers, several times as fast. Which is taken depends on device, type
# and size alone, never on a clock or on data, and changes only rounding.
# ----------------------------------------------------------------------------------------------------------------------


# A tensor, or numpy's array on the same memory: both are cut and assigned to alike.
Array = Any

# Twice the size from which torch uses several threads: there these could make up for numpy's wider kernels.
_MOST = 65536


@dataclass(frozen=True, kw_only=True)
class Elementwise:
    """One library's operations. Results go to the last argument, which overlaps no other unless they are the same.

    Args:
        of: a tensor's memory as the library's array.
        multiply: (a, b, out).
        add: (a, b, out).
        subtract: (a, b, out).
        tanh: (x, out).
        less_product: (a, b, c, out): ``a − b·c``, out being none of the three.
        plus_product: (a, b, c, out): ``a + b·c``, out being a or none of the three.
    """

    of: Callable[[Tensor], Array]
    multiply: Callable[[Array, Array, Array], object]
    add: Callable[[Array, Array, Array], object]
    subtract: Callable[[Array, Array, Array], object]
    tanh: Callable[[Array, Array], object]
    less_product: Callable[[Array, Array, Array, Array], object]
    plus_product: Callable[[Array, Array, Array, Array], object]


def elementwise(like: Tensor, entries: int) -> Elementwise:
    """What is faster for arrays of about so many entries."""
    by_numpy = (
        entries <= _MOST
        and type(like) is Tensor
        and like.device.type == "cpu"
        and like.dtype in (torch.float32, torch.float64)
        # What is recorded must be seen by torch.
        and not is_tracing_graph()
        and not torch._C._len_torch_dispatch_stack()  # pyright: ignore[reportPrivateUsage]
    )
    return NUMPY if by_numpy else TORCH


def _numpy_less_product(a: Array, b: Array, c: Array, out: Array) -> None:
    np.multiply(b, c, out)
    np.subtract(a, out, out)


def _numpy_plus_product(a: Array, b: Array, c: Array, out: Array) -> None:
    np.add(a, np.multiply(b, c), out)


TORCH = Elementwise(
    of=lambda tensor: tensor,
    multiply=lambda a, b, out: torch.mul(a, b, out=out),
    add=lambda a, b, out: torch.add(a, b, out=out),
    subtract=lambda a, b, out: torch.sub(a, b, out=out),
    tanh=lambda x, out: torch.tanh(x, out=out),
    less_product=lambda a, b, c, out: torch.addcmul(a, b, c, value=-1, out=out),
    plus_product=lambda a, b, c, out: torch.addcmul(a, b, c, out=out),
)
NUMPY = Elementwise(
    of=Tensor.numpy,
    multiply=np.multiply,
    add=np.add,
    subtract=np.subtract,
    tanh=np.tanh,
    less_product=_numpy_less_product,
    plus_product=_numpy_plus_product,
)


# ----------------------------------------------------------------------------------------------------------------------
# The loops of a GRU: gates r, z, n.
#
# With m what the state sends to n, the new state is ``n + z(h − n)``, n being ``tanh(x + r·m)``. The gradients at the
# gates are what arrives at the new state times numbers that the forward pass knows: ``a = (1 − z)(1 − n²)`` at n and x,
# ``a·r`` at m, and that times ``m(1 − r)`` at r; ``z(h − n)(1 − z)`` at z. The forward pass keeps these and z, each
# apart in memory. Legend: `cells`.
# ----------------------------------------------------------------------------------------------------------------------


class _Work:
    """What one step works in: parts of `space` [7, B, h] and `gates` [B, 2, h], cut to the active records."""

    def __init__(self, space: Tensor, gates: Tensor, n: int, ops: Elementwise) -> None:
        cut = space[:, :n]
        self.records = n
        # r and z as records have them, as they come and squashed; what the state sends to n.
        self.gates, self.squashed, self.m = gates[:n], cut[:2].transpose(0, 1), cut[6]
        self.product = self.gates.flatten(1)
        self.r, self.z, self.new, self.kept, self.flat, self.one, self.sent = ops.of(cut)


def gru_forward(
    cell: CellWeights, steps: TimeSteps, joined: Tensor, states: Tensor, c: Tensor
) -> tuple[list[Tensor], Tensor]:
    """The states, written into `states`, and what the backward pass needs."""
    records, h = states.shape[1:]
    inputs = joined.shape[2] - h
    shifts = [None if shift is None else shift[2 * h :] for shift in (cell.bias_ih, cell.bias_hh)]
    of_input = affine(joined[:, :, :inputs].flatten(0, 1), cell.weight_ih[2 * h :], shifts[0])
    gates_of = affine_map(records, *cell.rows(0, 2 * h))
    of_state = affine_map(records, cell.weight_hh[2 * h :], shifts[1])
    ops = elementwise(joined, records * h)
    of, multiply, less_product = ops.of, ops.multiply, ops.less_product
    slopes, space = joined.new_empty(len(steps.active), 5, records, h), joined.new_empty(7, records, h)
    gates = joined.new_empty(records, 2, h)
    space[5] = 1
    every, state_of = joined.unbind(0), states.unbind(0)
    from_input, slopes_of, positions = of(of_input.unflatten(0, joined.shape[:2])), of(slopes), of(states)
    work = _Work(space, gates, records, ops)
    for t, before, behind, n in steps.forwards():
        if n != work.records:
            work = _Work(space, gates, n, ops)
        gates_of(first(every[before], n), work.product)
        torch.sigmoid(work.gates, out=work.squashed)
        of_state(first(state_of[before], n), work.m)
        ops.plus_product(from_input[before][:n], work.r, work.sent, work.new)
        ops.tanh(work.new, work.new)
        ops.subtract(positions[before][:n], work.new, work.kept)
        multiply(work.z, work.kept, work.kept)
        ops.add(work.new, work.kept, positions[behind][:n])
        at_r, at_z, at_sent, at_new, z = slopes_of[t][:, :n]
        less_product(work.one, work.new, work.new, work.flat)
        less_product(work.flat, work.flat, work.z, at_new)
        multiply(at_new, work.r, at_sent)
        less_product(work.sent, work.sent, work.r, at_r)
        less_product(work.kept, work.kept, work.z, at_z)
        z[:] = work.z
        carry(state_of, before, behind, n)
    return [slopes], c


def gru_backward(
    cell: CellWeights,
    steps: TimeSteps,
    states: Tensor,
    kept: list[Tensor],
    grads: Tensor,
    dh: Tensor,
    dc: Tensor | None,
) -> Result:
    """The gradients at the gates and at the first state."""
    del dc
    (slopes,) = kept
    records, h = states.shape[1:]
    back, dh = affine_map(records, cell.weight_hh.t()), dh.clone(memory_format=torch.contiguous_format)
    ops = elementwise(states, records * h)
    of, multiply = ops.of, ops.multiply
    d_state, d_new, arriving = (
        space_for(steps, states, 3 * h),
        space_for(steps, states, h),
        states.new_empty(records, h),
    )
    rows, slopes_of, arrived = d_state.unbind(0), of(slopes), of(grads)
    d_state_of, d_new_of, d_states, d_before = of(d_state), of(d_new), of(arriving), of(dh)
    for t, _, _, n in reversed(steps.forwards()):
        slope, d_gate, du, now = slopes_of[t][:, :n], d_state_of[t][:n], d_states[:n], d_before[:n]
        ops.add(now, arrived[t][:n], du)
        for gate in (1, 2):
            multiply(du, slope[gate], d_gate[:, gate * h : (gate + 1) * h])
        multiply(d_gate[:, 2 * h :], slope[0], d_gate[:, :h])
        multiply(du, slope[3], d_new_of[t][:n])
        back(first(rows[t], n), first(dh, n))
        ops.plus_product(now, du, slope[4], now)
    return Result(input_gates=torch.cat([d_state[..., : 2 * h], d_new], dim=2), state_gates=d_state, dh=dh)


# ----------------------------------------------------------------------------------------------------------------------
# The loops of an LSTM: gates i, f, g, o.
#
# With c the cell, s = tanh(c) and u = o·s the output, the gradients at the gates are products of what arrives at u and
# at c with six numbers that the forward pass knows: ``du·u(1 − o)`` at o and, with ``dc + du·(o − u·s)`` as the new dc,
# ``dc·ig(1 − i)`` at i, ``dc·fc(1 − f)`` at f, ``dc·i(1 − g²)`` at g; ``dc·f`` goes on. The forward pass keeps these
# six, each apart in memory. Legend: `cells`.
# ----------------------------------------------------------------------------------------------------------------------


class _LstmWork:
    """What one step works in: parts of `space` [10, B, h] and `gates` [B, 4, h], cut to the active records."""

    def __init__(self, space: Tensor, gates: Tensor, n: int, ops: Elementwise) -> None:
        cut = space[:, :n]
        arrays = ops.of(cut)
        self.records = n
        # i, f, g, o as records have them, as they come and all squashed as i, f, o are; that of g isn't read.
        self.gates, self.squashed = gates[:n], cut[:4].transpose(0, 1)
        self.product, self.before_g = self.gates.flatten(1), ops.of(self.gates)[:, 2]
        self.i_f, self.i, self.f, self.o = arrays[:2], arrays[0], arrays[1], arrays[3]
        self.g_c, self.g, self.c = arrays[4:6], arrays[4], arrays[5]
        self.ig_fc, self.ig, self.fc = arrays[6:8], arrays[6], arrays[7]
        self.s, self.u, self.unprojected = arrays[8], arrays[9], cut[9]


def lstm_forward(
    cell: CellWeights, steps: TimeSteps, joined: Tensor, states: Tensor, c: Tensor
) -> tuple[list[Tensor], Tensor]:
    """The states, written into `states`, what the backward pass needs, and the last cell state."""
    count, records, h = len(steps.active), joined.shape[1], cell.weight_hh.shape[0] // 4
    gates_of = affine_map(records, *cell.rows(0, 4 * h))
    project = None if cell.weight_hr is None else affine_map(records, cell.weight_hr)
    ops = elementwise(joined, records * h)
    multiply, add, tanh, less_product = ops.multiply, ops.add, ops.tanh, ops.less_product
    slopes, space = joined.new_empty(count, 6, records, h), joined.new_empty(10, records, h)
    gates = joined.new_empty(records, 4, h)
    space[5] = c
    unprojected = joined.new_empty(0) if project is None else space_for(steps, joined, h)
    every, state_of = joined.unbind(0), states.unbind(0)
    slopes_of, positions, work = ops.of(slopes), ops.of(states), _LstmWork(space, gates, records, ops)
    for t, before, behind, n in steps.forwards():
        if n != work.records:
            work = _LstmWork(space, gates, n, ops)
        gates_of(first(every[before], n), work.product)
        torch.sigmoid(work.gates, out=work.squashed)
        tanh(work.before_g, work.g)
        multiply(work.i_f, work.g_c, work.ig_fc)
        add(work.ig, work.fc, work.c)
        tanh(work.c, work.s)
        multiply(work.o, work.s, work.u)
        if project is None:
            positions[behind][:n] = work.u
        else:
            unprojected[t, :n] = work.unprojected
            project(work.unprojected, first(state_of[behind], n))
        slope = slopes_of[t][:, :n]
        less_product(work.ig_fc, work.ig_fc, work.i_f, slope[:2])
        less_product(work.i, work.ig, work.g, slope[2])
        less_product(work.u, work.u, work.o, slope[3])
        less_product(work.o, work.u, work.s, slope[4])
        slope[5] = work.f
        carry(state_of, before, behind, n)
    return [slopes, unprojected], space[5]


def lstm_backward(
    cell: CellWeights,
    steps: TimeSteps,
    states: Tensor,
    kept: list[Tensor],
    grads: Tensor,
    dh: Tensor,
    dc: Tensor | None,
) -> Result:
    """The gradients at the gates and at the first states."""
    slopes, unprojected = kept
    records, h, r = states.shape[1], cell.weight_hh.shape[0] // 4, states.shape[2]
    back, dh = affine_map(records, cell.weight_hh.t()), dh.clone(memory_format=torch.contiguous_format)
    unproject = None if cell.weight_hr is None else affine_map(records, cell.weight_hr.t())
    ops = elementwise(states, records * h)
    of, multiply, add, plus_product = ops.of, ops.multiply, ops.add, ops.plus_product
    d_gates = space_for(steps, states, 4 * h)
    d_outputs = None if unproject is None else space_for(steps, states, r)
    dc = states.new_zeros(records, h) if dc is None else dc.clone()
    # Gradients at the gates, each apart in memory: rows are written whole, for parts of a row are slow to reach.
    apart, arriving, unprojecting = (
        states.new_empty(4, records, h),
        states.new_empty(records, r),
        dc.new_empty(dc.shape),
    )
    by_record, rows, split = apart.transpose(0, 1), d_gates.unbind(0), d_gates.unflatten(2, (4, h)).unbind(0)
    slopes_of, arrived, d_cells, d_before = of(slopes), of(grads), of(dc), of(dh)
    d_parts, d_states, d_unprojected = of(apart), of(arriving), of(unprojecting)
    for t, _, _, n in reversed(steps.forwards()):
        slope, d_gate, d_cell, du = slopes_of[t][:, :n], d_parts[:, :n], d_cells[:n], d_states[:n]
        add(d_before[:n], arrived[t][:n], du)
        if d_outputs is not None and unproject is not None:
            d_outputs[t, :n] = arriving[:n]
            unproject(first(arriving, n), first(unprojecting, n))
            du = d_unprojected[:n]
        plus_product(d_cell, du, slope[4], d_cell)
        multiply(d_cell, slope[:3], d_gate[:3])
        multiply(du, slope[3], d_gate[3])
        multiply(d_cell, slope[5], d_cell)
        first(split[t], n).copy_(first(by_record, n))
        back(first(rows[t], n), first(dh, n))
    result = Result(input_gates=d_gates, state_gates=d_gates, dh=dh, dc=dc)
    return result if d_outputs is None else replace(result, unprojected=unprojected, outputs=d_outputs)


# ----------------------------------------------------------------------------------------------------------------------
# The loops of a plain recurrent layer with tanh or relu.
# ----------------------------------------------------------------------------------------------------------------------


# ``factor · (1 − y²)``, the slope of y = tanh(·), in one pass.
_tanh_slope = torch.ops.aten.tanh_backward.grad_input


def rnn_forward(
    cell: CellWeights, steps: TimeSteps, joined: Tensor, states: Tensor, c: Tensor
) -> tuple[list[Tensor], Tensor]:
    """The states, written into `states`; they are all that the backward pass needs."""
    weight, bias = cell.rows(0, cell.weight_hh.shape[0])
    every, state_of = joined.unbind(0), states.unbind(0)
    new_state = affine_map(joined.shape[1], weight, bias, "tanh" if cell.kind == "tanh" else "relu")
    for _, before, behind, n in steps.forwards():
        new_state(first(every[before], n), first(state_of[behind], n))
        carry(state_of, before, behind, n)
    return [], c


def rnn_backward(
    cell: CellWeights,
    steps: TimeSteps,
    states: Tensor,
    kept: list[Tensor],
    grads: Tensor,
    dh: Tensor,
    dc: Tensor | None,
) -> Result:
    """The gradients at the gates and at the first state."""
    del dc, kept
    d_gates = space_for(steps, states, states.shape[2])
    back = affine_map(states.shape[1], cell.weight_hh.t())
    dh = dh.clone(memory_format=torch.contiguous_format)
    rows, arrived = d_gates.unbind(0), grads.unbind(0)
    for t, _, behind, n in reversed(steps.forwards()):
        new = first(states[behind], n)
        d_now = first(dh, n) + first(arrived[t], n)
        row = first(rows[t], n)
        if cell.kind == "tanh":
            _tanh_slope(d_now, new, grad_input=row)
        else:
            torch.mul(d_now, new > 0, out=row)
        back(row, first(dh, n))
    return Result(input_gates=d_gates, state_gates=d_gates, dh=dh)
