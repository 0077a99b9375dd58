"""One direction of one recurrent layer: a loop in plain torch whose backward hands over the gate gradients (floor 1).

torch's fused kernels compute the same numbers but hide the gradients of the gates, which are all that per-record
gradients need: with G the gate gradients, a record's gradients are ``G^T x`` and ``G^T h``. Inputs and states lie side
by side, so that a step is one product forward and one backward. Legend: T steps, B records, d inputs, h units,
r outputs (r = h unless projected). Batches of unequal length have ``active[t]`` records at step t, the first ones; the
others keep their state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sordino.gradients.edge import asks_for_parameters
from sordino.gradients.products import affine, affine_map

__all__ = ["Cell", "Steps", "run_direction"]

Kind = Literal["lstm", "gru", "tanh", "relu"]

# Called with (inputs, previous states, unprojected outputs) and the gradients at (input gates, state gates, outputs).
GateReceiver = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], None]

# ``factor · y(1 − y)`` and ``factor · (1 − y²)``, the slopes of y = σ(·) and y = tanh(·), in one pass.
_sigmoid_slope = torch.ops.aten.sigmoid_backward.grad_input
_tanh_slope = torch.ops.aten.tanh_backward.grad_input


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


def run_direction(
    cell: Cell, steps: Steps, receive: GateReceiver | None, anchor: Tensor, x: Tensor, h: Tensor, c: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the loop.

    Args:
        cell: the weights.
        steps: the order of the steps.
        receive: takes what the backward pass brings; None where nothing is captured.
        anchor: a scalar that requires grad.
        x: inputs [T, B, d].
        h: first state [B, r].
        c: first cell state [B, h] of an LSTM, otherwise None.

    Returns:
        Outputs [T, B, r] (zero where a record has ended), last state, and last cell state (of an LSTM).
    """
    first = h if c is None else c
    return _Direction.apply(cell, steps, receive, anchor, x, h, first)


class _Direction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cell: Cell, steps: Steps, receive: GateReceiver | None, anchor: Tensor, x, h, c):
        count, records, inputs = x.shape
        # Row t holds step t's input and the state before it; the last state (the first in reverse) has a row alone.
        joined = x.new_empty(count + 1, records, inputs + cell.weight_hh.shape[1])
        rows, states = joined[1:] if steps.reverse else joined[:-1], joined[:, :, inputs:]
        rows[:, :, :inputs] = x
        states[-1 if steps.reverse else 0] = h
        kept, last_cell = _FORWARD[cell.kind](cell, steps, joined, states, c)
        ctx.cell, ctx.steps, ctx.receive, ctx.anchor, ctx.inputs = cell, steps, receive, anchor, inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(joined, *kept)
        outputs = states[:-1] if steps.reverse else states[1:]
        outputs = _without_ended(outputs, steps).clone(memory_format=torch.contiguous_format)
        return outputs, states[0 if steps.reverse else -1].clone(), last_cell.clone()

    @staticmethod
    def backward(ctx, *gradients: Tensor | None):
        receive = ctx.receive if asks_for_parameters(ctx.anchor) else None
        grad_outputs, grad_h, grad_c = gradients
        joined, *kept = ctx.saved_tensors
        cell, steps, inputs = ctx.cell, ctx.steps, ctx.inputs
        rows, states = joined[1:] if steps.reverse else joined[:-1], joined[:, :, inputs:]
        if grad_outputs is None:
            grad_outputs = joined.new_zeros(states[1:].shape)
        elif min(steps.active, default=0) < states.shape[1]:
            grad_outputs = _without_ended(grad_outputs, steps)
        dh = joined.new_zeros(states[0].shape) if grad_h is None else grad_h
        result = _BACKWARD[cell.kind](cell, steps, states, kept, grad_outputs, dh, grad_c)
        if receive is not None:
            saved, grads = (rows[:, :, :inputs], rows[:, :, inputs:]), (result.input_gates, result.state_gates)
            if result.outputs is not None:
                saved, grads = (*saved, result.unprojected), (*grads, result.outputs)
            receive(saved, grads)
        dx = None
        if ctx.needs_input_grad[4]:
            gates = result.input_gates
            dx = affine(gates.flatten(0, 1), cell.weight_ih.t()).unflatten(0, gates.shape[:2])
        dc = result.dc if cell.kind == "lstm" else None
        return None, None, None, None, dx, result.dh, dc


@dataclass(eq=False, kw_only=True)
class _Result:
    input_gates: Tensor
    state_gates: Tensor
    dh: Tensor
    dc: Tensor | None = None
    unprojected: Tensor | None = None
    outputs: Tensor | None = None


def _without_ended(x: Tensor, steps: Steps) -> Tensor:
    """`x` [T, B, …] with the rows of ended records set to zero."""
    records = x.shape[1]
    if min(steps.active, default=records) == records:
        return x
    active = torch.tensor(steps.active, device=x.device)[:, None] > torch.arange(records, device=x.device)
    return torch.where(active[:, :, None], x, 0)


