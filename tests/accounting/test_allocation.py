"""Random allocation: exact values for two steps, the laws every answer obeys, and what is not amplified."""

import math

import numpy as np
import pytest
from scipy.special import ndtr

from sordino.accounting import delta, epsilon, membership_advantage, true_positive_rate, without_amplification
from sordino.accounting.base import Repeated
from sordino.accounting.pld import pld_delta
from sordino.accounting.pld_discretized import RandomAllocationPLD, allocation_lattices
from sordino.accounting.rdp import adding_moment, removing_moment
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError
from sordino.events import Composed, Event, Gaussian, Laplace, RandomAllocation, SelfComposed

ADD, REPLACE, ZERO = NeighboringRelation


def allocated(steps: int, sigma: float, *, participations: int = 1, epochs: int = 1) -> Event:
    noise = Gaussian(noise_multiplier=sigma)
    return RandomAllocation(steps=steps, participations=participations, epochs=epochs, event=noise)


def exact_for_two_steps(at: float, m: float, removing: bool) -> float:
    """One coordinate integrated on a fine grid, the other in closed form (a lognormal call or put)."""
    x = np.linspace(-13, 13, 400_001)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    first = np.exp(m * x - m * m / 2)
    if removing:
        strike = 2 * math.exp(at) - first
        y = (np.log(np.maximum(strike, 1e-300)) + m * m / 2) / m
        inner = np.where(strike > 0, ndtr(m - y) - np.maximum(strike, 0) * ndtr(-y), 1 - strike) / 2
    else:
        strike = 2 * math.exp(-at) - first
        y = (np.log(np.maximum(strike, 1e-300)) + m * m / 2) / m
        inner = math.exp(at) / 2 * np.where(strike > 0, strike * ndtr(y) - ndtr(y - m), 0.0)
    return float(np.trapezoid(density * inner, x))


@pytest.mark.parametrize("removing", [True, False])
@pytest.mark.parametrize(("m", "at"), [(0.25, 0.1), (1.0, 0.0), (1.0, 1.0), (1.5, 2.5)])
def test_two_steps_are_a_double_integral(m, at, removing):
    truth = exact_for_two_steps(at, m, removing)
    law = RandomAllocationPLD(steps=2, shift=m, removing=removing)
    lower, upper = pld_delta([Repeated(law, 1)], at)
    assert lower <= truth * (1 + 1e-9) + 1e-15
    assert truth * (1 - 1e-9) - 1e-15 <= upper
    assert upper <= 1.003 * truth + 1e-9
    if removing:
        assert lower >= 0.997 * truth - 1e-9


def test_the_loss_from_above_keeps_its_mass_and_the_one_from_below_has_no_more():
    lower, upper = allocation_lattices(RandomAllocationPLD(steps=50, shift=0.8, removing=True), 1e-3, math.log(1e-9))
    assert upper.masses.sum() + upper.infinite == pytest.approx(1, abs=1e-5)
    assert lower.masses.sum() <= 1
    assert lower.masses.sum() == pytest.approx(1, abs=1e-3)
    assert upper.uncertain < 1e-9


@pytest.mark.parametrize("neighboring_relation", [ADD, ZERO])
def test_more_steps_more_noise_and_fewer_epochs_cost_less(neighboring_relation):
    base = epsilon(allocated(100, 1.0, epochs=2), 1e-6, neighboring_relation=neighboring_relation)
    for cheaper in (allocated(150, 1.0, epochs=2), allocated(100, 1.1, epochs=2), allocated(100, 1.0)):
        assert epsilon(cheaper, 1e-6, neighboring_relation=neighboring_relation).upper < base.lower
    assert base.upper < epsilon(SelfComposed(event=Gaussian(noise_multiplier=1.0), count=2), 1e-6).lower
    twice = SelfComposed(event=allocated(100, 1.0), count=2)
    assert epsilon(twice, 1e-6, neighboring_relation=neighboring_relation) == base


def test_several_uses_are_one_in_each_block_of_a_division():
    uneven = epsilon(allocated(5, 2.0, participations=2), 1e-5)
    blocks = epsilon(Composed(events=(allocated(2, 2.0), allocated(3, 2.0))), 1e-5)
    assert uneven.upper == blocks.upper
    assert uneven.lower == 0 < blocks.lower
    everywhere = epsilon(allocated(4, 2.0, participations=4), 1e-5)
    assert everywhere.upper == epsilon(SelfComposed(event=Gaussian(noise_multiplier=2.0), count=4), 1e-5).upper


