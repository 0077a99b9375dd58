"""The robust membership attack (floor 4): does training raise a record's likelihood more than that of others?"""

from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sordino import checks
from sordino.audit.attacks.roc import roc
from sordino.errors import InvalidArgument

__all__ = ["rmia_average", "rmia_offset", "rmia_scores"]

Floats = NDArray[np.float64]

_LEAST = 1e-30
_USUAL_OFFSET = 0.3


def rmia_average(mean_out: ArrayLike, *, offset: float) -> Floats:
    """P(x) over models with and without x, from models without it: ((1 + a)·P_out + 1 − a) / 2.

    Args:
        mean_out: mean probability of the record's label over models without it.
        offset: a in [0, 1]: 1 says that training on x changes nothing.

    Example:
        >>> average = rmia_average(0.5, offset=0.3)
        >>> round(float(average), 6), round(float(0.9 / average), 4)
        (0.675, 1.3333)
    """
    a = checks.in_range(0.0, 1.0, offset=offset)
    return np.asarray(((1 + a) * np.asarray(mean_out, dtype=np.float64) + 1 - a) / 2)


def rmia_scores(
    target: ArrayLike,
    references: ArrayLike,
    included: ArrayLike,
    *,
    population_target: ArrayLike,
    population_references: ArrayLike,
    offset: float = _USUAL_OFFSET,
    gamma: float = 1.0,
    online: bool = False,
) -> Floats:
    """Share of population records z with [p(x)/P(x)] / [p(z)/P(z)] ≥ γ. One reference model is enough.

    Args:
        target: the attacked model's probability of each record's own label, (records,), in [0, 1].
        references: the same of the reference models, (models, records).
        included: whether each model saw each record; every record out of at least one (and in one, when online).
        population_target: the attacked model on records that nobody trained on, (population,).
        population_references: the reference models on them, (models, population).
        offset: a of `rmia_average`, from `rmia_offset` or left as it is.
        gamma: γ > 0.
        online: average over models with and without the record, instead of a guess from those without.

    Returns:
        Scores in [0, 1], (records,).

    References:
        Zarifzadeh, Liu, Shokri 2024, "Low-cost high-power membership inference attacks", equations 2–4 and 10.
    """
    checks.positive(gamma=gamma)
    p_x, models = np.asarray(target, dtype=np.float64), np.asarray(references, dtype=np.float64)
    seen = cast("NDArray[np.bool_]", np.asarray(included, dtype=bool))
    p_z, models_z = np.asarray(population_target, np.float64), np.asarray(population_references, np.float64)
    if models.shape != (len(models_z), len(p_x)) or seen.shape != models.shape or models_z.shape[1:] != p_z.shape:
        raise InvalidArgument(
            "references and population_references must have shapes (models, records) and (models, population), got "
            f"{models.shape} and {models_z.shape}. Put the models first."
        )
    out = ~seen
    if not len(p_z) or not out.any(axis=0).all() or (online and not seen.any(axis=0).all()):
        raise InvalidArgument(
            "every record must be left out of one reference model at least, and with online=True be in one, and the "
            "population must not be empty. Train more reference models."
        )
    mean_out = np.where(out, models, 0.0).sum(axis=0) / out.sum(axis=0)
    if online:
        mean_in = np.where(seen, models, 0.0).sum(axis=0) / seen.sum(axis=0)
        average = (mean_in + mean_out) / 2
    else:
        average = rmia_average(mean_out, offset=offset)
    average_z = models_z.mean(axis=0) if online else rmia_average(models_z.mean(axis=0), offset=offset)
    ratios = np.maximum(p_x, _LEAST) / np.maximum(average, _LEAST)
    ratios_z = np.sort(np.maximum(p_z, _LEAST) / np.maximum(average_z, _LEAST))
    return np.searchsorted(ratios_z, ratios / gamma, side="right") / len(p_z)


def rmia_offset(references: ArrayLike, included: ArrayLike, *, population_references: ArrayLike) -> float:
    """The offset a that works best against one of the attacker's own models, whose members the attacker knows.

    Args:
        references: reference models' probabilities of each record's own label, (models, records).
        included: whether each model saw each record; every record out of at least two.
        population_references: the reference models on records that nobody trained on, (models, population).

    Returns:
        One of 0, 0.1, …, 1; 0.3 where no value is better than guessing.

    References:
        Zarifzadeh, Liu, Shokri 2024, appendix B.2.2.
    """
    models, seen = np.asarray(references, dtype=np.float64), cast("NDArray[np.bool_]", np.asarray(included, dtype=bool))
    models_z = np.asarray(population_references, dtype=np.float64)
    member = seen[0]
    if len(models) < 2 or member.all() or not member.any():
        return _USUAL_OFFSET
    best, offset = 0.5, _USUAL_OFFSET
    for a in np.linspace(0, 1, 11).round(1).tolist():
        scores = rmia_scores(
            models[0],
            models[1:],
            seen[1:],
            population_target=models_z[0],
            population_references=models_z[1:],
            offset=a,
        )
        area = roc(scores[member], scores[~member], false_positive_rates=()).auc
        if area > best:
            best, offset = area, a
    return offset
