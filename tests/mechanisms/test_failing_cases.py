"""Mistakes that other libraries shipped, one test each: what was wrong there, and the right value here."""

import math
import warnings

import numpy as np
import pytest
from scipy import stats

from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.events import BoundedRange, PureDP
from sordino.mechanisms import (
    AboveThreshold,
    DiscreteGaussianMechanism,
    DiscreteLaplaceMechanism,
    ExponentialMechanism,
    GaussianBudget,
    GaussianMechanism,
    GeneralizedExponentialMechanism,
    GeometricMechanism,
    GridGaussianMechanism,
    KNormMechanism,
    LaplaceMechanism,
    PermuteAndFlip,
    PrivateCount,
    PrivateCovariance,
    PrivateHistogram,
    PrivateMean,
    PrivateQuantile,
    PrivateSecondMoment,
    PrivateSum,
    PureBudget,
    RandomizedResponseMechanism,
    ReportNoisyMax,
    analytic_noise_multiplier,
    gaussian_mechanism_delta,
    make_budget,
)
from sordino.randomness import KeyedRNG

PURE = PureBudget(epsilon=1.0)
GAUSSIAN = GaussianBudget(noise_multiplier=1.0)


def spread(release, times=60):
    return np.std([np.asarray(release(), dtype=float) for _ in range(times)], axis=0)


@pytest.mark.parametrize("chosen", [PURE, GAUSSIAN], ids=["pure", "gaussian"])
def test_p1_no_statistic_is_released_without_noise_however_lopsided_the_bounds(chosen, seeded):
    total = PrivateSum(budget=chosen, bounds=((0.0, 5.0), (-5.0, 0.0), (0.0, 1e-6)), rng=seeded(1))
    observed = spread(lambda: total.release(np.ones((3, 3))))
    factor = math.sqrt(2) if chosen is PURE else 1.0
    assert observed == pytest.approx(factor * total.scales, rel=0.5)
    moments = PrivateSecondMoment(budget=chosen, data_norm=5.0, columns=3, rng=seeded(2))
    assert (spread(lambda: moments.release(np.ones((3, 3)))) > 0.4 * moments.scale).all()


def test_p2_the_budgets_of_a_mean_and_of_its_count_add_up_to_the_declared_one():
    for share in (0.1, 0.5, 0.9):
        total, count = PrivateMean(budget=PURE, bounds=(0.0, 1.0), count_share=share).parts
        assert total.budget.epsilon + count.budget.epsilon == pytest.approx(1.0, rel=1e-15)
        assert total.budget.epsilon + count.budget.epsilon <= 1.0


def test_p3_each_share_goes_to_the_part_it_is_named_for():
    total, count = PrivateMean(budget=PURE, bounds=(0.0, 1.0), count_share=0.2).parts
    assert count.budget.epsilon == pytest.approx(0.2)
    assert total.budget.epsilon == pytest.approx(0.8)


def test_p7_the_sensitivity_of_a_sum_is_the_larger_bound_not_the_range():
    assert PrivateSum(budget=PURE, bounds=(100.0, 101.0)).sensitivities == pytest.approx([101.0], rel=1e-8)
    # A mean centers first, so there it is half the range.
    centered = PrivateMean(budget=PURE, bounds=(100.0, 101.0)).parts[0]
    assert centered.sensitivities == pytest.approx([0.5], rel=1e-8)


def test_p9_tiny_and_nearly_equal_bounds_are_clipped_exactly():
    total = PrivateSum(budget=PURE, bounds=((0.0, 1e-9), (0.0, 1.0), (0.0, 1.000001)))
    steps = total.exact_value([[5e-9, 2.0, 2.0]])
    assert np.ldexp(steps.astype(float), total._exponents) == pytest.approx([1e-9, 1.0, 1.000001], rel=1e-8)


def test_p10_a_quantile_of_duplicates_is_a_number_and_the_right_one(seeded):
    mechanism = PrivateQuantile(epsilon=1.0, quantile=0.5, bounds=(0.0, 100.0), resolution=101, rng=seeded(3))
    assert mechanism.release([42.0] * 10_000) == 42.0
    # Everything at a bound, two heaps, one record, and a NaN among them.
    assert mechanism.release([0.0] * 10_000) == 0.0
    assert mechanism.release([100.0] * 10_000) == 100.0
    assert mechanism.release([10.0] * 6000 + [90.0] * 4000 + [math.nan] * 50) == 10.0
    assert 0.0 <= mechanism.release([math.nan]) <= 100.0


