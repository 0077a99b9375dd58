"""The sparse vector technique: published allocation, exact privacy on small cases, and nothing but answers released."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from sordino.errors import BudgetExceeded, InvalidArgument
from sordino.events import PureDP
from sordino.mechanisms import AboveThreshold


@pytest.mark.parametrize(
    ("positives", "share", "threshold_scale", "value_scale"),
    [(1, 0.38649, 2.5874, 3.2599), (10, 0.11950, 8.3681, 22.7144)],
)
def test_the_budget_is_shared_as_published(positives, share, threshold_scale, value_scale):
    mechanism = AboveThreshold(epsilon=1.0, sensitivity=1.0, threshold=0.0, max_positives=positives)
    assert mechanism.threshold_epsilon == pytest.approx(share, abs=1e-5)
    assert mechanism.threshold_scale == pytest.approx(threshold_scale, abs=1e-4)
    assert mechanism.value_scale == pytest.approx(value_scale, abs=1e-4)
    assert mechanism.threshold_epsilon + mechanism.value_epsilon == 1.0
    assert mechanism.event() == PureDP(epsilon=1.0)


def test_monotone_values_need_half_the_noise():
    plain = AboveThreshold(epsilon=1.0, sensitivity=1.0, threshold=0.0, max_positives=4)
    monotone = AboveThreshold(epsilon=1.0, sensitivity=1.0, threshold=0.0, max_positives=4, monotone=True)
    assert monotone.value_scale == pytest.approx(4 / (1 - 1 / (1 + 4 ** (2 / 3))))
    assert monotone.value_scale < plain.value_scale


def answers_probability(mechanism, values, answers):
    """P(answers): the product of Laplace tails given the threshold's noise, integrated over a fine grid of it."""
    z = np.linspace(-80, 80, 40_001)
    density = np.exp(-np.abs(z) / mechanism.threshold_scale) / (2 * mechanism.threshold_scale)
    for value, answer in zip(values, answers, strict=True):
        above = stats.laplace.sf(mechanism.threshold + z - value, scale=mechanism.value_scale)
        density *= above if answer else 1 - above
    return integrate.simpson(density, x=z)


def test_answers_have_the_law_that_the_scales_imply(seeded):
    mechanism = AboveThreshold(epsilon=4.0, sensitivity=1.0, threshold=1.0, rng=seeded(1))
    values, trials = [0.0, 1.0, 2.0], 1000
    outcomes = {(True,): 0, (False, True): 0, (False, False, True): 0, (False, False, False): 0}
    for _ in range(trials):
        outcomes[tuple(mechanism.release(values).tolist())] += 1
    expected = [answers_probability(mechanism, values[: len(o)], o) for o in outcomes]
    assert sum(expected) == pytest.approx(1.0, abs=1e-5)
    assert stats.chisquare(list(outcomes.values()), np.array(expected) * trials / sum(expected)).pvalue > 1e-3
    wrong = AboveThreshold(epsilon=8.0, sensitivity=1.0, threshold=1.0)
    other = np.array([answers_probability(wrong, values[: len(o)], o) for o in outcomes])
    assert stats.chisquare(list(outcomes.values()), other * trials / other.sum()).pvalue < 1e-6


@pytest.mark.parametrize("monotone", [False, True])
def test_every_outcome_of_neighbors_is_within_e_to_the_epsilon(monotone):
    mechanism = AboveThreshold(epsilon=1.0, sensitivity=1.0, threshold=0.0, max_positives=2, monotone=monotone)
    values = np.array([0.3, -0.5, 1.0])
    changes = [(1, 1, 1)] if monotone else [(1, 1, 1), (-1, 1, -1), (1, -1, 1), (-1, -1, 1)]
    for change in changes:
        for outcome in [(True, True), (False, True, True), (True, False, True), (False, False, False)]:
            size = len(outcome)
            before = answers_probability(mechanism, values[:size], outcome)
            after = answers_probability(mechanism, (values + change)[:size], outcome)
            assert abs(math.log(before / after)) <= 1.0 + 1e-4


def test_a_session_stops_after_the_last_positive_and_says_how_to_go_on(seeded):
    mechanism = AboveThreshold(epsilon=500.0, sensitivity=1.0, threshold=10.0, max_positives=2, rng=seeded(2))
    session = mechanism.session()
    assert [session.ask(value) for value in (0.0, 20.0, 0.0, 20.0)] == [False, True, False, True]
    assert session.is_over
    with pytest.raises(BudgetExceeded, match="Start another session, which is charged again"):
        session.ask(0.0)
    assert mechanism.release([20.0, 20.0, 20.0]).tolist() == [True, True]


def test_only_answers_leave_the_mechanism(seeded):
    mechanism = AboveThreshold(epsilon=1.0, sensitivity=1.0, threshold=0.0, rng=seeded(3))
    released = mechanism.release([1.0, 2.0, 3.0])
    assert released.dtype == np.bool_
    assert not any(isinstance(value, np.ndarray) for value in vars(mechanism).values())


def test_sessions_use_fresh_noise_and_values_that_are_not_finite_count_as_zero(seeded):
    mechanism = AboveThreshold(epsilon=0.5, sensitivity=1.0, threshold=0.0, max_positives=50, rng=seeded(4))
    first, second = mechanism.release(np.zeros(60)), mechanism.release(np.zeros(60))
    assert first.tolist() != second.tolist()
    sure = AboveThreshold(epsilon=1e4, sensitivity=1.0, threshold=5.0, rng=seeded(5))
    assert sure.release([math.nan, math.inf, -math.inf, 10.0]).tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be"),
        ({"sensitivity": math.inf}, "sensitivity must be"),
        ({"max_positives": 0}, "max_positives must be an integer ≥ 1"),
        ({"threshold": math.nan}, "threshold must be"),
    ],
)
def test_wrong_parameters_are_refused(change, message):
    with pytest.raises(InvalidArgument, match=message):
        AboveThreshold(**({"epsilon": 1.0, "sensitivity": 1.0, "threshold": 0.0} | change))
