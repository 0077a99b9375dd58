"""Choosing a candidate: exact laws by enumeration, published values, and what each choice costs."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sordino.errors import InvalidArgument
from sordino.events import BoundedRange, PureDP
from sordino.mechanisms import ExponentialMechanism, GeneralizedExponentialMechanism, PermuteAndFlip, ReportNoisyMax

SCORES = (0.0, 1.0, 2.0)
EXPONENTIAL = (0.186324, 0.307196, 0.506480)
EXPONENTIAL_MONOTONE = (0.090031, 0.244728, 0.665241)
FLIP = (0.146751, 0.266077, 0.587172)
FLIP_MONOTONE = (0.059370, 0.175642, 0.764988)


def flip_law(acceptance):
    """Permute-and-flip by brute force: the average over all orders of the chance to be the first one taken."""
    law = np.zeros(len(acceptance))
    orders = list(itertools.permutations(range(len(acceptance))))
    for order in orders:
        reached = 1.0
        for candidate in order:
            law[candidate] += reached * acceptance[candidate] / len(orders)
            reached *= 1 - acceptance[candidate]
    return law


def choices(mechanism, trials=1500):
    """How often each candidate was chosen."""
    return np.bincount([mechanism.release(SCORES) for _ in range(trials)], minlength=len(SCORES))


def law_fits(counts, law):
    """p-value of the frequencies of choices under a law."""
    return stats.chisquare(counts, np.array(law) / sum(law) * counts.sum()).pvalue


def expected_error(law):
    return float(2.0 - np.dot(law, SCORES))


@pytest.mark.parametrize(("monotone", "law"), [(False, EXPONENTIAL), (True, EXPONENTIAL_MONOTONE)])
def test_the_exponential_mechanism_has_the_published_probabilities(monotone, law, seeded):
    mechanism = ExponentialMechanism(epsilon=1.0, sensitivity=1.0, monotone=monotone, rng=seeded(1))
    assert mechanism.probabilities(SCORES) == pytest.approx(law, abs=1e-6)
    counts = choices(mechanism)
    assert law_fits(counts, law) > 1e-3
    assert law_fits(counts, EXPONENTIAL_MONOTONE if law == EXPONENTIAL else EXPONENTIAL) < 1e-6


@pytest.mark.parametrize(("monotone", "law"), [(False, FLIP), (True, FLIP_MONOTONE)])
def test_permute_and_flip_has_the_published_probabilities(monotone, law, seeded):
    mechanism = PermuteAndFlip(epsilon=1.0, sensitivity=1.0, monotone=monotone, rng=seeded(2))
    assert flip_law(mechanism.acceptance(SCORES)) == pytest.approx(law, abs=1e-6)
    counts = choices(mechanism)
    assert law_fits(counts, law) > 1e-3
    assert law_fits(counts, EXPONENTIAL_MONOTONE if monotone else EXPONENTIAL) < 1e-6


def test_expected_errors_are_the_published_ones():
    for epsilon, exponential, flip in ((1.0, 0.679843, 0.559580), (2.0, 0.424790, 0.294381)):
        choice = ExponentialMechanism(epsilon=epsilon, sensitivity=1.0)
        permuted = PermuteAndFlip(epsilon=epsilon, sensitivity=1.0)
        assert expected_error(choice.probabilities(SCORES)) == pytest.approx(exponential, abs=1e-6)
        assert expected_error(flip_law(permuted.acceptance(SCORES))) == pytest.approx(flip, abs=1e-6)


@pytest.mark.parametrize(
    ("noise", "monotone", "law"),
    [
        ("gumbel", False, EXPONENTIAL),
        ("gumbel", True, EXPONENTIAL_MONOTONE),
        ("exponential", False, FLIP),
        ("exponential", True, FLIP_MONOTONE),
    ],
)
def test_noisy_max_is_the_exponential_mechanism_with_gumbel_and_permute_and_flip_with_exponential_noise(
    noise, monotone, law, seeded
):
    mechanism = ReportNoisyMax(epsilon=1.0, sensitivity=1.0, noise=noise, monotone=monotone, rng=seeded(3))
    assert law_fits(choices(mechanism), law) > 1e-3


def test_noisy_max_with_laplace_noise_has_its_law(seeded):
    # Two candidates one unit apart: P(second) = P(Lap − Lap' ≤ 1/scale), with density (1 + |d|)e^{−|d|}/4.
    mechanism = ReportNoisyMax(epsilon=1.0, sensitivity=1.0, noise="laplace", rng=seeded(4))
    wins = sum(mechanism.release([0.0, 1.0]) for _ in range(1500))
    chance = 1 - math.exp(-0.5) * (2 + 0.5) / 4
    assert stats.binomtest(wins, 1500, chance).pvalue > 1e-3
    assert stats.binomtest(wins, 1500, chance - 0.08).pvalue < 1e-4


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(-1, 1)), min_size=1, max_size=6), st.floats(0.05, 5))
def test_neighboring_scores_move_the_log_probabilities_inside_a_range_of_epsilon(pairs, epsilon):
    scores, change = np.array(pairs).T
    mechanism = ExponentialMechanism(epsilon=epsilon, sensitivity=1.0)
    losses = np.log(mechanism.probabilities(scores)) - np.log(mechanism.probabilities(scores + change))
    finite = losses[np.isfinite(losses)]
    assert np.ptp(finite) <= epsilon * (1 + 1e-9) + 1e-9  # bounded range, the stronger property
    assert np.abs(finite).max() <= epsilon * (1 + 1e-9) + 1e-9


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-20, 20), st.floats(-1, 1)), min_size=2, max_size=5), st.floats(0.05, 5))
def test_permute_and_flip_is_epsilon_private_by_enumeration(pairs, epsilon):
    scores, change = np.array(pairs).T
    mechanism = PermuteAndFlip(epsilon=epsilon, sensitivity=1.0)
    first, second = flip_law(mechanism.acceptance(scores)), flip_law(mechanism.acceptance(scores + change))
    assert (first <= math.exp(epsilon) * second * (1 + 1e-9)).all()


def test_permute_and_flip_is_not_bounded_range_so_it_is_charged_in_full():
    mechanism = PermuteAndFlip(epsilon=1.0, sensitivity=1.0)
    first, second = flip_law(mechanism.acceptance([5.0, 0.0])), flip_law(mechanism.acceptance([4.0, 1.0]))
    equal = flip_law(mechanism.acceptance([0.0, 0.0])), flip_law(mechanism.acceptance([-1.0, 1.0]))
    losses = np.log(first / second), np.log(equal[0] / equal[1])
    assert max(np.ptp(loss) for loss in losses) > 1.0
    assert mechanism.event() == PureDP(epsilon=1.0)
    assert ExponentialMechanism(epsilon=1.0, sensitivity=1.0).event() == BoundedRange(epsilon=1.0)
    assert ReportNoisyMax(epsilon=1.0, sensitivity=1.0).event() == BoundedRange(epsilon=1.0)
    for noise in ("exponential", "laplace"):
        assert ReportNoisyMax(epsilon=1.0, sensitivity=1.0, noise=noise).event() == PureDP(epsilon=1.0)


def test_measures_weigh_candidates_and_a_candidate_without_measure_is_never_chosen(seeded):
    mechanism = ExponentialMechanism(epsilon=2.0, sensitivity=1.0, rng=seeded(5))
    assert mechanism.probabilities([0.0, 0.0, 0.0], [1.0, 3.0, 0.0]) == pytest.approx([0.25, 0.75, 0.0])
    # By hand: weights e⁰·2 and e¹·1.
    assert mechanism.probabilities([0, 1], [2, 1]) == pytest.approx(np.array([2, math.e]) / (2 + math.e))
    assert {mechanism.release([0.0, 0.0, 50.0], [1.0, 1.0, 0.0]) for _ in range(200)} == {0, 1}
    assert mechanism.probabilities([0.0, 1.0], [0.0, 0.0]) == pytest.approx([0.5, 0.5])


def test_huge_and_tiny_scores_neither_overflow_nor_underflow(seeded):
    mechanism = ExponentialMechanism(epsilon=1.0, sensitivity=1e-3, rng=seeded(6))
    assert mechanism.release([1e300, -1e300, 0.0]) == 0
    assert mechanism.release([-1e9, -1e9 - 1]) == 0
    assert mechanism.probabilities([1e15, 1e15 + 2e-3 * 0]) == pytest.approx([0.5, 0.5])


def test_failed_candidates_count_as_the_worst():
    bounded = ExponentialMechanism(epsilon=1.0, sensitivity=1.0, score_bounds=(0.0, 10.0))
    expected = bounded.probabilities([0.0, 5.0, 0.0, 10.0])
    assert bounded.probabilities([math.nan, 5.0, -math.inf, 99.0]) == pytest.approx(expected)
    # A neighbor whose candidate did not fail is as near as any other: the loss stays within ε.
    losses = np.log(bounded.probabilities([math.nan, 5.0]) / bounded.probabilities([1.0, 5.0]))
    assert np.abs(losses).max() <= 1.0
    unbounded = ExponentialMechanism(epsilon=1.0, sensitivity=1.0)
    assert unbounded.probabilities([math.nan, 3.0, 5.0]) == pytest.approx(unbounded.probabilities([3.0, 3.0, 5.0]))
    assert unbounded.probabilities([math.nan, math.nan]) == pytest.approx([0.5, 0.5])


def test_the_generalised_exponential_mechanism_gives_the_published_values():
    mechanism = GeneralizedExponentialMechanism(epsilon=1.0, sensitivities=(1, 2, 50), failure_probability=0.05)
    assert mechanism.penalty == pytest.approx(8.188689, abs=1e-6)
    assert mechanism.normalized_errors([10, 5, 0]) == pytest.approx([0, 1.062896, 7.671486], abs=1e-6)
    assert mechanism.probabilities([10, 5, 0]) == pytest.approx([0.621373, 0.365214, 0.013413], abs=1e-6)
    assert mechanism.event() == BoundedRange(epsilon=1.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-50, 50), st.floats(0.1, 20), st.floats(-1, 1)), min_size=1, max_size=6),
    st.floats(0.1, 4),
)
def test_normalised_errors_have_sensitivity_one(triples, epsilon):
    errors, sensitivities, change = np.array(triples).T
    mechanism = GeneralizedExponentialMechanism(epsilon=epsilon, sensitivities=tuple(sensitivities.tolist()))
    moved = mechanism.normalized_errors(errors + change * sensitivities) - mechanism.normalized_errors(errors)
    assert np.abs(moved).max() <= 1 + 1e-9
    assert mechanism.normalized_errors(errors).min() == pytest.approx(0, abs=1e-12)


def test_a_precise_candidate_is_found_beside_an_imprecise_one(seeded):
    generalized = GeneralizedExponentialMechanism(epsilon=1.0, sensitivities=(1.0, 1.0, 1000.0), rng=seeded(7))
    plain = ExponentialMechanism(epsilon=1.0, sensitivity=1000.0)
    assert generalized.probabilities([0.0, 50.0, 0.0])[0] > 0.95
    assert plain.probabilities([0.0, -50.0, 0.0])[0] < 0.4
    assert [generalized.release([0.0, 50.0, 0.0]) for _ in range(20)].count(0) > 15


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ExponentialMechanism(epsilon=-1.0, sensitivity=1.0), "epsilon must be"),
        (lambda: ExponentialMechanism(epsilon=1.0, sensitivity=0.0), "sensitivity must be"),
        (lambda: ExponentialMechanism(epsilon=1.0, sensitivity=1.0, score_bounds=(1.0, 1.0)), "score_bounds must be"),
        (lambda: ReportNoisyMax(epsilon=1.0, sensitivity=1.0, noise="uniform"), "noise must be one of"),
        (lambda: GeneralizedExponentialMechanism(epsilon=1.0, sensitivities=()), "sensitivities must be"),
        (lambda: GeneralizedExponentialMechanism(epsilon=1.0, sensitivities=(1.0, 0.0)), "sensitivity must be"),
        (lambda: ExponentialMechanism(epsilon=1.0, sensitivity=1.0).release([]), "scores must be a vector"),
        (lambda: ExponentialMechanism(epsilon=1.0, sensitivity=1.0).release([[1.0]]), "scores must be a vector"),
        (lambda: ExponentialMechanism(epsilon=1.0, sensitivity=1.0).release([1.0], [1.0, 2.0]), "measures must have"),
        (
            lambda: GeneralizedExponentialMechanism(epsilon=1.0, sensitivities=(1.0, 2.0)).release([1.0]),
            "errors must have 2 entries",
        ),
    ],
)
def test_wrong_parameters_and_shapes_are_refused(build, message):
    with pytest.raises(InvalidArgument, match=message):
        build()
