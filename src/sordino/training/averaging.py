"""Averages of the weights over the steps of a run: post-processing, so they cost no privacy.

The noise of single steps averages out; the bias of early steps is kept small, by leaving them out (`TailWeightAverage`)
or
by forgetting them (`ExponentialWeightAverage`). Under strong noise an average of the last steps beats the last step.

References:
    Polyak, Juditsky 1992 (averages of iterates); Rakhlin, Shamir, Sridharan 2012, section 5 (tail averages);
    De et al. 2022, section 3.4 (exponential averages in private training).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from sordino import checks


class Averaging(Protocol):
    """A rule that says how much the weights after each step count."""

    def weight(self, step: int, steps: int) -> float:
        """Share in [0, 1] of the average that the weights after step `step` (from 0, of `steps`) replace."""
        ...


@dataclass(frozen=True, kw_only=True)
class TailWeightAverage:
    """The plain mean of the weights after the last steps.

    Guarantee: post-processing of the private steps; no further privacy is spent.

    Args:
        fraction: share of the steps, in (0, 1], whose weights are averaged.

    Example:
        >>> [TailWeightAverage(fraction=0.5).weight(step, 4) for step in range(4)]
        [0.0, 0.0, 1.0, 0.5]
    """

    fraction: float = 0.5

    def __post_init__(self) -> None:
        checks.probability(zero=False, fraction=self.fraction)

    def weight(self, step: int, steps: int) -> float:
        """1/k for the k-th step of the tail, 0 before it."""
        kept = max(1, round(self.fraction * steps))
        place = step - (steps - kept)
        return 0.0 if place < 0 else 1.0 / (place + 1)


@dataclass(frozen=True, kw_only=True)
class ExponentialWeightAverage:
    """An exponential moving average whose decay is warmed up, so that the random start is soon forgotten.

    Guarantee: post-processing of the private steps; no further privacy is spent.

    Args:
        decay: final decay in [0, 1); the average then remembers about 1 / (1 − decay) steps.

    References:
        De et al. 2022, section 3.4: decay after t steps is min(decay, (1 + t) / (10 + t)).

    Example:
        >>> [round(ExponentialWeightAverage(decay=0.9).weight(step, 1000), 3) for step in (0, 10, 500)]
        [1.0, 0.45, 0.1]
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        checks.probability(one=False, decay=self.decay)

    def weight(self, step: int, steps: int) -> float:  # noqa: ARG002 (the length of the run plays no part)
        """1 − decay, after the warm-up; the first step replaces the start."""
        return 1.0 if step == 0 else max(1 - self.decay, 9 / (10 + step))


class WeightAverage:
    """The running average of one model's parameters under one rule.

    Args:
        rule: how much each step counts.
        model: whose parameters are averaged; buffers are left alone.
        steps: length of the run.
    """

    def __init__(self, rule: Averaging, model: nn.Module, *, steps: int) -> None:
        self.rule = rule
        self._parameters = list(model.parameters())
        self._steps = steps
        self._average: list[Tensor] | None = None

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step `step`."""
        weight = self.rule.weight(step, self._steps)
        if weight == 0:
            return
        if self._average is None:
            # Averages of half-precision weights would lose what a single step adds: they are held in float32.
            self._average = [parameter.to(_held(parameter), copy=True) for parameter in self._parameters]
            return
        for average, parameter in zip(self._average, self._parameters, strict=True):
            average.lerp_(parameter.to(average.dtype), weight)

    @torch.no_grad()
    def load(self) -> None:
        """Write the average into the model; before the first counted step this changes nothing."""
        if self._average is not None:
            for average, parameter in zip(self._average, self._parameters, strict=True):
                parameter.copy_(average)

    def state_dict(self) -> list[Tensor] | None:
        """The average so far, one tensor a parameter; None before the first counted step."""
        return self._average

    def load_state_dict(self, state: list[Tensor] | None) -> None:
        """Go on from what `state` gave."""
        devices = [parameter.device for parameter in self._parameters]
        self._average = None if state is None else [part.to(at) for part, at in zip(state, devices, strict=True)]


def _held(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


# ----------------------------------------------------------------------------------------------------------------------
# Several views of a record, averaged before clipping: augmentation that costs no privacy and no noise.
# ----------------------------------------------------------------------------------------------------------------------


def average_over_views(
    loss: Callable[..., Tensor],
    transform: Callable[..., tuple[object, ...]],
    *,
    views: int,
) -> Callable[..., Tensor]:
    """A loss whose gradient is the mean over `views` random views of each record, clipped as one.

    When: images or other records with transformations that keep the label. Each record still contributes one clipped
    gradient, so noise and ε are those of a single view, while its direction is steadier. A step costs `views` forward
    and backward passes.

    Guarantee: releases nothing; a record's views are added up before clipping, since they are calls of the same model
    on the same records.

    Args:
        loss: ``loss(model, *batch)``, one value per record.
        transform: ``transform(*batch)``, a random view of the same records in the same order, as a tuple. It must treat
            each record alone, which the check before the first step tries out together with the loss.
        views: K ≥ 1.

    Returns:
        A loss for `fit`.

    Example:
        >>> def loss(model, x, y):
        ...     return nn.functional.cross_entropy(model(x), y, reduction="none")
        >>> def blurred(x, y):
        ...     return nn.functional.dropout(x, 0.1), y
        >>> averaged = average_over_views(loss, blurred, views=4)
        >>> averaged(nn.Linear(3, 2), torch.ones(5, 3), torch.zeros(5).long()).shape
        torch.Size([5])

    References:
        De, Berrada, Hayes, Smith, Balle 2022, "Unlocking high-accuracy differentially private image classification
        through scale", section 3.2.
    """
    checks.integer(1, views=views)

    def averaged(model: nn.Module, *batch: object) -> Tensor:
        return torch.stack([loss(model, *transform(*batch)) for _ in range(views)]).mean(0)

    return averaged
