"""The likelihood-ratio attack (floor 4): is the model's confidence in a record like that of models that saw it?

Confidence is φ = log(p/(1 − p)) of the record's own label, which is close to normal over models.
"""

from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from sordino.errors import InvalidArgument

__all__ = ["gaussian_log_ratio", "lira_offline", "lira_online"]

Floats = NDArray[np.float64]

# With fewer models on one side a record's own variance is mostly noise (the paper pools below 64 models in all).
_ENOUGH = 32
_LEAST_STD = 1e-6


def gaussian_log_ratio(
    value: ArrayLike, *, in_mean: ArrayLike, in_std: ArrayLike, out_mean: ArrayLike, out_std: ArrayLike
) -> Floats:
    """Log of the density of N(in) over that of N(out) at `value`.

    Example:
        >>> normal = {"in_mean": 2.0, "in_std": 1.0, "out_mean": 0.0, "out_std": 1.0}
        >>> gaussian_log_ratio([1.0, 2.0], **normal).tolist()
        [0.0, 2.0]
    """
    inside = stats.norm.logpdf(value, in_mean, in_std)
    return np.asarray(inside - stats.norm.logpdf(value, out_mean, out_std), dtype=np.float64)


def lira_online(target: ArrayLike, references: ArrayLike, included: ArrayLike) -> Floats:
    """Scores when the attacker trained reference models with each record and others without it.

    Args:
        target: φ of the attacked model, (records,).
        references: φ of the reference models, (models, records).
        included: whether each model saw each record, (models, records); every record in and out of at least two.

    Returns:
        log likelihood ratio of in over out, (records,).

    Example:
        >>> seen = [[True], [True], [False], [False]]
        >>> lira_online([2.0], [[1.0], [3.0], [-1.0], [1.0]], seen).round(6).tolist()
        [1.0]

    References:
        Carlini et al. 2022, "Membership inference attacks from first principles", algorithm 1.
    """
    phi, models, seen = _checked(target, references, included, both=True)
    in_mean, in_std = _moments(models, seen)
    out_mean, out_std = _moments(models, ~seen)
    return gaussian_log_ratio(phi, in_mean=in_mean, in_std=in_std, out_mean=out_mean, out_std=out_std)


def lira_offline(target: ArrayLike, references: ArrayLike, included: ArrayLike) -> Floats:
    """Scores when only models without the record can be used: how unlikely is this much confidence?

    Args:
        target: φ of the attacked model, (records,).
        references: φ of the reference models, (models, records).
        included: whether each model saw each record; every record out of at least two.

    Returns:
        −log P[N(out) > φ], (records,): ≥ 0, higher is more suspicious.

    Example:
        >>> lira_offline([0.0], [[-1.0], [1.0]], [[False], [False]]).round(6).tolist()
        [0.693147]

    References:
        Carlini et al. 2022, section V.
    """
    phi, models, seen = _checked(target, references, included, both=False)
    mean, std = _moments(models, ~seen)
    return np.asarray(-stats.norm.logsf(phi, mean, std), dtype=np.float64)


def _moments(models: Floats, used: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Mean and standard deviation over the models that count; the latter pooled over records when they are few."""
    counts = used.sum(axis=0)
    mean = np.where(used, models, 0.0).sum(axis=0) / counts
    squares = np.where(used, (models - mean) ** 2, 0.0).sum(axis=0)
    # Each record's own mean takes one degree of freedom.
    if counts.min() < _ENOUGH:
        std = np.full_like(mean, np.sqrt(squares.sum() / (counts - 1).sum()))
    else:
        std = np.sqrt(squares / (counts - 1))
    return mean, np.maximum(std, _LEAST_STD)


def _checked(
    target: ArrayLike, references: ArrayLike, included: ArrayLike, *, both: bool
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    phi, models = np.asarray(target, dtype=np.float64), np.asarray(references, dtype=np.float64)
    seen = cast("NDArray[np.bool_]", np.asarray(included, dtype=bool))
    if phi.ndim != 1 or models.ndim != 2 or models.shape[1:] != phi.shape or seen.shape != models.shape:
        raise InvalidArgument(
            "target, references and included must have shapes (records,), (models, records) and (models, records), "
            f"got {phi.shape}, {models.shape} and {seen.shape}. Put the models first."
        )
    if (~seen).sum(axis=0).min() < 2 or (both and seen.sum(axis=0).min() < 2):
        raise InvalidArgument(
            "every record must be left out of two reference models at least, and with the online attack be in two, got "
            "fewer. Train more reference models."
        )
    return phi, models, seen
