"""How much Gaussian noise (ε, δ) needs: published values, the safe side, and budgets whose shares add up."""

import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.errors import InvalidArgument
from sordino.events import Gaussian, PureDP
from sordino.mechanisms import (
    GaussianBudget,
    GaussianMechanism,
    PureBudget,
    analytic_noise_multiplier,
    classical_noise_multiplier,
    gaussian_mechanism_delta,
    make_budget,
)


def exact_delta(noise_multiplier, epsilon):
    """The closed form of Balle and Wang with 80 digits."""
    with mpmath.workdps(80):
        mu, e = 1 / mpmath.mpf(noise_multiplier), mpmath.mpf(epsilon)
        return mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu)


@pytest.mark.parametrize(
    ("epsilon", "delta", "expected"),
    [(1, 1e-5, 3.730632), (0.5, 1e-6, 8.057618), (0.1, 1e-6, 36.30469), (8, 1e-5, 0.600229)],
)
def test_the_analytic_calibration_gives_the_published_values(epsilon, delta, expected):
    assert analytic_noise_multiplier(epsilon=epsilon, delta=delta) == pytest.approx(expected, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.floats(-8, 4), st.floats(-60, -0.001))
def test_the_analytic_calibration_is_on_the_safe_side_and_tight(log_epsilon, log_delta):
    epsilon, delta = 10.0**log_epsilon, 10.0**log_delta
    multiplier = analytic_noise_multiplier(epsilon=epsilon, delta=delta)
    assert exact_delta(multiplier, epsilon) <= delta
    assert exact_delta(multiplier * (1 - 1e-4), epsilon) > delta


@settings(max_examples=60, deadline=None)
@given(st.floats(-3, 4), st.floats(-6, 3))
def test_delta_agrees_with_eighty_digits(log_multiplier, log_epsilon):
    multiplier, epsilon = 10.0**log_multiplier, 10.0**log_epsilon
    exact = exact_delta(multiplier, epsilon)
    got = gaussian_mechanism_delta(noise_multiplier=multiplier, epsilon=epsilon)
    assert got == pytest.approx(float(exact), rel=1e-9, abs=1e-300)


def test_the_classical_calibration_is_the_textbook_one_below_one():
    assert classical_noise_multiplier(epsilon=0.5, delta=1e-5) == pytest.approx(math.sqrt(2 * math.log(1.25e5)) / 0.5)
    assert classical_noise_multiplier(epsilon=0.5, delta=1e-5) > analytic_noise_multiplier(epsilon=0.5, delta=1e-5)


def test_the_classical_calibration_is_refused_from_epsilon_one_on():
    for epsilon in (1.0, 1.5, 20.0):
        with pytest.raises(InvalidArgument, match="Use the analytic calibration"):
            classical_noise_multiplier(epsilon=epsilon, delta=1e-5)
    with pytest.raises(InvalidArgument, match="Use the analytic calibration"):
        GaussianMechanism.from_budget(epsilon=2.0, delta=1e-5, l2_sensitivity=1.0, calibration="classical")


def test_the_analytic_calibration_is_the_default():
    built = GaussianMechanism.from_budget(epsilon=1.0, delta=1e-5, l2_sensitivity=2.0)
    assert built.stddev == pytest.approx(2 * 3.730632, rel=1e-6)
    with pytest.raises(InvalidArgument, match="calibration must be one of"):
        GaussianMechanism.from_budget(epsilon=1.0, delta=1e-5, l2_sensitivity=2.0, calibration="folklore")


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, math.nan])
def test_a_delta_that_buys_nothing_is_refused(delta):
    with pytest.raises(InvalidArgument, match="delta must be"):
        analytic_noise_multiplier(epsilon=1.0, delta=delta)


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-3, 50), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6))
def test_shares_of_a_budget_add_up_to_it_and_never_to_more(size, weights):
    shares = PureBudget(epsilon=size).split(*weights)
    total = math.fsum(share.epsilon for share in shares)
    assert size * (1 - 1e-12) <= total <= size * (1 + 1e-15)
    parts = GaussianBudget(noise_multiplier=size).split(*weights)
    precision = math.fsum(part.noise_multiplier**-2 for part in parts)
    assert precision == pytest.approx(size**-2, rel=1e-12)
    assert [share.epsilon / size for share in shares] == pytest.approx([w / sum(weights) for w in weights])


def test_a_budget_is_pure_without_delta_and_gaussian_with():
    assert make_budget(epsilon=2.0).event() == PureDP(epsilon=2.0)
    gaussian = make_budget(epsilon=1.0, delta=1e-5)
    assert isinstance(gaussian.event(), Gaussian)
    assert gaussian_mechanism_delta(noise_multiplier=gaussian.noise_multiplier, epsilon=1.0) <= 1e-5
    with pytest.raises(InvalidArgument, match="weights"):
        gaussian.split()
