"""Filters and odometers: the published counts, refusal without a charge, soundness against the accountants."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.accounting import GDPFilter, RDPFilter, ZCDPFilter, ZCDPOdometer, epsilon
from sordino.errors import BudgetExceeded, InvalidArgument, UnsupportedEvent
from sordino.events import Composed, Gaussian, Laplace, NonPrivate, PoissonSampled, SelfComposed

TEN = Gaussian(noise_multiplier=10.0)


def admitted(guard, event, most: int = 1000) -> int:
    count = 0
    while count < most and guard.admit(event):
        count += 1
    return count


def test_the_published_counts_six_by_zcdp_seven_by_gaussian_dp():
    assert admitted(ZCDPFilter(epsilon=1.0, delta=1e-5), TEN) == 6
    assert admitted(GDPFilter(epsilon=1.0, delta=1e-5), TEN) == 7


@pytest.mark.parametrize("kind", [ZCDPFilter, GDPFilter])
def test_a_refusal_charges_nothing_and_a_smaller_step_may_still_fit(kind):
    guard = kind(epsilon=1.0, delta=1e-5)
    admitted(guard, TEN)
    before = guard.spent
    assert not guard.admit(TEN)
    assert guard.spent == before
    assert guard.admit(Gaussian(noise_multiplier=1000.0))
    assert guard.spent > before
    assert guard.remaining >= 0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), goal=st.floats(0.2, 8.0))
def test_whatever_noise_was_chosen_the_admitted_steps_cost_at_most_the_budget(seed, goal):
    source = np.random.default_rng(seed)
    for kind in (ZCDPFilter, GDPFilter):
        guard = kind(epsilon=goal, delta=1e-6)
        taken = []
        for _ in range(60):
            event = Gaussian(noise_multiplier=float(np.exp(source.uniform(0, 4))))
            if guard.admit(event):
                taken.append(event)
        assert epsilon(Composed(events=tuple(taken)), 1e-6).lower <= goal


def test_the_gaussian_filter_is_exact_to_the_last_step():
    guard = GDPFilter(epsilon=1.0, delta=1e-5)
    count = admitted(guard, Gaussian(noise_multiplier=100.0))
    assert epsilon(SelfComposed(event=Gaussian(noise_multiplier=100.0), count=count), 1e-5).upper <= 1.0
    assert epsilon(SelfComposed(event=Gaussian(noise_multiplier=100.0), count=count + 1), 1e-5).lower > 1.0


def test_a_renyi_filter_takes_sampled_steps_and_stays_within_the_renyi_bound():
    step = PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=1.0))
    guard = RDPFilter(epsilon=2.0, delta=1e-5, order=6.0)
    block = SelfComposed(event=step, count=100)
    count = 100 * admitted(guard, block)
    assert count > 0
    assert epsilon(SelfComposed(event=step, count=count), 1e-5).upper <= 2.0
    best = epsilon(SelfComposed(event=step, count=count), 1e-5, accountant="rdp").upper
    assert best <= 2.0 * (1 + 1e-9)


def test_unprotected_steps_never_fit_and_require_raises():
    guard = ZCDPFilter(epsilon=1.0, delta=1e-5)
    assert not guard.admit(NonPrivate(reason="printed"))
    with pytest.raises(BudgetExceeded):
        guard.require(Gaussian(noise_multiplier=0.1))
    assert guard.spent == 0
    with pytest.raises(UnsupportedEvent):
        GDPFilter(epsilon=1.0, delta=1e-5).admit(Laplace(noise_multiplier=1.0))
    with pytest.raises(UnsupportedEvent):
        guard.admit(PoissonSampled(sample_rate=0.1, event=TEN))
    with pytest.raises(InvalidArgument):
        ZCDPFilter(epsilon=0.0, delta=1e-5)
    with pytest.raises(InvalidArgument):
        RDPFilter(epsilon=1.0, delta=1e-5, order=1.0)


def test_many_small_charges_are_never_rounded_in_favor_of_one_more():
    guard = ZCDPFilter(epsilon=1.0, delta=1e-5)
    count = admitted(guard, Gaussian(noise_multiplier=400.0), most=20_000)
    assert count * (1 / (2 * 400.0**2)) <= guard.budget
    assert (count + 1) * (1 / (2 * 400.0**2)) > guard.budget * (1 - 1e-9)


def test_an_odometer_never_reads_below_the_fixed_schedule_and_never_falls():
    odometer = ZCDPOdometer(delta=1e-5)
    assert odometer.epsilon == 0
    readings = [odometer.charge(TEN) for _ in range(40)]
    assert readings == sorted(readings)
    for count in (1, 10, 40):
        assert readings[count - 1] >= epsilon(SelfComposed(event=TEN, count=count), 1e-5, accountant="zcdp").upper
    assert math.isinf(odometer.charge(NonPrivate(reason="printed")))
