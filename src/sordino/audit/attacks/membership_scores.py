"""The likelihood-ratio attack: is the model's confidence in a record like that of models that saw it?

Confidence is φ = log(p/(1 − p)) of the record's own label, which is close to normal over models.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks
from sordino.audit.attacks.roc import roc_curve
from sordino.errors import InvalidArgument
from sordino.installation import require
from sordino.randomness import KeyedRNG
from sordino.training.probing.snapshots import evaluation_mode

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


# ----------------------------------------------------------------------------------------------------------------------
# The robust membership attack: does training raise a record's likelihood more than that of others?
# ----------------------------------------------------------------------------------------------------------------------


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
        population_target: the attacked model on records outside the training data, (population,).
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
        population_references: the reference models on records outside the training data, (models, population).

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
        area = roc_curve(scores[member], scores[~member], false_positive_rates=()).auc
        if area > best:
            best, offset = area, a
    return offset


# ----------------------------------------------------------------------------------------------------------------------
# Shadow models: learn from models of one's own what the confidences of members look like.
# ----------------------------------------------------------------------------------------------------------------------


_SHADOW_LEAST = 1e-12
_FEWEST = 10


def shadow_scores(
    probabilities: ArrayLike, labels: ArrayLike, shadow_probabilities: ArrayLike, included: ArrayLike
) -> Floats:
    """Scores of one attack model per class, trained on the shadow models' confidence vectors. A baseline.

    Args:
        probabilities: of the attacked model, (records, classes).
        labels: (records,), indices of classes.
        shadow_probabilities: of the shadow models on the same records, (models, records, classes).
        included: whether each shadow model saw each record, (models, records).

    Returns:
        Log odds of being a member, (records,).

    References:
        Shokri, Stronati, Song, Shmatikov 2017, "Membership inference attacks against machine learning models".
    """
    require("estimators", "sklearn", user="shadow_scores")
    from sklearn.linear_model import LogisticRegression

    own, shadows = np.asarray(probabilities, dtype=np.float64), np.asarray(shadow_probabilities, dtype=np.float64)
    right, seen = np.asarray(labels), cast("NDArray[np.bool_]", np.asarray(included, dtype=bool))
    if shadows.shape[1:] != own.shape or seen.shape != shadows.shape[:2] or right.shape != own.shape[:1]:
        raise InvalidArgument(
            "probabilities and shadow_probabilities must have shapes (records, classes) and (models, records, "
            f"classes), got {own.shape} and {shadows.shape}. Put the models first."
        )
    scores = np.zeros(len(own))
    for label in np.unique(right):
        mine = right == label
        members = seen[:, mine].ravel()
        # A class that is nearly always, or nearly never, in the shadow models teaches nothing: its score stays 0.
        if min(members.sum(), (~members).sum()) < _FEWEST:
            continue
        known = _features(shadows[:, mine].reshape(-1, own.shape[1]), label)
        learner = LogisticRegression(max_iter=200).fit(known, members)
        scores[mine] = learner.decision_function(_features(own[mine], label))
    return scores


def _features(probabilities: Floats, label: int) -> Floats:
    """Log confidences, and the log odds of the record's own class."""
    clipped = np.clip(probabilities, _SHADOW_LEAST, 1.0)
    own = clipped[:, label]
    return np.column_stack([np.log(clipped), np.log(own) - np.log(np.maximum(1 - own, _SHADOW_LEAST))])


# ----------------------------------------------------------------------------------------------------------------------
# The quantile-regression attack: more confidence than records like this one get. No other models.
# ----------------------------------------------------------------------------------------------------------------------


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
    require("estimators", "sklearn", user="quantile_scores")
    from sklearn.ensemble import HistGradientBoostingRegressor

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


# ----------------------------------------------------------------------------------------------------------------------
# The loss threshold: anyone who fits suspiciously well was trained on.
# ----------------------------------------------------------------------------------------------------------------------


def loss_scores(losses: ArrayLike) -> NDArray[np.float64]:
    """Scores of the simplest attack: member if the loss is at most a threshold.

    The attacker knows the model's confidence in each record's own label, and nothing else.

    Args:
        losses: of the attacked model, one a record.

    Returns:
        −loss: higher is more suspicious.

    Example:
        >>> loss_scores([0.25, 2.0]).tolist()
        [-0.25, -2.0]

    References:
        Yeom, Giacomelli, Fredrikson, Jha 2018, "Privacy risk in machine learning", adversary 1.
    """
    return -np.asarray(losses, dtype=np.float64)


