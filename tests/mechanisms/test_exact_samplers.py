"""The integer samplers have the laws they claim, in the body, in the tails, and in the branches that never happen."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from scipy import stats

from sordino.errors import InvalidArgument
from sordino.mechanisms.samplers import (
    bernoulli_exp,
    discrete_gaussian,
    discrete_laplace,
    geometric,
    geometric_at_inverse_e,
    half_normal_integer,
    rounded_gaussian,
    uniform_below,
)

DRAWS = 60_000


def laplace_mass(scale):
    q = math.exp(-1 / scale)
    return lambda x: (1 - q) / (1 + q) * q ** np.abs(x)


def discrete_gaussian_mass(stddev):
    whole = np.arange(-int(40 * stddev + 40), int(40 * stddev + 41))
    total = np.exp(-(whole.astype(float) ** 2) / (2 * stddev**2)).sum()
    return lambda x: np.exp(-(x.astype(float) ** 2) / (2 * stddev**2)) / total


def rounded_gaussian_mass(stddev):
    return lambda x: stats.norm.cdf((x + 0.5) / stddev) - stats.norm.cdf((x - 0.5) / stddev)


def two_armed(fits, draws, law, scale):
    """The right scale passes; 5 % more and 5 % less are caught."""
    reach = int(60 * scale + 40)
    assert fits(draws, law(scale), reach) > 1e-3
    assert fits(draws, law(scale * 1.05), reach) < 1e-6
    assert fits(draws, law(scale / 1.05), reach) < 1e-6


@pytest.mark.parametrize(("numerator", "denominator"), [(5, 1), (7, 2), (3, 4), (10, 1), (12345, 4096)])
def test_discrete_laplace_draws_have_their_law(seeded, fits, numerator, denominator):
    draws = discrete_laplace(numerator, denominator, DRAWS, seeded(1).new_stream("test"))
    two_armed(fits, draws, laplace_mass, numerator / denominator)


@pytest.mark.parametrize(("numerator", "denominator"), [(1, 1), (5, 1), (3, 2), (9, 8), (123456789, 1 << 24)])
def test_discrete_gaussian_draws_have_their_law(seeded, fits, numerator, denominator):
    draws = discrete_gaussian(numerator, denominator, DRAWS, seeded(2).new_stream("test"))
    two_armed(fits, draws, discrete_gaussian_mass, numerator / denominator)


@pytest.mark.parametrize("stddev", [1, 2, 7, 100])
def test_rounded_gaussian_draws_have_their_law(seeded, fits, stddev):
    draws = rounded_gaussian(stddev, DRAWS, seeded(3).new_stream("test"))
    two_armed(fits, draws, rounded_gaussian_mass, stddev)


@pytest.mark.parametrize("word_bits", [1, 2, 5])
def test_the_law_of_rounded_gaussian_draws_is_the_same_when_every_comparison_ties(seeded, fits, word_bits):
    draws = rounded_gaussian(6, 8_000, seeded(4).new_stream("test"), word_bits=word_bits)
    assert fits(draws, rounded_gaussian_mass(6), 60) > 1e-3
    assert fits(draws, rounded_gaussian_mass(6 * 1.1), 60) < 1e-4


@pytest.mark.parametrize("stddev", [1 << 20, (1 << 40) + 7, 1 << 50])
def test_rounded_gaussian_draws_on_a_fine_grid_are_normal(seeded, stddev):
    draws = rounded_gaussian(stddev, DRAWS, seeded(5).new_stream("test")) / stddev
    assert stats.kstest(draws, "norm").pvalue > 1e-3
    assert stats.kstest(draws / 1.05, "norm").pvalue < 1e-6
    for far in (2.0, 3.0):
        expected = 2 * stats.norm.sf(far) * DRAWS
        assert abs((np.abs(draws) > far).sum() - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize(("numerator", "denominator"), [(1, 1), (6, 1), (5, 3)])
def test_geometric_draws_have_their_law(seeded, fits, numerator, denominator):
    q = math.exp(-denominator / numerator)
    draws = geometric(numerator, denominator, DRAWS, seeded(6).new_stream("test"))
    assert draws.min() == 0
    assert fits(draws, lambda x: np.where(x < 0, 0.0, (1 - q) * q ** np.maximum(x, 0)), 200) > 1e-3


@pytest.mark.parametrize("bound", [1, 2, 3, 10, 1000, (1 << 40) + 15, (1 << 62) - 1])
def test_uniform_integers_are_uniform(seeded, bound):
    draws = uniform_below(bound, DRAWS, seeded(7).new_stream("test"))
    assert draws.min() >= 0
    assert draws.max() < bound
    if bound <= 1000:
        assert stats.chisquare(np.bincount(draws, minlength=bound)).pvalue > 1e-3 or bound == 1
    else:
        assert stats.kstest(draws / bound, "uniform").pvalue > 1e-3


def test_the_incomplete_cycle_of_residues_is_drawn_again(scripted):
    # 2⁶⁴ = 3·k + 1: the last word would make residue 0 more likely.
    assert uniform_below(3, 2, scripted([(1 << 64) - 1, 4, 5])).tolist() == [2, 1]


@pytest.mark.parametrize(("numerator", "denominator"), [(0, 5), (1, 5), (5, 5), (7, 5), (23, 10), (0, 1), (2, 1)])
def test_bernoulli_exp_succeeds_with_its_probability(seeded, numerator, denominator):
    trials = bernoulli_exp(np.full(DRAWS, numerator), denominator, seeded(8).new_stream("test"))
    chance = math.exp(-numerator / denominator)
    spread = math.sqrt(max(chance * (1 - chance), 1e-12) / DRAWS)
    assert abs(trials.mean() - chance) < 4 * spread + (0 if numerator else 1e-15)


def tail(value, bits):
    with localcontext() as context:
        context.prec = 100
        return int(Decimal(-value).exp() * (1 << bits))


def test_a_tie_with_a_tail_probability_is_settled_by_the_next_digits(scripted):
    first = tail(2, 64)
    second = tail(2, 128) % (1 << 64)
    draw = geometric_at_inverse_e.draw
    assert draw(1, scripted([first - 1])).tolist() == [2]
    assert draw(1, scripted([first + 1])).tolist() == [1]
    assert draw(1, scripted([first, second - 1])).tolist() == [2]
    assert draw(1, scripted([first, second + 1])).tolist() == [1]
    third = tail(2, 192) % (1 << 64)
    assert draw(1, scripted([first, second, third - 1])).tolist() == [2]
    # A word of zeros lies below every tail that has 64 digits; the value depends on how many zeros follow.
    assert draw(1, scripted([0, 1 << 63])).tolist() == [45]
    assert draw(1, scripted([0, 0, 1 << 63])).tolist() == [89]


def test_the_whole_part_of_a_half_normal_has_its_law(seeded, fits):
    mass = np.exp(-(np.arange(12.0) ** 2) / 2)
    draws = half_normal_integer.draw(DRAWS, seeded(9).new_stream("test"))
    lookup = np.concatenate([mass / mass.sum(), np.zeros(100)])
    assert fits(draws, lambda x: np.where(x < 0, 0.0, lookup[np.maximum(x, 0)]), 60) > 1e-3


def test_no_draws_are_no_draws(seeded):
    stream = seeded().new_stream("test")
    for empty in (
        discrete_laplace(2, 1, 0, stream),
        discrete_gaussian(2, 1, 0, stream),
        rounded_gaussian(2, 0, stream),
    ):
        assert empty.shape == (0,)
        assert empty.dtype == np.int64


def test_scales_that_would_leave_int64_are_refused(seeded):
    stream = seeded().new_stream("test")
    with pytest.raises(InvalidArgument, match="coarser grid"):
        discrete_laplace(1 << 60, 1, 1, stream)
    with pytest.raises(InvalidArgument, match="coarser grid"):
        rounded_gaussian(1 << 51, 1, stream)
    with pytest.raises(InvalidArgument, match="scale_numerator"):
        geometric(0, 1, 1, stream)


def test_draws_of_one_stream_are_uncorrelated(seeded):
    stream = seeded(10).new_stream("test")
    for draws in (discrete_laplace(50, 1, DRAWS, stream), rounded_gaussian(50, DRAWS, stream)):
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 4 / math.sqrt(DRAWS)
        assert abs(draws.mean()) < 5 * draws.std() / math.sqrt(DRAWS)
