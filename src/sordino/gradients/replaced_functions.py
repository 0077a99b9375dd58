"""``F.multi_head_attention_forward`` with its projections captured.

The same operations as torch's in the same order of random numbers, so that a seed gives the same dropout masks, but
with the records first. Legend of shapes: B records, T queries, S keys, E width, H heads, e = E/H.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from sordino.errors import RecordCountMismatch, UnsupportedModule
from sordino.gradients.interception import FunctionInterceptor, Replacement, needs_parameter_grads
from sordino.gradients.numerics import affine, without_autocast
from sordino.gradients.recurrent_cells import (
    CellWeights,
    Kind,
    TimeSteps,
    gru_backward,
    gru_forward,
    lstm_backward,
    lstm_forward,
    rnn_backward,
    rnn_forward,
    without_ended,
)
from sordino.gradients.rules.composite import LinearMap, direct_rule, parts_rule
from sordino.shapes import Float, Shaped


def attention(
    interceptor: FunctionInterceptor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Float[Tensor, "T B E"], Tensor | None]:
    """Multi-head attention with the arguments of ``F.multi_head_attention_forward``."""
    if static_k is not None or static_v is not None:
        raise UnsupportedModule(
            f"{interceptor.label} must compute its keys and values, got static ones. Pass key and value."
        )
    _check_records(interceptor, query, key, value)
    if is_causal and attn_mask is None:
        raise RuntimeError("attn_mask must be given with is_causal, got none. Pass the causal mask as well.")
    if is_causal and key_padding_mask is None and not need_weights:
        attn_mask = None
    else:
        is_causal = is_causal and key_padding_mask is None
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else (in_proj_weight,) * 3
    q, k, v = _projections(interceptor, (query, key, value), weights, in_proj_bias, embed_dim_to_check)
    if bias_k is not None and bias_v is not None:
        k, v = _with_biases(interceptor, k, v, bias_k, bias_v)
    extra = int(bias_k is not None) + int(add_zero_attn)
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    mask = _mask(attn_mask, key_padding_mask, num_heads, extra, q.dtype)
    q, k, v = (x.unflatten(2, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    dropout_p = dropout_p if training else 0.0
    if need_weights:
        mixed, shares = _with_weights(q, k, v, mask, dropout_p)
        shares = shares.mean(dim=1) if average_attn_weights else shares
    else:
        mixed, shares = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal), None
    # Time first in memory as torch's: a dropout behind it draws its mask in the order of memory.
    mixed = mixed.permute(2, 0, 1, 3).flatten(2)
    part = LinearMap(weight=interceptor.name(out_proj_weight), bias=interceptor.name(out_proj_bias))
    output = F.linear(mixed, out_proj_weight.detach(), None if out_proj_bias is None else out_proj_bias.detach())
    (output,) = interceptor.capture(parts_rule, _names([part]), (part,), (output,), (mixed.transpose(0, 1),), dim=1)
    return output, shares


def _check_records(interceptor: FunctionInterceptor, *inputs: Tensor) -> None:
    """A single row is refused as well: it may be one record's, which must not count for all."""
    if any(x.dim() != 3 or x.shape[1] != interceptor.records for x in inputs):
        raise RecordCountMismatch(
            f"the inputs of {interceptor.label} must have one row per record, got another number or none. "
            "Call it with a batch, and expand learned queries to it."
        )


def _names(parts: list[LinearMap]) -> set[str]:
    return {name for part in parts for name in (part.weight, part.bias) if name is not None}


def _projections(
    interceptor: FunctionInterceptor,
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor | None, ...],
    bias: Tensor | None,
    width: int,
) -> list[Float[Tensor, "B T E"]]:
    """Queries, keys and values; inputs that are one tensor, read by neighboring rows of one weight, go together."""
    packed = weights[0] is weights[1] is weights[2]
    sources: list[tuple[Tensor, int, int]] = []
    for i, x in enumerate(inputs):
        if packed and sources and sources[-1][0] is x:
            sources[-1] = (x, sources[-1][1], i + 1)
        else:
            sources.append((x, i, i + 1))
    parts, saved, outputs = [], [], []
    for x, first, last in sources:
        rows, weight = (first * width, last * width), weights[first]
        assert weight is not None
        shift = None if bias is None else bias.detach()[rows[0] : rows[1]]
        saved.append(x.transpose(0, 1))
        outputs.append(F.linear(saved[-1], weight.detach()[rows[0] : rows[1]] if packed else weight.detach(), shift))
        own = rows if packed else None
        parts.append(LinearMap(weight=interceptor.name(weight), bias=interceptor.name(bias), rows=own, bias_rows=rows))
    passed = interceptor.capture(parts_rule, _names(parts), tuple(parts), tuple(outputs), tuple(saved))
    return [chunk for output in passed for chunk in output.split(width, dim=2)]


