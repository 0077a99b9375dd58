"""Lower bounds: golden values, a slow second way for each number, and how often they are wrong."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from sordino.accounting import epsilon as accounted
from sordino.accounting import true_positive_rate
from sordino.audit import (
    CanaryGuesses,
    EventTradeOffFamily,
    GaussianTradeOffFamily,
    MembershipTrials,
    clopper_pearson,
    gaussian_mu,
    gaussian_multi_run,
    guess_canaries,
    make_trials,
    multi_run_trade_off_bound,
    normal_pair_epsilon,
    one_run_lower_bound,
    one_run_p_value,
    one_run_trade_off_bound,
    one_shot_estimate,
)
from sordino.errors import InvalidArgument
from sordino.events import Gaussian, PoissonSampled
from sordino.randomness import KeyedRNG

# Computed apart from this code and cross-checked with a public implementation: m, r, v, δ, ε at 95 %.
ONE_RUN = [
    (1000, 100, 90, 0, 1.6308),
    (1000, 100, 90, 1e-6, 1.6304),
    (1000, 100, 90, 1e-5, 1.6261),
    (1000, 100, 90, 1e-4, 1.5806),
    (1000, 100, 90, 1e-3, 0.3885),
    (1000, 100, 75, 1e-3, 0.0),
    (1000, 100, 100, 1e-5, 3.4654),
    (1000, 100, 100, 1e-3, 0.8090),
    (1000, 200, 150, 1e-5, 0.8200),
    (1000, 200, 180, 1e-3, 1.1341),
    (1000, 50, 50, 1e-3, 0.0),
    (1000, 50, 50, 1e-5, 2.7562),
    (1000, 1000, 550, 1e-5, 0.0940),
    (1000, 1000, 526, 0, 0.0),
    (1000, 1000, 1000, 1e-3, 3.4890),
    (5000, 500, 450, 1e-3, 0.2114),
    (100, 100, 60, 1e-4, 0.0495),
]
CURVE = [
    (1000, 100, 90, 2.4564),
    (1000, 100, 75, 1.0059),
    (1000, 200, 150, 1.2969),
    (1000, 1000, 550, 0.1856),
    (1000, 100, 100, 5.549),
    (5000, 500, 450, 2.7761),
]
# n, false positives, false negatives, ε by Clopper-Pearson, μ, ε of μ-GDP, all at δ = 1e-5.
MANY = [
    (500, 0, 0, 4.9056, 4.8793, 31.997),
    (1000, 0, 0, 5.6006, 5.3598, 36.490),
    (10_000, 0, 0, 7.9048, 6.7504, 50.800),
    (1000, 5, 500, 3.6961, 2.1902, 11.188),
    (1000, 50, 200, 2.4710, 2.2626, 11.650),
    (1000, 160, 160, 1.4880, 1.7988, 8.780),
    (1000, 300, 300, 0.7106, 0.8828, 3.7912),
    (1000, 0, 900, 3.1044, 1.2889, 5.888),
    (1000, 500, 500, 0.0, 0.0, 0.0),
]


def tally(m, r, v):
    return CanaryGuesses(canaries=m, guesses=r, correct=v)


@pytest.mark.parametrize(("m", "r", "v", "delta", "epsilon"), ONE_RUN)
def test_one_run_gives_the_golden_values(m, r, v, delta, epsilon):
    assert one_run_lower_bound(tally(m, r, v), delta=delta).epsilon == pytest.approx(epsilon, abs=1e-3)


@pytest.mark.parametrize(("m", "r", "v", "epsilon"), CURVE)
def test_one_run_with_a_gaussian_family_gives_the_golden_values(m, r, v, epsilon):
    assert one_run_trade_off_bound(tally(m, r, v), delta=1e-5).epsilon == pytest.approx(epsilon, abs=1e-3)


@pytest.mark.parametrize(("n", "fp", "fn", "cp", "mu", "gdp"), MANY)
def test_many_runs_give_the_golden_values(n, fp, fn, cp, mu, gdp):
    found = MembershipTrials(without=n, false_positives=fp, including=n, false_negatives=fn)
    assert clopper_pearson(found, delta=1e-5).epsilon == pytest.approx(cp, abs=1e-3)
    assert gaussian_mu(found) == pytest.approx(mu, abs=1e-3)
    assert gaussian_multi_run(found, delta=1e-5).epsilon == pytest.approx(gdp, abs=1e-3)


def exact_p_value(m, r, v, epsilon, delta):
    """All terms as fractions."""
    q = Fraction(1) / (1 + Fraction(math.exp(-epsilon)))
    mass = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    alpha = max((sum(mass[v - i : v]) / i for i in range(1, v + 1)), default=Fraction(0))
    return float(sum(mass[v:]) + 2 * m * Fraction(delta) * alpha)


@pytest.mark.parametrize(("v", "epsilon", "delta"), [(40, 0.3, 0.0), (33, 1.0, 1e-3), (1, 0.0, 1e-4), (0, 1.0, 1e-3)])
def test_the_p_value_is_the_sum_of_its_exact_terms(v, epsilon, delta):
    expected = min(1.0, exact_p_value(120, 45, v, epsilon, delta))
    assert one_run_p_value(tally(120, 45, v), epsilon=epsilon, delta=delta) == pytest.approx(expected, rel=1e-9)


def test_the_published_p_values_come_out():
    assert one_run_p_value(tally(1000, 100, 85), epsilon=1, delta=0) == pytest.approx(0.0034839, rel=1e-4)
    assert one_run_p_value(tally(1000, 100, 90), epsilon=1, delta=0) == pytest.approx(2.736e-5, rel=1e-3)


def test_the_bound_is_where_the_p_value_crosses_and_no_smaller_epsilon_is_kept():
    found, delta = tally(1000, 100, 90), 1e-3
    bound = one_run_lower_bound(found, delta=delta).epsilon
    below = [one_run_p_value(found, epsilon=one, delta=delta) for one in np.linspace(0, bound - 1e-5, 200)]
    assert max(below) <= 0.05 + 1e-12
    assert one_run_p_value(found, epsilon=bound + 1e-4, delta=delta) > 0.05


def test_errors_of_many_runs_are_bounded_as_the_binomial_law_says():
    found = MembershipTrials(without=200, false_positives=7, including=300, false_negatives=20)
    for rate, wrong, runs in zip(found.rates(0.95), (7, 20), (200, 300), strict=True):
        assert stats.binom.cdf(wrong, runs, rate) == pytest.approx(0.025, rel=1e-9)


def test_an_event_family_of_gaussians_is_the_gaussian_family_up_to_its_lines():
    family = EventTradeOffFamily(event=lambda factor: Gaussian(noise_multiplier=factor), name="Gaussian")
    for found in (tally(1000, 100, 90), tally(1000, 200, 150)):
        exact = one_run_trade_off_bound(found, delta=1e-5).epsilon
        assert exact * 0.97 < one_run_trade_off_bound(found, delta=1e-5, family=family).epsilon <= exact * (1 + 1e-6)
    many = MembershipTrials(without=1000, false_positives=100, including=1000, false_negatives=100)
    exact = gaussian_multi_run(many, delta=1e-5).epsilon
    assert exact * 0.97 < multi_run_trade_off_bound(many, delta=1e-5, family=family).epsilon <= exact * (1 + 1e-6)
    assert multi_run_trade_off_bound(many, delta=1e-5, family=GaussianTradeOffFamily()).epsilon == pytest.approx(
        exact, rel=1e-4
    )


def test_a_subsampled_family_says_what_the_accountant_says_at_strength_one():
    def event(factor):
        return PoissonSampled(sample_rate=0.8, event=Gaussian(noise_multiplier=factor))

    family = EventTradeOffFamily(event=event, name="DP-SGD")
    assert family.epsilon(1.0, 1e-5) == accounted(event(1.0), 1e-5).lower
    many = MembershipTrials(without=500, false_positives=100, including=500, false_negatives=100)
    bound = multi_run_trade_off_bound(many, delta=1e-5, family=family).epsilon
    # At that strength the best attack, by the accountant's own search, reaches these error rates and hardly better
    # ones; the family covers both directions at once, so it may ask for a little more.
    strength = optimize.brentq(lambda one: accounted(event(1 / one), 1e-5).lower - bound, 0.3, 6.0, rtol=1e-6)
    false_positive, false_negative = many.rates(0.95)
    assert 0 <= 1 - false_negative - true_positive_rate(event(1 / strength), false_positive) < 0.02


@pytest.mark.parametrize(("mean", "deviation"), [(1.0, 1.0), (0.8, 1.3), (1.5, 0.7), (0.0, 1.2)])
def test_the_epsilon_of_two_normal_laws_is_where_the_integral_of_their_difference_is_delta(mean, deviation):
    epsilon = normal_pair_epsilon(mean, deviation, delta=1e-3)
    laws = stats.norm(mean, deviation), stats.norm(0, 1)

    def excess(p, q):
        return integrate.quad(lambda x: max(0.0, p.pdf(x) - math.exp(epsilon) * q.pdf(x)), -15, 15, limit=500)[0]

    assert max(excess(*laws), excess(*laws[::-1])) == pytest.approx(1e-3, rel=1e-4)


# ── how often the bounds are wrong ──────────────────────────────────────────────────────────────────────────


def one_run_nulls(method, mu, *, runs, m=200, r=40):
    """Whether each of `runs` bounds on ideal Gaussian scores is above the truth."""
    generator = np.random.default_rng(0)
    truth = GaussianTradeOffFamily().epsilon(mu, 1e-5) if mu else 0.0
    known = {}
    above = 0
    for _ in range(runs):
        present = generator.random(m) < 0.5
        found = guess_canaries(generator.normal(size=m) + mu * present, present, above=r // 2, below=r // 2)
        if found not in known:
            known[found] = method(found)
        above += known[found] > truth
    return above / runs


def many_nulls(method, mu, *, runs, n=200):
    generator = np.random.default_rng(1)
    truth = GaussianTradeOffFamily().epsilon(mu, 1e-5) if mu else 0.0
    above = 0
    for _ in range(runs):
        above += method(make_trials(generator.normal(mu, size=n), generator.normal(size=n))) > truth
    return above / runs


@pytest.mark.parametrize("mu", [0.0, 1.0])
@pytest.mark.parametrize(
    "method",
    [
        lambda found: one_run_lower_bound(found, delta=1e-5).epsilon,
        lambda found: one_run_trade_off_bound(found, delta=1e-5).epsilon,
    ],
    ids=["one run", "one run, curve"],
)
def test_one_run_is_above_the_truth_in_at_most_the_promised_share(method, mu):
    assert one_run_nulls(method, mu, runs=1000) <= 0.065


@pytest.mark.parametrize("mu", [0.0, 1.0])
@pytest.mark.parametrize(
    "method",
    [
        lambda found: clopper_pearson(found, delta=1e-5).epsilon,
        lambda found: gaussian_multi_run(found, delta=1e-5).epsilon,
        lambda found: multi_run_trade_off_bound(found, delta=1e-5, family=GaussianTradeOffFamily()).epsilon,
    ],
    ids=["Clopper-Pearson", "Gaussian", "curve"],
)
def test_many_runs_are_above_the_truth_in_at_most_the_promised_share(method, mu):
    assert many_nulls(method, mu, runs=1000 if mu == 0 else 200) <= 0.065


def test_the_best_of_many_thresholds_without_paying_for_it_is_caught_by_the_same_nulls():
    generator, above = np.random.default_rng(2), 0
    for _ in range(200):
        scores, present = generator.normal(size=200), generator.random(200) < 0.5
        best = max(
            one_run_p_value(guess_canaries(scores, present, above=k, below=k), epsilon=0, delta=0) <= 0.05
            for k in range(5, 100, 5)
        )
        above += best
    assert above / 200 > 0.15


def test_a_strong_attack_shows_a_good_part_of_the_truth():
    generator = np.random.default_rng(3)
    found = []
    for _ in range(20):
        present = generator.random(1000) < 0.5
        found.append(guess_canaries(generator.normal(size=1000) + present, present, above=50, below=50))
    # Published medians for μ = 1 (ε = 4.377): 1.626 and 2.456.
    assert np.median([one_run_lower_bound(one, delta=1e-5).epsilon for one in found]) == pytest.approx(1.626, abs=0.25)
    assert np.median([one_run_trade_off_bound(one, delta=1e-5).epsilon for one in found]) == pytest.approx(
        2.456, abs=0.35
    )


# ── the estimate ────────────────────────────────────────────────────────────────────────────────────────────


def one_release(noise_multiplier, canaries, dimension=20_000):
    generator = np.random.default_rng(4)
    directions = generator.normal(size=(canaries, dimension))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    moved = directions.sum(0) + noise_multiplier * generator.normal(size=dimension)
    return directions @ moved / np.linalg.norm(moved)


def test_the_one_shot_estimate_is_near_the_truth_and_has_an_interval():
    estimate = one_shot_estimate(one_release(1.0, 300), dimension=20_000, delta=1e-6, rng=KeyedRNG())
    truth = GaussianTradeOffFamily().epsilon(1.0, 1e-6)
    assert truth - 1 < estimate.epsilon < truth + 2
    assert estimate.interval[0] < estimate.epsilon < estimate.interval[1]
    assert "not a bound" in str(estimate)


def test_normal_noise_multipliers_of_one_three_and_ten_come_back():
    # N(1, z²) against N(0, z²) at δ = 1e-6.
    for multiplier, epsilon in ((4.2247, 1.0), (1.5439, 3.0), (0.5411, 10.0)):
        assert normal_pair_epsilon(1.0, multiplier, delta=1e-6, reference_deviation=multiplier) == pytest.approx(
            epsilon, abs=2e-3
        )


# ── arguments ───────────────────────────────────────────────────────────────────────────────────────────────


def test_scores_that_are_no_numbers_and_ties_do_not_depend_on_what_was_in():
    present = np.array([True, False, True, False])
    first = guess_canaries([1.0, math.nan, math.nan, 1.0], present, above=2, below=2)
    second = guess_canaries([1.0, math.nan, math.nan, 1.0], ~present, above=2, below=2)
    assert first.correct + second.correct == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: tally(10, 11, 3),
        lambda: tally(10, 5, 6),
        lambda: MembershipTrials(without=10, false_positives=11, including=10, false_negatives=0),
        lambda: guess_canaries([1.0, 2.0], [True], above=1, below=0),
        lambda: guess_canaries([1.0, 2.0], [True, False], above=2, below=1),
        lambda: make_trials([1.0], [2.0]),
        lambda: one_run_lower_bound(tally(10, 5, 5), delta=1.0),
        lambda: one_run_lower_bound(tally(10, 5, 5), delta=0.0, confidence=1.0),
        lambda: one_shot_estimate([1.0, 2.0], dimension=3, delta=1e-5),
    ],
)
def test_impossible_counts_are_refused(make):
    with pytest.raises(InvalidArgument):
        make()


def test_the_ceiling_is_what_a_perfect_attack_shows():
    bound = one_run_lower_bound(tally(1000, 100, 80), delta=0)
    assert bound.ceiling == pytest.approx(3.4930, abs=1e-3)
    # q^r = α, solved apart.
    alone = optimize.brentq(lambda one: 100 * math.log(1 / (1 + math.exp(-one))) - math.log(0.05), 0.1, 10)
    assert bound.ceiling == pytest.approx(alone, abs=1e-6)
    assert bound.to_dict()["confidence"] == 0.95
