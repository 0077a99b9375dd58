"""Laplace, Gaussian and K-norm mechanisms on numpy values, in floating point and on the grid."""

import itertools
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from sordino.errors import InvalidArgument
from sordino.events import DiscreteGaussian, DiscreteLaplace, Gaussian, Laplace, PureDP, ZeroConcentratedDP
from sordino.mechanisms import (
    DiscreteGaussianMechanism,
    DiscreteLaplaceMechanism,
    GaussianMechanism,
    GeometricMechanism,
    GridGaussianMechanism,
    KNormMechanism,
    LaplaceMechanism,
)
from sordino.mechanisms.base import to_float_array

COUNT = 80_000


def fits(noise, law):
    return stats.kstest(noise, law).pvalue


def two_armed(noise, law, scale):
    assert fits(noise / scale, law) > 1e-3
    assert fits(noise / scale / 1.05, law) < 1e-4
    assert fits(noise / scale * 1.05, law) < 1e-4


def test_laplace_noise_has_scale_sensitivity_over_epsilon(seeded):
    mechanism = LaplaceMechanism(epsilon=0.25, l1_sensitivity=3.0, rng=seeded(1))
    assert mechanism.scale == 12.0
    two_armed(mechanism.release(np.full(COUNT, 5.0)) - 5.0, "laplace", 12.0)
    assert mechanism.event() == Laplace(noise_multiplier=4.0)


def test_gaussian_noise_has_deviation_multiplier_times_sensitivity(seeded):
    mechanism = GaussianMechanism(noise_multiplier=1.5, l2_sensitivity=2.0, rng=seeded(2))
    two_armed(mechanism.release(np.zeros(COUNT)), "norm", 3.0)
    assert mechanism.event() == Gaussian(noise_multiplier=1.5)


def test_grid_gaussian_noise_has_deviation_multiplier_times_sensitivity(seeded):
    mechanism = GridGaussianMechanism(
        noise_multiplier=1.5, l2_sensitivity=2.0, dimension=COUNT, granularity=2.0**-20, rng=seeded(3)
    )
    assert mechanism.stddev == pytest.approx(3.0, rel=1e-3)
    assert mechanism.stddev >= 3.0
    two_armed(mechanism.release(np.zeros(COUNT)), "norm", 3.0)
    assert mechanism.event() == Gaussian(noise_multiplier=1.5)


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_discrete_noise_on_a_fine_grid_has_the_scale_of_its_continuous_twin(seeded, mechanism):
    shared = {"dimension": COUNT, "granularity": 2.0**-24, "rng": seeded(4)}
    if mechanism == "laplace":
        built = DiscreteLaplaceMechanism(epsilon=0.5, l1_sensitivity=4.0, **shared)
        two_armed(built.release(np.zeros(COUNT)), "laplace", 8.0)
        assert 8.0 <= built.scale < 8.0 * 1.01
        assert built.event().epsilon <= 0.5
    else:
        built = DiscreteGaussianMechanism(noise_multiplier=2.0, l2_sensitivity=4.0, **shared)
        two_armed(built.release(np.zeros(COUNT)), "norm", 8.0)
        assert built.event() == ZeroConcentratedDP(rho=0.125)


def test_geometric_noise_is_whole_and_has_its_scale(seeded):
    mechanism = GeometricMechanism(epsilon=0.5, l1_sensitivity=2, dimension=COUNT, rng=seeded(5))
    noise = mechanism.release(np.full(COUNT, 7)) - 7
    assert noise.dtype == np.int64
    q = math.exp(-1 / 4)
    spread = math.sqrt(2 * q) / (1 - q)
    assert noise.std() == pytest.approx(spread, rel=0.025)
    assert noise.std() != pytest.approx(spread * 1.05, rel=0.025)


@pytest.mark.parametrize("norm", [1, 2, math.inf])
@pytest.mark.parametrize("dimension", [1, 2, 7])
def test_the_norm_of_k_norm_noise_is_gamma_of_the_dimension(seeded, norm, dimension):
    # r·‖u‖ with r ~ Gamma(k + 1) and ‖u‖ = U^{1/k} is Gamma(k).
    mechanism = KNormMechanism(epsilon=2.0, sensitivity=3.0, norm=norm, dimension=dimension, rng=seeded(6))
    norms = np.array([np.linalg.norm(mechanism.noise(), ord=norm) for _ in range(2000)])
    law = stats.gamma(dimension, scale=1.5).cdf
    assert fits(norms, law) > 1e-3
    assert fits(norms * 1.2, law) < 1e-4
    assert fits(norms / 1.2, law) < 1e-4


