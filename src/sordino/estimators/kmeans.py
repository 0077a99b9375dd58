"""k-means by a fixed number of noisy Lloyd steps.

Proof: docs/proofs/k-means.md.

References:
    Blum, Dwork, McSherry, Nissim 2005, "Practical privacy: the SuLQ framework", section 4.4. Su, Cao, Li, Bertino, Jin
    2016, "Differentially private k-means clustering" (few steps, spread starting centers).
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import cdist
from sklearn.base import TransformerMixin
from sklearn.utils.validation import check_is_fitted

from sordino import checks
from sordino.estimators.base import ColumnBounds, PrivateEstimator, column_bounds, fill_missing, validate_matrix
from sordino.events import Event
from sordino.mechanisms import PrivateCount, PrivateSum, make_budget
from sordino.mechanisms.base import FloatArray, Numbers
from sordino.mechanisms.calibration import Budget
from sordino.randomness import KeyedRNG

# The count's part in a step's budget, with one for each column of the sums.
_COUNT_WEIGHT = 0.5
_TRIED = 64


@dataclass(kw_only=True, eq=False, repr=False)
class KMeans(TransformerMixin, PrivateEstimator):
    """Private k-means: `max_iter` steps, each with a noisy count and noisy sums of every cluster.

    Guarantee: `cluster_centers_` are (epsilon, delta)-differentially private for one record added or removed. Starting
    centers don't look at records, the number of steps is fixed, and a cluster is treated as empty by its noisy count.
    Records are clipped to `bounds`, a missing entry is their middle. Labels of the records and their distances would
    be releases of their own: there are none.

    Args:
        n_clusters: k ≥ 1.
        epsilon: ε > 0. Required.
        delta: δ in [0, 1); 0 for geometric and Laplace noise. Required.
        bounds: (lower, upper), numbers or one a column, from public knowledge. Required.
        max_iter: number of steps ≥ 1; more steps mean more noise in each.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `guarantee_` then carries "not for release".
        ledger: None, or the account, or a reservation on it, that every fit is charged to.

    Attributes:
        cluster_centers_: [k, d], inside the bounds.
        n_iter_: `max_iter`.
        guarantee_: the guarantee.
        events_: what was done to each cluster, in order; the clusters hold different records.

    Example:
        >>> X = np.repeat([[1.0, 1.0], [9.0, 9.0]], 2000, axis=0)
        >>> model = KMeans(2, epsilon=2.0, delta=1e-6, bounds=(0.0, 10.0)).fit(X)
        >>> model.cluster_centers_.shape
        (2, 2)
    """

    n_clusters: int = field(default=8, kw_only=False)
    bounds: ColumnBounds | None = None
    max_iter: int = 5

    def fit(self, X: Numbers, y: object = None) -> "KMeans":  # noqa: ARG002 (scikit-learn's signature)
        """Fit to records X [n, d]; charged first, then read."""
        epsilon, delta = self._budget()
        clusters = checks.integer(1, n_clusters=self.n_clusters)
        steps = checks.integer(1, max_iter=self.max_iter)
        rng = self._randomness()
        records = validate_matrix(X, estimator=self, reset=True)
        lower, upper = column_bounds(self.bounds, records.shape[1])
        records = fill_missing(records, bounds=(lower, upper))
        shares = make_budget(epsilon=epsilon, delta=delta).split(*[1.0] * steps)
        rounds = [_Step(share, records.shape[1], rng) for share in shares]
        self._charge([event for one in rounds for event in one.events()])
        middle, half = lower / 2 + upper / 2, upper / 2 - lower / 2
        points = np.clip((np.clip(records, lower, upper) - middle) / half, -1.0, 1.0)
        centers = _spread_centers(clusters, records.shape[1], rng)
        for one in rounds:
            members = _squares(points, centers, half).argmin(axis=1)
            centers = np.stack([one.center(points[members == index], centers[index]) for index in range(clusters)])
        self.cluster_centers_ = middle + half * centers
        self.n_iter_ = steps
        return self

    def transform(self, X: Numbers) -> FloatArray:
        """Distances of records to the centers [n, k]."""
        check_is_fitted(self)
        records = validate_matrix(X, estimator=self, reset=False)
        records = fill_missing(records, bounds=column_bounds(self.bounds, records.shape[1]))
        return np.asarray(cdist(records, self.cluster_centers_), dtype=np.float64)

    def predict(self, X: Numbers) -> npt.NDArray[np.int64]:
        """The nearest center of each record [n]."""
        return self.transform(X).argmin(axis=1)


class _Step:
    """One Lloyd step: a noisy count and noisy sums of points in [−1, 1]^d for each cluster.

    Args:
        share: this step's budget.
        columns: d.
        rng: where the noise comes from.
    """

    def __init__(self, share: Budget, columns: int, rng: KeyedRNG) -> None:
        for_count, for_sums = share.split(_COUNT_WEIGHT, float(columns))
        self.count = PrivateCount(budget=for_count, rng=rng)
        self.sums = PrivateSum(budget=for_sums, bounds=((-1.0, 1.0),) * columns, rng=rng)

    def events(self) -> list[Event]:
        return [self.count.event(), self.sums.event()]

    def center(self, points: FloatArray, before: FloatArray) -> FloatArray:
        """The noisy mean; where the noisy count is small against its noise, the center stays where it was."""
        count = float(self.count.release(points))
        sums = np.asarray(self.sums.release(points))
        # Three deviations of the sums' noise, a public number: below that a mean would be noise.
        least = max(1.0, 3.0 * float(np.asarray(self.sums.scales)[0]))
        return np.clip(sums / count, -1.0, 1.0) if count >= least else before


def _squares(points: FloatArray, centers: FloatArray, half: FloatArray) -> FloatArray:
    """Squared distances [n, k] in the records' units, scaled by the largest range so that nothing overflows."""
    unit = half / half.max()
    return np.asarray(cdist(points * unit, centers * unit, metric="sqeuclidean"), dtype=np.float64)


def _spread_centers(clusters: int, columns: int, rng: KeyedRNG) -> FloatArray:
    """Starting centers in [−¾, ¾]^d, each the farthest of many uniform points from those before it."""
    drawn = rng.new_stream("k-means").uniform(clusters * _TRIED * columns).reshape(clusters, _TRIED, columns)
    candidates = 1.5 * drawn - 0.75
    centers = candidates[0, :1]
    for drawn_points in candidates[1:]:
        farthest = cdist(drawn_points, centers).min(axis=1).argmax()
        centers = np.vstack([centers, drawn_points[farthest]])
    return centers
