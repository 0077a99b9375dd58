"""The gradient of one batch, as a participant might share it (floor 4): exact, or clipped and noisy."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks
from sordino.clipping import FlatClipping
from sordino.errors import InvalidArgument
from sordino.mechanisms import standard_normal
from sordino.randomness import Randomness

__all__ = ["gradient_of_update", "privatized_gradient", "shared_gradient"]


def shared_gradient(model: nn.Module, features: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """The mean gradient of cross entropy, one tensor a trained parameter: what plain federated learning sends.

    Guarantee: none. A single record can often be read off it.

    Args:
        model: features (B, …) ↦ logits (B, classes).
        features: records first.
        labels: (B,).
    """
    loss = F.cross_entropy(model(features), labels)
    return torch.autograd.grad(loss, _trained(model))


def privatized_gradient(
    model: nn.Module,
    features: Tensor,
    labels: Tensor,
    *,
    max_grad_norm: float,
    noise_multiplier: float,
    randomness: Randomness | None = None,
) -> tuple[Tensor, ...]:
    """The same, as one DP-SGD step sends it: each record's gradient clipped, the sum noisy, divided by the batch size.

    Guarantee: one Gaussian release with this noise multiplier under add-or-remove-one, for a public number of records.

    Args:
        model: features (B, …) ↦ logits (B, classes).
        features: records first.
        labels: (B,).
        max_grad_norm: clipping norm C > 0.
        noise_multiplier: standard deviation over C, ≥ 0.
        randomness: of the noise; fresh by default.
    """
    checks.positive(max_grad_norm=max_grad_norm)
    checks.non_negative(noise_multiplier=noise_multiplier)
    parameters = _trained(model)
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for row in range(len(labels)):
        own = shared_gradient(model, features[row : row + 1], labels[row : row + 1])
        squared = sum(((part.double() ** 2).sum() for part in own), torch.zeros((), dtype=torch.float64))
        (factor,) = FlatClipping().factors(squared[None], max_grad_norm=max_grad_norm).tolist()
        if factor > 0:
            total = [sum_ + factor * part for sum_, part in zip(total, own, strict=True)]
    source = randomness or Randomness()
    stddev = noise_multiplier * max_grad_norm
    return tuple((sum_ + stddev * _noise(sum_, source)) / max(1, len(labels)) for sum_ in total)


def gradient_of_update(
    model: nn.Module, update: Mapping[str, Tensor], *, learning_rate: float, steps: int = 1
) -> tuple[Tensor, ...]:
    """The gradient that a participant's update stands for, −Δ / (η · steps): exact for one step of plain SGD.

    After more steps it is their mean gradient along the way, which attacks take for that at the start.

    Args:
        model: names the trained parameters and their order.
        update: how far each of them moved, by name.
        learning_rate: η > 0 of the participant.
        steps: SGD steps that it took, ≥ 1.

    Example:
        >>> [part.tolist() for part in gradient_of_update(nn.Linear(1, 1, bias=False), {"weight": -torch.ones(1, 1)},
        ...                                               learning_rate=0.5)]
        [[[2.0]]]
    """
    scale = checks.positive(learning_rate=learning_rate) * checks.integer(1, steps=steps)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if set(names) != set(update):
        raise InvalidArgument("update must hold every trained parameter by its name, got others. Was a layer frozen?")
    return tuple(update[name].detach() / -scale for name in names)


def _noise(like: Tensor, randomness: Randomness) -> Tensor:
    return standard_normal(like.numel(), randomness.fresh("shared-gradient")).reshape(like.shape).to(like)


def _trained(model: nn.Module) -> Sequence[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
