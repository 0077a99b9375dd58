"""Torch's recurrent functions (lstm, gru, rnn_tanh, rnn_relu) with their gates captured (floor 1, gradients).

Layers, directions, dropout between layers and packed sequences as in torch, in torch's order of random numbers.
"""

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from sordino.errors import RecordCountMismatch
from sordino.gradients.cells import Cell, Kind, Steps
from sordino.gradients.direction import GateReceiver, run_direction
from sordino.gradients.rules.parts import Part, parts_rule
from sordino.gradients.tap import Replacement, Tap

__all__ = ["recurrent_replacements"]


def recurrent_replacements() -> dict[object, Replacement]:
    """Torch's recurrent functions, and what stands in for them."""
    functions: list[tuple[object, Kind]] = [
        (torch.lstm, "lstm"),
        (torch.gru, "gru"),
        (torch.rnn_tanh, "tanh"),
        (torch.rnn_relu, "relu"),
    ]
    return {function: partial(_recurrent, kind=kind) for function, kind in functions}


def _recurrent(tap: Tap, x: Tensor, *rest: object, kind: Kind) -> tuple[Tensor, ...]:
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
    _check_records(tap, x)
    directions = 2 if bidirectional else 1
    rows = len(weights) // (cast("int", layers) * directions)
    last: list[list[Tensor]] = []
    with torch.autocast(x.device.type, enabled=False):
        x = x.to(weights[0].dtype)
        for layer in range(cast("int", layers)):
            outputs = []
            for direction in range(directions):
                k = layer * directions + direction
                own = weights[k * rows : (k + 1) * rows]
                first = [s[k].to(x.dtype) for s in states]
                steps = Steps(active=active, reverse=direction == 1)
                cell, parts = _cell(tap, kind, own, bool(biased))
                result = run_direction(
                    cell, steps, _receiver(tap, parts), tap.anchor, x, first[0], first[1] if kind == "lstm" else None
                )
                outputs.append(result[0])
                last.append(list(result[1:]))
            x = torch.cat(outputs, dim=2) if directions == 2 else outputs[0]
            if training and cast("float", dropout) > 0 and layer < cast("int", layers) - 1:
                x = _dropped(x, cast("float", dropout), batch_sizes)
    hidden = [torch.stack([pair[i] for pair in last]) for i in range(len(states))]
    output = x.transpose(0, 1) if batch_first else x
    return _packed(x, batch_sizes) if batch_sizes is not None else output, *hidden


def _check_records(tap: Tap, x: Tensor) -> None:
    """A single sequence is refused as well: it may be one record's, which must not count for all."""
    if not tap.batched or x.shape[1] != tap.records:
        raise RecordCountMismatch(
            f"an input of {tap.label} must have one row per record, got another number. "
            "Keep one sequence per record, and pack all of them."
        )


def _cell(tap: Tap, kind: Kind, own: Sequence[Tensor], biased: bool) -> tuple[Cell, tuple[Part, ...]]:
    """The weights of one direction in torch's order, and the captured names of its linear maps."""
    weight_ih, weight_hh, *others = own
    bias_ih, bias_hh = others[:2] if biased else (None, None)
    projection = others[2 * biased] if len(others) > 2 * biased else None
    values = [None if tensor is None else tensor.detach() for tensor in (bias_ih, bias_hh, projection)]
    cell = Cell(
        kind=kind,
        weight_ih=weight_ih.detach(),
        weight_hh=weight_hh.detach(),
        bias_ih=values[0],
        bias_hh=values[1],
        weight_hr=values[2],
    )
    parts = [
        Part(weight=tap.name(weight_ih), bias=tap.name(bias_ih)),
        Part(weight=tap.name(weight_hh), bias=tap.name(bias_hh), joined=kind != "gru"),
    ]
    if projection is not None:
        parts.append(Part(weight=tap.name(projection), bias=None))
    return cell, tuple(parts)


def _receiver(tap: Tap, parts: tuple[Part, ...]) -> GateReceiver | None:
    names = {name for part in parts for name, _ in part.roles().values()}
    if not names:
        return None
    receive = tap.receiver(parts_rule, names, parts, tuple(0 for _ in parts))
    order = tap.order

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
