"""Principal components from noisy second moments (floor 4).

References:
    Dwork, Talwar, Thakurta, Zhang 2014, "Analyze Gauss", algorithm 1. Abadi et al. 2016, section 4 (normalised rows).
"""

import numpy as np
import numpy.typing as npt
from sklearn.base import TransformerMixin
from sklearn.utils.validation import check_is_fitted

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators.base import PrivateEstimator
from sordino.estimators.intake import declared, matrix, normalised_rows, unit_rows
from sordino.ledger import Account, Reservation
from sordino.mechanisms import PrivateSecondMoment, budget
from sordino.mechanisms.values import FloatArray, Numbers

__all__ = ["PCA"]


class PCA(TransformerMixin, PrivateEstimator):
    """Private principal components about a declared centre.

    Guarantee: the components and ratios are post-processing of one noisy matrix of second moments, which is
    (epsilon, delta)-differentially private under `neighboring_relation`. Records are cut back to `data_norm`; one with
    a NaN contributes nothing. `transform` projects each record by itself and is not private.

    Args:
        n_components: number of components, 1 … d; None keeps all.
        epsilon: ε > 0. Required.
        delta: δ in [0, 1); 0 for Laplace noise. Required.
        data_norm: the largest ℓ2 norm of a record less `centre`, > 0, from public knowledge. Required.
        centre: [d], public, or None for 0. A private mean spends its own budget (`sordino.mechanisms.PrivateMean`).
        normalize: scale every record to norm `data_norm`, short ones too: directions count, lengths don't.
        neighboring_relation: ``add_or_remove_one``, ``replace_special`` or ``replace_one``.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `privacy_` then carries "not for release".
        ledger: None, or the account, or a reservation on it, that every fit is charged to.

    Attributes:
        components_: [n_components, d], orthonormal rows, largest second moment first.
        mean_: [d], the declared centre.
        explained_variance_ratio_: [n_components], of the noisy second moments about the centre.
        n_components_: their number.
        privacy_: the guarantee.
        events_: what was done.

    Example:
        >>> X = np.repeat([[1.0, 1.0], [0.9, 1.1], [-1.0, -1.0]], 1000, axis=0)
        >>> pca = PCA(n_components=1, epsilon=1.0, delta=1e-6, data_norm=2.0).fit(X)
        >>> np.abs(pca.components_).round(1).tolist()
        [[0.7, 0.7]]
    """

    def __init__(
        self,
        n_components: int | None = None,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        data_norm: float | None = None,
        centre: npt.ArrayLike | None = None,
        normalize: bool = False,
        neighboring_relation: str = "add_or_remove_one",
        random_state: int | None = None,
        reproducible: bool = False,
        ledger: Account | Reservation | None = None,
    ) -> None:
        self.n_components = n_components
        self.epsilon = epsilon
        self.delta = delta
        self.data_norm = data_norm
        self.centre = centre
        self.normalize = normalize
        self.neighboring_relation = neighboring_relation
        self.random_state = random_state
        self.reproducible = reproducible
        self.ledger = ledger

    def fit(self, X: Numbers, y: object = None) -> "PCA":  # noqa: ARG002 (scikit-learn's signature)
        """Fit to records X [n, d]; charged first, then read."""
        epsilon, delta = self._budget()
        norm = checks.positive(
            data_norm=declared(self.data_norm, name="data_norm", meaning="the largest norm of a row")
        )
        relation = NeighboringRelation(
            checks.one_of(list(NeighboringRelation), neighboring_relation=self.neighboring_relation)
        )
        randomness = self._randomness()
        records, present = matrix(X, estimator=self, reset=True)
        columns = records.shape[1]
        kept = self._kept(columns)
        centre = np.zeros(columns) if self.centre is None else np.asarray(self.centre, dtype=np.float64)
        if centre.shape != (columns,) or not np.isfinite(centre).all():
            raise InvalidArgument(
                f"centre must be {columns} finite numbers, got shape {centre.shape}. Declare one each."
            )
        # Rows are scaled to norm 1 and so is the matrix: only directions and ratios are of interest.
        mechanism = PrivateSecondMoment(
            budget=budget(epsilon=epsilon, delta=delta),
            data_norm=1.0,
            columns=columns,
            relation=relation,
            randomness=randomness,
        )
        self._charge([mechanism.event()], relation=relation)
        with np.errstate(all="ignore"):  # a warning would tell that an entry overflows
            shifted = np.nan_to_num(records[present] - centre)
        rows = unit_rows(shifted, norm)
        if self.normalize:
            rows = normalised_rows(rows)
        values, vectors = np.linalg.eigh(mechanism.release(rows))
        order = np.argsort(-values, kind="stable")[:kept]
        self.components_ = vectors.T[order]
        total = float(np.maximum(values, 0.0).sum())
        self.explained_variance_ratio_ = np.maximum(values[order], 0.0) / total if total > 0 else np.zeros(kept)
        self.mean_, self.n_components_ = centre, kept
        return self

    def _kept(self, columns: int) -> int:
        if self.n_components is None:
            return columns
        kept = checks.integer(1, n_components=self.n_components)
        if kept > columns:
            raise InvalidArgument(f"n_components must be at most the {columns} columns, got {kept}. Keep fewer.")
        return kept

    def transform(self, X: Numbers) -> FloatArray:
        """Projections [n, n_components]; a record with an entry that is not finite is taken as the centre."""
        check_is_fitted(self)
        records, present = matrix(X, estimator=self, reset=False)
        return np.where(present[:, None], records - self.mean_, 0.0) @ self.components_.T

    def inverse_transform(self, X: Numbers) -> FloatArray:
        """Records [n, d] of projections [n, n_components]."""
        check_is_fitted(self)
        return np.asarray(X, dtype=np.float64) @ self.components_ + self.mean_
