"""Randomized response: exact odds, fair lies, unbiased estimates."""

import math

import numpy as np
import pytest
from scipy import stats

from sordino.errors import InvalidArgument
from sordino.events import RandomizedResponse as RandomizedResponseEvent
from sordino.mechanisms import RandomizedResponseMechanism

COUNT = 40_000


@pytest.mark.parametrize("categories", [("a", "b"), ("a", "b", "c", "d", "e")])
def test_truth_and_lies_have_their_probabilities(seeded, categories):
    mechanism = RandomizedResponseMechanism(epsilon=1.0, categories=categories, rng=seeded(1))
    answers = mechanism.release(["b"] * COUNT)
    counts = np.array([(answers == category).sum() for category in categories])
    others = len(categories) - 1

    def law(epsilon):
        truth = math.exp(epsilon) / (math.exp(epsilon) + others)
        return COUNT * np.array([truth if c == "b" else (1 - truth) / others for c in categories])

    assert stats.chisquare(counts, law(1.0)).pvalue > 1e-3
    assert stats.chisquare(counts, law(1.12)).pvalue < 1e-4
    assert stats.chisquare(counts, law(0.88)).pvalue < 1e-4


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 5.0, 40.0, 200.0])
@pytest.mark.parametrize("size", [2, 3, 1000])
def test_the_odds_of_truth_never_exceed_e_to_the_epsilon(epsilon, size):
    mechanism = RandomizedResponseMechanism(epsilon=epsilon, categories=tuple(range(size)))
    truth = mechanism._threshold
    assert 0 < truth < 1 << 62
    odds = math.log(truth) - math.log((1 << 62) - truth) + math.log(size - 1)
    assert odds <= epsilon + 1e-12
    assert mechanism.event() == RandomizedResponseEvent(epsilon=epsilon, categories=size)


def test_a_value_that_was_not_declared_is_answered_by_chance(seeded):
    mechanism = RandomizedResponseMechanism(epsilon=10.0, categories=(0, 1, 2), rng=seeded(2))
    answers = mechanism.release([None] * 30_000)
    assert stats.chisquare(np.bincount(answers.astype(int), minlength=3)).pvalue > 1e-3


def test_estimates_are_unbiased(seeded):
    mechanism = RandomizedResponseMechanism(epsilon=1.5, categories=("x", "y", "z"), rng=seeded(3))
    shares = mechanism.estimate(mechanism.release(["x"] * 24_000 + ["y"] * 12_000 + ["z"] * 4_000))
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.02)
    assert shares.sum() == pytest.approx(1.0)


def test_booleans_are_the_default(seeded):
    released = RandomizedResponseMechanism(epsilon=1.0, rng=seeded(4)).release([True, False, True])
    assert released.dtype == np.bool_


def test_wrong_declarations_are_refused():
    for categories in ((), ("a",), ("a", "a")):
        with pytest.raises(InvalidArgument, match="categories must be at least two different answers"):
            RandomizedResponseMechanism(epsilon=1.0, categories=categories)
    with pytest.raises(InvalidArgument, match="answers must be at least one declared"):
        RandomizedResponseMechanism(epsilon=1.0).estimate([])
