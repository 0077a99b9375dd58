"""One direction of one recurrent layer: a loop in plain torch whose backward hands over the gate gradients (floor 1).

torch's fused kernels compute the same numbers but hide the gradients of the gates, which are all that per-record
gradients need: with G the gate gradients, a record's gradients are ``G^T x`` and ``G^T h``. What doesn't depend on the
loop is computed for all time steps at once. Legend: T steps, B records, d inputs, h units, r outputs (r = h unless
projected). Batches of unequal length have ``active[t]`` records at step t, the first ones; the others keep their state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sordino.gradients.edge import asks_for_parameters

__all__ = ["Cell", "Steps", "run_direction"]

Kind = Literal["lstm", "gru", "tanh", "relu"]

# Called with (inputs, previous states, unprojected outputs) and the gradients at (input gates, state gates, outputs).
GateReceiver = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], None]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The weights of one direction of one layer, detached: torch's `weight_ih`, `weight_hh`, biases, `weight_hr`."""

    kind: Kind
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    weight_hr: Tensor | None = None


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
        gates = x @ cell.weight_ih.t()
        if cell.bias_ih is not None and cell.bias_hh is not None:
            gates += cell.bias_ih if cell.kind == "gru" else cell.bias_ih + cell.bias_hh
        count, records = x.shape[:2]
        states = x.new_empty(count + 1, records, cell.weight_hh.shape[1])
        states[-1 if steps.reverse else 0] = h
        kept = _FORWARD[cell.kind](cell, steps, gates, states, c)
        ctx.cell, ctx.steps, ctx.receive, ctx.anchor = cell, steps, receive, anchor
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, states, *kept)
        last = 0 if steps.reverse else -1
        outputs = states[:-1] if steps.reverse else states[1:]
        outputs = _without_ended(outputs, steps).clone() if count else outputs.clone()
        return outputs, states[last].clone(), kept[1][last].clone() if cell.kind == "lstm" else c.clone()

    @staticmethod
    def backward(ctx, *gradients: Tensor | None):
        receive = ctx.receive if asks_for_parameters(ctx.anchor) else None
        grad_outputs, grad_h, grad_c = gradients
        x, states, *kept = ctx.saved_tensors
        cell, steps = ctx.cell, ctx.steps
        if grad_outputs is None:
            grad_outputs = torch.zeros_like(states[1:])
        elif min(steps.active, default=0) < states.shape[1]:
            grad_outputs = _without_ended(grad_outputs, steps)
        dh = torch.zeros_like(states[0]) if grad_h is None else grad_h.clone()
        dc = torch.zeros_like(kept[1][0]) if cell.kind == "lstm" and grad_c is None else grad_c
        result = _BACKWARD[cell.kind](cell, steps, states, kept, grad_outputs, dh, dc)
        before = states[1:] if steps.reverse else states[:-1]
        if receive is not None:
            saved, grads = (x, before), (result.input_gates, result.state_gates)
            if result.outputs is not None:
                saved, grads = (*saved, result.unprojected), (*grads, result.outputs)
            receive(saved, grads)
        dx = result.input_gates @ cell.weight_ih if ctx.needs_input_grad[4] else None
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


def _carry(tensor: Tensor, before: int, behind: int, active: int) -> None:
    """The ended records' state stays."""
    if active < tensor.shape[1]:
        tensor[behind, active:] = tensor[before, active:]


