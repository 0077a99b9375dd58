"""Noise alone, clipping alone, both, neither (floor 4): which of the two slows a training down."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sordino import checks
from sordino.clipping import FlatClipping
from sordino.clipping.clipping import Clipping
from sordino.diagnostics.kernels import RecordLoss, cross_entropy
from sordino.gradients import GradientCapture
from sordino.mechanisms import standard_normal
from sordino.randomness import Randomness

__all__ = ["Convergence", "convergence"]

_ARMS = {"neither": (False, False), "noise alone": (False, True), "clipping alone": (True, False), "both": (True, True)}


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """Mean loss on the records over the steps, from the same start.

    Args:
        losses: for neither, noise alone, clipping alone and both: the loss before each step and after the last.
        steps: number of steps.
        max_grad_norm: clipping norm.
        noise_multiplier: standard deviation of the noise on the sum over it.
    """

    losses: dict[str, tuple[float, ...]]
    steps: int
    max_grad_norm: float
    noise_multiplier: float


def convergence(
    model: nn.Module,
    features: Tensor,
    labels: Tensor,
    *,
    steps: int,
    learning_rate: float,
    max_grad_norm: float,
    noise_multiplier: float,
    loss: RecordLoss = cross_entropy,
    clipping: Clipping | None = None,
    randomness: Randomness | None = None,
) -> Convergence:
    """Full-batch gradient descent four times from the model's weights; the model itself is left unchanged.

    Guarantee: none. Noise without clipping protects nobody, however much it is: one record can move the sum by any
    amount. It is here for comparison, on public records.

    Args:
        model: features ↦ outputs, each record alone.
        features: public records.
        labels: one a record.
        steps: ≥ 1.
        learning_rate: > 0.
        max_grad_norm: clipping norm C > 0.
        noise_multiplier: σ ≥ 0; noise on the sum has standard deviation σC with clipping and without.
        loss: of each record.
        clipping: flat by default.
        randomness: of the noise; both noisy arms get the same noise.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.linspace(-1, 1, 60).reshape(20, 3)
        >>> found = convergence(nn.Linear(3, 2), x, (x[:, 0] > 0).long(), steps=5, learning_rate=1.0,
        ...                     max_grad_norm=0.1, noise_multiplier=0.0)
        >>> found.losses["neither"][-1] < found.losses["clipping alone"][-1] < found.losses["both"][0]
        True

    References:
        Bu, Wang, Long 2023, section 3: in continuous time noise has no part in whether training converges.
    """
    checks.integer(1, steps=steps)
    checks.positive(learning_rate=learning_rate)
    checks.positive(max_grad_norm=max_grad_norm)
    checks.non_negative(noise_multiplier=noise_multiplier)
    method, source = clipping or FlatClipping(), randomness or Randomness()
    found = {}
    for name, (clips, is_noisy) in _ARMS.items():
        found[name] = _descent(
            deepcopy(model),
            (features, labels),
            loss,
            learning_rate=learning_rate,
            factors=(lambda squares: method.factors(squares, max_grad_norm=max_grad_norm))
            if clips
            else torch.ones_like,
            stddev=noise_multiplier * max_grad_norm if is_noisy else 0.0,
            steps=steps,
            randomness=source,
        )
    return Convergence(losses=found, steps=steps, max_grad_norm=max_grad_norm, noise_multiplier=noise_multiplier)


def _descent(
    model: nn.Module,
    records: tuple[Tensor, Tensor],
    loss: RecordLoss,
    *,
    learning_rate: float,
    factors: Callable[[Tensor], Tensor],
    stddev: float,
    steps: int,
    randomness: Randomness,
) -> tuple[float, ...]:
    features, labels = records
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    capture, losses = GradientCapture(model), []
    for step in range(steps):
        sums = {parameter: torch.zeros_like(parameter) for parameter in parameters}
        with capture.recording(records=len(labels)):
            own = loss(model(features), labels)
            own.sum().backward()
        losses.append(own.detach().mean().item())
        capture.add_weighted_sums(factors(capture.squared_bounds()), sums)
        capture.discard()
        for place, parameter in enumerate(parameters):
            noise = standard_normal(
                parameter.numel(), randomness.stream("convergence", step=step, tensor=place)
            ).reshape(parameter.shape)
            with torch.no_grad():
                parameter -= learning_rate * (sums[parameter] + stddev * noise.to(parameter)) / len(labels)
    capture.detach()
    with torch.no_grad():
        losses.append(loss(model(features), labels).mean().item())
    return tuple(losses)
