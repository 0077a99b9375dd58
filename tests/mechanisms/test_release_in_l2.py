"""A value released in ℓ2 by a pure or a Gaussian budget: the noise has the law that the budget's event stands for."""

import numpy as np
import pytest
from scipy import stats

from sordino.events import Gaussian, PureDP
from sordino.mechanisms.additive import release_in_l2
from sordino.mechanisms.calibration import GaussianBudget, PureBudget
from sordino.randomness import KeyedRNG

SENSITIVITY = 0.5
SHAPE = (2, 3)


def noise(budget, draws=400):
    rng = KeyedRNG(seed=4, reproducible=True)
    value = np.arange(6.0).reshape(SHAPE)
    released = np.array(
        [release_in_l2(value, budget=budget, l2_sensitivity=SENSITIVITY, rng=rng) for _ in range(draws)]
    )
    assert released.shape == (draws, *SHAPE)
    return (released - value).reshape(draws, -1)


def test_a_gaussian_budget_gives_each_entry_its_multiple_of_the_sensitivity():
    budget = GaussianBudget(noise_multiplier=3.0)
    assert budget.event() == Gaussian(noise_multiplier=3.0)
    assert stats.kstest(noise(budget).ravel(), stats.norm(scale=3.0 * SENSITIVITY).cdf).pvalue > 1e-4


@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_a_pure_budget_gives_a_length_by_the_gamma_law_and_a_direction_by_none(epsilon):
    # Density ∝ exp(−ε‖x‖₂/Δ) in d = 6 dimensions: the length has the law Gamma(d, Δ/ε).
    budget = PureBudget(epsilon=epsilon)
    assert budget.event() == PureDP(epsilon=epsilon)
    drawn = noise(budget)
    lengths = np.linalg.norm(drawn, axis=1)
    assert stats.kstest(lengths, stats.gamma(6, scale=SENSITIVITY / epsilon).cdf).pvalue > 1e-4
    # One coordinate of a uniform direction in six dimensions: (1 + u)/2 has the law Beta(5/2, 5/2).
    assert stats.kstest((1 + drawn[:, 0] / lengths) / 2, stats.beta(2.5, 2.5).cdf).pvalue > 1e-4
