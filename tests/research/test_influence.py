import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from sordino.errors import InvalidArgument
from sordino.research import (
    constant_noise_schedule,
    excess_risk_bound,
    momentum_influence,
    noise_influence,
    noise_to_signal,
    optimal_noise_schedule,
    optimal_steps,
)


def budget_of(noise):
    return math.fsum(sigma**-2 for sigma in noise)


@pytest.mark.parametrize(
    "weights",
    [
        noise_influence(12, condition_number=3.0),
        momentum_influence(12, condition_number=6.0, momentum=0.6),
        (0.3, 2.0, 0.01),
    ],
)
def test_the_least_noise_is_what_a_numerical_minimiser_finds(weights):
    budget = 0.7
    noise = optimal_noise_schedule(weights, budget=budget)
    assert math.isclose(budget_of(noise.values), budget, rel_tol=1e-12)

    def cost(logits):
        shares = np.exp(logits - logits.max())
        precision = budget * shares / shares.sum()
        return budget * float(np.sum(np.asarray(weights) / precision))

    found = minimize(cost, np.zeros(len(weights)), method="BFGS", options={"gtol": 1e-12})
    ours = budget * math.fsum(q * sigma**2 for q, sigma in zip(weights, noise.values, strict=True))
    assert math.isclose(ours, found.fun, rel_tol=1e-6)
    assert math.isclose(ours, math.fsum(math.sqrt(q) for q in weights) ** 2, rel_tol=1e-12)


def test_noise_falls_by_the_fourth_root_of_gamma_each_step():
    noise = optimal_noise_schedule(noise_influence(20, condition_number=5.0), budget=1.0).values
    ratios = [later / earlier for earlier, later in itertools.pairwise(noise)]
    assert all(math.isclose(ratio, 0.8**0.25, rel_tol=1e-12) for ratio in ratios)


@given(
    condition_number=st.floats(1.5, 50.0),
    alpha=st.floats(1e-7, 0.05),
    noise=st.lists(st.floats(0.5, 20.0), min_size=1, max_size=30),
)
def test_no_schedule_of_the_same_budget_has_a_smaller_bound_than_the_least_noise(condition_number, alpha, noise):
    weights = noise_influence(len(noise), condition_number=condition_number, alpha=alpha)
    best = optimal_noise_schedule(weights, budget=budget_of(noise)).values
    given_bound = excess_risk_bound(noise, condition_number=condition_number, alpha=alpha)
    assert excess_risk_bound(best, condition_number=condition_number, alpha=alpha) <= given_bound * (1 + 1e-9)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("condition_number", "alpha"), [(10.0, 1e-4), (5.0, 1e-3), (3.0, 0.5), (100.0, 1e-6)])
def test_the_best_number_of_steps_has_the_smallest_bound_of_all(condition_number, alpha, dynamic):
    def bound(steps):
        if steps == 0:
            return 1.0
        weights = noise_influence(steps, condition_number=condition_number, alpha=alpha)
        noise = optimal_noise_schedule(weights, budget=1.0) if dynamic else constant_noise_schedule(steps, budget=1.0)
        return excess_risk_bound(noise.values, condition_number=condition_number, alpha=alpha)

    best = optimal_steps(condition_number=condition_number, alpha=alpha, dynamic=dynamic)
    around = [count for count in {0, 1, best - 5, best - 1, best + 1, best + 5, 2 * best + 1} if count >= 0]
    assert all(bound(best) <= bound(count) for count in around)


def test_the_best_dynamic_number_of_steps_is_the_published_one_up_to_rounding():
    gamma, alpha = 0.9, 1e-4
    published = 2 * math.log(alpha / (alpha + (1 - math.sqrt(gamma)) ** 2)) / math.log(gamma)
    assert abs(optimal_steps(condition_number=10.0, alpha=alpha, dynamic=True) - published) <= 1


def test_influence_of_momentum_rises_to_a_hump_and_falls_at_the_end():
    weights = momentum_influence(60, condition_number=20.0, momentum=0.9)
    top = weights.index(max(weights))
    assert 30 < top < 59
    assert all(value > 0 for value in weights)
    assert weights[-1] == pytest.approx(1.0)
    gamma = 1 - 1 / 20
    published = [(0.9 ** (2 * left) - gamma**left) / (0.9**2 - gamma) for left in range(60, 0, -1)]
    assert weights == pytest.approx(published, rel=1e-12)


def test_noise_to_signal_is_the_published_ratio():
    alpha = noise_to_signal(dimensions=100, lipschitz=2.0, budget=0.5, smoothness=4.0, records=1000.0, excess=0.25)
    assert alpha == pytest.approx(100 * 4 / (2 * 0.5 * 4 * 1e6 * 0.25))


def test_values_outside_their_range_are_refused_by_name():
    with pytest.raises(InvalidArgument, match="condition_number"):
        noise_influence(3, condition_number=1.0)
    with pytest.raises(InvalidArgument, match="influences"):
        optimal_noise_schedule((), budget=1.0)
    with pytest.raises(InvalidArgument, match="momentum"):
        momentum_influence(3, condition_number=2.0, momentum=1.0)
