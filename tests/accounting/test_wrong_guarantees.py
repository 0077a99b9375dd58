"""Faults that once stated too little, by kind: negative moments, replaced records in a sample, losses cut off."""

import math

import numpy as np
import pytest

from sordino.accounting import epsilon, epsilon_by_accountant, renyi_divergence
from sordino.accounting.base import sampled_epsilon
from sordino.definitions import NeighboringRelation
from sordino.events import (
    ApproximateDP,
    DiscreteLaplace,
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    RandomizedResponse,
    RepeatAndSelect,
    SelfComposed,
)

ADD, REPLACE, ZERO = NeighboringRelation


def _two_outcomes_divergence(p: float, q: float, mean: float, order: float) -> float:
    """Rényi divergence of the best of Poisson(mean) runs that are 1 with probability p (q), or nothing; by hand."""

    def law(one: float) -> list[float]:
        none, worst = math.exp(-mean), math.exp(-mean * one)
        return [none, worst - none, 1 - worst]

    return math.log(math.fsum(a**order * b ** (1 - order) for a, b in zip(law(p), law(q), strict=True))) / (order - 1)


@pytest.mark.parametrize("mean", [1e-3, 0.1, 0.5, 0.99, 1.0, 3.0])
@pytest.mark.parametrize("size", [0.01, 0.3, 1.5])
def test_a_selection_among_few_runs_is_never_cheaper_than_nothing(mean, size):
    event = RepeatAndSelect(
        event=RandomizedResponse(epsilon=size, categories=2), distribution="poisson", mean=mean, shape=0
    )
    p = 1 / (1 + math.exp(-size))
    for order in (1.2, 2.0, 5.0, 40.0):
        truth = max(_two_outcomes_divergence(*pair, mean, order) for pair in ((p, 1 - p), (1 - p, p)))
        assert renyi_divergence(event, order) >= truth > 0


def test_selections_with_a_small_mean_add_up():
    rare = RepeatAndSelect(event=Gaussian(noise_multiplier=100.0), distribution="poisson", mean=0.01, shape=0)
    assert 0 < epsilon(rare, 1e-5).upper < epsilon_by_accountant(SelfComposed(event=rare, count=100), 1e-5)["rdp"]


def test_a_sample_does_not_amplify_the_pure_loss_of_a_replaced_record():
    # One record, which is drawn or not: "nothing drawn" with probability 1 − q, otherwise its randomized response.
    rate, size = 0.1, 1.0
    hit = [rate / (1 + math.exp(-size)), rate / (1 + math.exp(size))]
    event = PoissonSampled(sample_rate=rate, event=PureDP(epsilon=size))
    assert epsilon(event, 0.0, neighboring_relation=REPLACE).upper >= math.log(hit[0] / hit[1])
    assert epsilon(event, 0.0, neighboring_relation=ADD).upper == pytest.approx(math.log1p(rate * math.expm1(size)))
    assert epsilon(event, 0.0, neighboring_relation=ZERO).upper == pytest.approx(math.log1p(rate * math.expm1(size)))


@pytest.mark.parametrize("size", [1e-6, 0.5, 29.9, 30.1, 500.0, 800.0, 1e4, 1e12])
def test_the_epsilon_of_a_sample_is_right_however_large(size):
    exact = math.log1p(0.01 * math.expm1(size)) if size < 700 else size + math.log(0.01)
    assert sampled_epsilon(size, 0.01) == pytest.approx(exact, rel=1e-13)
    assert epsilon(PoissonSampled(sample_rate=0.01, event=PureDP(epsilon=size)), 0.0).upper >= exact * (1 - 1e-13)


def test_what_is_unprotected_in_a_sample_stays_so():
    assert sampled_epsilon(math.inf, 0.5) == math.inf


@pytest.mark.parametrize(
    "event",
    [
        PureDP(epsilon=1e4),
        ApproximateDP(epsilon=1e4, delta=1e-7),
        RandomizedResponse(epsilon=2000.0, categories=3),
        DiscreteLaplace(scale=1e-3, sensitivity=1),
        PoissonSampled(sample_rate=0.01, event=Laplace(noise_multiplier=1e-3)),
    ],
)
@pytest.mark.filterwarnings("error")
def test_losses_beyond_a_double_have_a_bound_and_no_warning(event):
    assert 900 < epsilon(event, 1e-5).upper <= 1e4


def test_answers_are_the_same_whatever_numpy_is_told_to_do_with_underflow():
    gaussian = Gaussian(noise_multiplier=1.0)
    for event in (
        RandomAllocation(steps=10, participations=1, epochs=2, event=gaussian),
        RepeatAndSelect(event=gaussian, distribution="negative_binomial", mean=5.0, shape=1.0),
    ):
        with np.errstate(all="raise"):
            found = epsilon(event, 1e-5)
        assert found == epsilon(event, 1e-5)
