"""The PLD accountant: brackets of exact values, agreement with the contour, and the pieces it stands on."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.accounting import delta, epsilon
from sordino.accounting.dominating_pairs import dominating_pairs
from sordino.accounting.pld_discretized import optimistic_discretization, pessimistic_discretization
from sordino.definitions import NeighboringRelation
from sordino.events import (
    ApproximateDP,
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Gaussian,
    GroupPoissonSampled,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    SampledWithoutReplacement,
    SampledWithReplacement,
    SelfComposed,
)

ADD, REPLACE, ZERO = NeighboringRelation


def sampled(q: float, sigma: float, steps: int) -> Event:
    return SelfComposed(event=PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma)), count=steps)


def fixed(population: int, size: int, sigma: float, steps: int) -> Event:
    step = SampledWithoutReplacement(dataset_size=population, sample_size=size, event=Gaussian(noise_multiplier=sigma))
    return SelfComposed(event=step, count=steps)


def repeated(population: int, size: int, sigma: float, steps: int) -> Event:
    step = SampledWithReplacement(dataset_size=population, sample_size=size, event=Gaussian(noise_multiplier=sigma))
    return SelfComposed(event=step, count=steps)


LAWS = {
    "gaussian": Gaussian(noise_multiplier=1.3),
    "laplace": Laplace(noise_multiplier=2.0),
    "poisson gaussian": PoissonSampled(sample_rate=0.1, event=Gaussian(noise_multiplier=0.8)),
    "poisson laplace": PoissonSampled(sample_rate=0.2, event=Laplace(noise_multiplier=1.5)),
    "fixed size": SampledWithoutReplacement(dataset_size=100, sample_size=10, event=Gaussian(noise_multiplier=3.0)),
    "group": GroupPoissonSampled(sample_rate=0.05, group_size=3, event=Gaussian(noise_multiplier=2.0)),
    "response": RandomizedResponse(epsilon=1.0, categories=4),
    "pure": PureDP(epsilon=0.7),
    "approximate": ApproximateDP(epsilon=0.7, delta=1e-3),
    "discrete gaussian": DiscreteGaussian(stddev=2.0, sensitivity=2),
    "discrete laplace": DiscreteLaplace(scale=2.0, sensitivity=3),
}


def all_laws() -> list:
    cases = [pytest.param(event, ADD, id=name) for name, event in LAWS.items()]
    return [*cases, pytest.param(LAWS["fixed size"], REPLACE, id="fixed size, replace one")]


@pytest.mark.parametrize(("event", "neighboring_relation"), all_laws())
def test_a_law_is_a_pair_of_distributions_with_the_stated_likelihood_ratio(event, neighboring_relation):
    for law in dominating_pairs(event, neighboring_relation):
        low, high = law.support
        edges = np.linspace(low - 0.1, high + 0.1, 4001)
        p_above, q_above = law.upper(edges)
        p_below, q_below = law.lower(edges)
        assert p_above + p_below == pytest.approx(1 - law.infinite, abs=1e-12)
        assert q_above + q_below == pytest.approx(q_above[0] + q_below[0], abs=1e-12)
        assert q_above[0] <= 1 + 1e-12
        # In every interval the ratio of masses lies between its ends' e^loss.
        p, q = -np.diff(p_above), -np.diff(q_above)
        solid = (p > 1e-8) & (q > 1e-8)
        ratio = np.log(p[solid] / q[solid])
        assert np.all(ratio >= edges[:-1][solid] - 1e-6)
        assert np.all(ratio <= edges[1:][solid] + 1e-6)


@pytest.mark.parametrize(("event", "neighboring_relation"), all_laws())
def test_lattices_enclose_the_law_and_keep_q_at_most_one(event, neighboring_relation):
    for law in dominating_pairs(event, neighboring_relation):
        step = (law.support[1] - law.support[0]) / 500
        upper, lower = pessimistic_discretization(law, step), optimistic_discretization(law, step)
        assert upper.masses.sum() + upper.infinite == pytest.approx(1, abs=1e-9)
        assert (upper.masses * np.exp(-upper.losses)).sum() <= 1 + 1e-9
        assert lower.masses.sum() + lower.infinite <= 1 + 1e-12
        for target in np.linspace(0, law.support[1], 23):
            exact = law.upper(np.array([target]))
            curve = float(exact[0][0] - math.exp(target) * exact[1][0]) + law.infinite
            above = upper.infinite + np.sum(np.maximum(0, -np.expm1(target - upper.losses)) * upper.masses)
            below = lower.infinite + np.sum(np.maximum(0, -np.expm1(target - lower.losses)) * lower.masses)
            assert below <= curve + 1e-14
            assert above >= curve - 1e-14


@pytest.mark.parametrize(("q", "sigma"), [(1e-5, 1.0), (1e-3, 0.6), (0.1, 1.0), (0.5, 3.0)])
@pytest.mark.parametrize("points", [60, 1000, 7919])
def test_the_lattice_from_below_keeps_both_masses(q, sigma, points):
    # What rounding down by a share of the step costs, T steps cost T times: the mean must be kept, not only bounded.
    for law in dominating_pairs(PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma)), ADD):
        cut = law.cut(math.log(1e-15))
        step = (cut.support[1] - cut.support[0]) / points
        lower = optimistic_discretization(cut, step)
        fine = pessimistic_discretization(cut, (cut.support[1] - cut.support[0]) / 60_000)
        means = [float(one.masses @ one.losses) for one in (lower, fine)]
        spread = math.sqrt(float(fine.masses @ (fine.losses - means[1]) ** 2))
        assert means[1] - (0.02 if step < spread / 2 else 0.3) * step <= means[0] <= means[1] + 1e-3 * step


@pytest.mark.parametrize(
    ("event", "neighboring_relation", "wanted", "width"),
    [
        (fixed(10_000, 1, 1.0, 1_000_000), ZERO, 1e-5, 1e-3),
        (fixed(60_000, 256, 1.1, 14_062), REPLACE, 1e-5, 5e-4),
        (repeated(2900, 197, 5.08, 2), ADD, 1e-5, 1e-4),
        (repeated(60_000, 256, 1.1, 1), ADD, 1e-5, 1e-4),
        (sampled(1e-5, 1.0, 1_000_000), ADD, 1e-12, 1e-3),
        (sampled(1e-5, 0.6, 10_000), ADD, 1e-12, 2e-3),
    ],
)
def test_rare_and_displaced_records_have_narrow_intervals(event, neighboring_relation, wanted, width):
    answer = epsilon(event, wanted, neighboring_relation=neighboring_relation)
    assert answer.accountant == "pld"
    assert 0 < answer.width <= width * answer.upper


def test_what_lies_far_beyond_is_cut_by_mass_and_not_by_the_farthest_component():
    (law, _) = dominating_pairs(
        SampledWithReplacement(dataset_size=1000, sample_size=30, event=Gaussian(noise_multiplier=1.0)), ADD
    )
    cut = law.cut(math.log(1e-12))
    assert cut.support[1] < law.support[1] / 3
    assert float(cut.upper(np.array([cut.support[1]]))[0][0]) <= 1e-12
    assert float(cut.lower(np.array([cut.support[0]]))[0][0]) <= 1e-12


@settings(max_examples=6, deadline=None)
@given(q=st.floats(0.005, 0.3), sigma=st.floats(0.8, 4.0), steps=st.integers(20, 300), exponent=st.floats(3, 18))
def test_the_pld_and_contour_intervals_overlap(q, sigma, steps, exponent):
    contour = epsilon(sampled(q, sigma, steps), 10**-exponent, accountant="contour")
    pld = epsilon(sampled(q, sigma, steps), 10**-exponent, accountant="pld")
    assert pld.lower <= contour.upper
    assert contour.lower <= pld.upper
    assert pld.width <= 1e-3 * pld.upper + 1e-9


def test_a_pure_mechanism_composed_is_the_binomial_of_kairouz_oh_and_viswanath():
    count, base, target = 100, 0.1, 1.5
    share = math.exp(base) / (1 + math.exp(base))
    exact = sum(
        math.comb(count, k)
        * share**k
        * (1 - share) ** (count - k)
        * max(0.0, -math.expm1(target - (2 * k - count) * base))
        for k in range(count + 1)
    )
    answer = delta(SelfComposed(event=PureDP(epsilon=base), count=count), target, accountant="pld")
    assert answer.lower <= exact * (1 + 1e-9)
    assert answer.upper >= exact * (1 - 1e-9)
    assert answer.width <= 1e-3 * exact


def test_infinite_losses_are_added_up():
    event = SelfComposed(event=ApproximateDP(epsilon=0.0, delta=1e-4), count=3)
    exact = 1 - (1 - 1e-4) ** 3
    answer = delta(event, 1.0, accountant="pld")
    assert answer.lower <= exact * (1 + 1e-11)
    assert answer.upper >= exact * (1 - 1e-11)
    assert math.isinf(epsilon(event, 1e-4, accountant="pld").lower)
    assert epsilon(event, 4e-4, accountant="pld").upper == 0


def test_a_fixed_size_sample_under_add_or_remove_is_poisson_with_half_the_noise():
    fixed = SelfComposed(
        event=SampledWithoutReplacement(dataset_size=100, sample_size=5, event=Gaussian(noise_multiplier=4.0)), count=50
    )
    assert epsilon(fixed, 1e-5).upper == pytest.approx(epsilon(sampled(0.05, 2.0, 50), 1e-5).upper, rel=1e-9)


def test_a_fixed_size_sample_under_replace_one_costs_at_least_either_kind_of_step():
    event = SelfComposed(
        event=SampledWithoutReplacement(dataset_size=100, sample_size=5, event=Gaussian(noise_multiplier=2.0)), count=20
    )
    answer = epsilon(event, 1e-5, neighboring_relation=REPLACE)
    assert answer.accountant == "pld"
    assert answer.upper >= epsilon(sampled(0.05, 2.0, 20), 1e-5).lower


def test_a_group_of_one_is_a_record_and_a_larger_group_costs_more():
    def group(size: int) -> Event:
        step = GroupPoissonSampled(sample_rate=0.02, group_size=size, event=Gaussian(noise_multiplier=2.0))
        return SelfComposed(event=step, count=200)

    assert epsilon(group(1), 1e-5) == epsilon(sampled(0.02, 2.0, 200), 1e-5)
    costs = [epsilon(group(size), 1e-5).upper for size in (1, 2, 3)]
    assert costs == sorted(costs)


def test_laplace_on_a_poisson_sample_costs_less_than_without_and_more_than_nothing():
    plain = SelfComposed(event=Laplace(noise_multiplier=2.0), count=10)
    thin = SelfComposed(event=PoissonSampled(sample_rate=0.1, event=Laplace(noise_multiplier=2.0)), count=10)
    assert 0 < epsilon(thin, 1e-5).lower < epsilon(thin, 1e-5).upper < epsilon(plain, 1e-5).lower
    mixed = Composed(events=(thin, sampled(0.1, 2.0, 10)))
    assert epsilon(mixed, 1e-5, accountant="pld").upper > epsilon(thin, 1e-5).lower