def _first(tensor: Tensor, n: int) -> Tensor:
    """The rows of the active records."""
    return tensor if tensor.shape[0] == n else tensor[:n]


def _with_ended(now: Tensor, before: Tensor) -> Tensor:
    """The active records' rows of `now`, the others' of `before`."""
    n = now.shape[0]
    return now if n == before.shape[0] else torch.cat([now, before[n:]])


def _carry(states: Sequence[Tensor], before: int, behind: int, n: int) -> None:
    """The ended records' state stays."""
    if n < states[behind].shape[0]:
        states[behind][n:] = states[before][n:]


def _gates_of(steps: Steps, like: Tensor, width: int) -> Tensor:
    """Space for gradients [T, B, width], zero where a record has ended."""
    count, records = len(steps.active), like.shape[1]
    ended = min(steps.active, default=0) < records
    return (like.new_zeros if ended else like.new_empty)(count, records, width)


def _split(gates: Tensor, parts: int) -> list[tuple[Tensor, ...]]:
    """One list of a view for each step, for every part of the gates' columns."""
    return [part.unbind(0) for part in gates.chunk(parts, dim=2)]


# --- LSTM: i, f, g, o ---------------------------------------------------------------------------------------------


def _lstm_forward(cell: Cell, steps: Steps, joined: Tensor, states: Tensor, c: Tensor) -> tuple[list[Tensor], Tensor]:
    h = cell.weight_hh.shape[0] // 4
    (weight_i_f, bias_i_f), (weight_g, bias_g), (weight_o, bias_o) = (
        cell.rows(first * h, last * h) for first, last in ((0, 2), (2, 3), (3, 4))
    )
    weight = torch.cat([weight_i_f, weight_o])
    bias = None if bias_i_f is None or bias_o is None else torch.cat([bias_i_f, bias_o])
    every, behind_each = joined.unbind(0), states.unbind(0)
    kept: list[Tensor] = []
    squashed_gates = affine_map(joined.shape[1], weight, bias, "sigmoid")
    new_cell = affine_map(joined.shape[1], weight_g, bias_g, "tanh")
    for _, before, behind, n in steps.forwards():
        row = _first(every[before], n)
        i_f_o = squashed_gates(row)
        i, f, o = i_f_o.chunk(3, dim=1)
        g = new_cell(row)
        now = torch.mul(f, _first(c, n)).addcmul_(i, g)
        squashed = torch.tanh(now)
        state = _first(behind_each[behind], n)
        if cell.weight_hr is None:
            torch.mul(o, squashed, out=state)
        else:
            state.copy_(affine(o * squashed, cell.weight_hr))
        _carry(behind_each, before, behind, n)
        kept += [i_f_o, g, squashed, c]
        c = _with_ended(now, c)
    return kept, c


def _lstm_backward(
    cell: Cell, steps: Steps, states: Tensor, kept: list[Tensor], grads: Tensor, dh: Tensor, dc: Tensor | None
) -> _Result:
    h = cell.weight_hh.shape[0] // 4
    d_gates = _gates_of(steps, states, 4 * h)
    rows, (d_i, d_f, d_g, d_o) = d_gates.unbind(0), _split(d_gates, 4)
    projected = cell.weight_hr is not None
    d_outputs = _gates_of(steps, states, states.shape[2]) if projected else None
    unprojected = _gates_of(steps, states, h) if projected else None
    back, arrived = affine_map(states.shape[1], cell.weight_hh.t().contiguous()), grads.unbind(0)
    dc = states.new_zeros(states.shape[1], h) if dc is None else dc.clone()
    order = steps.forwards()
    for place in reversed(range(len(order))):
        t, _, _, n = order[place]
        i_f_o, g, squashed, before = kept[4 * place : 4 * place + 4]
        i, f, o = i_f_o.chunk(3, dim=1)
        d_now = _first(dh, n) + _first(arrived[t], n)
        if d_outputs is not None and unprojected is not None and cell.weight_hr is not None:
            d_outputs[t, :n], unprojected[t, :n] = d_now, o * squashed
            d_now = affine(d_now, cell.weight_hr.t())
        _sigmoid_slope(d_now * squashed, o, grad_input=_first(d_o[t], n))
        d_cell = _first(dc, n)
        d_now *= o
        d_cell += _tanh_slope(d_now, squashed, grad_input=d_now)
        _sigmoid_slope(d_cell * g, i, grad_input=_first(d_i[t], n))
        _sigmoid_slope(d_cell * _first(before, n), f, grad_input=_first(d_f[t], n))
        _tanh_slope(d_cell * i, g, grad_input=_first(d_g[t], n))
        d_cell *= f
        dh = _with_ended(back(_first(rows[t], n)), dh)
    return _Result(input_gates=d_gates, state_gates=d_gates, dh=dh, dc=dc, unprojected=unprojected, outputs=d_outputs)


