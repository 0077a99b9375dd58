"""A plan and an optimizer for a model, from public facts alone (floor 6): shapes, sizes, ε and δ.

Every constant below was chosen once, on public data sets (UCI Adult, MNIST, Fashion-MNIST and random parts of them
with 1000 to 4000 records), looking at their test accuracy, and is frozen. So using them on other data costs no
privacy, while the accuracies on those data sets themselves are a little better than on data nobody tuned for.

One rule sets the learning rate. Over T steps with momentum β the noise on one weight adds up to a standard deviation
of about √T · η/(1 − β) · zC/B (learning rate η, noise multiplier z, clipping norm C, divisor B). η is the largest value
for which that stays below the model's `noise_per_weight`, and at most what clipped training is still stable with.

Test accuracy measured with these constants at δ = 1e-5, lowest and highest of the runs in brackets:

| data set, ε | logistic | mlp | cnn |
|---|---|---|---|
| Adult, 1 | 84.7–84.8 % (5) | 84.7–84.9 % (5) | |
| Fashion-MNIST, 3 | | 83.4–83.8 % (5) | 85.4–86.0 % (3) |
| Fashion-MNIST, 5000 records only, 3 | 79.1 % (1) | 78.5 % (1) | 75.4 % (1) |
| Fashion-MNIST, 4.6 | 83.0–83.2 % (5) | | |
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.recipes.models import MODELS, cnn, logistic, mlp
from sordino.training import Performance, Plan
from sordino.training.averaging import Averaging, TailAverage

__all__ = ["ModelFactory", "Recipe", "recommend"]

ModelFactory = Callable[[tuple[int, ...], int], nn.Module]
"""(shape of one record's features, number of classes) ↦ a module that returns logits."""

_MOMENTUM = 0.9


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What was chosen on public data for one model.

    Args:
        batch_size: expected batch size; None trains on full batches, which are simplest to account for and, for the
            same number of steps, take the least noise a record.
        steps: number of steps.
        max_grad_norm: clipping norm.
        largest_learning_rate: the learning rate when noise is weak.
        noise_per_weight: largest standard deviation of the noise accumulated in one weight.
        averaged_fraction: share of the steps whose weights are averaged.
        microbatch_size: records that fit into memory together.
    """

    batch_size: int | None
    steps: int
    max_grad_norm: float
    largest_learning_rate: float
    noise_per_weight: float
    averaged_fraction: float
    microbatch_size: int


_SETTINGS = {
    "logistic": _Settings(
        batch_size=None,
        steps=100,
        max_grad_norm=1.0,
        largest_learning_rate=16.0,
        noise_per_weight=1.0,
        averaged_fraction=0.5,
        microbatch_size=4096,
    ),
    "mlp": _Settings(
        batch_size=4096,
        steps=200,
        max_grad_norm=1.0,
        largest_learning_rate=4.0,
        noise_per_weight=0.5,
        averaged_fraction=0.5,
        microbatch_size=4096,
    ),
    "cnn": _Settings(
        batch_size=2048,
        steps=240,
        max_grad_norm=0.3,
        largest_learning_rate=5.3,
        noise_per_weight=0.14,
        averaged_fraction=0.25,
        microbatch_size=512,
    ),
}
_OTHER = _SETTINGS["cnn"]
_FACTORIES: dict[str, ModelFactory] = {"logistic": logistic, "mlp": mlp, "cnn": cnn}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything a run needs besides the records.

    Args:
        model: name of the model.
        shape: shape of one record's features.
        classes: number of classes.
        plan: all that changes the guarantee.
        learning_rate: of SGD with Nesterov momentum.
        momentum: in [0, 1).
        averaging: average of the weights, or None.
        performance: chunk size and device.
        factory: makes the model.
    """

    model: str
    shape: tuple[int, ...]
    classes: int
    plan: Plan
    learning_rate: float
    momentum: float
    averaging: Averaging | None
    performance: Performance
    factory: ModelFactory

    def build_model(self) -> nn.Module:
        """A new model with random weights from torch's generator."""
        return self.factory(self.shape, self.classes)

    def build_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over `parameters`."""
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=self.momentum, nesterov=self.momentum > 0)


def recommend(
    model: str | ModelFactory,
    *,
    shape: Sequence[int],
    classes: int,
    population: int,
    target_epsilon: float,
    delta: float,
    steps: int | None = None,
    dataset_size_is_public: bool = True,
    device: str = "cpu",
) -> Recipe:
    """A recipe that works without tuning on the private records.

    Guarantee: only public facts go in, so the recipe costs no privacy; a run of it is (target_epsilon, delta)-
    differentially private at most, for one example added or removed.

    Args:
        model: "logistic", "mlp" or "cnn", or a function (shape, classes) ↦ module for classification.
        shape: shape of one record's features.
        classes: number of classes, ≥ 2.
        population: public number of records, or a public guess of it when `dataset_size_is_public` is False.
        target_epsilon: ε of the whole run, never exceeded.
        delta: δ in (0, 1); below 1 / population.
        steps: number of steps; by default the model's own.
        dataset_size_is_public: whether `population` is the true, public size; the guarantee then says so.
        device: where to train.

    Returns:
        The recipe.

    Raises:
        InvalidArgument: a value outside its range, an unknown model, or a shape that the model can't take.

    Example:
        >>> recipe = recommend("logistic", shape=(104,), classes=2, population=30162, target_epsilon=1.0, delta=1e-5)
        >>> recipe.plan.steps, recipe.plan.sample_rate, round(recipe.learning_rate, 1)
        (100, 1.0, 8.1)
    """
    name = model if isinstance(model, str) else getattr(model, "__name__", "custom")
    if isinstance(model, str):
        checks.one_of(MODELS, model=model)
    settings = _SETTINGS[model] if isinstance(model, str) else _OTHER
    factory = _FACTORIES[model] if isinstance(model, str) else model
    population = checks.integer(1, population=population)
    if delta >= 1 / population:
        raise InvalidArgument(
            f"delta must be below 1 / population = {1 / population:.3g}, got {delta!r}. "
            "A larger one would allow the release of whole records."
        )
    batch_size = population if settings.batch_size is None else min(settings.batch_size, population)
    plan = Plan.for_epsilon(
        target_epsilon=target_epsilon,
        delta=delta,
        sample_rate=batch_size / population,
        steps=settings.steps if steps is None else checks.integer(1, steps=steps),
        max_grad_norm=settings.max_grad_norm,
        expected_batch_size=float(batch_size),
        dataset_size_is_public=dataset_size_is_public,
    )
    return Recipe(
        model=name,
        shape=tuple(shape),
        classes=classes,
        plan=plan,
        learning_rate=_learning_rate(plan, settings),
        momentum=_MOMENTUM,
        averaging=TailAverage(fraction=settings.averaged_fraction),
        performance=Performance(microbatch_size=settings.microbatch_size, device=device),
        factory=factory,
    )


def _learning_rate(plan: Plan, settings: _Settings) -> float:
    """The largest stable one whose noise, added up over the run, stays below the model's bound."""
    noise_a_step = plan.at(0).mechanism.stddev / plan.at(0).expected_batch_size / (1 - _MOMENTUM)
    bound = settings.noise_per_weight / (noise_a_step * math.sqrt(plan.steps))
    return min(settings.largest_learning_rate, bound)
