"""Reference models (floor 4): what an attacker trains, each on half of the records in question."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.randomness import Randomness

__all__ = ["Confidence", "References", "TrainReference", "confidence", "plain_training", "train_references"]

Floats = NDArray[np.float64]
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
class References:
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
    modes = [(module, module.training) for module in model.modules()]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    model.eval()
    try:
        with torch.no_grad():
            logits = torch.cat([model(part.to(device)).double().cpu() for part in features.split(_BATCH)])
    finally:
        for module, mode in modes:
            module.training = mode
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
    train: TrainReference, records: Pair, *, count: int, population: Pair, randomness: Randomness
) -> References:
    """Trains `count` models, each on half of the records: every record is in exactly half of the models.

    Guarantee: none; the models were trained on the records as `train` does it. Keep them.

    Args:
        train: (features, labels) ↦ a new model.
        records: in question, features and labels.
        count: an even number of models, ≥ 4.
        population: records that none of the models sees.
        randomness: chooses the halves.

    References:
        Carlini et al. 2022, section VI-A.
    """
    if checks.integer(4, count=count) % 2:
        raise InvalidArgument(f"count must be even, got {count}: every record is in half of the models. Add one.")
    features, labels = records
    included = _halves(count, len(labels), randomness)
    models, others = [], []
    for row in included:
        chosen = torch.from_numpy(np.flatnonzero(row))
        model = train(features[chosen], labels[chosen])
        models.append(confidence(model, records))
        others.append(confidence(model, population))
    return References(models=tuple(models), included=included, population=tuple(others))


def _halves(count: int, records: int, randomness: Randomness) -> NDArray[np.bool_]:
    """(count, records): each column a random half of the models."""
    draws = randomness.fresh("reference-halves").uniform(count * records).reshape(count, records)
    return draws.argsort(axis=0).argsort(axis=0) < count // 2


def plain_training(
    build: Callable[[], nn.Module],
    *,
    steps: int = 300,
    batch_size: int = 128,
    learning_rate: float = 0.003,
    randomness: Randomness | None = None,
) -> TrainReference:
    """Training of a classifier by Adam, without privacy: for models of one's own, and for the demonstrations.

    Guarantee: none.

    Args:
        build: makes a new model that returns logits.
        steps: ≥ 1.
        batch_size: ≥ 1, drawn with replacement.
        learning_rate: > 0.
        randomness: draws the batches.

    Returns:
        (features, labels) ↦ trained model.
    """
    checks.integer(1, steps=steps)
    checks.positive(learning_rate=learning_rate)
    source = randomness or Randomness()

    def train(features: Tensor, labels: Tensor) -> nn.Module:
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
        size = min(checks.integer(1, batch_size=batch_size), len(labels))
        rows = source.fresh("reference-batches").uniform(steps * size).reshape(steps, size) * len(labels)
        for chosen in torch.from_numpy(rows.astype(np.int64)):
            optimizer.zero_grad()
            F.cross_entropy(model(features[chosen]), labels[chosen]).backward()
            optimizer.step()
        return model

    return train
