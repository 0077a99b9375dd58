"""From a shared gradient back to the record (floor 4): exactly for a linear layer, by search for other models.

Three ways: reading a linear layer with a bias (one record), matching gradients in ℓ2 (DLG; iDLG when the label is
read from a sign first), and matching their direction under a total-variation prior (inverting gradients).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.mechanisms import standard_normal
from sordino.randomness import Randomness

__all__ = ["Inversion", "invert_by_direction", "invert_by_matching", "label_from_sign", "read_linear_layer"]

_INNER = 20
_CLOSE_ENOUGH = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class Inversion:
    """What was recovered.

    Args:
        features: (B, …), the reconstruction.
        labels: (B,), read from the gradient, guessed, or given.
        distance: how far the reconstruction's gradient is from the shared one, in the method's own measure.
        method: how it was found.
    """

    features: Tensor
    labels: Tensor
    distance: float
    method: str


def read_linear_layer(weight_gradient: Tensor, bias_gradient: Tensor) -> Tensor:
    """The input of a linear layer, from the gradient of one record: x = (∂L/∂W)ᵢ / (∂L/∂b)ᵢ, exactly.

    Args:
        weight_gradient: (outputs, inputs).
        bias_gradient: (outputs,), not zero everywhere.

    Returns:
        The input, (inputs,).

    Example:
        >>> x, slope = torch.tensor([0.5, -2.0]), torch.tensor([0.0, 3.0])
        >>> read_linear_layer(slope[:, None] * x, slope)
        tensor([ 0.5000, -2.0000])

    References:
        Phong et al. 2018, "Privacy-preserving deep learning via additively homomorphic encryption", section 3.
    """
    row = int(bias_gradient.abs().argmax())
    if weight_gradient.ndim != 2 or bias_gradient.shape != weight_gradient.shape[:1] or bias_gradient[row] == 0:
        raise InvalidArgument(
            "bias_gradient must have one value per row of weight_gradient and not be zero, got another. "
            "Without a bias, or for a record that fits perfectly, the layer gives nothing away."
        )
    return weight_gradient[row] / bias_gradient[row]


def label_from_sign(last_bias_gradient: Tensor) -> int:
    """The label of one record: under cross entropy only its own class has a negative bias gradient (p − 1 < 0).

    Args:
        last_bias_gradient: of the last layer, (classes,).

    Example:
        >>> label_from_sign(torch.tensor([0.2, -0.9, 0.7]))
        1

    References:
        Zhao, Mopuri, Bilen 2020, "iDLG: improved deep leakage from gradients", equations 3–5.
    """
    return int(last_bias_gradient.argmin())


def invert_by_matching(
    model: nn.Module,
    gradient: Sequence[Tensor],
    *,
    shape: Sequence[int],
    classes: int,
    labels: Tensor | None = None,
    steps: int = 120,
    restarts: int = 3,
    randomness: Randomness | None = None,
) -> Inversion:
    """DLG: min over (x, y) of ‖∇L(x, y) − g‖² by L-BFGS; with `labels` given (iDLG reads them first), over x alone.

    The attacker knows the model, its weights, the batch size and the gradient. The activations must have second
    derivatives (tanh, sigmoid): behind ReLU the search stalls.

    Args:
        model: features ↦ logits.
        gradient: one tensor a trained parameter.
        shape: of one record's features.
        classes: number of classes, ≥ 2.
        labels: (B,) when they are known; None searches for one record's label too.
        steps: of L-BFGS, ≥ 1.
        restarts: from other noise, ≥ 1; the best is kept.
        randomness: of the starting points.

    Returns:
        The reconstruction with the smallest distance.

    References:
        Zhu, Liu, Han 2019, "Deep leakage from gradients", equation 5.
    """
    checks.integer(1, steps=steps)
    source, parameters = randomness or Randomness(), _trained(model, gradient)
    task = _Task(
        model=model,
        parameters=parameters,
        gradient=gradient,
        shape=(1 if labels is None else len(labels), *shape),
        classes=checks.integer(2, classes=classes),
        labels=labels,
    )
    found = [_matched(task, steps, source) for _ in range(checks.integer(1, restarts=restarts))]
    return min(found, key=lambda one: one.distance)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Task:
    model: nn.Module
    parameters: list[nn.Parameter]
    gradient: Sequence[Tensor]
    shape: tuple[int, ...]
    classes: int
    labels: Tensor | None

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """‖∇L(x, y) − g‖², with y as logits when labels are searched for."""
        targets = self.labels if self.labels is not None else y.softmax(dim=1)
        own = torch.autograd.grad(F.cross_entropy(self.model(x), targets), self.parameters, create_graph=True)
        return torch.stack([((a - b) ** 2).sum() for a, b in zip(own, self.gradient, strict=True)]).sum()


def _matched(task: _Task, steps: int, randomness: Randomness) -> Inversion:
    x = _start(task.shape, task.gradient[0], randomness).requires_grad_()
    y = _start((task.shape[0], task.classes), task.gradient[0], randomness).requires_grad_()
    searched = [x] if task.labels is not None else [x, y]
    optimizer = torch.optim.LBFGS(searched, lr=1.0, max_iter=_INNER, history_size=100, line_search_fn="strong_wolfe")
    best, kept = math.inf, (x.detach().clone(), y.detach().clone())

    def closure() -> Tensor:
        value = task.distance(x, y)
        for tensor, slope in zip(searched, torch.autograd.grad(value, searched), strict=True):
            tensor.grad = slope
        return value.detach()

    for _ in range(-(-steps // _INNER)):
        optimizer.step(closure)
        value = task.distance(x, y).item()
        if value < best:
            best, kept = value, (x.detach().clone(), y.detach().clone())
        if not math.isfinite(value) or value < _CLOSE_ENOUGH:
            break
    known = task.labels is not None
    return Inversion(
        features=kept[0],
        labels=task.labels if task.labels is not None else kept[1].argmax(dim=1),
        distance=best,
        method="gradient matching, labels known" if known else "gradient matching",
    )


def invert_by_direction(
    model: nn.Module,
    gradient: Sequence[Tensor],
    *,
    shape: Sequence[int],
    labels: Tensor,
    total_variation: float = 1e-2,
    steps: int = 600,
    learning_rate: float = 0.1,
    low: float = 0.0,
    high: float = 1.0,
    randomness: Randomness | None = None,
) -> Inversion:
    """Inverting gradients: min of 1 − cos(∇L(x), g) + α·TV(x) by Adam on signs, pixels kept within bounds.

    Works behind ReLU, where ℓ2 matching stalls, and for small batches.

    Args:
        model: features ↦ logits.
        gradient: one tensor a trained parameter.
        shape: of one record: (channels, height, width).
        labels: (B,), known or read by `label_from_sign`.
        total_variation: weight α ≥ 0 of the prior.
        steps: of Adam, ≥ 1; its learning rate falls by ten at 3/8, 5/8 and 7/8 of them.
        learning_rate: > 0, in units of pixels.
        low: smallest pixel.
        high: largest pixel.
        randomness: of the starting point.

    References:
        Geiping, Bauermeister, Dröge, Moeller 2020, "Inverting gradients", equation 4 and section 4.
    """
    checks.non_negative(total_variation=total_variation)
    checks.positive(learning_rate=learning_rate)
    parameters = _trained(model, gradient)
    x = _start((len(labels), *shape), gradient[0], randomness or Randomness()).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=learning_rate)
    milestones = [checks.integer(1, steps=steps) * k // 8 for k in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, 0.1)
    norm = torch.stack([(part**2).sum() for part in gradient]).sum().sqrt()
    best, kept = math.inf, x.detach().clone()
    for _ in range(steps):
        own = torch.autograd.grad(F.cross_entropy(model(x), labels), parameters, create_graph=True)
        inner = torch.stack([(a * b).sum() for a, b in zip(own, gradient, strict=True)]).sum()
        length = torch.stack([(a**2).sum() for a in own]).sum().sqrt()
        value = 1 - inner / (length * norm).clamp_min(1e-30) + total_variation * _roughness(x)
        if value.item() < best:
            best, kept = value.item(), x.detach().clone()
        x.grad = torch.autograd.grad(value, x)[0].sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(low, high)
    return Inversion(features=kept, labels=labels, distance=best, method="gradient direction, total variation")


def _roughness(x: Tensor) -> Tensor:
    """Mean absolute difference between neighbouring pixels."""
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


def _start(shape: tuple[int, ...], like: Tensor, randomness: Randomness) -> Tensor:
    count = int(torch.tensor(shape).prod())
    return standard_normal(count, randomness.fresh("inversion-start")).reshape(shape).to(like)


def _trained(model: nn.Module, gradient: Sequence[Tensor]) -> list[nn.Parameter]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if [tuple(part.shape) for part in gradient] != [tuple(parameter.shape) for parameter in parameters]:
        raise InvalidArgument(
            "gradient must have one tensor for each trained parameter in their order, got others. "
            "Take it from shared_gradient."
        )
    return parameters
