"""Canaries: records that an audit plants, each with probability ½.

A canary of gradients has one coordinate to itself, next to the model: its gradient there is larger than any clipping
norm, and no record's reaches it. It is the worst record for a mechanism, and leaves the model's training as it was.
Canaries of records go the whole way, through the model's own layers: mislabeled or synthetic ones.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.special import ndtr
from torch import Tensor, nn

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.randomness import KeyedRNG
from sordino.training.plan import Plan

_LOUD = 1000.0
"""A canary's gradient norm, in clipping norms."""


def draw_inclusion(count: int, rng: KeyedRNG) -> np.ndarray:
    """Which of `count` canaries are in: fair and independent."""
    return rng.new_stream("audit coins").uniform(checks.integer(1, count=count)) < 0.5


class _Marked(nn.Module):
    """The model, with one additional number for every canary."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        like = next(model.parameters())
        self.model = model
        self.marks = nn.Embedding(count, 1, device=like.device, dtype=like.dtype)
        nn.init.zeros_(self.marks.weight)
        self.train(model.training)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs)


class GradientCanaries:
    """Canaries whose gradients are unit directions next to the model's parameters.

    Args:
        model: of the user; it is trained in place.
        loss: ``loss(model, *batch)``, one value a record.
        data: equally long tensors, records first.
        plan: what is audited.
        present: [m], which canaries are in.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        data: Sequence[Tensor],
        plan: Plan,
        present: np.ndarray,
    ) -> None:
        self.model = _Marked(model, len(present))
        self._loss = loss
        self._loudness = _LOUD * max(plan.step_plan(step).max_grad_norm for step in {0, max(plan.steps - 1, 0)})
        positions, signs = _planted(present, plan.neighboring_relation)
        count = len(data[0])
        blanks = [torch.zeros((len(positions), *part.shape[1:]), dtype=part.dtype, device=part.device) for part in data]
        self.data = (
            *(torch.cat([part, blank]) for part, blank in zip(data, blanks, strict=True)),
            torch.cat([torch.zeros(count, dtype=torch.long), positions]),
            torch.cat([torch.zeros(count), signs]),
            torch.cat([torch.zeros(count), torch.ones(len(positions))]),
        )

    def loss(self, model: _Marked, *batch: Tensor) -> Tensor:
        """The user's loss of records; of a canary, its own number times a large one."""
        *own, positions, signs, planted = batch
        marks = model.marks(positions.clamp(0, model.marks.num_embeddings - 1)).flatten(1).sum(1)
        return (1 - planted) * self._loss(model.model, *own) + planted * signs * self._loudness * marks

    def inner_products(self) -> Tensor:
        """⟨canary's direction, the gradient that the optimizer is about to see⟩, [m]."""
        gradient = self.model.marks.weight.grad
        assert gradient is not None
        return gradient.flatten().double()

    def final_scores(self) -> Tensor:
        """What the final model alone says, [m]: how far down a canary's loss went."""
        return -self.model.marks.weight.detach().flatten().double()


def _planted(present: np.ndarray, neighboring_relation: NeighboringRelation) -> tuple[Tensor, Tensor]:
    """Places and signs of the canaries in the data: what is absent is left out, blank, or replaced by its opposite."""
    if neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        positions = torch.from_numpy(np.flatnonzero(present))
        return positions, torch.ones(len(positions))
    absent = -1.0 if neighboring_relation is NeighboringRelation.REPLACE_ONE else 0.0
    return torch.arange(len(present)), torch.from_numpy(np.where(present, 1.0, absent)).float()


