"""The quantile-regression attack (floor 4): more confidence than records like this one get. No other models."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.ensemble import HistGradientBoostingRegressor

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = ["quantile_scores"]


def quantile_scores(
    features: ArrayLike,
    confidences: ArrayLike,
    *,
    population_features: ArrayLike,
    population_confidences: ArrayLike,
    false_positive_rate: float = 0.05,
    iterations: int = 60,
) -> NDArray[np.float64]:
    """How far the confidence in each record exceeds the 1 − FPR quantile that is predicted from its features.

    Fitted on records that were not trained on. Above 0 accuses, at about the given false-positive rate; other
    thresholds give the rest of the curve.

    Args:
        features: of the records in question, (records, …), with the label among them if it is known.
        confidences: φ of the attacked model, (records,).
        population_features: of records that were not trained on, (population, …).
        population_confidences: φ of the attacked model on them.
        false_positive_rate: in (0, 1), whose quantile is learned.
        iterations: boosting rounds, ≥ 1.

    Returns:
        φ minus the predicted quantile, (records,).

    References:
        Bertran et al. 2023, "Scalable membership inference attacks via quantile regression", algorithm 1.
    """
    rate = checks.probability(zero=False, one=False, false_positive_rate=false_positive_rate)
    known, phi = _rows(population_features), np.asarray(population_confidences, dtype=np.float64)
    asked, own = _rows(features), np.asarray(confidences, dtype=np.float64)
    if len(known) != len(phi) or len(asked) != len(own) or known.shape[1] != asked.shape[1]:
        raise InvalidArgument("features and confidences must have one row a record, got others. Check their lengths.")
    learner = HistGradientBoostingRegressor(
        loss="quantile",
        quantile=1 - rate,
        max_iter=checks.integer(1, iterations=iterations),
        early_stopping=False,  # pyright: ignore[reportArgumentType] (its annotation names only "auto")
        random_state=0,
    )
    return own - learner.fit(known, phi).predict(asked)


def _rows(features: ArrayLike) -> NDArray[np.float64]:
    rows = np.asarray(features, dtype=np.float64)
    return rows.reshape(len(rows), -1)