def test_k_norm_noise_in_l1_is_laplace_noise_in_every_coordinate(seeded):
    mechanism = KNormMechanism(epsilon=1.0, sensitivity=2.0, norm=1, dimension=3, rng=seeded(7))
    noise = np.array([mechanism.noise() for _ in range(2000)])
    assert fits(noise[:, 1] / 2.0, "laplace") > 1e-3
    # Independent: within four standard errors. The same radius with a uniform direction of the ℓ2 ball gives 0.17.
    assert abs(np.corrcoef(np.abs(noise[:, 0]), np.abs(noise[:, 2]))[0, 1]) < 4 / math.sqrt(2000)


def test_k_norm_directions_are_uniform_in_the_ball(seeded):
    square = KNormMechanism(epsilon=1.0, sensitivity=1.0, norm=math.inf, dimension=2, rng=seeded(8))
    round_ = KNormMechanism(epsilon=1.0, sensitivity=1.0, norm=2, dimension=2, rng=seeded(9))
    z = np.array([square.noise() for _ in range(2000)])
    # Uniform in the square: the smaller coordinate over the larger one is uniform, and signs are fair.
    ratio = np.abs(z).min(axis=1) / np.abs(z).max(axis=1)
    assert fits(ratio, "uniform") > 1e-3
    assert abs((z > 0).mean() - 0.5) < 0.02
    angles = np.arctan2(*np.array([round_.noise() for _ in range(2000)]).T) / (2 * math.pi) + 0.5
    assert fits(angles, "uniform") > 1e-3


def test_k_norm_beats_laplace_where_the_change_is_known_in_l_infinity(seeded):
    # All 50 coordinates may move by 1 at once: ℓ1 sensitivity 50.
    mechanism = KNormMechanism(epsilon=1.0, sensitivity=1.0, norm=math.inf, dimension=50, rng=seeded(10))
    noise = np.array([mechanism.noise() for _ in range(400)])
    assert np.abs(noise).mean() < 0.6 * 50  # Laplace: mean absolute value 50


def test_events_name_the_law():
    assert KNormMechanism(epsilon=2.0, sensitivity=1.0, norm=1, dimension=4).event() == Laplace(noise_multiplier=0.5)
    assert KNormMechanism(epsilon=2.0, sensitivity=1.0, norm=2, dimension=4).event() == PureDP(epsilon=2.0)
    assert GeometricMechanism(epsilon=0.5).event() == DiscreteLaplace(scale=2.0, sensitivity=1)
    assert DiscreteGaussianMechanism(noise_multiplier=3.0, l2_sensitivity=2, integers=True).event() == DiscreteGaussian(
        stddev=6.0, sensitivity=2
    )


@pytest.mark.parametrize("granularity", [0.25, 2.0**-10, None])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.7])
def test_a_discrete_laplace_event_never_exceeds_epsilon_and_wastes_little(granularity, epsilon):
    mechanism = DiscreteLaplaceMechanism(epsilon=epsilon, l1_sensitivity=1.0, granularity=granularity)
    event = mechanism.event()
    assert event.sensitivity <= 256
    loss = event.sensitivity / event.scale
    assert epsilon * (1 - 1e-8) < loss <= epsilon * (1 + 1e-15)
    # The scale pays for the grid: sensitivity and at most one step for rounding (two when steps are few).
    assert mechanism.scale * epsilon >= 1.0 + mechanism.grid.step * (1 - 1e-9)