def test_p11_the_clipped_rows_are_the_ones_that_are_used():
    moments = PrivateSecondMoment(budget=GAUSSIAN, data_norm=1.0, columns=2)
    outside, inside = moments.exact_value([[300.0, 400.0]]), moments.exact_value([[0.6, 0.8]])
    assert np.trace(outside) <= moments._squared_norm
    assert outside == pytest.approx(inside, rel=1e-4)


def test_p13_only_the_exponential_mechanism_is_charged_as_bounded_range():
    assert isinstance(ExponentialMechanism(epsilon=1.0, sensitivity=1.0).event(), BoundedRange)
    assert PermuteAndFlip(epsilon=1.0, sensitivity=1.0).event() == PureDP(epsilon=1.0)
    assert ReportNoisyMax(epsilon=1.0, sensitivity=1.0, noise="exponential").event() == PureDP(epsilon=1.0)


def test_p14_the_largest_score_is_the_one_that_is_found(seeded):
    for mechanism in (
        ReportNoisyMax(epsilon=1e3, sensitivity=1.0, rng=seeded(4)),
        ExponentialMechanism(epsilon=1e3, sensitivity=1.0, rng=seeded(4)),
        PermuteAndFlip(epsilon=1e3, sensitivity=1.0, rng=seeded(4)),
    ):
        assert mechanism.release([1.0, 9.0, 5.0]) == 1
    least_error = GeneralizedExponentialMechanism(epsilon=1e3, sensitivities=(1.0, 1.0, 1.0), rng=seeded(4))
    assert least_error.release([9.0, 1.0, 5.0]) == 1


def test_p16_the_classical_deviation_above_epsilon_one_is_refused_because_its_delta_is_false():
    classical = math.sqrt(2 * math.log(1.25 / 1e-5)) / 20
    assert gaussian_mechanism_delta(noise_multiplier=classical, epsilon=20.0) == pytest.approx(1.5e-3, rel=0.05)
    with pytest.raises(InvalidArgument, match="analytic"):
        GaussianMechanism.from_budget(epsilon=20.0, delta=1e-5, l2_sensitivity=1.0, calibration="classical")


def test_p17_replace_one_doubles_the_noise_and_leaves_the_multiplier():
    relations = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
    add, both = (
        PrivateSum(budget=GAUSSIAN, bounds=(-1.0, 1.0), neighboring_relation=neighboring_relation)
        for neighboring_relation in relations
    )
    assert both.scales == pytest.approx(2 * add.scales, rel=1e-8)
    assert both.event() == add.event()


def test_p18_the_noise_of_a_mean_knows_nothing_of_the_number_of_records():
    mechanism = PrivateMean(budget=PURE, bounds=(0.0, 1.0))
    before = mechanism.parts[0].scales.tolist(), mechanism.parts[1].noise.scales.tolist(), mechanism.event()
    mechanism.release(np.zeros(10))
    mechanism.release(np.zeros(11))
    assert (mechanism.parts[0].scales.tolist(), mechanism.parts[1].noise.scales.tolist(), mechanism.event()) == before


def test_p19_a_score_that_is_a_difference_of_two_private_errors_moves_by_the_sum_of_both():
    # The generalized mechanism divides each difference by both sensitivities; by one alone it could move by 2.
    mechanism = GeneralizedExponentialMechanism(epsilon=1.0, sensitivities=(2.0, 2.0))
    moved = mechanism.normalized_errors([12.0, 3.0]) - mechanism.normalized_errors([10.0, 5.0])
    assert np.abs(moved).max() == pytest.approx(1.0)


def test_p20_the_sparse_vector_releases_answers_and_no_values(seeded):
    released = AboveThreshold(epsilon=1.0, sensitivity=1.0, threshold=0.0, max_positives=3, rng=seeded(5)).release(
        [0.123, 5.5, -3.3, 8.8]
    )
    assert released.dtype == np.bool_


