"""Logistic regression on privately whitened features, for many correlated columns.

A share of the budget is used for the second moments A of unit rows; x ↦ Px/‖Px‖ with P = (A₊ + λI)^(−1/2) makes the
directions of small variance as visible as the large ones; full-batch gradient descent on the whitened rows spends the
rest. All releases are Gaussian, so the whole is one Gaussian, exactly. Rows are kept once, in float32, and whitened in
their place a chunk at a time: 60 000 records of 4000 columns take 1 GB in addition to the caller's own.

References:
    Mehta, Krichene, Thakurta, Kurakin, Cutkosky 2022, "Differentially private image classification from features"
    (feature covariance); Dwork, Talwar, Thakurta, Zhang 2014, "Analyze Gauss", algorithm 1; Dong, Roth, Su 2022,
    corollary 3.3 (composition).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import softmax
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn
from torch.nn import functional as F

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators.base import (
    Labels,
    PrivateClassifier,
    declared_classes,
    declared_relation,
    declared_size,
    fill_missing,
    normalize_rows,
    validate_matrix,
)
from sordino.estimators.linear_mechanisms import train_weighted
from sordino.mechanisms import PrivateSecondMoment, make_budget
from sordino.mechanisms.base import FloatArray, Numbers
from sordino.mechanisms.calibration import GaussianBudget
from sordino.training.plan import Plan, noise_limited_learning_rate

# ----------------------------------------------------------------------------------------------------------------------
# Rows of length 1 in float32, made a chunk at a time, for tables too large for several copies.
# ----------------------------------------------------------------------------------------------------------------------


_CHUNK = 4096


def row_chunks(records: int) -> Iterator[slice]:
    """Slices of a few thousand records that cover all of them."""
    return (slice(start, start + _CHUNK) for start in range(0, records, _CHUNK))


def unit_rows_in_float32(X: Numbers, *, estimator: BaseEstimator, reset: bool) -> npt.NDArray[np.float32]:
    """Rows scaled to length 1, each by itself, as a fresh float32 [n, d]; entries that are not finite are 0.

    A float32 matrix is read a chunk at a time; anything else is first taken in as by `matrix`.
    """
    if isinstance(X, np.ndarray) and X.dtype == np.float32 and X.ndim == 2 and X.shape[1]:
        validate_data(estimator, cast("str", X), reset=reset, skip_check_array=True)  # its stub knows only the default
        records: npt.NDArray[np.floating] = X
    else:
        records = validate_matrix(X, estimator=estimator, reset=reset)
    rows = np.empty(records.shape, dtype=np.float32)
    for part in row_chunks(len(records)):
        # Lengths are measured in float64: entries near the ends of float32's range must not overflow.
        rows[part] = normalize_rows(fill_missing(records[part].astype(np.float64)))
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# Logistic regression on privately whitened features, for many correlated columns.
# ----------------------------------------------------------------------------------------------------------------------


Float32 = npt.NDArray[np.float32]

_MOMENTUM = 0.9
# Chosen on Fashion-MNIST: the noise that adds up in a weight over the run, and the rate that no noise asks for.
_NOISE_PER_WEIGHT = 0.12
_LARGEST_RATE = 50.0


@dataclass(kw_only=True, eq=False, repr=False)
class WhitenedLogisticRegression(PrivateClassifier):
    """Multinomial logistic regression on features whitened by their own private covariance.

    When: features of a frozen public model, scattering coefficients, pixels: hundreds of correlated columns, where
    plain descent is slow in the directions of small variance and noise leaves it little time. Rows are scaled to
    norm 1 first, so lengths don't count and no norm is declared.

    Guarantee: everything learned is (epsilon, delta)-differentially private under `neighboring_relation`: one
    noisy matrix of second moments of rows of norm ≤ 1, and `steps` noisy sums of gradients of norm ≤ `max_grad_norm`
    through the training engine's plan, composed as the one Gaussian that they are. Prediction whitens each record by
    itself. A missing entry is 0; a record with a label not among `classes` contributes nothing.

    Args:
        epsilon: ε > 0. Required.
        delta: δ in (0, 1). Required.
        classes: all labels, at least two. Required.
        dataset_size: the public number of records, or a public guess: the divisor of the noisy sums. Required.
        covariance_fraction: share of the budget, in (0, 1), that the second moments get.
        ridge: λ > 0 in units of the largest eigenvalue that noise alone would have.
        steps: full-batch steps ≥ 1.
        max_grad_norm: clipping norm > 0 of a record's gradient, which starts near 1 and falls as the record is learned.
            Below 1 it gives records that are still wrong, or nearly so, equal weight, and the noise falls with it.
        intercept_scaling: > 0, the constant appended to each row. A small one leaves the clipping norm to the row.
        learning_rate: > 0; None derives it from the plan.
        neighboring_relation: ``add_or_remove_one``, ``replace_special`` or ``replace_one``.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `guarantee_` then carries "not for release".
        ledger: None, or the account, or a reservation on it, that every fit is charged to.

    Attributes:
        whitening_: P [d, d].
        coef_: [K, d], of whitened rows of norm 1.
        intercept_: [K].
        classes_: the declared classes.
        guarantee_: the guarantee.
        events_: what was done.

    Example:
        >>> X, y = np.repeat([[1.0, 0.9], [0.9, 1.0]], 2000, axis=0), np.repeat([0, 1], 2000)
        >>> model = WhitenedLogisticRegression(epsilon=2.0, delta=1e-6, classes=(0, 1), dataset_size=4000).fit(X, y)
        >>> float(model.score(X, y))
        1.0
    """

    dataset_size: int | None = None
    covariance_fraction: float = 0.3
    ridge: float = 0.5
    steps: int = 80
    max_grad_norm: float = 1.0
    intercept_scaling: float = 1.0
    learning_rate: float | None = None
    neighboring_relation: str = "add_or_remove_one"

    def fit(self, X: Numbers, y: Labels) -> "WhitenedLogisticRegression":
        """Fit to records X [n, d] with labels y [n]; charged first, then read."""
        classes = declared_classes(self.classes)
        neighboring_relation = declared_relation(self.neighboring_relation)
        shared, plan = self._shares(neighboring_relation)
        ridge = checks.positive(ridge=self.ridge)
        rate = self._rate(plan)
        rng = self._randomness()
        constant = checks.positive(intercept_scaling=self.intercept_scaling)
        rows = unit_rows_in_float32(X, estimator=self, reset=True)
        found, _ = self._labels(y, len(rows))
        columns = rows.shape[1]
        moments = PrivateSecondMoment(
            budget=shared, data_norm=1.0, columns=columns, neighboring_relation=neighboring_relation, rng=rng
        )
        self._charge(
            [moments.event(), plan.event()], neighboring_relation=neighboring_relation, sampler=plan.sampler.describe()
        )
        present = found >= 0
        rows[~present] = 0.0
        self.classes_ = classes
        # The spectral edge of symmetric noise with deviation s off the diagonal is 2s√d.
        edge = 2 * moments.scale / math.sqrt(2) * math.sqrt(columns)
        self.whitening_ = _inverse_root(moments.release(rows), ridge * edge)
        linear = nn.Linear(columns + 1, len(classes), bias=False)
        nn.init.zeros_(linear.weight)
        model = nn.Sequential(nn.ConstantPad1d((0, 1), constant), linear)
        train_weighted(
            model,
            lambda scores, targets: F.cross_entropy(scores, targets, reduction="none"),
            torch.from_numpy(_whitened(rows, self.whitening_)),
            torch.from_numpy(np.maximum(found, 0)),
            present,
            plan=plan,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=_MOMENTUM, nesterov=True),
            averaged_fraction=0.1,
            rng=rng,
        )
        self.coef_ = linear.weight.detach()[:, :columns].double().numpy()
        self.intercept_ = linear.weight.detach()[:, columns].double().numpy() * constant
        return self

    def _shares(self, neighboring_relation: NeighboringRelation) -> tuple[GaussianBudget, Plan]:
        """The budget of the second moments, and the plan that spends the rest."""
        epsilon, delta = self._budget()
        whole = make_budget(epsilon=epsilon, delta=delta)
        if not isinstance(whole, GaussianBudget):
            raise InvalidArgument("delta must be above 0, got 0. Gradient descent needs some δ > 0.")
        share = checks.probability(zero=False, one=False, covariance_fraction=self.covariance_fraction)
        population = declared_size(self.dataset_size)
        steps = checks.integer(1, steps=self.steps)
        shared, rest = whole.split(share, 1 - share)
        plan = Plan(
            noise_multiplier=rest.noise_multiplier * math.sqrt(steps),
            max_grad_norm=checks.positive(max_grad_norm=self.max_grad_norm),
            sample_rate=1.0,
            steps=steps,
            expected_batch_size=float(population),
            delta=delta,
            neighboring_relation=neighboring_relation,
        )
        return shared, plan

    def _rate(self, plan: Plan) -> float:
        if self.learning_rate is not None:
            return checks.positive(learning_rate=self.learning_rate)
        largest = _LARGEST_RATE / plan.step_plan(0).max_grad_norm
        return min(largest, noise_limited_learning_rate(plan, _NOISE_PER_WEIGHT))

    def decision_function(self, X: Numbers) -> FloatArray:
        """Scores [n] of the second class, or [n, K]."""
        check_is_fitted(self)
        rows = unit_rows_in_float32(X, estimator=self, reset=False)
        scores = _whitened(rows, self.whitening_).astype(np.float64) @ self.coef_.T + self.intercept_
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    _scores = decision_function

    def predict_proba(self, X: Numbers) -> FloatArray:
        """Class probabilities [n, K]."""
        scores = self.decision_function(X)
        return softmax(np.stack([np.zeros_like(scores), scores], axis=1) if scores.ndim == 1 else scores, axis=1)


def _whitened(rows: Float32, whitening: FloatArray) -> Float32:
    """Px/‖Px‖ of each row, written in the rows' place."""
    matrix = whitening.astype(np.float32)
    for part in row_chunks(len(rows)):
        rows[part] = normalize_rows((rows[part] @ matrix).astype(np.float64))
    return rows


def _inverse_root(moments: FloatArray, ridge: float) -> FloatArray:
    """(A₊ + λI)^(−1/2): negative eigenvalues are noise and count as 0."""
    values, vectors = np.linalg.eigh(moments)
    return (vectors / np.sqrt(np.maximum(values, 0.0) + ridge)) @ vectors.T
