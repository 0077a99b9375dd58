"""The discrete Gaussian at every order and δ, against sums in 60 digits over all integers that count."""

import itertools
import math
from collections import defaultdict
from functools import cache

import mpmath as mp
import numpy as np
import pytest

from sordino.accounting import delta, epsilon, epsilon_by_accountant, renyi_divergence
from sordino.accounting.discrete_gaussian import DiscreteGaussianPLD, DiscreteGaussianTransform
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import Composed, DiscreteGaussian, Gaussian, PoissonSampled, SelfComposed


@pytest.fixture(autouse=True)
def _digits():
    with mp.workdps(60):
        yield


def noise(stddev, sensitivity=1):
    return DiscreteGaussian(stddev=stddev, sensitivity=sensitivity)


def masses(stddev, farthest):
    sigma = mp.mpf(stddev)
    weights = {x: mp.exp(-mp.mpf(x * x) / (2 * sigma**2)) for x in range(-farthest, farthest + 1)}
    total = mp.fsum(weights.values())
    return {x: weight / total for x, weight in weights.items()}


@cache
def losses(stddev, sensitivity, steps):
    """(loss, mass) of `steps` uses: P/Q of all draws depends on their sum t, e^{S(steps S − 2t)/2σ²}."""
    p = masses(stddev, math.ceil(40 * stddev) + 3 * sensitivity)
    law = p
    for _ in range(steps - 1):
        summed = defaultdict(mp.mpf)
        for (x, a), (y, b) in itertools.product(law.items(), p.items()):
            summed[x + y] += a * b
        law = summed
    square = 2 * mp.mpf(stddev) ** 2
    return [(mp.mpf(sensitivity * (steps * sensitivity - 2 * t)) / square, mass) for t, mass in law.items()]


def true_delta(stddev, sensitivity, at, *, steps=1):
    """Σ (P − e^ε Q)₊."""
    found = losses(stddev, sensitivity, steps)
    return mp.fsum(mass * (1 - mp.exp(at - loss)) for loss, mass in found if loss > at)


def true_epsilon(stddev, sensitivity, wanted, *, steps=1, rate=None):
    """By bisection; removing from a sample has δ(ε) = q δ₀(log(1 + (e^ε − 1)/q))."""
    low, high = mp.mpf(0), mp.mpf(2000)
    for _ in range(60):
        middle = (low + high) / 2
        inner = middle if rate is None else mp.log(1 + (mp.exp(middle) - 1) / mp.mpf(rate))
        here = true_delta(stddev, sensitivity, inner, steps=steps) * (1 if rate is None else rate)
        low, high = (middle, high) if here > wanted else (low, middle)
    return low


def true_divergence(stddev, sensitivity, order, *, rate=1.0, side="removing"):
    """log E_Q[(P/Q)^α] / (α − 1) with P = (1 − q) Q₀ + q P₀, or with the two swapped."""
    farthest = math.ceil(abs(order) * sensitivity + 60 * stddev) + sensitivity
    p = {x: mp.exp(-mp.mpf(x * x) / (2 * mp.mpf(stddev) ** 2)) for x in range(-farthest, farthest + 1)}
    total = mp.mpf(0)
    q = mp.mpf(rate)
    for x in range(-farthest, farthest - sensitivity + 1):
        here = p[x]
        there = mp.exp(-(mp.mpf(x - sensitivity) ** 2) / (2 * mp.mpf(stddev) ** 2))
        mixed = (1 - q) * there + q * here
        upper, lower = (mixed, there) if side == "removing" else (there, mixed)
        total += upper ** mp.mpf(order) * lower ** (1 - mp.mpf(order))
    return mp.log(total / mp.fsum(p.values())) / (mp.mpf(order) - 1)


@pytest.mark.parametrize(
    ("stddev", "sensitivity", "order"),
    [(2.5, 1, 50), (2.5, 1, 100), (0.5, 1, 20), (1.0, 1, 64), (0.3, 1, 7.5), (0.2, 3, 1.3), (1.0, 2, 33.7),
     (4.0, 3, 400), (0.7, 1, 1.01), (12.0, 5, 900.25), (0.05, 1, 2.5), (30.0, 7, 11.5)],
)  # fmt: skip
def test_the_divergence_is_right_at_every_order(stddev, sensitivity, order):
    truth = true_divergence(stddev, sensitivity, order)
    found = renyi_divergence(noise(stddev, sensitivity), order)
    assert truth * (1 - mp.mpf(10) ** -14) <= found <= truth * (1 + mp.mpf(10) ** -10) + mp.mpf(10) ** -13