@pytest.mark.parametrize("refine", [2, 3, 8])
def test_discrete_laplace_on_a_fine_grid_is_post_processing_of_a_coarse_one(refine):
    # The law on ℤ is that on refine·ℤ convolved with a difference of truncated geometric variables (proof page).
    q, reach = math.exp(-1 / 5), 400
    fine = q ** np.abs(np.arange(-reach, reach + 1))
    fine /= fine.sum()
    coarse = np.zeros_like(fine)
    steps = np.arange(-(reach // refine), reach // refine + 1)
    coarse[reach + refine * steps] = (q**refine) ** np.abs(steps)
    coarse /= coarse.sum()
    short = q ** np.arange(refine)
    short /= short.sum()
    kernel = np.convolve(short, short[::-1])
    rebuilt = np.convolve(coarse, kernel, mode="same")
    assert np.abs(rebuilt - fine)[50:-50].max() < 1e-12


@pytest.mark.parametrize(("narrow", "wide"), [(2.0, 2.1), (1.0, 7.0)])
def test_discrete_laplace_noise_of_a_larger_scale_is_post_processing_of_a_smaller_one(narrow, wide):
    # Convolving the narrow law with a mixture of 0 and the wide law gives the wide law (proof page).
    whole = np.arange(-600, 601)
    q, r = math.exp(-1 / narrow), math.exp(-1 / wide)
    small, large = ((1 - a) / (1 + a) * a ** np.abs(whole) for a in (q, r))
    stay = q / r * ((1 - r) / (1 - q)) ** 2
    kernel = (1 - stay) * large
    kernel[600] += stay
    assert 0 < stay < 1
    assert np.abs(np.convolve(small, kernel, mode="same") - large)[100:-100].max() < 1e-12


@pytest.mark.parametrize("granularity", [1.0, 0.25, 2.0**-8])
def test_the_largest_privacy_loss_on_the_grid_is_at_most_epsilon_after_rounding(granularity):
    # Brute force over pairs of values that differ by exactly the sensitivity: the released laws are shifted grids.
    mechanism = DiscreteLaplaceMechanism(epsilon=1.0, l1_sensitivity=0.9, granularity=granularity)
    scale = mechanism.ratio[0] / mechanism.ratio[1]
    for value in np.linspace(-1, 1, 201):
        first, second = mechanism.grid.integers([value, value + 0.9])
        assert abs(int(first) - int(second)) / scale <= 1.0


@pytest.mark.parametrize("dimension", [1, 2, 5, 16])
def test_rounding_to_the_grid_moves_vectors_by_no_more_than_the_added_sensitivity(dimension, seeded):
    mechanism = GridGaussianMechanism(
        noise_multiplier=1.0, l2_sensitivity=1.0, dimension=dimension, granularity=0.125, rng=seeded(11)
    )
    generator = np.random.default_rng(0)
    for _ in range(300):
        value = generator.normal(size=dimension)
        direction = generator.normal(size=dimension) if generator.random() < 0.7 else np.ones(dimension)
        other = value + direction / np.linalg.norm(direction)
        moved = np.linalg.norm((mechanism.grid.integers(value) - mechanism.grid.integers(other)).astype(float))
        assert moved <= mechanism.grid_stddev


def test_values_on_the_grid_stay_on_the_grid(seeded):
    for built in (
        DiscreteLaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0, granularity=0.5, rng=seeded()),
        DiscreteGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0, granularity=0.5, rng=seeded()),
        GridGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0, granularity=0.5, rng=seeded()),
    ):
        assert {float(built.release(0.3)) * 2 % 1 for _ in range(20)} == {0.0}


def test_discrete_gaussian_vectors_pay_rounding_with_the_root_of_the_dimension():
    flat = DiscreteGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=4.0, dimension=9, granularity=1.0)
    assert flat.grid_sensitivity == 4 + 3
    assert flat.stddev >= 7.0
    whole = DiscreteGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=4.0, dimension=9, integers=True)
    assert whole.grid_sensitivity == 4


@pytest.mark.parametrize(
    "build",
    [
        lambda r: LaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0, rng=r),
        lambda r: GaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0, rng=r),
        lambda r: KNormMechanism(epsilon=1.0, sensitivity=1.0, norm=2, dimension=6, rng=r),
        lambda r: DiscreteLaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0, dimension=6, rng=r),
        lambda r: DiscreteGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0, dimension=6, rng=r),
        lambda r: GridGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0, dimension=6, rng=r),
    ],
    ids=["laplace", "gaussian", "knorm", "discrete-laplace", "discrete-gaussian", "grid-gaussian"],
)
def test_shapes_are_kept_and_values_that_are_not_finite_are_released_as_zero(build, seeded):
    value = np.array([[math.nan, math.inf, -math.inf], [1.0, 2.0, 1e300]])
    released = build(seeded(1)).release(value)
    clean = build(seeded(1)).release(np.array([[0.0, 0.0, 0.0], [1.0, 2.0, 1e300]]))
    assert released.shape == (2, 3)
    assert np.array_equal(released, clean)
    assert np.isfinite(released).all()