def test_p21_bounds_edges_and_norms_are_declared_never_read_from_the_data():
    for build in (PrivateSum, PrivateMean):
        with pytest.raises(TypeError, match="bounds"):
            build(budget=PURE)
    with pytest.raises(TypeError, match="bounds"):
        PrivateQuantile(epsilon=1.0, quantile=0.5)
    with pytest.raises(TypeError, match="data_norm"):
        PrivateSecondMoment(budget=PURE, columns=2)
    with pytest.raises(MissingDeclaration, match="Declare the bins"):
        PrivateHistogram(budget=PURE)


def test_p22_the_noise_of_a_covariance_does_not_depend_on_the_data():
    # A "mechanism" that samples a Wishart or normal law around the data's own covariance is not private.
    def noise(rows):
        built = PrivateSecondMoment(budget=GAUSSIAN, data_norm=1.0, columns=3, rng=KeyedRNG(seed=1, reproducible=True))
        return built.release(rows) - np.ldexp(built.exact_value(rows).astype(float), 2 * built._exponent)

    assert noise(np.zeros((0, 3))) == pytest.approx(noise(np.full((50, 3), 0.5)), abs=1e-9)


def test_p23_noise_is_not_divided_by_the_number_of_bins_or_columns():
    few, many = (PrivateHistogram(budget=PURE, categories=tuple(range(bins))) for bins in (2, 1000))
    assert few.noise.scales[0] == many.noise.scales[0] == 1.0
    narrow, wide = (PrivateSum(budget=PURE, bounds=((0.0, 1.0),) * columns) for columns in (1, 10))
    assert wide.scales[0] == pytest.approx(10 * narrow.scales[0], rel=1e-6)


def test_p24_noise_comes_from_more_than_a_byte_of_entropy():
    released = {float(LaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0).release(0.0)) for _ in range(600)}
    assert len(released) == 600


def test_p25_noise_scales_with_the_declared_norm_and_is_symmetric(seeded):
    one, ten = (PrivateSecondMoment(budget=GAUSSIAN, data_norm=norm, columns=4) for norm in (1.0, 10.0))
    assert ten.scale == pytest.approx(100 * one.scale, rel=1e-4)
    released = ten.release(np.zeros((0, 4)))
    assert np.array_equal(released, released.T)


def test_p25_laplace_scales_are_sensitivity_over_epsilon_not_the_reverse():
    assert LaplaceMechanism(epsilon=4.0, l1_sensitivity=2.0).scale == 0.5
    assert ReportNoisyMax(epsilon=4.0, sensitivity=1.0).scale == 0.5
    assert GeometricMechanism(epsilon=4.0).scale == 0.25


@pytest.mark.parametrize("epsilon", [0.01, 0.3, 1.0, 7.0, 50.0])
@pytest.mark.parametrize("delta", [1e-10, 1e-6, 0.1])
def test_p25_calibrators_return_the_safe_side(epsilon, delta):
    multiplier = analytic_noise_multiplier(epsilon=epsilon, delta=delta)
    assert gaussian_mechanism_delta(noise_multiplier=multiplier, epsilon=epsilon) <= delta


def everything(rng):
    """One of each mechanism, with a value that its release takes."""
    vector = np.array([0.5, -0.5, 2.0])
    rows = np.array([[0.5, -0.5, 2.0]] * 4)
    shared = {"rng": rng}
    return [
        (LaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0, **shared), vector),
        (GaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0, **shared), vector),
        (KNormMechanism(epsilon=1.0, sensitivity=1.0, norm=2, dimension=3, **shared), vector),
        (DiscreteLaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0, dimension=3, **shared), vector),
        (DiscreteGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0, dimension=3, **shared), vector),
        (GridGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0, dimension=3, **shared), vector),
        (PrivateSum(budget=PURE, bounds=((-1.0, 1.0),) * 3, **shared), rows),
        (PrivateMean(budget=GAUSSIAN, bounds=((-1.0, 1.0),) * 3, **shared), rows),
        (PrivateQuantile(epsilon=1.0, quantile=0.5, bounds=(-1.0, 1.0), **shared), vector),
        (PrivateSecondMoment(budget=PURE, data_norm=1.0, columns=3, **shared), rows),
        (PrivateCovariance(budget=GAUSSIAN, data_norm=1.0, columns=3, **shared), rows),
        (PrivateHistogram(budget=PURE, edges=(-1.0, 0.0, 1.0), **shared), vector),
        (PrivateCount(budget=GaussianBudget(noise_multiplier=1e6), **shared), vector),
        (ExponentialMechanism(epsilon=1.0, sensitivity=1.0, **shared), vector),
        (ReportNoisyMax(epsilon=1.0, sensitivity=1.0, **shared), vector),
        (PermuteAndFlip(epsilon=1.0, sensitivity=1.0, **shared), vector),
        (GeneralizedExponentialMechanism(epsilon=1.0, sensitivities=(1.0, 2.0, 3.0), **shared), vector),
        (AboveThreshold(epsilon=1.0, sensitivity=1.0, threshold=0.0, **shared), vector),
        (RandomizedResponseMechanism(epsilon=1.0, categories=(0.5, -0.5, 2.0), **shared), vector),
    ]


