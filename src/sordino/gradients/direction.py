"""One direction of one recurrent layer: a loop over time whose backward hands over the gate gradients (floor 1).

torch's fused kernels compute the same numbers but hide the gradients of the gates, which are all that per-record
gradients need: with G the gate gradients, a record's gradients are ``G^T x`` and ``G^T h``. Inputs and states lie side
by side, so that a step is one product forward and one backward. Legend: `cells`.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sordino.gradients.cells import Cell, Steps, without_ended
from sordino.gradients.edge import asks_for_parameters
from sordino.gradients.gru import gru_backward, gru_forward
from sordino.gradients.lstm import lstm_backward, lstm_forward
from sordino.gradients.products import affine
from sordino.gradients.rnn import rnn_backward, rnn_forward

__all__ = ["GateReceiver", "run_direction"]

# Called with (inputs, previous states, unprojected outputs) and the gradients at (input gates, state gates, outputs).
GateReceiver = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], None]

_FORWARD = {"lstm": lstm_forward, "gru": gru_forward, "tanh": rnn_forward, "relu": rnn_forward}
_BACKWARD = {"lstm": lstm_backward, "gru": gru_backward, "tanh": rnn_backward, "relu": rnn_backward}


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
        # A record that is not finite warns nobody: it is found by its norm.
        with np.errstate(all="ignore"):
            kept, last_cell = _FORWARD[cell.kind](cell, steps, joined, states, c)
        ctx.cell, ctx.steps, ctx.receive, ctx.anchor, ctx.inputs = cell, steps, receive, anchor, inputs
        ctx.records_first = not x.is_contiguous() and x.transpose(0, 1).is_contiguous()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(joined, *kept)
        outputs = states[:-1] if steps.reverse else states[1:]
        outputs = without_ended(outputs, steps).clone(memory_format=torch.contiguous_format)
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
            grad_outputs = without_ended(grad_outputs, steps)
        dh = joined.new_zeros(states[0].shape) if grad_h is None else grad_h
        with np.errstate(all="ignore"):
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
            if ctx.records_first:
                # Laid out as the input: what reads it record by record would copy it again and again.
                dx = dx.transpose(0, 1).contiguous().transpose(0, 1)
        dc = result.dc if cell.kind == "lstm" else None
        return None, None, None, None, dx, result.dh, dc
