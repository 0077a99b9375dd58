"""How much the noise of each step matters at the end, measured on public data (floor 3).

The influence q_t of `sordino.schedules` is known in closed form for strongly convex losses only. Otherwise it can be
measured on public records of a similar task: perturb one step, train on, and look at the last loss.
"""

import copy
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.mechanisms.normal_draws import standard_normal
from sordino.randomness import Randomness

__all__ = ["estimate_influence", "exponential_influence"]

_LEAST = 1e-4  # of the largest: what is lost in rounding must not become an endless schedule


def estimate_influence(
    model: nn.Module,
    loss: Callable[..., Tensor],
    public_data: Sequence[Tensor],
    *,
    steps: int,
    learning_rate: float,
    perturbation: float,
    places: int = 8,
    draws: int = 4,
    randomness: Randomness | None = None,
) -> tuple[float, ...]:
    """q_t by experiment: how much the final loss rises when the gradient of step t alone has noise.

    Full-batch gradient descent is run once undisturbed, and for each of some steps with noise ±ξ in that step's
    gradient: half the second difference, (f(+ξ) + f(−ξ))/2 − f(0), is what noise costs in the mean, without the linear
    part. All steps are tried with the same ξ. Between them, log q is interpolated.

    Guarantee: `public_data` is read without protection. Give records that are public; what follows from the result is
    then public too, and a private run that is planned with it pays nothing for it.

    Args:
        model: where training starts; it is left alone.
        loss: ``loss(model, *batch)``, one value per record.
        public_data: equally long tensors, public.
        steps: T ≥ 1 of the run that is planned.
        learning_rate: > 0 of the descent.
        perturbation: standard deviation of ξ in each entry of the gradient, > 0: about the noise that is expected,
            z·C/B of a step.
        places: steps that are tried, ≥ 2, spread over the run.
        draws: of ξ for each, ≥ 1.
        randomness: of ξ; fresh when None.

    Returns:
        One number > 0 a step, the largest of them 1, for `least_noise`.

    Example:
        >>> features = torch.tensor([[1.0], [-1.0]])
        >>> def squares(model, x):
        ...     return model(x).square().sum(1)
        >>> found = estimate_influence(nn.Linear(1, 1, bias=False), squares, (features,), steps=4, learning_rate=0.25,
        ...     perturbation=0.1, places=4)
        >>> [round(value, 2) for value in found]
        [0.02, 0.06, 0.25, 1.0]

    References:
        Hong, Wang, Zhou 2022, section 5 (the influence of a step, estimated by its effect on the final loss).
    """
    count = checks.integer(1, steps=steps)
    checks.positive(learning_rate=learning_rate)
    checks.positive(perturbation=perturbation)
    tried = sorted({round(place) for place in np.linspace(0, count - 1, checks.integer(2, places=places))})
    randomness = Randomness() if randomness is None else randomness
    stream = randomness.fresh("influence")
    path = _descend(copy.deepcopy(model), loss, public_data, count, learning_rate)
    start = _mean_loss(path[-1], loss, public_data)
    size = sum(parameter.numel() for parameter in path[-1].parameters())
    noises = [
        perturbation * standard_normal(size, stream, dtype=torch.float64) for _ in range(checks.integer(1, draws=draws))
    ]
    costs: list[float] = []
    for step in tried:
        rises = []
        for noise in noises:
            ends = [
                _descend(copy.deepcopy(path[step]), loss, public_data, count - step, learning_rate, sign * noise)[-1]
                for sign in (1.0, -1.0)
            ]
            rises.append(sum(_mean_loss(end, loss, public_data) for end in ends) / 2 - start)
        costs.append(math.fsum(rises) / len(rises))
    largest = max(costs)
    if not largest > 0:
        raise InvalidArgument("perturbation must raise the final loss somewhere, got one that doesn't. Make it larger.")
    logs = np.log(np.maximum(np.array(costs) / largest, _LEAST))
    return tuple(float(value) for value in np.exp(np.interp(np.arange(count), tried, logs)))


def exponential_influence(influences: Sequence[float]) -> tuple[float, ...]:
    """The exponential q_t = e^{rate·(t − T + 1)} that is nearest to measured influences, by least squares of log q.

    Measured influences of networks are noisy; one rate is not.

    Example:
        >>> [round(value, 4) for value in exponential_influence((0.25, 0.5, 1.0))]
        [0.25, 0.5, 1.0]
    """
    logs = [math.log(checks.positive(influences=value)) for value in influences]
    if len(logs) < 2:
        raise InvalidArgument(f"influences must hold at least two steps, got {len(logs)}.")
    rate = float(np.polyfit(np.arange(len(logs)), logs, 1)[0])
    return tuple(math.exp(rate * (step - len(logs) + 1)) for step in range(len(logs)))


def _descend(
    model: nn.Module,
    loss: Callable[..., Tensor],
    data: Sequence[Tensor],
    steps: int,
    rate: float,
    first_noise: Tensor | None = None,
) -> list[nn.Module]:
    """The models before each step and after the last; the first step's gradient has `first_noise` added.

    Without noise every state is kept, since runs start from them; with noise only the last.
    """
    kept = [copy.deepcopy(model)] if first_noise is None else []
    parameters = list(model.parameters())
    for step in range(steps):
        gradients = torch.autograd.grad(loss(model, *data).mean(), parameters)
        with torch.no_grad():
            place = 0
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=rate)
                if step == 0 and first_noise is not None:
                    part = first_noise[place : place + parameter.numel()].view(parameter.shape)
                    parameter.sub_(part.to(parameter), alpha=rate)
                    place += parameter.numel()
        if first_noise is None:
            kept.append(copy.deepcopy(model))
    return kept or [model]


@torch.no_grad()
def _mean_loss(model: nn.Module, loss: Callable[..., Tensor], data: Sequence[Tensor]) -> float:
    return float(loss(model, *data).double().mean())