class RecordCanaries:
    """Canaries that are records as any other.

    Args:
        model: of the user; it is trained in place.
        loss: ``loss(model, *batch)``, one value a record.
        data: equally long tensors, records first.
        plan: what is audited, under add-or-remove-one.
        canaries: tensors like `data`, [m, …].
        present: [m], which canaries are in.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        data: Sequence[Tensor],
        plan: Plan,
        canaries: Sequence[Tensor],
        present: np.ndarray,
    ) -> None:
        if plan.neighboring_relation is not NeighboringRelation.ADD_OR_REMOVE_ONE:
            raise InvalidArgument(
                f"canaries must be 'gradients' under {plan.neighboring_relation.describe()}, got records: an absent "
                f"one "
                "would have to be replaced. Audit with gradients."
            )
        if [part.shape[1:] for part in canaries] != [part.shape[1:] for part in data]:
            raise InvalidArgument("canaries must have the shapes of the data's records, got others. Give like tensors.")
        self.model, self.loss = model, loss
        self._canaries = tuple(canaries)
        inside = torch.from_numpy(present)
        self.data = tuple(torch.cat([part, more[inside]]) for part, more in zip(data, canaries, strict=True))
        self._before = self._losses()

    def inner_products(self) -> Tensor:
        """⟨canary's loss gradient here, the gradient that the optimizer is about to see⟩, [m], each canary's scaled.

        All at once, as one directional derivative: central differences along the released gradient.
        """
        pairs = [(weight, weight.grad) for weight in self.model.parameters() if weight.grad is not None]
        length = torch.stack([gradient.norm() for _, gradient in pairs]).norm()
        size = torch.stack([weight.detach().norm() for weight, _ in pairs]).norm()
        step = float((1e-2 * (1 + size)) / (1e-30 + length))
        kept = [weight.detach().clone() for weight, _ in pairs]
        with torch.no_grad():
            ends = []
            for sign in (1.0, -1.0):
                for (weight, gradient), start in zip(pairs, kept, strict=True):
                    assert gradient is not None
                    weight.copy_(start + sign * step * gradient)
                ends.append(self._losses())
            for (weight, _), start in zip(pairs, kept, strict=True):
                weight.copy_(start)
        return (ends[0] - ends[1]) / (2 * step)

    def final_scores(self) -> Tensor:
        """How far down each canary's loss went, [m]."""
        return self._before - self._losses()

    def _losses(self) -> Tensor:
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return self.loss(self.model, *self._canaries).double()
        finally:
            self.model.train(training)


def mislabeled_canaries(data: Sequence[Tensor], count: int, rng: KeyedRNG) -> tuple[Tensor, ...]:
    """`count` records of the data with another label: for (features, labels) with labels 0, 1, ….

    The records are taken from the data, so the audit must not be released as if these were private in advance.

    Raises:
        InvalidArgument: the data are no such pair, have fewer records, or one label only.
    """
    if len(data) != 2 or data[1].dtype not in {torch.int64, torch.int32}:
        raise InvalidArgument("canaries must not be 'mislabeled' without integer labels, got other data. Use 'random'.")
    features, labels = data
    classes = int(labels.max()) + 1 if len(labels) else 0
    if classes < 2 or len(labels) < checks.integer(1, count=count):
        raise InvalidArgument(f"data must hold {count} records and two labels, got fewer. Ask for fewer canaries.")
    stream = rng.new_stream("audit canaries")
    positions = torch.from_numpy(np.argsort(stream.integers64(len(labels)))[:count].astype(np.int64))
    shift = torch.from_numpy(1 + (stream.integers64(count) % np.uint64(classes - 1)).astype(np.int64))
    return features[positions].clone(), ((labels[positions] + shift) % classes).to(labels.dtype)


def synthetic_canaries(data: Sequence[Tensor], count: int, rng: KeyedRNG) -> tuple[Tensor, ...]:
    """`count` records like those of the data, every entry drawn at random.

    Floats are uniform between the data's least and largest, integers too.
    """
    stream = rng.new_stream("audit canaries")

    def drawn(part: Tensor) -> Tensor:
        shape = (checks.integer(1, count=count), *part.shape[1:])
        unit = torch.from_numpy(stream.uniform(int(np.prod(shape)))).reshape(shape)
        low, high = float(part.min()), float(part.max())
        if part.dtype.is_floating_point:
            return (low + (high - low) * unit).to(part.dtype)
        return (low + torch.floor(unit * (high - low + 1))).to(part.dtype)

    return tuple(drawn(part) for part in data)


# ----------------------------------------------------------------------------------------------------------------------
# An estimate of ε from one run with canaries of random direction: not a bound.
#
# Each canary's update is a random unit vector times the clipping norm. Without it in the training, the cosine between
# it and what the model moved by is N(0, 1/d); with it, N(μ, s²), which is fitted. ε is that of the two normals.
#
# References:
#     Andrew et al. 2023, algorithm 2.
# ----------------------------------------------------------------------------------------------------------------------


_LARGEST_EPSILON = 500.0


@dataclass(frozen=True, kw_only=True)
class OneShotEstimate:
    """About how large ε is, if both distributions are normal. It proves nothing.

    Args:
        epsilon: the estimate.
        interval: 95 % of the estimates from canaries drawn again with replacement.
        delta: at this δ.
        canaries: how many cosines were fitted.
    """

    epsilon: float
    interval: tuple[float, float]
    delta: float
    canaries: int

    def __str__(self) -> str:
        low, high = self.interval
        return f"ε is about {self.epsilon:.2f} ({low:.2f} to {high:.2f} over canaries): an estimate, not a bound"