def test_replace_one_and_other_mechanisms_are_not_amplified():
    noise = Gaussian(noise_multiplier=2.0)
    answer = epsilon(allocated(100, 2.0, epochs=3), 1e-5, neighboring_relation=REPLACE)
    assert answer.upper == epsilon(SelfComposed(event=noise, count=3), 1e-5, neighboring_relation=REPLACE).upper
    assert answer.lower == 0
    laplace = RandomAllocation(steps=100, participations=1, epochs=1, event=Laplace(noise_multiplier=2.0))
    assert epsilon(laplace, 1e-5).upper == pytest.approx(epsilon(Laplace(noise_multiplier=2.0), 1e-5).upper, rel=1e-6)


def test_allocation_composes_with_other_mechanisms_and_bounds_attacks():
    both = Composed(events=(allocated(100, 1.0), Gaussian(noise_multiplier=3.0)))
    alone = epsilon(Gaussian(noise_multiplier=3.0), 1e-6)
    assert epsilon(both, 1e-6).lower > alone.upper
    assert epsilon(both, 1e-6).upper < epsilon(Composed(events=(both, allocated(100, 1.0))), 1e-6).lower
    assert membership_advantage(allocated(100, 1.0)).upper == delta(allocated(100, 1.0), 0.0).upper
    assert (
        0.01 < true_positive_rate(allocated(100, 1.0), 0.01) < true_positive_rate(Gaussian(noise_multiplier=1.0), 0.01)
    )


def test_where_the_sum_cannot_be_computed_the_answer_is_without_amplification():
    far = epsilon(allocated(100, 0.1), 1e-6)
    assert far.accountant == "rdp"
    assert far.upper >= epsilon(Gaussian(noise_multiplier=0.1), 1e-6).lower
    with pytest.raises(AccountingError):
        epsilon(allocated(100, 0.1), 1e-6, accountant="pld")
    assert without_amplification(allocated(10, 1.0)) == SelfComposed(event=Gaussian(noise_multiplier=1.0), count=10)


@pytest.mark.parametrize(("steps", "shift"), [(2, 0.7), (7, 1.3), (1000, 0.5)])
def test_moments_of_an_allocation_are_the_multinomial_sums(steps, shift):
    one = math.exp(shift * shift)
    second = (steps * one + steps * (steps - 1)) / steps**2
    third = (steps * one**3 + 3 * steps * (steps - 1) * one + steps * (steps - 1) * (steps - 2)) / steps**3
    bound = removing_moment(steps, shift)
    assert bound(1.0) == pytest.approx(math.log(second), rel=1e-9, abs=1e-12)
    assert bound(2.0) == pytest.approx(math.log(third), rel=1e-9, abs=1e-12)
    assert removing_moment(steps, 1.05 * shift)(1.0) > 1.05 * bound(1.0)


@pytest.mark.parametrize("lam", [0.3, 1.0, 2.7, 9.0])
def test_moments_bound_two_steps_by_quadrature(lam):
    shift = 0.8
    y = np.linspace(-14.0, 14.0, 1401)
    density = np.exp(-y * y / 2) * (y[1] - y[0]) / math.sqrt(2 * math.pi)
    ratio = np.exp(shift * y - shift * shift / 2)
    mean = (ratio[:, None] + ratio[None, :]) / 2
    weight = density[:, None] * density[None, :]
    removing = math.log(float(np.sum(weight * mean ** (lam + 1))))
    adding = math.log(float(np.sum(weight * mean**-lam)))
    assert removing - 1e-9 <= removing_moment(2, shift)(lam) <= (1.6 if lam < 1 else 1.2) * removing
    assert adding - 1e-9 <= adding_moment(2, shift)(lam)


def test_far_below_what_a_lattice_resolves_the_allocation_still_amplifies():
    event = RandomAllocation(steps=100, participations=1, epochs=10, event=Gaussian(noise_multiplier=2.0))
    tiny = epsilon(event, 1e-20)
    bare = epsilon(SelfComposed(event=Gaussian(noise_multiplier=2.0), count=10), 1e-20)
    assert tiny.upper < 0.2 * bare.upper
    assert tiny.upper > epsilon(event, 1e-5).upper
    assert epsilon(event, 1e-5, accountant="rdp").upper > epsilon(event, 1e-5).upper