def test_a_scalar_gives_a_scalar(seeded):
    assert np.ndim(LaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0).release(3.0)) == 0
    assert isinstance(GeometricMechanism(epsilon=1.0).release(3), np.int64)
    assert isinstance(GridGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0).release(3), np.float64)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LaplaceMechanism(epsilon=0.0, l1_sensitivity=1.0), "epsilon must be a finite number > 0, got 0.0"),
        (lambda: LaplaceMechanism(epsilon=1.0, l1_sensitivity=-1.0), "l1_sensitivity must be"),
        (lambda: LaplaceMechanism(epsilon=1e-300, l1_sensitivity=1e300), "scale must be a finite number"),
        (lambda: KNormMechanism(epsilon=1.0, sensitivity=1.0, norm=3, dimension=1), "norm must be one of 1, 2, inf"),
        (lambda: KNormMechanism(epsilon=1.0, sensitivity=1.0, norm=2, dimension=0), "dimension must be an integer ≥ 1"),
        (
            lambda: DiscreteLaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0, granularity=0.1),
            "granularity must be a power of two, got 0.1. Use 0.0625",
        ),
        (lambda: DiscreteLaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0, granularity=2.0**-60), "grid_scale"),
        (lambda: GeometricMechanism(epsilon=1e-20), "scale must be a number in"),
        (
            lambda: GridGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0, granularity=2.0**-60),
            "Choose a coarser granularity",
        ),
        (
            lambda: DiscreteGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=0.5, integers=True),
            "An integer moves by 1",
        ),
        (
            lambda: DiscreteGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1, integers=True, granularity=0.5),
            "Integers live on the grid of step 1",
        ),
        (lambda: GaussianMechanism(noise_multiplier=0.0, l2_sensitivity=1.0), "noise_multiplier must be"),
    ],
)
def test_wrong_parameters_are_refused_with_the_next_step(build, message):
    with pytest.raises(InvalidArgument) as caught:
        build()
    assert message in str(caught.value)


def test_wrong_kinds_and_shapes_of_values_are_refused_without_quoting_them():
    with pytest.raises(InvalidArgument, match="dtype"):
        LaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0).release(["secret"])
    with pytest.raises(InvalidArgument, match="3 entries, got 2"):
        KNormMechanism(epsilon=1.0, sensitivity=1.0, norm=2, dimension=3).release([1.0, 2.0])
    with pytest.raises(InvalidArgument, match="array of integers"):
        GeometricMechanism(epsilon=1.0).release(0.12345)


def test_the_same_noise_never_comes_twice(seeded):
    shared = seeded(1)
    mechanisms = [LaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0, rng=shared) for _ in range(2)]
    released = [mechanism.release(0.0) for mechanism, _ in itertools.product(mechanisms, range(3))]
    assert len(set(released)) == 6
    fresh = [LaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0).release(0.0) for _ in range(6)]
    assert len(set(fresh)) == 6


@pytest.mark.parametrize(
    "entry", [10**400, -(10**400), Fraction(10**400, 3), None, "x", object(), {}, float("nan"), Decimal("sNaN")]
)
def test_an_object_that_is_no_finite_number_is_absent_and_stops_nothing(entry):
    values = np.array([1.0, entry, True, np.bool_(True), np.float16(2)], dtype=object)
    found = to_float_array(values, "value")
    assert found[[0, 2, 3, 4]].tolist() == [1.0, 1.0, 1.0, 2.0]
    assert np.isnan(found[1])


@pytest.mark.parametrize("norm", [0, 3, 2.5, -math.inf])
def test_a_norm_that_is_no_number_of_ours_is_refused_with_the_number_to_give(norm):
    with pytest.raises(InvalidArgument, match=r"Give a number: 2 for ℓ2, math\.inf for ℓ∞"):
        KNormMechanism(epsilon=1.0, sensitivity=1.0, norm=norm, dimension=3)