def test_p26_one_seed_given_to_two_mechanisms_gives_different_noise(seeded):
    shared = seeded(6)
    first, second = ([m.release(v) for m, v in everything(shared)] for _ in range(2))
    for one, other in zip(first[:7], second[:7], strict=True):
        assert not np.array_equal(one, other)
    twins = [LaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0, rng=shared) for _ in range(2)]
    assert twins[0].release(0.0) != twins[1].release(0.0)


HOSTILE = (math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 0.0)


@pytest.mark.parametrize("position", range(19))
def test_p27_no_data_raise_or_warn(position, seeded):
    mechanism, value = everything(seeded(7))[position]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for hostile in HOSTILE:
            harmed = np.array(value, dtype=float)
            harmed.flat[0] = hostile
            released = mechanism.release(harmed)
            mechanism.release(np.full_like(harmed, hostile))
            kind = np.asarray(released).dtype.kind
            assert kind in "bif"
            assert kind != "f" or np.isfinite(np.asarray(released, dtype=float)).all()


def test_p27_columns_of_objects_neither_raise_nor_warn(seeded):
    odd = [1.0, None, "text", 2.0, [3.0], ([4.0],)]
    column = np.empty(6, dtype=object)
    column[:] = odd
    assert PrivateSum(budget=PureBudget(epsilon=1e6), bounds=(0.0, 5.0), rng=seeded(10)).release(
        column
    ) == pytest.approx(3.0, abs=1e-3)
    assert PrivateHistogram(budget=PURE, edges=(0.0, 1.5, 3.0)).exact_value(column).tolist() == [1, 1]
    assert PrivateHistogram(budget=PURE, categories=("text", None)).exact_value(odd).tolist() == [1, 1]
    assert len(RandomizedResponseMechanism(epsilon=1.0, categories=("text", None)).release(odd)) == 6


def test_p28_categories_are_declared_and_an_undeclared_one_is_no_error():
    with pytest.raises(MissingDeclaration):
        PrivateHistogram(budget=PURE)
    histogram = PrivateHistogram(budget=PURE, categories=("yes", "no"))
    assert histogram.release(["maybe"] * 5).shape == (2,)
    assert set(RandomizedResponseMechanism(epsilon=1.0, categories=("yes", "no")).release(["maybe"] * 50)) <= {
        "yes",
        "no",
    }


def test_p29_a_mechanism_keeps_nothing_of_the_data_it_has_seen(seeded):
    for mechanism, value in everything(seeded(8)):
        mechanism.release(value)
        before = {name: repr(kept) for name, kept in vars(mechanism).items()}
        mechanism.release(np.asarray(value) * 0.25 if not isinstance(mechanism, RandomizedResponseMechanism) else value)
        assert {name: repr(kept) for name, kept in vars(mechanism).items()} == before


def test_the_budget_of_epsilon_and_delta_is_the_one_that_is_spent():
    bought = make_budget(epsilon=2.0, delta=1e-6)
    assert gaussian_mechanism_delta(noise_multiplier=bought.noise_multiplier, epsilon=2.0) == pytest.approx(
        1e-6, rel=1e-6
    )


def test_u_counts_are_unbiased(seeded):
    mechanism = GeometricMechanism(epsilon=0.3, dimension=20_000, rng=seeded(9))
    noise = mechanism.release(np.full(20_000, 100)) - 100
    assert abs(stats.ttest_1samp(noise, 0.0).statistic) < 4
