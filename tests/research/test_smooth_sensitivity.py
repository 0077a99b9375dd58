"""Smooth sensitivity against its definition, and the guarantee of the noisy median by integration."""

import itertools
import math

import numpy as np
import pytest
from scipy.integrate import quad

from sordino.randomness import KeyedRNG
from sordino.research import SmoothMedian, local_sensitivity_of_median, smooth_sensitivity_of_median

GRID = (0.0, 0.1, 0.35, 1.0)
BOUNDS = (0.0, 1.0)


def median(values):
    return sorted(values)[(len(values) - 1) // 2]


def neighbors(values):
    for place, value in itertools.product(range(len(values)), GRID):
        yield (*values[:place], value, *values[place + 1 :])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_local_sensitivity_is_the_farthest_move_of_any_neighbor(count):
    for values in itertools.product(GRID, repeat=count):
        moved = max(abs(median(other) - median(values)) for other in neighbors(values))
        assert local_sensitivity_of_median(values, BOUNDS) == pytest.approx(moved)


@pytest.mark.parametrize("beta", [0.05, 0.4, 2.0])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_smooth_sensitivity_is_its_definition_over_all_datasets(count, beta):
    everything = list(itertools.product(GRID, repeat=count))
    local = {values: local_sensitivity_of_median(values, BOUNDS) for values in everything}
    for values in everything:
        defined = max(
            local[other] * math.exp(-beta * sum(a != b for a, b in zip(values, other, strict=True)))
            for other in everything
        )
        assert smooth_sensitivity_of_median(values, BOUNDS, beta) == pytest.approx(defined)


def test_between_neighbors_it_changes_by_a_factor_of_e_to_the_beta_at_most():
    generator = np.random.default_rng(0)
    beta = 0.1
    for _ in range(300):
        values = generator.choice([0.0, 0.5, 0.500001, 1.0], size=generator.integers(1, 40))
        other = values.copy()
        other[generator.integers(len(values))] = generator.choice([0.0, 0.5, 1.0])
        ours, theirs = (smooth_sensitivity_of_median(each, BOUNDS, beta) for each in (values, other))
        assert ours <= theirs * math.exp(beta) * (1 + 1e-9)
        assert abs(median(values) - median(other)) <= min(ours, theirs) * (1 + 1e-9)


def hockey_stick(epsilon, shift, ratio):
    """δ(ε) of Lap(0, 1) against Lap(shift, ratio), by integration."""

    def excess(x):
        return max(math.exp(-abs(x)) / 2 - math.exp(epsilon) * math.exp(-abs(x - shift) / ratio) / (2 * ratio), 0.0)

    pieces = [-60.0, -20.0, 0.0, shift, 20.0, 60.0]
    return sum(quad(excess, a, b, limit=400, epsabs=1e-14)[0] for a, b in itertools.pairwise(pieces))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.2, 1e-6), (1.0, 1e-5), (4.0, 1e-3)])
def test_the_noise_is_private_at_the_largest_allowed_change_of_shift_and_scale(epsilon, delta):
    beta = SmoothMedian(epsilon=epsilon, delta=delta, bounds=BOUNDS).beta
    worst = 0.0
    for share, sign in itertools.product((0.0, 0.5, 1.0), (1, -1)):
        ratio = math.exp(sign * beta)
        # |f − f'| is at most the smaller smooth sensitivity, in units of the noise of the first dataset.
        worst = max(worst, hockey_stick(epsilon, share * epsilon / 2 * min(ratio, 1.0), ratio))
    assert worst <= delta
    # Noise of the local sensitivity has no such bound: at a ratio of e^(10β) δ is far above.
    assert hockey_stick(epsilon, 0.0, math.exp(-10 * beta)) > delta


def test_local_sensitivity_gives_two_neighbors_away_and_smooth_sensitivity_does_not():
    calm, wild = [0.0] * 5 + [1.0] * 4, [0.0] * 4 + [1.0] * 5
    assert local_sensitivity_of_median([0.0] * 6 + [1.0] * 3, BOUNDS) == 0.0
    assert local_sensitivity_of_median(calm, BOUNDS) == 1.0
    smooth = [smooth_sensitivity_of_median(each, BOUNDS, 0.1) for each in ([0.0] * 6 + [1.0] * 3, calm, wild)]
    assert smooth[0] == pytest.approx(math.exp(-0.1))
    assert smooth[1] == smooth[2] == 1.0


def test_the_noise_has_the_stated_scale():
    values = np.linspace(0.0, 1.0, 201)
    rng = KeyedRNG(seed=1, reproducible=True)
    mechanism = SmoothMedian(epsilon=1.0, delta=1e-6, bounds=BOUNDS, rng=rng)
    released = np.array([mechanism.release(values) for _ in range(3000)])
    scale = mechanism.scale(values)
    assert np.median(released) == pytest.approx(0.5, abs=0.1 * scale)
    assert np.abs(released - 0.5).mean() == pytest.approx(scale, rel=0.08)
