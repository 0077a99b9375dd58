"""A plan and an optimizer for a model, from public facts alone: shapes, sizes, ε and δ.

Every constant below was chosen once, on public datasets (UCI Adult, MNIST, Fashion-MNIST and random parts of them
with 1000 to 4000 records), looking at their test accuracy, and is frozen. So using them on other data costs no
privacy, while the accuracies on those datasets themselves are a little better than on other data.

One rule sets the learning rate. Over T steps with momentum β the noise on one weight adds up to a standard deviation
of about √T · η/(1 − β) · zC/B (learning rate η, noise multiplier z, clipping norm C, divisor B). η is the largest value
for which that stays below the model's `noise_per_weight`, and at most what clipped training is still stable with.

Test accuracy measured with these constants at δ = 1e-5, lowest and highest of the runs in brackets:

| dataset, ε | logistic | mlp | cnn |
|---|---|---|---|
| Adult, 1 | 84.7–84.8 % (5) | 84.7–84.9 % (5) | |
| Fashion-MNIST, 3 | | 83.4–83.8 % (5) | 85.4–86.0 % (3) |
| Fashion-MNIST, 5000 records only, 3 | 79.1 % (1) | 78.5 % (1) | 75.4 % (1) |
| Fashion-MNIST, 4.6 | 83.0–83.2 % (5) | | |
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks
from sordino.data import DatasetSplits, Records
from sordino.errors import InvalidArgument
from sordino.ledger import Account, Reservation
from sordino.randomness import KeyedRNG
from sordino.recipes.models import MODELS, cnn, logistic, mlp
from sordino.runs import RunFolder
from sordino.training import PerformanceOptions, Plan
from sordino.training.averaging import Averaging, TailWeightAverage
from sordino.training.fit import FitResult, Transcript, fit
from sordino.training.plan import noise_limited_learning_rate
from sordino.training.probing.snapshots import evaluation_mode

ModelFactory = Callable[[tuple[int, ...], int], nn.Module]
"""(shape of one record's features, number of classes) ↦ a module that returns logits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NetworkSpec:
    """How a network is trained: public numbers, fixed in advance.

    Args:
        build: (shape of a record, classes) ↦ module that returns logits.
        batch_size: expected batch size; None for full batches, which are simplest to account for and, for the same
            number of steps, take the least noise a record.
        steps: number of steps.
        max_grad_norm: clipping norm.
        learning_rate: of SGD, or the plan ↦ it.
        momentum: in [0, 1); Nesterov's when `nesterov`.
        averaging: of the weights, or None.
        view: a random view of a batch (features, labels), each record by itself; None for the records as they are.
        views: views of a record whose gradients are averaged before clipping.
        microbatch_size: records that fit into memory together.
        inputs: records ↦ the network's inputs, each record by itself; None passes features on.
        noise_multiplier: fixes the noise; None takes the least that keeps the target.
        description: the network in words, for the report.
    """

    build: ModelFactory
    batch_size: int | None
    steps: int
    max_grad_norm: float
    learning_rate: float | Callable[[Plan], float]
    momentum: float = 0.9
    nesterov: bool = True
    averaging: Averaging | None = None
    view: Callable[..., tuple[object, ...]] | None = None
    views: int = 1
    microbatch_size: int | None = None
    inputs: Callable[[Records], Tensor] | None = None
    noise_multiplier: float | None = None
    description: str = ""

    def plan(
        self, *, dataset_size: int, delta: float, target_epsilon: float | None, dataset_size_is_public: bool = True
    ) -> Plan:
        """The plan whose noise is fixed, or the least for the target."""
        size = dataset_size if self.batch_size is None else min(self.batch_size, dataset_size)
        facts = {
            "max_grad_norm": self.max_grad_norm,
            "sample_rate": size / dataset_size,
            "steps": self.steps,
            "expected_batch_size": float(size),
            "delta": delta,
            "dataset_size_is_public": dataset_size_is_public,
        }
        if self.noise_multiplier is not None:
            return Plan(noise_multiplier=self.noise_multiplier, **facts)
        return Plan.for_epsilon(target_epsilon=checks.positive(target_epsilon=target_epsilon), **facts)

    def rate(self, plan: Plan) -> float:
        """The learning rate under this plan."""
        return self.learning_rate(plan) if callable(self.learning_rate) else self.learning_rate


def noise_limited(*, largest: float, noise_per_weight: float, momentum: float = 0.9) -> Callable[[Plan], float]:
    """A plan's `noise_limited_learning_rate`, at most `largest`."""
    return lambda plan: min(largest, noise_limited_learning_rate(plan, noise_per_weight, momentum=momentum))


# What was chosen on public data for each model.
NETWORKS: Mapping[str, NetworkSpec] = {
    "logistic": NetworkSpec(
        build=logistic,
        batch_size=None,
        steps=100,
        max_grad_norm=1.0,
        learning_rate=noise_limited(largest=16.0, noise_per_weight=1.0),
        averaging=TailWeightAverage(fraction=0.5),
        microbatch_size=4096,
        description="logistic regression on records of norm 2",
    ),
    "mlp": NetworkSpec(
        build=mlp,
        batch_size=4096,
        steps=200,
        max_grad_norm=1.0,
        learning_rate=noise_limited(largest=4.0, noise_per_weight=0.5),
        averaging=TailWeightAverage(fraction=0.5),
        microbatch_size=4096,
        description="64 tanh units on records of norm 2",
    ),
    "cnn": NetworkSpec(
        build=cnn,
        batch_size=2048,
        steps=240,
        max_grad_norm=0.3,
        learning_rate=noise_limited(largest=5.3, noise_per_weight=0.14),
        averaging=TailWeightAverage(fraction=0.25),
        microbatch_size=512,
        description="tanh CNN",
    ),
}
"""The named models, and how they are trained."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
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
    performance: PerformanceOptions
    factory: ModelFactory

    def build_model(self) -> nn.Module:
        """A new model with random weights from torch's generator."""
        return self.factory(self.shape, self.classes)

    def build_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over `parameters`."""
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=self.momentum, nesterov=self.momentum > 0)


def recommend_config(
    model: str | ModelFactory,
    *,
    shape: Sequence[int],
    classes: int,
    dataset_size: int,
    target_epsilon: float,
    delta: float,
    steps: int | None = None,
    dataset_size_is_public: bool = True,
    device: str = "cpu",
) -> TrainingConfig:
    """A recipe that works without tuning on the private records.

    Guarantee: only public facts go in, so the recipe costs no privacy; a run of it is (target_epsilon, delta)-
    differentially private at most, for one record added or removed.

    Args:
        model: "logistic", "mlp" or "cnn", or a function (shape, classes) ↦ module for classification.
        shape: shape of one record's features.
        classes: number of classes, ≥ 2.
        dataset_size: public number of records, or a public guess of it when `dataset_size_is_public` is False.
        target_epsilon: ε of the whole run, never exceeded.
        delta: δ in (0, 1); below 1 / dataset_size.
        steps: number of steps; by default the model's own.
        dataset_size_is_public: whether `dataset_size` is the true, public size; the guarantee then says so.
        device: where to train.

    Returns:
        The recipe.

    Raises:
        InvalidArgument: a value outside its range, an unknown model, or a shape that the model can't take.

    Example:
        >>> recipe = recommend_config(
        ...     "logistic", shape=(104,), classes=2, dataset_size=30162, target_epsilon=1.0, delta=1e-5
        ... )
        >>> recipe.plan.steps, recipe.plan.sample_rate, round(recipe.learning_rate, 1)
        (100, 1.0, 8.1)
    """
    if isinstance(model, str):
        checks.one_of(MODELS, model=model)
        name, spec = model, NETWORKS[model]
    else:
        name, spec = getattr(model, "__name__", "custom"), replace(NETWORKS["cnn"], build=model)
    if steps is not None:
        spec = replace(spec, steps=checks.integer(1, steps=steps))
    dataset_size = checks.integer(1, dataset_size=dataset_size)
    if delta >= 1 / dataset_size:
        raise InvalidArgument(
            f"delta must be below 1 / dataset_size = {1 / dataset_size:.3g}, got {delta!r}. "
            "A larger one would allow the release of whole records."
        )
    plan = spec.plan(
        dataset_size=dataset_size,
        delta=delta,
        target_epsilon=target_epsilon,
        dataset_size_is_public=dataset_size_is_public,
    )
    return TrainingConfig(
        model=name,
        shape=tuple(shape),
        classes=classes,
        plan=plan,
        learning_rate=spec.rate(plan),
        momentum=spec.momentum,
        averaging=spec.averaging,
        performance=PerformanceOptions(microbatch_size=spec.microbatch_size, device=device),
        factory=spec.build,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Running a recipe on a dataset, and what to compare the result with when the data are public.
# ----------------------------------------------------------------------------------------------------------------------


_TWIN_BATCH = 256
_TWIN_LEAST_STEPS = 1000
# (learning rate, epochs) of Adam: within half a percent of the best that was found on the public datasets.
_TWIN_LINEAR, _TWIN_OTHER = (0.02, 12), (0.003, 5)


def train_with_config(
    dataset: DatasetSplits,
    recipe: TrainingConfig,
    *,
    run_folder: RunFolder | None = None,
    resume_from: Path | None = None,
    checkpoint_every: int | None = None,
    diagnostics: str | None = None,
    ledger: Account | Reservation | None = None,
    transcript: Transcript | None = None,
    progress: bool = True,
    rng: KeyedRNG | None = None,
) -> FitResult:
    """Train the recipe's model on the training records.

    Guarantee: that of `fit` under ``recipe.plan``; only ``dataset.train`` is read.

    Args:
        dataset: its training records have the recipe's shape.
        recipe: from `recommend`.
        run_folder: open for writing; it gets the transcript, the model and the guarantee, and is closed.
        resume_from: the folder of a run of this recipe that was cut off.
        checkpoint_every: steps between checkpoints.
        diagnostics: None, or "private" as in `fit`.
        ledger: the dataset's account, as in `fit`.
        transcript: charged before each step, together with or instead of a run.
        progress: show step, ε so far and time left.
        rng: fresh for every run; None draws a new key from the operating system.

    Returns:
        The model with its guarantee.
    """
    _same_shape(dataset.train, recipe)
    return fit(
        recipe.build_model(),
        cross_entropy_per_record,
        dataset.train.tensors(),
        recipe.plan,
        optimizer=recipe.build_optimizer,
        performance=recipe.performance,
        rng=rng,
        averaging=recipe.averaging,
        run_folder=run_folder,
        resume_from=resume_from,
        checkpoint_every=checkpoint_every,
        diagnostics=diagnostics,
        ledger=ledger,
        transcript=transcript,
        progress=progress,
    )


def cross_entropy_per_record(model: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each record, shape (records,)."""
    return F.cross_entropy(model(features), labels, reduction="none")


def non_private_baseline(dataset: DatasetSplits, recipe: TrainingConfig) -> nn.Module:
    """The recipe's model trained on the same records without privacy, by Adam: the accuracy that privacy costs.

    Guarantee: none. So it is refused for data that are not declared public.

    Args:
        dataset: a public dataset.
        recipe: whose model is trained.

    Raises:
        InvalidArgument: the dataset is not public, or has no records.
    """
    checks.integer(1, records=len(dataset.train))
    if not dataset.public:
        raise InvalidArgument(
            f"dataset must be public to be trained on without privacy, got {dataset.name!r}. "
            "Declare the data public only if anyone may see them."
        )
    _same_shape(dataset.train, recipe)
    features, labels = (part.to(recipe.performance.device) for part in dataset.train.tensors())
    learning_rate, epochs = _TWIN_LINEAR if recipe.model in {"logistic", "mlp"} else _TWIN_OTHER
    steps = max(_TWIN_LEAST_STEPS, epochs * -(-len(labels) // _TWIN_BATCH))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = recipe.build_model().to(recipe.performance.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=steps)
        for rows in islice(_shuffled(len(labels)), steps):
            optimizer.zero_grad()
            cross_entropy_per_record(model, features[rows], labels[rows]).mean().backward()
            optimizer.step()
            schedule.step()
    return model


def _shuffled(records: int) -> Iterator[Tensor]:
    """Batches of indices, one epoch after another, in the same order every time."""
    rng = KeyedRNG(seed=0, reproducible=True)
    for epoch in count():
        order = np.argsort(rng.stream("twin", step=epoch).integers64(records))
        yield from torch.from_numpy(order).split(_TWIN_BATCH)


@torch.no_grad()
def accuracy(model: nn.Module, records: Records) -> float:
    """Share of records, in [0, 1], whose largest logit is that of their label.

    Guarantee: none beyond the model's. On private records the number is a statistic of them that nothing protects:
    measure on public records, or keep it to yourself.

    Args:
        model: features (B, …) ↦ logits (B, classes). Evaluated in evaluation mode, and left in the mode it was in.
        records: at least one.
    """
    features, labels = records.tensors()
    checks.integer(1, records=len(labels))
    chunks = zip(features.split(4096), labels.split(4096), strict=True)
    device = next(model.parameters()).device
    with evaluation_mode(model):
        right = [(model(x.to(device)).argmax(1).cpu() == y).sum() for x, y in chunks]
    return float(torch.stack(right).sum()) / len(labels)


def _same_shape(records: Records, recipe: TrainingConfig) -> None:
    if records.record_shape != recipe.shape:
        raise InvalidArgument(
            f"dataset must have records of shape {recipe.shape}, got {records.record_shape}. Ask for a recipe of that "
            "shape."
        )
