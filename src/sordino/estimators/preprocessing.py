"""Scalers with declared bounds: `StandardScaler`, which spends privacy, and `MinMaxScaler`, which doesn't."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from sordino import checks
from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument
from sordino.estimators.base import (
    ColumnBounds,
    PrivateEstimator,
    clip_rows,
    column_bounds,
    declared_norm,
    declared_relation,
    fill_missing,
    normalize_rows,
    validate_matrix,
)
from sordino.events import Event
from sordino.mechanisms import PrivateCount, PrivateSecondMoment, PrivateSum, make_budget
from sordino.mechanisms.base import FloatArray, Numbers
from sordino.mechanisms.calibration import Budget
from sordino.randomness import KeyedRNG

# ----------------------------------------------------------------------------------------------------------------------
# Count, means and variances of columns with declared bounds: what naive Bayes and standardizing need.
#
# Proof: docs/proofs/bounded-moments.md.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ColumnMoments:
    """Noisy moments of one group of records.

    Args:
        count: number of records, ≥ 1 after noise.
        means: [d], inside the bounds.
        variances: [d], > 0.
    """

    count: float
    means: FloatArray
    variances: FloatArray


@dataclass(frozen=True, kw_only=True)
class BoundedMoments:
    """The moments of records clipped to bounds, from a noisy count and noisy sums of u and u² − ½, −1 ≤ u ≤ 1.

    u is the record moved to the middle of the bounds and scaled by half their distance: so a record moves a sum by at
    most 1, wherever the bounds lie, and u² − ½ by at most ½.

    Guarantee: one release spends `budget` for one record added or removed.

    Args:
        budget: pure or Gaussian; a fifth goes to the count.
        lower: [d].
        upper: [d], above `lower`.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.mechanisms import make_budget
        >>> moments = BoundedMoments(budget=make_budget(epsilon=50.0), lower=np.zeros(1), upper=np.full(1, 10.0))
        >>> moments.release(np.repeat([[2.0], [6.0]], 5000, axis=0)).means.round(1).tolist()
        [4.0]
    """

    budget: Budget
    lower: FloatArray
    upper: FloatArray
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    @cached_property
    def count(self) -> PrivateCount:
        """The number of records."""
        share, _ = self.budget.split(1, 4)
        return PrivateCount(budget=share, rng=self.rng)

    @cached_property
    def sums(self) -> PrivateSum:
        """The sums of u [d], then of u² − ½ [d]."""
        _, share = self.budget.split(1, 4)
        columns = len(self.lower)
        bounds = ((-1.0, 1.0),) * columns + ((-0.5, 0.5),) * columns
        return PrivateSum(budget=share, bounds=bounds, rng=self.rng)

    def events(self) -> list[Event]:
        """The events of one release, one a part."""
        return [self.count.event(), self.sums.event()]

    def release(self, records: FloatArray) -> ColumnMoments:
        """Noisy moments of records [n, d]; a group without records has the moments of noise alone."""
        middle, half = self.lower / 2 + self.upper / 2, self.upper / 2 - self.lower / 2
        u = np.clip((np.clip(records, self.lower, self.upper) - middle) / half, -1.0, 1.0)
        count = max(float(self.count.release(records)), 1.0)
        sums = np.asarray(self.sums.release(np.hstack([u, u * u - 0.5])))
        means = np.clip(sums[: len(middle)] / count, -1.0, 1.0)
        squares = np.clip(sums[len(middle) :] / count + 0.5, 0.0, 1.0)
        # A variance below what its own noise can tell from 0 is raised to that, and never below a thousandth.
        floor = max(float(np.asarray(self.sums.scales)[-1]) / count, 1e-3)
        variances = np.maximum(squares - means * means, min(floor, 1.0))
        return ColumnMoments(count=count, means=middle + half * means, variances=half * half * variances)


# ----------------------------------------------------------------------------------------------------------------------
# Scalers with declared bounds: `StandardScaler`, which spends privacy, and `MinMaxScaler`, which doesn't.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class StandardScaler(OneToOneFeatureMixin, TransformerMixin, PrivateEstimator):
    """Subtracts noisy means and divides by noisy standard deviations.

    Bounds that are known well need no private moments: `MinMaxScaler` is free. What is fitted on the scaled records
    afterwards spends its own budget on top.

    Guarantee: means and deviations are (epsilon, delta)-differentially private for one record added or removed; the
    number of records is private and not an attribute. `transform` changes each record by itself and is not private.

    Args:
        epsilon: ε > 0. Required.
        delta: δ in [0, 1). Required.
        bounds: (lower, upper), numbers or one a column, from public knowledge. Required.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `guarantee_` then carries "not for release".
        ledger: None, or the account, or a reservation on it, that every fit is charged to.

    Attributes:
        mean_: [d].
        var_: [d].
        scale_: [d], their square roots.
        guarantee_: the guarantee.
        events_: what was done.

    Example:
        >>> X = np.repeat([[2.0], [6.0]], 5000, axis=0)
        >>> scaler = StandardScaler(epsilon=10.0, delta=1e-6, bounds=(0.0, 10.0)).fit(X)
        >>> scaler.transform([[8.0]]).round(0).tolist()
        [[2.0]]
    """

    bounds: ColumnBounds | None = None

    def fit(self, X: Numbers, y: object = None) -> "StandardScaler":  # noqa: ARG002 (scikit-learn's signature)
        """Fit to records X [n, d]; charged first, then read."""
        epsilon, delta = self._budget()
        rng = self._randomness()
        records = validate_matrix(X, estimator=self, reset=True)
        lower, upper = column_bounds(self.bounds, records.shape[1])
        records = fill_missing(records, bounds=(lower, upper))
        mechanism = BoundedMoments(budget=make_budget(epsilon=epsilon, delta=delta), lower=lower, upper=upper, rng=rng)
        self._charge(mechanism.events())
        moments = mechanism.release(records)
        self.mean_, self.var_ = moments.means, moments.variances
        self.scale_ = np.sqrt(self.var_)
        return self

    def transform(self, X: Numbers) -> FloatArray:
        """Scaled records [n, d]; a missing entry is the middle of its bounds, as in `fit`."""
        check_is_fitted(self)
        records = validate_matrix(X, estimator=self, reset=False)
        records = fill_missing(records, bounds=column_bounds(self.bounds, records.shape[1]))
        return (records - self.mean_) / self.scale_


class MinMaxScaler(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """Moves columns from declared bounds to [0, 1], clipping what lies outside. Nothing is learned from records.

    Guarantee: `fit` reads the number of columns and no record: ε = 0. `transform` changes each record by itself.

    Args:
        bounds: (lower, upper), numbers or one a column, from public knowledge. Required.

    Attributes:
        data_min_: [d], the declared lower bounds.
        data_max_: [d], the declared upper bounds.
        guarantee_: ε = 0.
        events_: empty.

    Example:
        >>> MinMaxScaler(bounds=(0.0, 10.0)).fit([[3.0]]).transform([[5.0], [99.0]]).tolist()
        [[0.5], [1.0]]
    """

    def __init__(self, *, bounds: ColumnBounds | None = None) -> None:
        self.bounds = bounds

    def fit(self, X: Numbers, y: object = None) -> "MinMaxScaler":  # noqa: ARG002 (scikit-learn's signature)
        """Take the number of columns from X [n, d]."""
        records = validate_matrix(X, estimator=self, reset=True)
        self.data_min_, self.data_max_ = column_bounds(self.bounds, records.shape[1])
        self.events_: tuple[Event, ...] = ()
        self.guarantee_ = Guarantee(epsilon=0.0, delta=0.0, accountant="exact", sampler="none")
        return self

    def transform(self, X: Numbers) -> FloatArray:
        """Records in [0, 1], shape (n, d); a missing entry is the middle, 0.5."""
        check_is_fitted(self)
        records = fill_missing(validate_matrix(X, estimator=self, reset=False), bounds=(self.data_min_, self.data_max_))
        clipped = np.clip(records, self.data_min_, self.data_max_)
        return np.clip((clipped - self.data_min_) / (self.data_max_ - self.data_min_), 0.0, 1.0)


# ----------------------------------------------------------------------------------------------------------------------
# Principal components from noisy second moments.
#
# References:
#     Dwork, Talwar, Thakurta, Zhang 2014, "Analyze Gauss", algorithm 1. Abadi et al. 2016, section 4 (normalized rows).
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class PCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, PrivateEstimator):
    """Private principal components about a declared center.

    Guarantee: the components and ratios are post-processing of one noisy matrix of second moments, which is
    (epsilon, delta)-differentially private under `neighboring_relation`. Records are cut back to `data_norm`; a
    missing entry is that of the center. `transform` projects each record by itself and is not private.

    Args:
        n_components: number of components, 1 … d; None keeps all.
        epsilon: ε > 0. Required.
        delta: δ in [0, 1); 0 for Laplace noise. Required.
        data_norm: the largest ℓ2 norm of a record less `center`, > 0, from public knowledge. Required.
        center: [d], public, or None for 0. A private mean spends its own budget (`sordino.mechanisms.PrivateMean`).
        normalize: scale every record to norm `data_norm`, short ones too: directions count, lengths don't.
        neighboring_relation: ``add_or_remove_one``, ``replace_special`` or ``replace_one``.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `guarantee_` then carries "not for release".
        ledger: None, or the account, or a reservation on it, that every fit is charged to.

    Attributes:
        components_: [n_components, d], orthonormal rows, largest second moment first.
        mean_: [d], the declared center.
        explained_variance_ratio_: [n_components], of the noisy second moments about the center.
        n_components_: their number.
        guarantee_: the guarantee.
        events_: what was done.

    Example:
        >>> X = np.repeat([[1.0, 1.0], [0.9, 1.1], [-1.0, -1.0]], 1000, axis=0)
        >>> pca = PCA(n_components=1, epsilon=1.0, delta=1e-6, data_norm=2.0).fit(X)
        >>> np.abs(pca.components_).round(1).tolist()
        [[0.7, 0.7]]
    """

    n_components: int | None = field(default=None, kw_only=False)
    data_norm: float | None = None
    center: npt.ArrayLike | None = None
    normalize: bool = False
    neighboring_relation: str = "add_or_remove_one"

    def fit(self, X: Numbers, y: object = None) -> "PCA":  # noqa: ARG002 (scikit-learn's signature)
        """Fit to records X [n, d]; charged first, then read."""
        epsilon, delta = self._budget()
        norm = declared_norm(self.data_norm)
        neighboring_relation = declared_relation(self.neighboring_relation)
        rng = self._randomness()
        records = validate_matrix(X, estimator=self, reset=True)
        columns = records.shape[1]
        kept = self._kept(columns)
        center = np.zeros(columns) if self.center is None else np.asarray(self.center, dtype=np.float64)
        if center.shape != (columns,) or not np.isfinite(center).all():
            raise InvalidArgument(
                f"center must be {columns} finite numbers, got shape {center.shape}. Declare one each."
            )
        # Rows are scaled to norm 1 and so is the matrix: only directions and ratios are of interest.
        mechanism = PrivateSecondMoment(
            budget=make_budget(epsilon=epsilon, delta=delta),
            data_norm=1.0,
            columns=columns,
            neighboring_relation=neighboring_relation,
            rng=rng,
        )
        self._charge([mechanism.event()], neighboring_relation=neighboring_relation)
        with np.errstate(all="ignore"):  # a warning would tell that an entry overflows
            shifted = np.nan_to_num(fill_missing(records, middle=center) - center)
        rows = clip_rows(shifted, norm)
        if self.normalize:
            rows = normalize_rows(rows)
        values, vectors = np.linalg.eigh(mechanism.release(rows))
        order = np.argsort(-values, kind="stable")[:kept]
        self.components_ = vectors.T[order]
        total = float(np.maximum(values, 0.0).sum())
        self.explained_variance_ratio_ = np.maximum(values[order], 0.0) / total if total > 0 else np.zeros(kept)
        self.mean_, self.n_components_ = center, kept
        return self

    @property
    def _n_features_out(self) -> int:  # asked for by get_feature_names_out
        return len(self.components_)

    def _kept(self, columns: int) -> int:
        if self.n_components is None:
            return columns
        kept = checks.integer(1, n_components=self.n_components)
        if kept > columns:
            raise InvalidArgument(f"n_components must be at most the {columns} columns, got {kept}. Keep fewer.")
        return kept

    def transform(self, X: Numbers) -> FloatArray:
        """Projections [n, n_components]; a missing entry is that of the center."""
        check_is_fitted(self)
        records = fill_missing(validate_matrix(X, estimator=self, reset=False), middle=self.mean_)
        return (records - self.mean_) @ self.components_.T

    def inverse_transform(self, X: Numbers) -> FloatArray:
        """Records [n, d] of projections [n, n_components]."""
        check_is_fitted(self)
        return np.asarray(X, dtype=np.float64) @ self.components_ + self.mean_
