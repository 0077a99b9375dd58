"""One loss a record from what Hugging Face models return (floor 4, integrations).

A model's own ``.loss`` is a mean over the tokens of the *batch*: how much a record counts in it depends on how many
tokens the others have. Here every record's loss is its own, divided by public numbers only.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.errors import InvalidArgument

__all__ = ["Labels", "decoder_inputs", "is_causal", "predicts_numbers", "record_losses"]

Labels = Tensor | Mapping[str, Tensor]

_IGNORED = -100
# Language models whose labels stand where they are, although their names say LMHead.
_UNSHIFTED = ("XLNetLMHeadModel", "XLMWithLMHeadModel", "FlaubertWithLMHeadModel")
_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")


def is_causal(model: nn.Module) -> bool:
    """Whether logits at a position predict the next token: by the name of the model's class, inside an adapter too."""
    inner = _inside(model)
    name = type(inner).__name__
    if "ConditionalGeneration" in name:
        return not getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    return ("CausalLM" in name or "LMHead" in name) and name not in _UNSHIFTED


def predicts_numbers(model: nn.Module) -> bool:
    """Whether the model's configuration says that its outputs are numbers."""
    return getattr(getattr(_inside(model), "config", None), "problem_type", None) == "regression"


def decoder_inputs(model: nn.Module, inputs: Mapping[str, Tensor], labels: Tensor) -> dict[str, Tensor]:
    """What the decoder of a sequence-to-sequence model reads: the labels, one place later, as the model shifts them.

    Args:
        model: any; nothing is added for one without such a decoder, or when `inputs` hold what it reads.
        inputs: what the model will be called with.
        labels: shape (B, T), −100 where nothing is predicted.
    """
    inner = _inside(model)
    shifts = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    is_seq2seq = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    tokens = labels.dim() == 2 and not labels.is_floating_point()
    if not is_seq2seq or not callable(shifts) or not tokens or any(name in inputs for name in _DECODER):
        return {}
    return {"decoder_input_ids": cast("Tensor", shifts(labels=labels))}


def record_losses(
    outputs: object, labels: Labels, *, causal: bool, label_smoothing: float = 0.0, numbers: bool = False
) -> Tensor:
    """The loss of each record, shape (B,).

    Classification: cross-entropy. Several labels at once (floating-point labels in the logits' shape): binary
    cross-entropy, their mean. Numbers: squared error, the mean over several. Tokens: the sum of the cross-entropies
    over positions whose label is not −100, divided by the length of the padded sequence, which is public; `causal`
    shifts labels by one. Question answering: the mean of the cross-entropies of first and last position; one outside
    the sequence counts for nothing.

    Args:
        outputs: what the model returned, with ``logits`` of shape (B, classes), (B, T, vocabulary) or (B, 1); or with
            ``start_logits`` and ``end_logits``, (B, T).
        labels: shape (B,), (B, T) or (B, classes); or ``start_positions`` and ``end_positions``, (B,) each.
        causal: whether position t predicts the token at t + 1.
        label_smoothing: share in [0, 1) of every cross-entropy over classes or tokens that is spread over all of them.

        numbers: whether floating-point labels in the logits' shape are numbers, and not several labels.

    Raises:
        InvalidArgument: logits and labels have other shapes or names.
    """
    if isinstance(labels, Mapping):
        return _span_losses(outputs, labels, label_smoothing)
    logits = _part(outputs, "logits")
    if logits is None:
        raise InvalidArgument("outputs must have logits, got none. Give record_loss=… to the trainer.")
    if labels.is_floating_point():
        return _number_losses(logits, labels, numbers=numbers)
    if logits.dim() == 2 and labels.dim() == 1:
        return F.cross_entropy(
            logits.float(), labels, ignore_index=_IGNORED, reduction="none", label_smoothing=label_smoothing
        )
    if logits.dim() == 3 and labels.dim() == 2:
        return _token_losses(logits, labels, causal=causal, label_smoothing=label_smoothing)
    raise _shapes()


def _number_losses(logits: Tensor, labels: Tensor, *, numbers: bool) -> Tensor:
    """Floating-point labels: several yes-or-no labels, or numbers."""
    if labels.dim() == 1 and logits.dim() == 2 and logits.shape[1] == 1:
        return (logits[:, 0].float() - labels.float()).square()
    if labels.shape != logits.shape:
        raise _shapes()
    if logits.shape[-1] > 1 and not numbers:
        losses = F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none")
    else:
        losses = (logits.float() - labels.float()).square()
    return losses if losses.dim() == 1 else losses.flatten(1).mean(1)


def _token_losses(logits: Tensor, labels: Tensor, *, causal: bool, label_smoothing: float) -> Tensor:
    length = logits.shape[1]
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(
        logits.float().transpose(1, 2),
        labels,
        ignore_index=_IGNORED,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return torch.sum(losses, 1) / length


def _span_losses(outputs: object, labels: Mapping[str, Tensor], label_smoothing: float) -> Tensor:
    names = ("start", "end")
    logits = [_part(outputs, f"{name}_logits") for name in names]
    if set(labels) != {f"{name}_positions" for name in names} or any(part is None for part in logits):
        raise InvalidArgument(
            f"labels must be of one kind, or start_positions and end_positions, got {', '.join(sorted(labels))}. Give "
            "record_loss=… to the trainer: (outputs, labels by name) to one loss a record."
        )
    total = None
    for name, part in zip(names, logits, strict=True):
        assert part is not None
        length, places = part.shape[1], labels[f"{name}_positions"].reshape(-1)
        # As the models do: an answer that was cut off is at the place after the last.
        losses = F.cross_entropy(
            part.float(),
            places.clamp(0, length),
            ignore_index=length,
            reduction="none",
            label_smoothing=label_smoothing,
        )
        total = losses if total is None else total + losses
    assert total is not None
    return total / 2


def _part(outputs: object, name: str) -> Tensor | None:
    found = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
    return found if isinstance(found, Tensor) else None


def _inside(model: nn.Module) -> nn.Module:
    """The model that an adapter is around, or itself."""
    inner = getattr(model, "get_base_model", None)
    return cast("nn.Module", inner()) if callable(inner) else model


def _shapes() -> InvalidArgument:
    return InvalidArgument(
        "labels must fit the model's logits, (B,) to (B, classes) or (B, T) to (B, T, vocabulary), got other shapes. "
        "Give record_loss=… to the trainer: (outputs, labels) to one loss a record."
    )