def _with_biases(
    interceptor: FunctionInterceptor,
    k: Float[Tensor, "B S E"],
    v: Float[Tensor, "B S E"],
    bias_k: Tensor,
    bias_v: Tensor,
) -> tuple[Tensor, Tensor]:
    """One more key and value, the same for every record."""
    names = [interceptor.name(bias_k), interceptor.name(bias_v)]
    copies = tuple(bias.detach().expand(interceptor.records, 1, -1).to(k.dtype).clone() for bias in (bias_k, bias_v))
    captured = [i for i in range(2) if names[i] is not None]
    own = tuple(str(names[i]) for i in captured)
    passed = interceptor.capture(direct_rule, set(own), own, tuple(copies[i] for i in captured), ()) if own else ()
    rows = list(copies)
    for i, copy in zip(captured, passed, strict=True):
        rows[i] = copy
    return torch.cat([k, rows[0]], dim=1), torch.cat([v, rows[1]], dim=1)


def _mask(
    attn_mask: Shaped[Tensor, "*any"] | None,
    key_padding_mask: Shaped[Tensor, "B S"] | None,
    heads: int,
    extra: int,
    dtype: torch.dtype,
) -> Float[Tensor, "#B #H #T s"] | None:
    """Both masks as one that is added to the scores; keys that were appended are always seen."""
    mask = None
    if attn_mask is not None:
        mask = F.pad(_added_mask(attn_mask, dtype), (0, extra))
        mask = mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (mask.shape[0] // heads, heads))
    if key_padding_mask is not None:
        padding = F.pad(_added_mask(key_padding_mask, dtype), (0, extra))[:, None, None]
        mask = padding if mask is None else mask + padding
    return mask


def _added_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf) if mask.dtype == torch.bool else mask


def _with_weights(
    q: Float[Tensor, "B H T e"], k: Float[Tensor, "B H S e"], v: Float[Tensor, "B H S e"], mask: Tensor | None, p: float
) -> tuple[Float[Tensor, "B H T e"], Float[Tensor, "B H T S"]]:
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores + mask
    shares = F.softmax(scores, dim=-1)
    if p > 0.0:
        shares = F.dropout(shares, p=p)
    return shares @ v, shares


# ----------------------------------------------------------------------------------------------------------------------
# One direction of one recurrent layer: a loop over time whose backward hands over the gate gradients.
#
# torch's fused kernels compute the same numbers but hide the gradients of the gates, which are all that per-record
# gradients need: with G the gate gradients, a record's gradients are ``G^T x`` and ``G^T h``. Inputs and states lie
# side by side, so that a step is one product forward and one backward. Legend: `cells`.
# ----------------------------------------------------------------------------------------------------------------------


# Called with (inputs, previous states, unprojected outputs) and the gradients at (input gates, state gates, outputs).
GateReceiver = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], None]

_FORWARD = {"lstm": lstm_forward, "gru": gru_forward, "tanh": rnn_forward, "relu": rnn_forward}
_BACKWARD = {"lstm": lstm_backward, "gru": gru_backward, "tanh": rnn_backward, "relu": rnn_backward}


