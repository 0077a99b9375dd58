"""What a cell trains: the recipes' models, and a hidden layer of rectifiers on the features as they are (floor 6)."""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor, nn

from sordino.data import DataSet
from sordino.mechanisms import PrivateSecondMoment
from sordino.mechanisms.budgets import GaussianBudget
from sordino.randomness import Randomness
from sordino.recipes import cnn, logistic, mlp
from sordino.sweeps.cell import Cell
from sordino.sweeps.settings import Settings

__all__ = ["Prepared", "build", "directions", "prepare"]

Prepared = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Features and labels to train on, and to measure on."""


def build(settings: Settings, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A new model with random weights from torch's generator."""
    match settings.model:
        case "logistic":
            return logistic(shape, classes)
        case "mlp":
            return mlp(shape, classes, width=settings.width)
        case "cnn":
            return cnn(shape, classes)
        case _:
            hidden = nn.Linear(math.prod(shape), settings.width)
            return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(settings.width, classes))


def prepare(cell: Cell, dataset: DataSet) -> Prepared:
    """The records as the model takes them: as they are, or on private principal components."""
    assert dataset.test is not None
    train, test = dataset.train.tensors(), dataset.test.tensors()
    if not cell.settings.pca:
        return train, test
    # Directions come from records of norm 1; the records are projected as they are.
    basis = _directions_for(cell, train[0])[:, : cell.settings.pca]
    return (train[0].flatten(1) @ basis, train[1]), (test[0].flatten(1) @ basis, test[1])


def _directions_for(cell: Cell, features: Tensor) -> Tensor:
    """Released once for all cells with the same data, noise and seed; the last ones are remembered."""
    told = cell.settings
    words = repr((cell.source, told.pca_noise_multiplier, told.seed))
    if words not in _RELEASED:
        seed = int(hashlib.sha256(words.encode()).hexdigest()[:24], 16)
        randomness = Randomness(seed=seed, reproducible=True)
        _RELEASED.clear()
        _RELEASED[words] = directions(
            _unit(features), noise_multiplier=told.pca_noise_multiplier, randomness=randomness
        ).float()
    return _RELEASED[words]


_RELEASED: dict[str, Tensor] = {}


def directions(rows: Tensor, *, noise_multiplier: float, randomness: Randomness) -> Tensor:
    """The principal directions about 0, as columns [d, d], of rows with norm at most 1: that of most weight first.

    Guarantee: post-processing of one noisy matrix of second moments, ``Gaussian(noise_multiplier)``.

    References:
        Abadi et al. 2016, section 4; Dwork, Talwar, Thakurta, Zhang 2014, algorithm 1.
    """
    mechanism = PrivateSecondMoment(
        budget=GaussianBudget(noise_multiplier=noise_multiplier),
        data_norm=1.0,
        columns=rows.shape[1],
        randomness=randomness,
    )
    moments = mechanism.release(rows.numpy().astype(np.float64))
    _, vectors = np.linalg.eigh(moments)  # in rising order
    return torch.from_numpy(np.ascontiguousarray(vectors[:, ::-1]))


def _unit(features: Tensor) -> Tensor:
    """Each record flat and with norm 1, by itself."""
    flat = features.flatten(1)
    return flat / flat.norm(dim=1, keepdim=True).clamp_min(1e-12)