# ----------------------------------------------------------------------------------------------------------------------
# Reference models: what an attacker trains, each on half of the records in question.
# ----------------------------------------------------------------------------------------------------------------------


Pair = tuple[Tensor, Tensor]
TrainReference = Callable[[Tensor, Tensor], nn.Module]
"""(features, labels) ↦ a newly trained model that returns logits."""

_BATCH = 2048


@dataclass(frozen=True, kw_only=True, eq=False)
class Confidence:
    """What one model says of records.

    Args:
        log_probabilities: (records, classes).
        own: log probability of each record's own label, (records,).
        phi: log(p / (1 − p)) of it, computed from logits without cancellation.
    """

    log_probabilities: Floats
    own: Floats
    phi: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceModels:
    """Reference models on the records in question, and on a population that none of them saw.

    Args:
        models: what each says of the records.
        included: whether each saw each record, (models, records).
        population: what each says of the population.
    """

    models: tuple[Confidence, ...]
    included: NDArray[np.bool_]
    population: tuple[Confidence, ...]


def confidence(model: nn.Module, records: Pair) -> Confidence:
    """The model's confidence in records, in evaluation mode; the model is left in the mode it was in.

    Args:
        model: features (B, …) ↦ logits (B, classes).
        records: features and labels, (records, …) and (records,).
    """
    features, labels = records
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with evaluation_mode(model), torch.no_grad():
        logits = torch.cat([model(part.to(device)).double().cpu() for part in features.split(_BATCH)])
    if logits.ndim != 2 or len(logits) != len(labels) or logits.shape[1] < 2:
        raise InvalidArgument(
            f"model must return logits (records, classes) with two classes or more, got shape {tuple(logits.shape)}."
        )
    rows = torch.arange(len(labels))
    own, others = logits[rows, labels], logits.clone()
    others[rows, labels] = -torch.inf
    return Confidence(
        log_probabilities=F.log_softmax(logits, dim=1).numpy(),
        own=F.log_softmax(logits, dim=1)[rows, labels].numpy(),
        phi=(own - torch.logsumexp(others, dim=1)).numpy(),
    )


def train_references(
    train: TrainReference, records: Pair, *, count: int, population: Pair, rng: KeyedRNG
) -> ReferenceModels:
    """Trains `count` models, each on half of the records: every record is in exactly half of the models.

    Guarantee: none; the models were trained on the records as `train` does it. Keep them.

    Args:
        train: (features, labels) ↦ a new model.
        records: in question, features and labels.
        count: an even number of models, ≥ 4.
        population: records that none of the models sees.
        rng: chooses the halves.

    References:
        Carlini et al. 2022, section VI-A.
    """
    if checks.integer(4, count=count) % 2:
        raise InvalidArgument(f"count must be even, got {count}: every record is in half of the models. Add one.")
    features, labels = records
    included = _halves(count, len(labels), rng)
    models, others = [], []
    for row in included:
        chosen = torch.from_numpy(np.flatnonzero(row))
        model = train(features[chosen], labels[chosen])
        models.append(confidence(model, records))
        others.append(confidence(model, population))
    return ReferenceModels(models=tuple(models), included=included, population=tuple(others))


def _halves(count: int, records: int, rng: KeyedRNG) -> NDArray[np.bool_]:
    """(count, records): each column a random half of the models."""
    draws = rng.new_stream("reference-halves").uniform(count * records).reshape(count, records)
    return draws.argsort(axis=0).argsort(axis=0) < count // 2


def standard_training(
    build: Callable[[], nn.Module],
    *,
    steps: int = 300,
    batch_size: int = 128,
    learning_rate: float = 0.003,
    rng: KeyedRNG | None = None,
) -> TrainReference:
    """Training of a classifier by Adam, without privacy: for models of one's own, and for the demonstrations.

    Guarantee: none.

    Args:
        build: makes a new model that returns logits.
        steps: ≥ 1.
        batch_size: ≥ 1, drawn with replacement.
        learning_rate: > 0.
        rng: draws the batches.

    Returns:
        (features, labels) ↦ trained model.
    """
    checks.integer(1, steps=steps)
    checks.positive(learning_rate=learning_rate)
    source = rng or KeyedRNG()

    def train(features: Tensor, labels: Tensor) -> nn.Module:
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
        size = min(checks.integer(1, batch_size=batch_size), len(labels))
        rows = source.new_stream("reference-batches").uniform(steps * size).reshape(steps, size) * len(labels)
        for chosen in torch.from_numpy(rows.astype(np.int64)):
            optimizer.zero_grad()
            F.cross_entropy(model(features[chosen]), labels[chosen]).backward()
            optimizer.step()
        return model

    return train
