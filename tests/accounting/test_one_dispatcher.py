"""One place knows what bounds an event: both engines compute from its pairs, and historical accountants stay away."""

import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from sordino.accounting import asymptotic_log_moment, asymptotic_moments_epsilon, delta, epsilon
from sordino.accounting.base import add_costs
from sordino.accounting.dominating_pairs import dominating_pairs
from sordino.accounting.event_mgfs import pair_mgf
from sordino.accounting.filters import RDPOrdersFilter, ZCDPFilter, best_orders
from sordino.accounting.pld_discretized import pessimistic_discretization
from sordino.definitions import NeighboringRelation
from sordino.errors import UnsupportedEvent
from sordino.events import (
    ApproximateDP,
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    Gaussian,
    GaussianMixture,
    GroupPoissonSampled,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    SampledWithoutReplacement,
    SampledWithReplacement,
    SelfComposed,
    ShuffledEpochs,
)

ADD, ZERO, REPLACE = (
    NeighboringRelation.ADD_OR_REMOVE_ONE,
    NeighboringRelation.REPLACE_SPECIAL,
    NeighboringRelation.REPLACE_ONE,
)
TWO = Gaussian(noise_multiplier=2.0)

KNOWN = [
    (TWO, ADD, 1),
    (PoissonSampled(sample_rate=0.1, event=TWO), ADD, 2),
    (PoissonSampled(sample_rate=0.1, event=TWO), ZERO, 2),
    (PoissonSampled(sample_rate=0.1, event=TWO), REPLACE, 1),
    (GroupPoissonSampled(sample_rate=0.1, group_size=3, event=TWO), ADD, 2),
    (SampledWithoutReplacement(dataset_size=40, sample_size=4, event=TWO), ADD, 2),
    (SampledWithoutReplacement(dataset_size=40, sample_size=40, event=TWO), ADD, 1),
    (SampledWithoutReplacement(dataset_size=40, sample_size=40, event=TWO), REPLACE, 1),
    (SampledWithReplacement(dataset_size=40, sample_size=4, event=TWO), ADD, 2),
    (GaussianMixture(noise_multiplier=2.0, sensitivities=(0.0, 1.0), probabilities=(0.5, 0.5)), ADD, 2),
    (GaussianMixture(noise_multiplier=2.0, sensitivities=(1.0,), probabilities=(1.0,)), ADD, 1),
    (Laplace(noise_multiplier=2.0), REPLACE, 1),
    (DiscreteGaussian(stddev=2.0, sensitivity=2), ADD, 1),
    (DiscreteLaplace(scale=2.0, sensitivity=2), ADD, 1),
    (RandomizedResponse(epsilon=1.0, categories=4), ADD, 1),
    (PureDP(epsilon=0.7), ADD, 1),
]


@pytest.mark.parametrize(("event", "relation", "directions"), KNOWN, ids=lambda value: getattr(value, "kind", None))
def test_the_moment_generating_function_is_that_of_the_distribution(event, relation, directions):
    pairs = dominating_pairs(event, relation)
    assert len(pairs) == directions
    for pair in pairs:
        transform = pair_mgf(pair)
        lattice = pessimistic_discretization(pair, (pair.support[1] - pair.support[0]) / 50_000)
        for lam in (0.3, 1.0):
            by_masses = math.log(float(lattice.masses @ np.exp(lam * lattice.losses)))
            assert transform.moments(lam).log_mgf == pytest.approx(by_masses, rel=2e-5, abs=1e-9)


def test_infinite_losses_and_larger_curves_have_a_distribution_and_no_moment_generating_function():
    for event in (
        ApproximateDP(epsilon=0.5, delta=1e-3),
        PoissonSampled(sample_rate=0.1, event=Laplace(noise_multiplier=2.0)),
    ):
        for pair in dominating_pairs(event, ADD):
            with pytest.raises(UnsupportedEvent):
                pair_mgf(pair)
    (larger,) = dominating_pairs(SampledWithoutReplacement(dataset_size=40, sample_size=4, event=TWO), REPLACE)
    with pytest.raises(UnsupportedEvent):
        pair_mgf(larger)


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (SampledWithReplacement(dataset_size=40, sample_size=4, event=Laplace(noise_multiplier=1.0)), REPLACE),
        (GroupPoissonSampled(sample_rate=0.1, group_size=2, event=TWO), REPLACE),
        (PoissonSampled(sample_rate=0.1, event=Laplace(noise_multiplier=1.0)), REPLACE),
        (SampledWithoutReplacement(dataset_size=40, sample_size=4, event=Laplace(noise_multiplier=1.0)), ADD),
        (ShuffledEpochs(epochs=1, steps_per_epoch=4, event=TWO), ADD),
    ],
)
def test_what_has_no_pair_under_a_relation_is_refused_by_every_accountant_alike(event, relation):
    with pytest.raises(UnsupportedEvent):
        epsilon(event, 1e-5, neighboring_relation=relation)
    with pytest.raises(UnsupportedEvent):
        delta(event, 1.0, neighboring_relation=relation)


def test_a_whole_fixed_size_sample_is_a_plain_gaussian_at_the_displaced_distance():
    whole = SampledWithoutReplacement(dataset_size=10, sample_size=10, event=TWO)
    for relation, shift in ((ADD, 2.0), (ZERO, 2.0), (REPLACE, 1.0)):
        answer = epsilon(SelfComposed(event=whole, count=9), 1e-6, neighboring_relation=relation)
        truth = epsilon(Gaussian(noise_multiplier=2.0 / shift / 3), 1e-6)
        assert answer.upper == pytest.approx(truth.upper, rel=1e-9)
        assert answer.lower <= truth.upper