@pytest.mark.parametrize("order", [1e6, 1e9, 1e15, 1e30, 1e100])
@pytest.mark.parametrize("stddev", [0.5, 1.0, 3.7, 1e3, 1e9])
def test_the_divergence_never_falls_below_the_least_that_it_can_be(stddev, order):
    # θ(t)/θ(0) is at least θ(½)/θ(0), so that K is that far below the Gaussian's at most.
    least = min(1.0, math.exp(-1 / (8 * stddev**2)))
    continuous = order / (2 * stddev**2)
    found = renyi_divergence(noise(stddev), order)
    assert continuous + math.log(least) / (order - 1) <= found * (1 + 1e-13)
    assert found <= continuous * (1 + 1e-12)


@pytest.mark.parametrize(
    ("stddev", "sensitivity", "rate", "order"),
    [(2.5, 1, 0.01, 100), (1.0, 1, 0.3, 8.5), (0.5, 1, 0.001, 12), (3.0, 2, 0.9, 40), (6.0, 1, 1e-6, 300),
     (20.0, 30, 0.05, 5.0), (40.0, 1, 0.5, 1500)],
)  # fmt: skip
def test_the_divergence_of_a_sample_is_right_at_every_order(stddev, sensitivity, rate, order):
    truth = max(true_divergence(stddev, sensitivity, order, rate=rate, side=side) for side in ("removing", "adding"))
    found = renyi_divergence(PoissonSampled(sample_rate=rate, event=noise(stddev, sensitivity)), order)
    assert truth <= found <= truth * (1 + mp.mpf(10) ** -9) + mp.mpf(10) ** -11


def test_a_sample_at_an_order_beyond_the_sum_says_so():
    with pytest.raises(AccountingError, match="order"):
        renyi_divergence(PoissonSampled(sample_rate=0.1, event=noise(1.0)), 1e9)


@pytest.mark.parametrize(
    ("stddev", "sensitivity", "wanted"),
    [(1.0, 1, 1e-60), (1.0, 1, 1e-100), (1.0, 1, 1e-300), (4.0, 1, 1e-60), (4.0, 3, 1e-100), (0.5, 1, 1e-200),
     (0.5, 2, 1e-5), (0.3, 1, 1e-12), (1.0, 5, 1e-80), (7.5, 2, 1e-150), (2.0, 1, 0.3), (0.25, 1, 1e-250)],
)  # fmt: skip
def test_epsilon_is_never_below_the_truth_however_small_delta_is(stddev, sensitivity, wanted):
    truth = true_epsilon(stddev, sensitivity, mp.mpf(wanted))
    answer = epsilon(noise(stddev, sensitivity), wanted)
    assert answer.lower <= truth * (1 + mp.mpf(10) ** -12)
    assert truth * (1 - mp.mpf(10) ** -12) <= answer.upper
    for name, upper in epsilon_by_accountant(noise(stddev, sensitivity), wanted).items():
        assert truth * (1 - mp.mpf(10) ** -12) <= upper, name
    if wanted > 1e-240:
        assert answer.upper <= truth * (1 + mp.mpf(10) ** -3)


@pytest.mark.parametrize(("stddev", "steps", "wanted"), [(1.0, 2, 1e-80), (0.7, 3, 1e-40), (1.5, 2, 1e-150)])
def test_compositions_are_not_cut_either(stddev, steps, wanted):
    truth = true_epsilon(stddev, 1, mp.mpf(wanted), steps=steps)
    event = SelfComposed(event=noise(stddev), count=steps)
    answer = epsilon(event, wanted)
    assert answer.lower <= truth * (1 + mp.mpf(10) ** -12)
    assert truth * (1 - mp.mpf(10) ** -12) <= answer.upper <= truth * (1 + mp.mpf(10) ** -3)
    assert all(truth * (1 - mp.mpf(10) ** -12) <= upper for upper in epsilon_by_accountant(event, wanted).values())


@pytest.mark.parametrize(("stddev", "at"), [(1.0, 3.0), (1.0, 18.0), (0.5, 30.0), (3.0, 7.0), (1.0, 36.0)])
def test_delta_is_right_far_out(stddev, at):
    truth = true_delta(stddev, 1, mp.mpf(at))
    answer = delta(noise(stddev), at)
    assert answer.lower <= truth * (1 + mp.mpf(10) ** -9)
    assert truth * (1 - mp.mpf(10) ** -9) <= answer.upper