# --- GRU: r, z, n -------------------------------------------------------------------------------------------------


def _gru_forward(cell: Cell, steps: Steps, joined: Tensor, states: Tensor, c: Tensor) -> tuple[list[Tensor], Tensor]:
    h, inputs = states.shape[2], joined.shape[2] - states.shape[2]
    weight, bias = cell.rows(0, 2 * h)
    shifts = [None if shift is None else shift[2 * h :] for shift in (cell.bias_ih, cell.bias_hh)]
    of_input = affine(joined[:, :, :inputs].flatten(0, 1), cell.weight_ih[2 * h :], shifts[0])
    from_input = of_input.unflatten(0, joined.shape[:2]).unbind(0)
    every, state_of = joined.unbind(0), states.unbind(0)
    kept: list[Tensor] = []
    squashed = affine_map(joined.shape[1], weight, bias, "sigmoid")
    of_state = affine_map(joined.shape[1], cell.weight_hh[2 * h :], shifts[1])
    for _, before, behind, n in steps.forwards():
        r_z = squashed(_first(every[before], n))
        r, z = r_z.chunk(2, dim=1)
        state = _first(state_of[before], n)
        hidden = of_state(state)
        new = torch.addcmul(_first(from_input[before], n), r, hidden).tanh_()
        torch.lerp(new, state, z, out=_first(state_of[behind], n))
        _carry(state_of, before, behind, n)
        kept += [r_z, hidden, new]
    return kept, c


def _gru_backward(
    cell: Cell, steps: Steps, states: Tensor, kept: list[Tensor], grads: Tensor, dh: Tensor, dc: Tensor | None
) -> _Result:
    del dc
    h = states.shape[2]
    d_state, d_new = _gates_of(steps, states, 3 * h), _gates_of(steps, states, h)
    rows, (d_r, d_z, d_hidden) = d_state.unbind(0), _split(d_state, 3)
    back, arrived = affine_map(states.shape[1], cell.weight_hh.t().contiguous()), grads.unbind(0)
    order = steps.forwards()
    for place in reversed(range(len(order))):
        t, before, _, n = order[place]
        r_z, hidden, new = kept[3 * place : 3 * place + 3]
        r, z = r_z.chunk(2, dim=1)
        d_now = _first(dh, n) + _first(arrived[t], n)
        slope = _tanh_slope(torch.addcmul(d_now, d_now, z, value=-1), new, grad_input=_first(d_new[t], n))
        torch.mul(slope, r, out=_first(d_hidden[t], n))
        _sigmoid_slope(slope * hidden, r, grad_input=_first(d_r[t], n))
        _sigmoid_slope((_first(states[before], n) - new).mul_(d_now), z, grad_input=_first(d_z[t], n))
        dh = _with_ended(back(_first(rows[t], n)).addcmul_(d_now, z), dh)
    return _Result(input_gates=torch.cat([d_state[..., : 2 * h], d_new], dim=2), state_gates=d_state, dh=dh)


# --- plain RNN ----------------------------------------------------------------------------------------------------


def _rnn_forward(cell: Cell, steps: Steps, joined: Tensor, states: Tensor, c: Tensor) -> tuple[list[Tensor], Tensor]:
    weight, bias = cell.rows(0, cell.weight_hh.shape[0])
    every, state_of = joined.unbind(0), states.unbind(0)
    new_state = affine_map(joined.shape[1], weight, bias, "tanh" if cell.kind == "tanh" else "relu")
    for _, before, behind, n in steps.forwards():
        _first(state_of[behind], n).copy_(new_state(_first(every[before], n)))
        _carry(state_of, before, behind, n)
    return [], c


def _rnn_backward(
    cell: Cell, steps: Steps, states: Tensor, kept: list[Tensor], grads: Tensor, dh: Tensor, dc: Tensor | None
) -> _Result:
    del dc, kept
    d_gates = _gates_of(steps, states, states.shape[2])
    back = affine_map(states.shape[1], cell.weight_hh.t().contiguous())
    rows, arrived = d_gates.unbind(0), grads.unbind(0)
    for t, _, behind, n in reversed(steps.forwards()):
        new = _first(states[behind], n)
        d_now = _first(dh, n) + _first(arrived[t], n)
        row = _first(rows[t], n)
        if cell.kind == "tanh":
            _tanh_slope(d_now, new, grad_input=row)
        else:
            torch.mul(d_now, new > 0, out=row)
        dh = _with_ended(back(row), dh)
    return _Result(input_gates=d_gates, state_gates=d_gates, dh=dh)


_FORWARD = {"lstm": _lstm_forward, "gru": _gru_forward, "tanh": _rnn_forward, "relu": _rnn_forward}
_BACKWARD = {"lstm": _lstm_backward, "gru": _gru_backward, "tanh": _rnn_backward, "relu": _rnn_backward}
