"""Compositions of losses with few values, against the formula of Kairouz, Oh and Viswanath in 60 digits."""

import itertools
import math

import mpmath as mp
import pytest

from sordino.accounting import delta, epsilon, epsilon_by_accountant
from sordino.definitions import NeighboringRelation
from sordino.events import (
    ApproximateDP,
    Composed,
    DiscreteLaplace,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    SelfComposed,
)


@pytest.fixture(autouse=True)
def _digits():
    with mp.workdps(60):
        yield


def true_delta(steps, at):
    """Σ over all numbers of high losses, of steps (ε₀, δ₀, k): mechanisms known by (ε, δ) alone."""
    kept = mp.mpf(1)
    parts = []
    for own, lost, count in steps:
        e = mp.exp(mp.mpf(own))
        kept *= (1 - mp.mpf(lost)) ** count
        parts.append(
            [
                ((2 * i - count) * mp.mpf(own), mp.binomial(count, i) * (e / (1 + e)) ** i / (1 + e) ** (count - i))
                for i in range(count + 1)
            ]
        )
    total = mp.mpf(0)
    for choice in itertools.product(*parts):
        loss = mp.fsum(one for one, _ in choice)
        if loss > at:
            total += mp.fprod(mass for _, mass in choice) * (1 - mp.exp(at - loss))
    return (1 - kept) + kept * total


def true_epsilon(steps, wanted):
    low, high = mp.mpf(0), mp.mpf(sum(own * count for own, _, count in steps)) + 1
    if true_delta(steps, low) <= wanted:
        return mp.mpf(0)
    for _ in range(110):
        middle = (low + high) / 2
        low, high = (middle, high) if true_delta(steps, middle) > wanted else (low, middle)
    return low


def pure(steps):
    return Composed(
        events=tuple(
            SelfComposed(event=ApproximateDP(epsilon=own, delta=lost) if lost else PureDP(epsilon=own), count=count)
            for own, lost, count in steps
        )
    )


@pytest.mark.parametrize(
    "steps",
    [
        [(0.1, 0.0, 1)], [(0.1, 0.0, 5)], [(1.0, 0.0, 2)], [(0.01, 0.0, 30)], [(2.0, 0.0, 10)], [(0.3277983, 0.0, 3)],
        [(0.5, 0.0, 200)], [(0.2, 0.0, 7), (0.7, 0.0, 4)], [(0.05, 0.0, 6), (0.11, 0.0, 5), (1.3, 0.0, 3)],
        [(0.3, 1e-9, 12)], [(30.0, 0.0, 2)],
    ],
)  # fmt: skip
@pytest.mark.parametrize("wanted", [1e-3, 2.94e-8, 1e-10, 1e-40])
def test_the_interval_holds_the_exact_answer_and_little_else(steps, wanted):
    if any(lost for _, lost, _ in steps) and wanted < 1e-7:
        return
    truth = true_epsilon(steps, mp.mpf(wanted))
    for name in ("auto", "pld", "optimal"):
        answer = epsilon(pure(steps), wanted, accountant=name)
        assert answer.lower <= truth * (1 + mp.mpf(10) ** -14)
        assert truth * (1 - mp.mpf(10) ** -14) <= answer.upper
        assert answer.upper - answer.lower <= 1e-9 * (1e-3 + float(truth))


@pytest.mark.parametrize("steps", [[(0.2, 0.0, 7)], [(0.2, 0.0, 7), (0.7, 0.0, 4)], [(0.3, 1e-9, 12)]])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_delta_is_as_exact(steps, share):
    at = share * sum(own * count for own, _, count in steps)
    truth = true_delta(steps, mp.mpf(at))
    answer = delta(pure(steps), at, accountant="pld")
    assert answer.lower <= truth <= answer.upper
    assert answer.width <= 1e-10 * float(truth)


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("count", [1, 2, 5, 20])
@pytest.mark.parametrize("wanted", [1e-4, 1e-8, 1e-10])
def test_noise_with_a_largest_loss_has_a_lower_end_near_its_upper_one(scale, count, wanted):
    for event in (
        Laplace(noise_multiplier=scale),
        DiscreteLaplace(scale=scale, sensitivity=1),
        DiscreteLaplace(scale=scale, sensitivity=4),
        RandomizedResponse(epsilon=1 / scale, categories=4),
        PoissonSampled(sample_rate=0.3, event=Laplace(noise_multiplier=scale)),
        PoissonSampled(sample_rate=0.3, event=PureDP(epsilon=1 / scale)),
    ):
        answer = epsilon(SelfComposed(event=event, count=count), wanted)
        assert answer.upper - answer.lower <= 2e-3 * answer.upper


def test_many_uses_are_a_short_sum():
    answer = epsilon(SelfComposed(event=PureDP(epsilon=1e-3), count=1_000_000), 1e-6)
    other = epsilon_by_accountant(SelfComposed(event=PureDP(epsilon=1e-3), count=1_000_000), 1e-6)["zcdp"]
    assert answer.width < 1e-5
    assert answer.upper < other


@pytest.mark.parametrize("neighboring_relation", list(NeighboringRelation))
def test_an_answer_of_laplace_noise_is_its_closed_form(neighboring_relation):
    # δ(ε) = 1 − e^{(ε − 1/b)/2} for one use (Balle, Barthe and Gaboardi 2018, theorem 3).
    for scale, wanted in ((0.5, 1e-8), (3.0, 1e-10), (1.0, 1e-3)):
        truth = 1 / scale + 2 * math.log1p(-wanted)
        answer = epsilon(Laplace(noise_multiplier=scale), wanted, neighboring_relation=neighboring_relation)
        assert answer.lower <= truth * (1 + 1e-12)
        assert truth * (1 - 1e-12) <= answer.upper
