"""One loss a record from what Hugging Face models return (floor 4, integrations).

A model's own ``.loss`` is a mean over the tokens of the *batch*: how much a record counts in it depends on how many
tokens the others have. Here every record's loss is its own, divided by public numbers only.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.errors import InvalidArgument

__all__ = ["is_causal", "record_losses"]

_IGNORED = -100


def is_causal(model: nn.Module) -> bool:
    """Whether logits at a position predict the next token: by the name of the model's class, inside an adapter too."""
    inner = getattr(model, "get_base_model", None)
    name = type(inner() if callable(inner) else model).__name__
    return "CausalLM" in name or "LMHead" in name


def record_losses(outputs: object, labels: Tensor, *, causal: bool) -> Tensor:
    """The loss of each record, shape (B,).

    Classification: cross-entropy. Several labels at once (floating-point labels in the logits' shape): binary
    cross-entropy, their mean. Numbers: squared error. Tokens: the sum of the cross-entropies over positions whose label
    is not −100, divided by the length of the padded sequence, which is public; `causal` shifts labels by one.

    Args:
        outputs: what the model returned, with ``logits`` of shape (B, classes), (B, T, vocabulary) or (B, 1).
        labels: shape (B,), (B, T) or (B, classes).
        causal: whether position t predicts the token at t + 1.

    Raises:
        InvalidArgument: logits and labels have other shapes.
    """
    logits = outputs["logits"] if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise InvalidArgument("outputs must have logits, got none. Give record_loss=… to the trainer.")
    if labels.is_floating_point():
        if labels.shape == logits.shape and logits.shape[-1] > 1:
            losses = F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none")
        elif logits.numel() == labels.numel():
            losses = (logits.float().reshape(labels.shape) - labels.float()).square()
        else:
            raise _shapes()
        return losses.reshape(len(losses), -1).mean(1)
    if logits.dim() == 2 and labels.dim() == 1:
        return F.cross_entropy(logits.float(), labels, reduction="none")
    if logits.dim() == 3 and labels.dim() == 2:
        return _token_losses(logits, labels, causal=causal)
    raise _shapes()


def _token_losses(logits: Tensor, labels: Tensor, *, causal: bool) -> Tensor:
    length = logits.shape[1]
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=_IGNORED, reduction="none")
    return torch.sum(losses, 1) / length


def _shapes() -> InvalidArgument:
    return InvalidArgument(
        "labels must fit the model's logits, (B,) to (B, classes) or (B, T) to (B, T, vocabulary), got other shapes. "
        "Give record_loss=… to the trainer: (outputs, labels) to one loss a record."
    )