@pytest.mark.parametrize(("rate", "stddev", "wanted"), [(0.01, 1.0, 1e-80), (0.3, 2.0, 1e-120), (0.001, 0.6, 1e-30)])
def test_a_sample_is_not_cut_either(rate, stddev, wanted):
    truth = true_epsilon(stddev, 1, mp.mpf(wanted), rate=rate)
    event = PoissonSampled(sample_rate=rate, event=noise(stddev))
    assert all(truth * (1 - mp.mpf(10) ** -12) <= upper for upper in epsilon_by_accountant(event, wanted).values())
    assert epsilon(event, wanted).upper <= truth * (1 + mp.mpf(10) ** -3)


@pytest.mark.parametrize(("stddev", "sensitivity"), [(0.2, 1), (0.9, 2), (1.0, 1), (2.3, 3), (30.0, 7)])
@pytest.mark.parametrize("lam", [0.25, 3.3, 60.0])
def test_the_line_is_the_sum_over_the_integers(stddev, sensitivity, lam):
    one = DiscreteGaussianTransform(stddev=stddev, sensitivity=sensitivity)
    line = one.line(lam, 10.0, 1e-12)
    period = 2 * math.pi * stddev**2 / sensitivity
    u = period * np.array([0.0, 0.01, 0.3, 0.5, 0.77, 1.0, 1.4, 3.1])
    found, radius = line.characteristic(u)
    middle = round(-lam * sensitivity)
    wide = math.ceil(14 * stddev) + 2
    x = np.arange(middle - wide, middle + wide + 1)
    weights = np.exp(-((x + lam * sensitivity) ** 2) / (2 * stddev**2))
    loss = sensitivity * (sensitivity - 2 * x) / (2 * stddev**2) - line.moments.mean
    direct = np.exp(1j * np.multiply.outer(u, loss)) @ (weights / weights.sum())
    assert np.all(np.abs(np.exp(found) - direct) <= radius + 1e-11 * (1 + u))
    assert line.moments.mean == pytest.approx(one.moments(lam).mean)
    slope = (one.moments(lam * (1 + 1e-5)).log_mgf - one.moments(lam * (1 - 1e-5)).log_mgf) / (2e-5 * lam)
    assert line.moments.mean == pytest.approx(slope, rel=1e-4)


def test_beside_a_gaussian_the_contour_answers_with_what_the_lattice_says():
    event = Composed(events=(SelfComposed(event=noise(1.5), count=3), Gaussian(noise_multiplier=2.0)))
    for wanted in (1e-5, 1e-40):
        contour, lattice = (epsilon(event, wanted, accountant=name) for name in ("contour", "pld"))
        assert max(contour.lower, lattice.lower) <= min(contour.upper, lattice.upper)
        assert contour.width < 1e-6


@pytest.mark.parametrize(("stddev", "sensitivity"), [(1.3, 2), (0.4, 1), (40.0, 9)])
def test_tails_have_full_relative_accuracy(stddev, sensitivity):
    law = DiscreteGaussianPLD(stddev=stddev, sensitivity=sensitivity, reach=36.0)
    p = masses(stddev, math.ceil(50 * stddev) + sensitivity)
    for deviations in (0, 3, 10, 25, 35):
        edge = -math.floor(deviations * stddev)
        loss = sensitivity * (sensitivity - 2 * edge) / (2 * stddev**2)
        (above,), (beyond,) = law.upper(np.array([loss]))
        assert above == pytest.approx(float(mp.fsum(mass for x, mass in p.items() if x < edge)), rel=1e-14, abs=0)
        moved = mp.fsum(mass for x, mass in p.items() if x < edge - sensitivity)
        assert beyond == pytest.approx(float(moved), rel=1e-14, abs=1e-300)
        (below,), (under,) = law.lower(np.array([loss]))
        assert above + below == pytest.approx(1, abs=1e-15)
        assert beyond + under == pytest.approx(1, abs=1e-15)


def test_widths_beyond_a_list_are_answered_by_moments():
    wide = noise(1e6, 3)
    found = epsilon_by_accountant(wide, 1e-30)
    assert {"rdp", "zcdp"} <= set(found)
    continuous = epsilon(Gaussian(noise_multiplier=1e6 / 3), 1e-30).upper
    assert all(upper >= continuous * (1 - 1e-6) for upper in found.values())
    with pytest.raises(UnsupportedEvent, match="stddev"):
        DiscreteGaussianPLD(stddev=1e6, sensitivity=3).require_listable()