def _sigmoid_slope(factor: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """``factor · y(1 − y)``, the slope of y = σ(·), in one pass."""
    return torch.ops.aten.sigmoid_backward.grad_input(factor, y, grad_input=out)


def _tanh_slope(factor: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """``factor · (1 − y²)``, the slope of y = tanh(·), in one pass."""
    return torch.ops.aten.tanh_backward.grad_input(factor, y, grad_input=out)


# --- LSTM: i, f, g, o ---------------------------------------------------------------------------------------------


def _lstm_forward(cell: Cell, steps: Steps, gates: Tensor, states: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    h = cell.weight_hh.shape[0] // 4
    cells = gates.new_empty(states.shape[0], states.shape[1], h)
    cells[-1 if steps.reverse else 0] = c
    squashed = torch.zeros_like(cells[1:])
    unprojected = states if cell.weight_hr is None else torch.zeros_like(cells[1:])
    weight = cell.weight_hh.t()
    for t, before, behind, n in steps.forwards():
        row = gates[t, :n].addmm_(states[before, :n], weight)
        i_f = row[:, : 2 * h].sigmoid_()
        g, o = row[:, 2 * h : 3 * h].tanh_(), row[:, 3 * h :].sigmoid_()
        now = torch.mul(i_f[:, h:], cells[before, :n], out=cells[behind, :n]).addcmul_(i_f[:, :h], g)
        tanh = torch.tanh(now, out=squashed[t, :n])
        if cell.weight_hr is None:
            torch.mul(o, tanh, out=states[behind, :n])
        else:
            torch.mm(torch.mul(o, tanh, out=unprojected[t, :n]), cell.weight_hr.t(), out=states[behind, :n])
        _carry(states, before, behind, n)
        _carry(cells, before, behind, n)
    return gates, cells, squashed, *(() if cell.weight_hr is None else (unprojected,))


def _lstm_backward(
    cell: Cell, steps: Steps, states: Tensor, kept: list[Tensor], grads: Tensor, dh: Tensor, dc: Tensor
) -> _Result:
    del states
    gates, cells, squashed = kept[:3]
    h = cells.shape[2]
    i, f, g, o = gates.split(h, dim=2)
    previous = cells[1:] if steps.reverse else cells[:-1]
    # What a gate's gradient is per unit of the cell's (i, f, g) or the output's (o) gradient.
    slopes = torch.empty_like(gates)
    _sigmoid_slope(g, i, slopes[..., :h])
    _sigmoid_slope(previous, f, slopes[..., h : 2 * h])
    _tanh_slope(i, g, slopes[..., 2 * h : 3 * h])
    _sigmoid_slope(squashed, o, slopes[..., 3 * h :])
    through = _tanh_slope(o, squashed, torch.empty_like(squashed))
    d_gates = torch.zeros_like(gates) if min(steps.active, default=0) < gates.shape[1] else torch.empty_like(gates)
    d_outputs = None if cell.weight_hr is None else torch.zeros_like(grads)
    dc = dc.clone()
    for t, _, _, n in reversed(steps.forwards()):
        d_now = dh[:n] + grads[t, :n]
        if d_outputs is not None and cell.weight_hr is not None:
            d_outputs[t, :n] = d_now
            d_now = d_now @ cell.weight_hr
        d_cell = dc[:n].addcmul_(d_now, through[t, :n])
        row, slope = d_gates[t, :n], slopes[t, :n]
        torch.mul(slope[:, : 3 * h].unflatten(1, (3, h)), d_cell[:, None], out=row[:, : 3 * h].unflatten(1, (3, h)))
        torch.mul(slope[:, 3 * h :], d_now, out=row[:, 3 * h :])
        d_cell.mul_(f[t, :n])
        torch.mm(row, cell.weight_hh, out=dh[:n])
    return _Result(
        input_gates=d_gates,
        state_gates=d_gates,
        dh=dh,
        dc=dc,
        unprojected=None if cell.weight_hr is None else kept[3],
        outputs=d_outputs,
    )


# --- GRU: r, z, n -------------------------------------------------------------------------------------------------


def _gru_forward(cell: Cell, steps: Steps, gates: Tensor, states: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    del c
    h = states.shape[2]
    hidden = torch.zeros_like(gates[..., :h])
    weight, shift = cell.weight_hh.t(), cell.bias_hh
    for t, before, behind, n in steps.forwards():
        from_state = states[before, :n] @ weight if shift is None else torch.addmm(shift, states[before, :n], weight)
        r_z = gates[t, :n, : 2 * h].add_(from_state[:, : 2 * h]).sigmoid_()
        hidden[t, :n] = from_state[:, 2 * h :]
        new = gates[t, :n, 2 * h :].addcmul_(r_z[:, :h], hidden[t, :n]).tanh_()
        torch.lerp(new, states[before, :n], r_z[:, h:], out=states[behind, :n])
        _carry(states, before, behind, n)
    return gates, hidden


def _gru_backward(
    cell: Cell, steps: Steps, states: Tensor, kept: list[Tensor], grads: Tensor, dh: Tensor, dc: Tensor | None
) -> _Result:
    del dc
    gates, hidden = kept
    h = states.shape[2]
    r, z, new = gates.split(h, dim=2)
    previous = states[1:] if steps.reverse else states[:-1]
    slopes = torch.empty_like(gates)
    slope_new = _tanh_slope(1 - z, new, torch.empty_like(new))
    _sigmoid_slope(slope_new * hidden, r, slopes[..., :h])
    _sigmoid_slope(previous - new, z, slopes[..., h : 2 * h])
    torch.mul(slope_new, r, out=slopes[..., 2 * h :])
    d_state = torch.zeros_like(gates)
    d_all = torch.zeros_like(grads)
    for t, _, _, n in reversed(steps.forwards()):
        d_now = torch.add(dh[:n], grads[t, :n], out=d_all[t, :n])
        row = d_state[t, :n]
        torch.mul(slopes[t, :n].unflatten(1, (3, h)), d_now[:, None], out=row.unflatten(1, (3, h)))
        torch.mul(d_now, z[t, :n], out=dh[:n]).addmm_(row, cell.weight_hh)
    d_input = torch.cat([d_state[..., : 2 * h], d_all * slope_new], dim=2)
    return _Result(input_gates=_without_ended(d_input, steps), state_gates=d_state, dh=dh)


# --- plain RNN ----------------------------------------------------------------------------------------------------


def _rnn_forward(cell: Cell, steps: Steps, gates: Tensor, states: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    del c
    weight = cell.weight_hh.t()
    for t, before, behind, n in steps.forwards():
        row = gates[t, :n].addmm_(states[before, :n], weight)
        states[behind, :n] = row.tanh_() if cell.kind == "tanh" else row.relu_()
        _carry(states, before, behind, n)
    return (gates,)


def _rnn_backward(
    cell: Cell, steps: Steps, states: Tensor, kept: list[Tensor], grads: Tensor, dh: Tensor, dc: Tensor | None
) -> _Result:
    del dc, states
    (new,) = kept
    slopes = 1 - new * new if cell.kind == "tanh" else (new > 0).to(new.dtype)
    d_gates = torch.zeros_like(new)
    for t, _, _, n in reversed(steps.forwards()):
        row = torch.add(dh[:n], grads[t, :n], out=d_gates[t, :n]).mul_(slopes[t, :n])
        torch.mm(row, cell.weight_hh, out=dh[:n])
    return _Result(input_gates=d_gates, state_gates=d_gates, dh=dh)


_FORWARD = {"lstm": _lstm_forward, "gru": _gru_forward, "tanh": _rnn_forward, "relu": _rnn_forward}
_BACKWARD = {"lstm": _lstm_backward, "gru": _gru_backward, "tanh": _rnn_backward, "relu": _rnn_backward}