def run_direction(
    cell: CellWeights,
    steps: TimeSteps,
    receive: GateReceiver | None,
    anchor: Tensor,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
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
    def forward(ctx, cell: CellWeights, steps: TimeSteps, receive: GateReceiver | None, anchor: Tensor, x, h, c):
        count, records, inputs = x.shape
        # Row t holds step t's input and the state before it; the last state (the first in reverse) has a row alone.
        joined = x.new_empty(count + 1, records, inputs + cell.weight_hh.shape[1])
        rows, states = joined[1:] if steps.reverse else joined[:-1], joined[:, :, inputs:]
        rows[:, :, :inputs] = x
        states[-1 if steps.reverse else 0] = h
        # A record that is not finite raises no warning: it is found by its norm.
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
        receive = ctx.receive if needs_parameter_grads(ctx.anchor) else None
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


# ----------------------------------------------------------------------------------------------------------------------
# Torch's recurrent functions (lstm, gru, rnn_tanh, rnn_relu) with their gates captured.
#
# Layers, directions, dropout between layers and packed sequences as in torch, in torch's order of random numbers.
# ----------------------------------------------------------------------------------------------------------------------


def recurrent_replacements() -> dict[object, Replacement]:
    """Torch's recurrent functions, and what stands in for them."""
    functions: list[tuple[object, Kind]] = [
        (torch.lstm, "lstm"),
        (torch.gru, "gru"),
        (torch.rnn_tanh, "tanh"),
        (torch.rnn_relu, "relu"),
    ]
    return {function: partial(_recurrent, kind=kind) for function, kind in functions}


def _recurrent(interceptor: FunctionInterceptor, x: Tensor, *rest: object, kind: Kind) -> tuple[Tensor, ...]:
    """Both forms of the functions: padded (x, state, weights, …, batch_first) and packed (x, batch_sizes, state, …)."""
    packed = isinstance(rest[0], Tensor) and not rest[0].is_floating_point()
    batch_sizes = cast("Tensor", rest[0]) if packed else None
    state, weights, biased, layers, dropout, training, bidirectional = rest[1:8] if packed else rest[:7]
    batch_first = bool(rest[7]) and not packed
    if batch_sizes is not None:
        active = batch_sizes.tolist()
        x = _pad(x, batch_sizes)
    else:
        x = x.transpose(0, 1) if batch_first else x
        active = [x.shape[1]] * x.shape[0]
    weights = cast("Sequence[Tensor]", weights)
    states = cast("tuple[Tensor, ...]", state if kind == "lstm" else (state,))
    _recurrent_check_records(interceptor, x)
    directions = 2 if bidirectional else 1
    rows = len(weights) // (cast("int", layers) * directions)
    last: list[list[Tensor]] = []
    with without_autocast(x.device.type):
        x = x.to(weights[0].dtype)
        for layer in range(cast("int", layers)):
            outputs = []
            for direction in range(directions):
                k = layer * directions + direction
                own = weights[k * rows : (k + 1) * rows]
                first = [s[k].to(x.dtype) for s in states]
                steps = TimeSteps(active=active, reverse=direction == 1)
                cell, parts = _cell(interceptor, kind, own, bool(biased))
                result = run_direction(
                    cell,
                    steps,
                    _receiver(interceptor, parts),
                    interceptor.anchor,
                    x,
                    first[0],
                    first[1] if kind == "lstm" else None,
                )
                outputs.append(result[0])
                last.append(list(result[1:]))
            x = torch.cat(outputs, dim=2) if directions == 2 else outputs[0]
            if training and cast("float", dropout) > 0 and layer < cast("int", layers) - 1:
                x = _dropped(x, cast("float", dropout), batch_sizes)
    hidden = [torch.stack([pair[i] for pair in last]) for i in range(len(states))]
    output = x.transpose(0, 1) if batch_first else x
    return _packed(x, batch_sizes) if batch_sizes is not None else output, *hidden


def _recurrent_check_records(interceptor: FunctionInterceptor, x: Tensor) -> None:
    """A single sequence is refused as well: it may be one record's, which must not count for all."""
    if not interceptor.batched or x.shape[1] != interceptor.records:
        raise RecordCountMismatch(
            f"an input of {interceptor.label} must have one row per record, got another number. "
            "Keep one sequence per record, and pack all of them."
        )


def _cell(
    interceptor: FunctionInterceptor, kind: Kind, own: Sequence[Tensor], biased: bool
) -> tuple[CellWeights, tuple[LinearMap, ...]]:
    """The weights of one direction in torch's order, and the captured names of its linear maps."""
    weight_ih, weight_hh, *others = own
    bias_ih, bias_hh = others[:2] if biased else (None, None)
    projection = others[2 * biased] if len(others) > 2 * biased else None
    values = [None if tensor is None else tensor.detach() for tensor in (bias_ih, bias_hh, projection)]
    cell = CellWeights(
        kind=kind,
        weight_ih=weight_ih.detach(),
        weight_hh=weight_hh.detach(),
        bias_ih=values[0],
        bias_hh=values[1],
        weight_hr=values[2],
    )
    parts = [
        LinearMap(weight=interceptor.name(weight_ih), bias=interceptor.name(bias_ih)),
        LinearMap(weight=interceptor.name(weight_hh), bias=interceptor.name(bias_hh), joined=kind != "gru"),
    ]
    if projection is not None:
        parts.append(LinearMap(weight=interceptor.name(projection), bias=None))
    return cell, tuple(parts)


def _receiver(interceptor: FunctionInterceptor, parts: tuple[LinearMap, ...]) -> GateReceiver | None:
    names = {name for part in parts for name, _ in part.roles().values()}
    if not names:
        return None
    receive = interceptor.receiver(parts_rule, names, parts, tuple(0 for _ in parts))
    order = interceptor.order

    def records_first(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().transpose(0, 1)
        return tensor if order is None else tensor.index_select(0, order)

    def forward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        receive(tuple(records_first(s) for s in saved), tuple(records_first(g) for g in grads))

    return forward


def _pad(data: Tensor, batch_sizes: Tensor) -> Tensor:
    return pad_packed_sequence(PackedSequence(data, batch_sizes))[0]


def _packed(x: Tensor, batch_sizes: Tensor) -> Tensor:
    active = torch.arange(x.shape[1])[None] < batch_sizes[:, None]
    return x[active.to(x.device)]


def _dropped(x: Tensor, p: float, batch_sizes: Tensor | None) -> Tensor:
    """Dropout between layers; torch draws for packed rows only."""
    if batch_sizes is None:
        return torch.dropout(x, p, True)
    return _pad(torch.dropout(_packed(x, batch_sizes), p, True), batch_sizes)
