"""Clipping by estimated norms: the certified ε against simulation, quadrature, and the exact Gaussian's."""

import math

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from sordino import accounting
from sordino.accounting.pld_mechanisms import distances
from sordino.definitions import NeighboringRelation
from sordino.errors import UnsupportedEvent
from sordino.events import Gaussian, PoissonSampled, ProjectedGaussian, SelfComposed, from_json, to_json


def gaussian_delta(mu, epsilon):
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)


def sampled_delta(mu, rate, epsilon):
    """Removing one record from a Poisson sample: q · δ at log(1 + (e^ε − 1)/q), the textbook form."""
    return rate * gaussian_delta(mu, math.log1p(math.expm1(epsilon) / rate))


def test_distances_are_rounded_up_and_their_probabilities_are_the_laws():
    for count in (1, 5, 50):
        found = distances(count)
        assert math.fsum(share for _, share in found) == pytest.approx(1, abs=1e-9)
        above = 1.0
        for place, share in found[:-1]:
            above -= share
            # What is counted as farther than `place` is at least what is farther: P(√(r/X) > place).
            assert above >= stats.chi2.cdf(count / place**2, count) * (1 - 1e-6) - 2e-16


@pytest.mark.parametrize(("projections", "noise", "steps"), [(10, 20.0, 50), (50, 10.0, 20)])
def test_full_batches_cost_what_a_simulation_of_all_distances_says(projections, noise, steps):
    draws = np.random.default_rng(0).chisquare(projections, size=(100_000, steps))
    total = np.sqrt((projections / draws).sum(1)) / noise
    event = SelfComposed(event=ProjectedGaussian(noise_multiplier=noise, projections=projections), count=steps)
    epsilon = accounting.epsilon(event, 1e-3).upper
    simulated = optimize.brentq(
        lambda e: (
            float(np.mean(stats.norm.cdf(total / 2 - e / total) - math.exp(e) * stats.norm.cdf(-total / 2 - e / total)))
            - 1e-3
        ),
        0.0,
        50.0,
    )
    assert simulated * 0.999 <= epsilon <= simulated * 1.02


@pytest.mark.parametrize(("projections", "noise", "rate"), [(10, 1.0, 0.1), (20, 2.0, 0.5), (10, 5.0, 1.0)])
def test_one_step_costs_what_quadrature_over_the_distance_says(projections, noise, rate):
    event = ProjectedGaussian(noise_multiplier=noise, projections=projections)
    found = accounting.delta(PoissonSampled(sample_rate=rate, event=event), 0.5).upper
    expected, _ = integrate.quad(
        lambda x: sampled_delta(math.sqrt(projections / x) / noise, rate, 0.5) * stats.chi2.pdf(x, projections),
        1e-6,
        20 * projections,
        limit=400,
    )
    assert expected * 0.999 <= found <= expected * 1.05


def test_it_costs_more_than_exact_clipping_and_less_with_more_projections():
    def epsilon(event):
        return accounting.epsilon(SelfComposed(event=PoissonSampled(sample_rate=0.05, event=event), count=100), 1e-5)

    exact = epsilon(Gaussian(noise_multiplier=2.0))
    found = [epsilon(ProjectedGaussian(noise_multiplier=2.0, projections=r)).upper for r in (20, 50, 200, 10_000)]
    assert found == sorted(found, reverse=True)
    assert exact.upper < found[-1] < 1.01 * exact.upper


def test_few_projections_leave_no_guarantee_at_a_small_delta():
    event = PoissonSampled(sample_rate=0.01, event=ProjectedGaussian(noise_multiplier=1.0, projections=1))
    assert math.isinf(accounting.epsilon(SelfComposed(event=event, count=1000), 1e-5).upper)


def test_nothing_is_claimed_from_below_and_replacing_is_refused():
    event = SelfComposed(event=ProjectedGaussian(noise_multiplier=20.0, projections=50), count=3)
    assert accounting.epsilon(event, 1e-5).lower == 0
    with pytest.raises(UnsupportedEvent):
        accounting.epsilon(event, 1e-5, neighboring_relation=NeighboringRelation.REPLACE_ONE)


def test_the_event_goes_through_json():
    event = PoissonSampled(sample_rate=0.1, event=ProjectedGaussian(noise_multiplier=2.0, projections=7))
    assert from_json(to_json(event)) == event


def test_no_noise_is_no_protection():
    event = PoissonSampled(sample_rate=0.1, event=ProjectedGaussian(noise_multiplier=0.0, projections=7))
    assert math.isinf(accounting.epsilon(event, 1e-5).upper)
