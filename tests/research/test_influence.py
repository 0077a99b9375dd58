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
    max_momentum_learning_rate,
    momentum_effect,
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


def exact_excess_risk(curvatures, start, noise, *, momentum, learning_rate):
    """The expected final loss of debiased momentum on ½ Σ hᵢ xᵢ², over that of the start: moments, step by step."""
    total = 0.0
    for h, x in zip(curvatures, start, strict=True):
        mean, cov = np.array([x, 0.0]), np.zeros((2, 2))
        for step, sigma in enumerate(noise, start=1):
            rate = learning_rate / (1 - momentum**step)
            fresh = 1 - momentum
            move = np.array([[1 - rate * fresh * h, -rate * momentum], [fresh * h, momentum]])
            kick = np.array([-rate * fresh, fresh]) * sigma
            mean, cov = move @ mean, move @ cov @ move.T + np.outer(kick, kick)
        total += h * (mean[0] ** 2 + cov[0, 0]) / 2
    return total / (np.asarray(curvatures) @ np.square(start) / 2)


@pytest.mark.parametrize("steps", [5, 60])
@pytest.mark.parametrize("condition_number", [1.5, 20.0])
@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.5, 0.9])
def test_the_bound_holds_for_quadratics_whose_risk_is_known_exactly(condition_number, momentum, steps):
    curvatures = np.linspace(1 / condition_number, 1.0, 6)
    noise = np.geomspace(3.0, 1.0, steps) * 0.02
    rates = {"condition_number": condition_number, "momentum": momentum}
    largest = max_momentum_learning_rate(**rates) if momentum else 1.0
    ratios = []
    for start, rate in itertools.product((np.eye(6)[0], np.eye(6)[5], np.ones(6)), (largest, largest / 3)):
        alpha = noise_to_signal(
            dimensions=6,
            lipschitz=1.0,
            budget=budget_of(noise),
            smoothness=1.0,
            records=1.0,
            excess=float(curvatures @ start**2 / 2),
        )
        bound = excess_risk_bound(noise, alpha=alpha, learning_rate=rate, **rates)
        ratios.append(bound / exact_excess_risk(curvatures, start, noise, momentum=momentum, learning_rate=rate))
    assert min(ratios) >= 1.0


def test_the_bound_knows_alpha_step_size_and_influences():
    noise = constant_noise_schedule(40, budget=1.0).values
    curve = {"condition_number": 20.0, "momentum": 0.5}
    small, large = (excess_risk_bound(noise, alpha=alpha, learning_rate=0.1, **curve) for alpha in (1e-6, 1e-2))
    assert large > small
    slow, fast = (excess_risk_bound(noise, alpha=1e-9, learning_rate=rate, **curve) for rate in (0.01, 0.1))
    assert slow == pytest.approx((1 - 0.01 / 20) ** 40, rel=1e-6)
    assert fast == pytest.approx((1 - 0.1 / 20) ** 40, rel=1e-6)
    weights = momentum_influence(40, learning_rate=0.1, **curve)
    given_weights = excess_risk_bound(
        noise, alpha=1e-2, influences=[0.4 * q for q in weights], learning_rate=0.1, **curve
    )
    assert given_weights == pytest.approx(large, rel=1e-12)


@pytest.mark.parametrize(("condition_number", "momentum"), [(1.5, 0.3), (20.0, 0.5), (20.0, 0.9), (1000.0, 0.1)])
def test_above_the_largest_learning_rate_momentum_has_a_term_of_its_own(condition_number, momentum):
    rates = {"condition_number": condition_number, "momentum": momentum}
    largest = max_momentum_learning_rate(**rates)
    assert (
        momentum_effect(learning_rate=largest, **rates) <= 0 < momentum_effect(learning_rate=largest * 1.001, **rates)
    )
    noise = constant_noise_schedule(3, budget=1.0).values
    with pytest.raises(InvalidArgument, match=f"learning_rate must be ≤ {largest:.4g}"):
        excess_risk_bound(noise, alpha=0.1, learning_rate=largest * 1.01, **rates)
    rate = largest * 1.01
    gamma = 1 - rate / condition_number
    without = excess_risk_bound(noise, alpha=0.1, learning_rate=rate, velocities=(0.0, 0.0, 0.0), **rates)
    with_them = excess_risk_bound(noise, alpha=0.1, learning_rate=rate, velocities=(3.0, 2.0, 1.0), **rates)
    term = rate * momentum_effect(learning_rate=rate, **rates) * (3 * gamma**2 + 2 * gamma + 1)
    assert with_them - without == pytest.approx(term, rel=1e-6)
    assert momentum_effect(condition_number=1.5, momentum=0.9) == math.inf


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