def test_nothing_loads_the_historical_accountants_unless_asked():
    code = """
import sys
from sordino.accounting import epsilon, calibrate_noise_multiplier, ZCDPFilter, privacy_profile
from sordino.events import *
from sordino.ledger import Ledger
step = PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=1.0))
for event in (SelfComposed(event=step, count=100), Laplace(noise_multiplier=1.0), PureDP(epsilon=0.1),
              RepeatAndSelect(event=PureDP(epsilon=0.1), distribution="threshold", mean=5.0, shape=0.0)):
    epsilon(event, 1e-5)
ZCDPFilter(epsilon=1.0, delta=1e-5).admit(Gaussian(noise_multiplier=10.0))
assert not [name for name in sys.modules if "historical" in name]
epsilon(step, 1e-5, accountant="moments")
assert "sordino.accounting.historical" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_asymptotic_moment_is_about_twice_the_moment_and_its_epsilon_the_minimum_over_orders():
    # Abadi et al. 2016, lemma 3: q = .01, sigma = 4; the moment itself is q²λ(λ+1)/(2σ²) to first order.
    (pair, _) = dominating_pairs(PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0)), ADD)
    for order in (1, 5, 20):
        ratio = asymptotic_log_moment(0.01, 4.0, order) / pair_mgf(pair).moments(float(order)).log_mgf
        assert 1.7 < ratio < 2.0
    for steps in (1000, 10_000, 100_000):
        event = SelfComposed(event=PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0)), count=steps)
        by_hand = min(
            (steps * 1e-4 * order * (order + 1) / (0.99 * 16) + math.log(1e5)) / order for order in range(1, 33)
        )
        found = asymptotic_moments_epsilon(event, 1e-5).value
        assert found == pytest.approx(by_hand, rel=1e-12)
        assert found > epsilon(event, 1e-5, accountant="moments").upper > epsilon(event, 1e-5).upper


@pytest.mark.parametrize(("rate", "sigma"), [(0.01, 0.9), (0.5, 4.0), (0.0156, 4.1)])
def test_the_asymptotic_moment_is_refused_outside_of_the_lemma(rate, sigma):
    with pytest.raises(UnsupportedEvent, match="noise_multiplier must be"):
        asymptotic_moments_epsilon(PoissonSampled(sample_rate=rate, event=Gaussian(noise_multiplier=sigma)), 1e-5)


def test_a_filter_decides_alike_with_a_state_of_its_own_and_from_the_totals_of_a_ledger():
    source = np.random.default_rng(4)
    guard = RDPOrdersFilter(epsilon=1.0, delta=1e-5, orders=best_orders(1.0, 1e-5))
    rule = RDPOrdersFilter(epsilon=1.0, delta=1e-5, orders=best_orders(1.0, 1e-5))
    total, admitted = (0.0,) * rule.num_measures, []
    for _ in range(60):
        event = Gaussian(noise_multiplier=float(np.exp(source.uniform(1.5, 5))))
        after = add_costs(total, rule.costs(event))
        assert guard.admit(event) is rule.fits(after)
        if rule.fits(after):
            total = after
            admitted.append(event)
    assert 0 < len(admitted) < 60
    assert epsilon(Composed(events=tuple(admitted)), 1e-5).upper <= 1.0
    assert guard.total == pytest.approx(total, rel=1e-12)
    # Several orders share δ: the one-measure filter for Gaussians has room for more.
    alone = ZCDPFilter(epsilon=1.0, delta=1e-5)
    assert all(alone.admit(event) for event in admitted)


@pytest.mark.parametrize(("size", "drawn", "sigma"), [(1000, 50, 1.0), (40, 40, 6.0), (60_000, 600, 0.8)])
@pytest.mark.parametrize(("relation", "diameters"), [(REPLACE, 1), (ZERO, 2)])
def test_a_step_with_replacement_costs_what_the_theorem_says(size, drawn, sigma, relation, diameters):
    # Balle, Barthe and Gaboardi 2018, theorem 10, with the Gaussian's own profile for k displaced records.
    def profile(value: float, shift: float) -> float:
        return float(
            stats.norm.cdf(shift / 2 - value / shift) - math.exp(value) * stats.norm.cdf(-shift / 2 - value / shift)
        )

    event = SampledWithReplacement(dataset_size=size, sample_size=drawn, event=Gaussian(noise_multiplier=sigma))
    hit = 1 - (1 - 1 / size) ** drawn
    for at in (0.05, 0.5, 1.5):
        inner = math.log1p(math.expm1(at) / hit)
        by_hand = math.fsum(
            float(stats.binom.pmf(k, drawn, 1 / size)) * profile(inner, k * diameters / sigma)
            for k in range(1, min(drawn, 60) + 1)
        )
        found = delta(event, at, neighboring_relation=relation)
        assert found.lower <= by_hand * (1 + 1e-6)
        assert found.upper >= by_hand * (1 - 1e-6)
        assert found.upper == pytest.approx(by_hand, rel=3e-4)
        assert delta(event, at, neighboring_relation=relation, accountant="rdp").upper >= by_hand
