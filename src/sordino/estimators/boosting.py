"""Cyclic boosting of one-feature trees on noisy sums of residuals (floor 4).

Proof: docs/proofs/cyclic-boosting.md.

References:
    Lou, Caruana, Gehrke 2012 (boosting one feature at a time). Nori, Caruana, Bu, Shen, Kulkarni 2021, "Accuracy,
    interpretability, and differential privacy via explainable boosting", algorithm 2 (random splits, noisy sums).
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.estimators.features import Feature
from sordino.estimators.losses import Loss
from sordino.events import Event, SelfComposed
from sordino.mechanisms import DiscreteLaplaceMechanism, GridGaussianMechanism, PrivateHistogram, PureBudget
from sordino.mechanisms.budgets import Budget
from sordino.mechanisms.values import FloatArray
from sordino.randomness import Randomness, Stream

__all__ = ["CyclicBoosting", "Shapes"]

IntegerArray = npt.NDArray[np.int64]

# Residuals are rounded towards zero to multiples of 2^-20, so that sums of them are exact in any order.
_GRID_BITS = 20
_COUNTS_SHARE = 0.05
# A leaf of the finest tree should hold so many times more than the noise that one whole run adds to it.
_FINEST = 5.0


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """What was learned, one entry a feature.

    Args:
        values: what each bin adds to the scores [bins, k].
        counts: noisy numbers of records [bins], ≥ 0.
    """

    values: list[FloatArray]
    counts: list[FloatArray]


@dataclass(frozen=True, kw_only=True)
class CyclicBoosting:
    """Additive model Σⱼ fⱼ(xⱼ), fⱼ constant on bins: round by round, feature by feature, one noisy tree.

    A tree's leaves are intervals with random ends, or single categories: nothing in them depends on records. Its
    values come from one noisy vector, the sums of residuals in its leaves, and from noisy counts that are released
    once. A record lies in one leaf of each tree, so it moves the vector by its own residual and no more.

    Guarantee: one release spends `budget` under the declared relation: 1/20 of it on one histogram a feature, the
    rest on rounds × features releases of equal shares.

    Args:
        loss: of scores; its gradient's bound is what one record can move.
        budget: Gaussian, or pure for discrete Laplace noise.
        features: at least one.
        rounds: ≥ 1.
        learning_rate: > 0.
        smoothing: ≥ 0; every leaf is shrunk as if it held that many times the noise of one release more, at unit 1.
        unit: > 0, how far scores reach about: the smaller, the less noise they bear.
        relation: the neighbouring relation.
        randomness: of the noise and of the trees; by default a fresh key of this object's own.
    """

    loss: Loss
    budget: Budget
    features: tuple[Feature, ...]
    rounds: int
    learning_rate: float
    smoothing: float
    unit: float = 1.0
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.integer(1, rounds=self.rounds)
        checks.positive(learning_rate=self.learning_rate)
        checks.non_negative(smoothing=self.smoothing)
        checks.positive(unit=self.unit)

    @property
    def releases(self) -> int:
        """How many vectors of sums are released."""
        return self.rounds * len(self.features)

    @cached_property
    def sums_share(self) -> Budget:
        """The budget of one vector of sums."""
        return self.budget.split(_COUNTS_SHARE, 1 - _COUNTS_SHARE)[1].split(*[1.0] * self.releases)[0]

    @cached_property
    def histograms(self) -> list[PrivateHistogram]:
        """The release of each feature's counts."""
        share = self.budget.split(_COUNTS_SHARE, 1 - _COUNTS_SHARE)[0].split(*[1.0] * len(self.features))[0]
        return [
            PrivateHistogram(
                budget=share,
                edges=tuple(np.arange(feature.bins + 1) - 0.5),
                relation=self.relation,
                randomness=self.randomness,
            )
            for feature in self.features
        ]

    def sums(self, leaves: int) -> GridGaussianMechanism | DiscreteLaplaceMechanism:
        """The release of residual sums [leaves, k]: one record moves them by its residual, replacing one by two."""
        bound = self.loss.lipschitz * self.relation.sensitivity_factor
        size = leaves * self.loss.outputs
        if isinstance(self.sums_share, PureBudget):
            # With several outputs a residual is e_y − p, of ℓ2 norm ≤ √2 and ℓ1 norm ≤ 2.
            return DiscreteLaplaceMechanism(
                epsilon=self.sums_share.epsilon,
                l1_sensitivity=bound if self.loss.outputs == 1 else bound * 2**0.5,
                dimension=size,
                randomness=self.randomness,
            )
        return GridGaussianMechanism(
            noise_multiplier=self.sums_share.noise_multiplier,
            l2_sensitivity=bound,
            dimension=size,
            randomness=self.randomness,
        )

    @cached_property
    def noise(self) -> float:
        """Deviation of the noise on one sum."""
        mechanism = self.sums(1)
        return 2**0.5 * mechanism.scale if isinstance(mechanism, DiscreteLaplaceMechanism) else mechanism.stddev

    def events(self) -> list[Event]:
        """The events of one release: the histograms, then all vectors of sums."""
        return [
            *(histogram.event() for histogram in self.histograms),
            SelfComposed(event=self.sums_share.event(), count=self.releases),
        ]

    def exact(self, bins: IntegerArray, leaves: int, scores: FloatArray, targets: FloatArray) -> FloatArray:
        """Sums of residuals [leaves, k] of records in these leaves; −1 is in none. Not private."""
        residuals = -self.loss.gradients(scores, targets)
        steps = np.trunc(np.ldexp(residuals, _GRID_BITS))
        inside = bins >= 0
        columns = [np.bincount(bins[inside], weights=column[inside], minlength=leaves) for column in steps.T]
        return np.ldexp(np.stack(columns, axis=1), -_GRID_BITS)

    def release(self, bins: IntegerArray, targets: FloatArray) -> Shapes:
        """Shapes for records in bins [n, features] with targets [n]."""
        released = [histogram.release(column) for histogram, column in zip(self.histograms, bins.T, strict=True)]
        counts = [np.maximum(count, 0).astype(np.float64) for count in released]
        total = max(float(np.mean([count.sum() for count in released])), 1.0)
        most = self._most_leaves(total)
        trees = self.randomness.fresh("boosting-trees")
        values = [np.zeros((feature.bins, self.loss.outputs)) for feature in self.features]
        scores = np.zeros((len(bins), self.loss.outputs))
        for _ in range(self.rounds):
            for place, feature in enumerate(self.features):
                leaves = _leaves(feature, most, trees)
                step = self._tree(leaves, counts[place], bins[:, place], scores, targets)[leaves]
                values[place] += step
                scores += np.where(bins[:, place, None] >= 0, step[bins[:, place]], 0.0)
        return Shapes(values=values, counts=counts)

    @property
    def _bend(self) -> float:
        """Curvature of a record's loss in one score."""
        return self.loss.curvature if self.loss.outputs == 1 else self.loss.curvature / 2

    def _most_leaves(self, total: float) -> float:
        """How fine a tree may be, by noisy numbers alone."""
        whole_run = self.noise / self.rounds**0.5
        return max(total * self._bend * self.unit / (_FINEST * whole_run), 2.0)

    def _tree(
        self, leaves: IntegerArray, counts: FloatArray, bins: IntegerArray, scores: FloatArray, targets: FloatArray
    ) -> FloatArray:
        """What each leaf adds to the scores [leaves, k]."""
        number = int(leaves.max()) + 1
        sums = self.exact(np.where(bins >= 0, leaves[bins], -1), number, scores, targets)
        noisy = np.asarray(self.sums(number).release(sums))
        weight = np.bincount(leaves, weights=counts, minlength=number) * self._bend
        shrunk = np.maximum(weight, self._bend) + self.smoothing / self.unit * self.noise
        return self.learning_rate * noisy / shrunk[:, None]


def _leaves(feature: Feature, most: float, trees: Stream) -> IntegerArray:
    """The leaf of each bin [bins]: its own for categories; for intervals 2 … `most` leaves, few as often as many."""
    bins = feature.bins
    if not feature.ordered or bins <= 2:
        return np.arange(bins)
    drawn = trees.uniform(bins)
    number = min(round(2.0 * (min(most, bins) / 2.0) ** float(drawn[0])), bins)
    # The cuts are those with the smallest of independent numbers: any set of that size as likely as any other.
    cuts = np.sort(np.argsort(drawn[1:])[: number - 1]) + 1
    return np.searchsorted(cuts, np.arange(bins), side="right").astype(np.int64)
