"""Attack terms against slow oracles."""

import math

import numpy as np
import pytest

from sordino import accounting
from sordino.accounting import (
    fit_gaussian_trade_off,
    membership_advantage,
    reconstruction_bound,
    trade_off_curve,
    true_positive_rate,
)
from sordino.errors import InvalidArgument
from sordino.events import (
    Event,
    Gaussian,
    Laplace,
    NonPrivate,
    NoOp,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    SelfComposed,
)


def sampled(q: float, sigma: float, steps: int) -> Event:
    return SelfComposed(event=PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma)), count=steps)


def normal_cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


@pytest.mark.parametrize("fpr", [1e-4, 0.01, 0.3, 0.9])
def test_one_sampled_step_is_the_neyman_pearson_test(fpr):
    q, sigma = 0.4, 0.9
    # Oracle: thresholds on y, both directions, on a fine grid.
    best = 0.0
    for threshold in np.linspace(-12, 14, 40_001):
        alone = 1 - normal_cdf(threshold / sigma)
        mixed = (1 - q) * alone + q * (1 - normal_cdf((threshold - 1) / sigma))
        if alone <= fpr:
            best = max(best, mixed)
        if 1 - mixed <= fpr:
            best = max(best, 1 - alone)
    answer = true_positive_rate(sampled(q, sigma, 1), fpr)
    assert best <= answer * (1 + 1e-9)
    assert answer == pytest.approx(best, rel=2e-3)


def test_randomised_response_is_its_two_by_two_table():
    p = math.e / (1 + math.e)
    event = RandomizedResponse(epsilon=1.0, categories=2)
    assert true_positive_rate(event, 1 - p) == pytest.approx(p, rel=1e-4)
    assert membership_advantage(event).upper == pytest.approx(2 * p - 1, rel=1e-9)
    assert true_positive_rate(PureDP(epsilon=1.0), 1e-3) == pytest.approx(math.e * 1e-3, rel=1e-3)


def test_nothing_reveals_nothing_and_no_privacy_everything():
    assert true_positive_rate(NoOp(), 0.05) == pytest.approx(0.05)
    assert true_positive_rate(NonPrivate(reason="printed"), 0.05) == 1
    assert membership_advantage(NonPrivate(reason="printed")).upper == 1


def test_the_trade_off_curve_is_convex_decreasing_and_above_no_attack_at_all():
    rates = list(np.linspace(0.05, 0.9, 12))
    curve = trade_off_curve(sampled(0.05, 1.0, 50), rates)
    assert curve == sorted(curve, reverse=True)
    assert np.all(np.diff(curve, 2) >= -1e-6)
    assert all(0 <= value <= 1 - rate + 1e-12 for value, rate in zip(curve, rates, strict=True))


@pytest.mark.parametrize(
    "event",
    [
        sampled(0.05, 1.0, 50),
        sampled(0.1, 50.0, 10),
        sampled(0.01, 0.5, 2000),
        Gaussian(noise_multiplier=0.3),
        SelfComposed(event=Laplace(noise_multiplier=10.0), count=20),
    ],
)
def test_one_rate_searched_over_epsilon_is_as_good_as_a_whole_curve_and_no_better_than_exact(event):
    rates = [float(rate) for rate in np.geomspace(1e-4, 0.9, 25)]
    for rate, missed in list(zip(rates, trade_off_curve(event, rates), strict=True))[2::8]:
        # Both are bounds; the curve's shares its ε among rates and lies within a few percent.
        searched = true_positive_rate(event, rate)
        assert searched <= (1 - missed) * (1 + 1e-3)
        assert 1 - missed <= 1.03 * searched


def test_advantage_is_the_largest_gap_of_the_trade_off_curve():
    event = sampled(0.1, 1.2, 40)
    rates = [float(rate) for rate in np.linspace(0.02, 0.6, 24)]
    gaps = [1 - missed - rate for rate, missed in zip(rates, trade_off_curve(event, rates), strict=True)]
    assert max(gaps) <= membership_advantage(event).upper + 1e-9
    assert max(gaps) == pytest.approx(membership_advantage(event).upper, rel=0.02)


def test_reconstruction_is_never_below_the_prior_and_grows_with_it():
    event = SelfComposed(event=Laplace(noise_multiplier=10.0), count=5)
    values = [reconstruction_bound(event, prior) for prior in (1e-6, 1e-3, 0.1)]
    assert values == sorted(values)
    assert all(value >= prior for value, prior in zip(values, (1e-6, 1e-3, 0.1), strict=True))


def test_a_gaussian_is_its_own_best_fit_and_laplace_has_regret():
    fit = fit_gaussian_trade_off(Gaussian(noise_multiplier=0.8))
    assert fit.mu == pytest.approx(1.25, rel=1e-6)
    assert fit.regret < 1e-6
    assert fit_gaussian_trade_off(Laplace(noise_multiplier=1.0)).regret > 1e-3


@pytest.mark.parametrize("fpr", [0.0, 1.0, -0.1, math.nan])
def test_a_rate_outside_the_open_unit_interval_is_refused(fpr):
    with pytest.raises(InvalidArgument):
        true_positive_rate(Gaussian(noise_multiplier=1.0), fpr)


SLOWLY_DECAYING = SelfComposed(event=PoissonSampled(sample_rate=0.001, event=Gaussian(noise_multiplier=0.7)), count=20)


@pytest.mark.parametrize(
    "event",
    [
        Gaussian(noise_multiplier=1.0),
        SelfComposed(event=PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=1.0)), count=500),
        SLOWLY_DECAYING,
    ],
)
def test_the_privacy_profile_bounds_delta_from_above_and_closely(event):
    points = [0.0, 0.5, 2.0]
    for epsilon, found in zip(points, accounting.privacy_profile(event, points), strict=True):
        exact = accounting.delta(event, epsilon)
        assert exact.lower <= found <= exact.upper * 1.02 + 1e-9


def test_where_the_contour_integral_refuses_attacks_are_still_bounded():
    found = 1 - accounting.trade_off_curve(SLOWLY_DECAYING, [k / 10 for k in range(1, 10)])[0]
    spent = accounting.delta(SLOWLY_DECAYING, 0.05).upper
    assert 0.1 <= found <= math.exp(0.05) * 0.1 + spent + 0.002
