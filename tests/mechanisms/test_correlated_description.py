"""Strategies and participations survive JSON to the last bit."""

import json

import numpy as np
import pytest

from sordino.errors import InvalidArgument
from sordino.mechanisms.correlated import (
    BandedInverse,
    BinaryTree,
    CyclicPoisson,
    FixedEpochOrder,
    IndependentNoise,
    MinSeparation,
    SingleParticipation,
    optimize_banded,
    optimize_buffered,
    optimize_dense,
    participation_from_dict,
    participation_to_dict,
    strategy_from_dict,
    strategy_to_dict,
)
from sordino.mechanisms.correlated.strategies import strategy_digest

STRATEGIES = [
    IndependentNoise(steps=12),
    optimize_banded(5, steps=12),
    BandedInverse.square_root(bands=4, steps=12),
    optimize_buffered(3, steps=12),
    BinaryTree(steps=12),
    optimize_dense(12),
]
PARTICIPATIONS = [
    SingleParticipation(),
    MinSeparation(min_separation=3),
    MinSeparation(min_separation=3, participations=2),
    FixedEpochOrder(steps_per_epoch=4),
    CyclicPoisson(groups=7, sample_rate=0.1),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_a_strategy_comes_back_from_json(strategy):
    back = strategy_from_dict(json.loads(json.dumps(strategy_to_dict(strategy))))
    assert type(back) is type(strategy)
    assert strategy_digest(back) == strategy_digest(strategy)
    assert np.array_equal(back.matrix(), strategy.matrix())


def test_fingerprints_tell_strategies_apart():
    assert len({strategy_digest(strategy) for strategy in STRATEGIES}) == len(STRATEGIES)
    assert strategy_digest(optimize_banded(5, steps=12)) != strategy_digest(optimize_banded(5, steps=13))


@pytest.mark.parametrize("participation", PARTICIPATIONS, ids=repr)
def test_a_participation_comes_back_from_json(participation):
    assert participation_from_dict(json.loads(json.dumps(participation_to_dict(participation)))) == participation


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        {"kind": "cubic"},
        {"kind": "tree"},
        {"kind": "tree", "steps": 4, "seed": 1},
        {"kind": "tree", "steps": 0},
    ],
)
def test_other_bodies_are_refused(body):
    with pytest.raises(InvalidArgument, match="must be"):
        strategy_from_dict(body)
    with pytest.raises(InvalidArgument, match="must be"):
        participation_from_dict(body)
