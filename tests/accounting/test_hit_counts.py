"""Equal sampled steps with hardly any noise: binomial sums against the lattice, the contour and one step's formula."""

import math

import pytest

from sordino.accounting import calibrate_noise_multiplier, delta, epsilon
from sordino.accounting.closed_form import HitCounts, remove_direction_delta, sampled_gaussian_epsilon
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import Event, Gaussian, PoissonSampled, SampledWithoutReplacement, SelfComposed

ADD, REPLACE, ZERO = NeighboringRelation


def sampled(rate: float, noise: float, steps: int) -> Event:
    return SelfComposed(event=PoissonSampled(sample_rate=rate, event=Gaussian(noise_multiplier=noise)), count=steps)


@pytest.mark.parametrize(("rate", "noise", "steps", "wanted"), [(0.01, 0.04, 100, 1e-5), (0.3, 0.02, 7, 1e-6),
                         (0.01, 0.03, 3, 1e-5), (0.001, 0.035, 10, 1e-3), (0.5, 0.04, 2, 0.3)])  # fmt: skip
@pytest.mark.parametrize(("neighboring_relation", "factor"), [(ADD, 1.0), (ZERO, 1.0), (REPLACE, 0.5)])
def test_the_sum_lies_within_what_the_lattice_says_and_is_far_narrower(
    rate, noise, steps, wanted, neighboring_relation, factor
):
    # Under replace-one each side is moved by half of the shift.
    event = sampled(rate, noise * factor, steps)
    exact = epsilon(event, wanted, neighboring_relation=neighboring_relation, accountant="closed_form")
    lattice = epsilon(event, wanted, neighboring_relation=neighboring_relation, accountant="pld")
    assert lattice.lower <= exact.upper
    assert exact.lower <= lattice.upper
    assert exact.width <= 1e-8 * exact.upper
    back = delta(event, exact.upper, neighboring_relation=neighboring_relation, accountant="closed_form")
    assert back.lower <= wanted * (1 + 1e-12)
    assert back.upper == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("rate", "noise", "steps", "relation"), [(0.01, 0.03, 1000, ADD), (0.3, 0.02, 7, ADD),
                         (0.01, 0.015, 1000, REPLACE), (0.3, 0.02, 7, REPLACE)])  # fmt: skip
def test_the_sum_and_the_contour_agree(rate, noise, steps, relation):
    event = sampled(rate, noise, steps)
    exact, contour = (
        epsilon(event, 1e-6, neighboring_relation=relation, accountant=name) for name in ("closed_form", "contour")
    )
    assert max(exact.lower, contour.lower) <= min(exact.upper, contour.upper)
    assert contour.width <= 1e-6 * contour.upper


@pytest.mark.parametrize(("rate", "shift", "wanted"), [(0.01, 30.0, 1e-5), (0.4, 200.0, 1e-9), (1e-4, 45.0, 1e-6)])
def test_one_step_is_the_formula(rate, shift, wanted):
    one = HitCounts(rate=rate, shift=shift, count=1, replacing=False)
    low, high = one.epsilon(wanted)
    truth = sampled_gaussian_epsilon(wanted, rate, shift)
    assert low <= truth[1]
    assert truth[0] <= high <= truth[1] * (1 + 1e-10)
    below, above = one.delta(truth[0])
    curve = remove_direction_delta(truth[0], rate, shift)
    assert below <= curve[1]
    assert curve[0] <= above


def test_a_fixed_size_sample_moves_twice_as_far():
    event = SelfComposed(
        event=SampledWithoutReplacement(dataset_size=100, sample_size=5, event=Gaussian(noise_multiplier=0.06)),
        count=50,
    )
    assert epsilon(event, 1e-5) == epsilon(sampled(0.05, 0.03, 50), 1e-5)


@pytest.mark.parametrize(("rate", "steps", "target"), [(0.01, 1000, 1e6), (0.001, 100_000, 1e6), (0.01, 1000, 3e4)])
def test_an_epsilon_of_a_million_is_calibrated_and_exact(rate, steps, target):
    noise = calibrate_noise_multiplier(lambda z: sampled(rate, z, steps), target_epsilon=target, delta=1e-5)
    answer = epsilon(sampled(rate, noise, steps), 1e-5)
    assert target * (1 - 1e-4) <= answer.lower <= answer.upper <= target
    # Hits times half the squared shift, at the 1e-5 quantile of the binomial, are most of it.
    from scipy.stats import binom

    hits = float(binom.isf(1e-5, steps, rate))
    assert hits - 1 <= target / (1 / (2 * noise**2)) <= hits + 1


def test_more_noise_than_shows_who_was_used_is_refused():
    with pytest.raises(UnsupportedEvent):
        epsilon(sampled(0.01, 0.06, 100), 1e-5, accountant="closed_form")
    with pytest.raises(AccountingError, match="contour"):
        epsilon(sampled(0.01, 0.045, 100), 1e-60, accountant="closed_form")
    with pytest.raises(AccountingError, match="contour"):
        delta(sampled(0.5, 0.04, 100), 1.0, accountant="closed_form")
    assert math.isfinite(epsilon(sampled(0.01, 0.045, 100), 1e-60).upper)