def normal_pair_epsilon(mean: float, deviation: float, *, delta: float, reference_deviation: float = 1.0) -> float:
    """ε at δ of N(mean, deviation²) against N(0, reference_deviation²), the worse of the two directions.

    Args:
        mean: of the first distribution.
        deviation: of the first distribution, > 0.
        delta: in (0, 1).
        reference_deviation: > 0.

    Example:
        >>> round(normal_pair_epsilon(1.0, 1.0, delta=1e-5), 3)
        4.377
    """
    checks.positive(deviation=deviation)
    checks.positive(reference_deviation=reference_deviation)
    checks.probability(zero=False, one=False, delta=delta)
    m, s = mean / reference_deviation, deviation / reference_deviation

    def worst(epsilon: float) -> float:
        return max(_delta(epsilon, (m, s), (0.0, 1.0)), _delta(epsilon, (0.0, 1.0), (m, s)))

    low, high = 0.0, _LARGEST_EPSILON
    if worst(low) <= delta:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if worst(middle) > delta else (low, middle)
    return low


def _delta(epsilon: float, first: tuple[float, float], second: tuple[float, float]) -> float:
    """P(S) − e^ε Q(S) on S = {log p/q > ε}, which a quadratic bounds: a·x² + b·x + c > 0."""
    (m, s), (n, t) = first, second
    a = (1 / t**2 - 1 / s**2) / 2
    b = m / s**2 - n / t**2
    c = math.log(t / s) - (m / s) ** 2 / 2 + (n / t) ** 2 / 2 - epsilon
    if abs(a) < 1e-14:
        if b == 0:
            return max(0.0, 1 - math.exp(epsilon)) if c > 0 else 0.0
        edges, inside = (-c / b, math.copysign(math.inf, b)), True
    else:
        square = b * b - 4 * a * c
        if square <= 0:
            return 0.0 if a < 0 else max(0.0, -math.expm1(epsilon))
        # The root without cancellation first, the other from the product of the two.
        far = -(b + math.copysign(math.sqrt(square), b)) / 2
        edges, inside = (far / a, c / far), a < 0
    low, high = min(edges), max(edges)

    def mass(mean: float, deviation: float) -> float:
        lower, upper = (low - mean) / deviation, (high - mean) / deviation
        if inside:
            # In the upper tail the mirrored difference keeps its digits.
            return float(ndtr(-lower) - ndtr(-upper)) if lower > 0 else float(ndtr(upper) - ndtr(lower))
        return float(ndtr(lower) + ndtr(-upper))

    q = mass(n, t)
    return max(0.0, mass(m, s) - (math.exp(epsilon + math.log(q)) if q > 0 else 0.0))


def one_shot_estimate(
    cosines: ArrayLike, *, dimension: int, delta: float, draws: int = 200, rng: KeyedRNG | None = None
) -> OneShotEstimate:
    """About how large ε is, from the cosines of the canaries that were in.

    Guarantee: none. With few canaries the estimate is far too high (about 2.7 for a true 1.0 with 100 of them), and it
    assumes normal distributions.

    Args:
        cosines: [k] cosines between each canary and what the model moved by, k ≥ 3.
        dimension: of the parameters, ≥ 1.
        delta: in (0, 1).
        draws: resamplings for the interval, ≥ 20.
        rng: for the resamplings.

    Example:
        >>> estimate = one_shot_estimate([0.11, 0.09, 0.10, 0.12, 0.08], dimension=10_000, delta=1e-6)
        >>> estimate.canaries, estimate.epsilon > 10
        (5, True)

    References:
        Andrew et al. 2023, section 3.
    """
    values = np.asarray(cosines, dtype=np.float64)
    if values.ndim != 1 or len(values) < 3 or not np.isfinite(values).all():
        raise InvalidArgument("cosines must be a vector of at least 3 finite numbers, got another. Use more canaries.")
    checks.integer(1, dimension=dimension)
    count, deviation = checks.integer(20, draws=draws), dimension**-0.5

    def estimate(sample: np.ndarray) -> float:
        spread = max(float(sample.std(ddof=1)), 1e-9 * deviation)
        return normal_pair_epsilon(float(sample.mean()), spread, delta=delta, reference_deviation=deviation)

    stream = (KeyedRNG() if rng is None else rng).new_stream("one-shot resampling")
    positions = (stream.uniform(count * len(values)) * len(values)).astype(int).reshape(count, len(values))
    low, high = np.quantile([estimate(values[row]) for row in positions], [0.025, 0.975])
    return OneShotEstimate(
        epsilon=estimate(values), interval=(float(low), float(high)), delta=delta, canaries=len(values)
    )
