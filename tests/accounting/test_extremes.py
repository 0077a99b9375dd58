"""The stated range: δ to 1e-30, steps to 1e7, noise from 0.3 to 1000, sampling rate from 1e-6 to 1."""

import itertools
import math

import pytest
from scipy.stats import norm

from sordino.accounting import epsilon
from sordino.events import Event, Gaussian, PoissonSampled, SelfComposed


def sampled(q: float, sigma: float, steps: int) -> Event:
    return SelfComposed(event=PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma)), count=steps)


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "target"),
    [
        (1e-6, 1000.0, 10_000_000, 1e-30),
        (0.5, 0.3, 1000, 1e-5),
        (0.5, 0.3, 10_000_000, 1e-5),
        (1.0, 0.3, 10_000_000, 1e-30),
        (0.9, 1000.0, 10_000_000, 1e-30),
        (0.01, 30.0, 10_000_000, 1e-30),
        (0.001, 0.5, 1_000_000, 1e-12),
        (1e-6, 0.3, 10_000_000, 1e-30),
    ],
)
def test_far_corners_are_certified(q, sigma, steps, target):
    answer = epsilon(sampled(q, sigma, steps), target)
    assert answer.accountant in {"contour", "closed_form"}
    assert 0 < answer.lower <= answer.upper < math.inf
    assert answer.width <= 1e-6 * answer.upper


@pytest.mark.slow
def test_the_whole_range_gives_a_sound_answer_without_warnings():
    grid = itertools.product((1e-6, 1e-3, 0.3, 1.0), (0.3, 2.0, 1000.0), (1, 3, 1000, 10_000_000), (1e-30, 1e-5, 0.5))
    for q, sigma, steps, target in grid:
        answer = epsilon(sampled(q, sigma, steps), target)
        assert 0 <= answer.lower <= answer.upper < math.inf


@pytest.mark.parametrize("noise_multiplier", [1e-12, 1e-9, 0.99e-6, 1.01e-6, 1e-4])
@pytest.mark.parametrize("delta", [1e-300, 1e-5, 0.3])
def test_hardly_any_noise_has_an_answer(noise_multiplier, delta):
    found = epsilon(Gaussian(noise_multiplier=noise_multiplier), delta)
    mu = 1 / noise_multiplier
    # Φ(−t) = δ at ε = μ²/2 + tμ, up to what e^ε Φ(−b) takes away, which is below φ(t)/μ.
    expected = mu * (mu / 2 + float(norm.isf(delta)))
    assert found.lower <= expected * (1 + 1e-9)
    assert found.upper >= expected * (1 - 1e-4)
    assert found.upper - found.lower <= 60 * mu
