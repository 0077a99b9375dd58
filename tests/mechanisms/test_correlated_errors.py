"""Errors of prefix sums under correlated noise: published values, slow matrices, and no better neighbor."""

import math

import numpy as np
import pytest

from sordino.errors import InvalidArgument
from sordino.mechanisms.correlated import (
    BandedInverse,
    BandedToeplitz,
    BinaryTree,
    BufferedToeplitz,
    FixedEpochOrder,
    IndependentNoise,
    MinSeparation,
    SingleParticipation,
    max_error,
    mean_error,
    noise_matrix,
    optimize_banded,
    optimize_buffered,
    optimize_dense,
    prefix_variances,
    sensitivity,
    square_root_coefficients,
    tree_sensitivity,
)

ONCE = SingleParticipation()


def square_root(steps):
    return BandedToeplitz(coefficients=square_root_coefficients(steps), steps=steps)


def worked_out(strategy, momentum=0.0):
    """Prefix variances from whole matrices: positions of an optimizer that is driven by C⁻¹, one step at a time."""
    noise = np.linalg.inv(strategy.matrix())
    velocity, position, variances = np.zeros(strategy.steps), np.zeros(strategy.steps), []
    for row in noise:
        velocity = momentum * velocity + row
        position = position + velocity
        variances.append(float(position @ position))
    return np.array(variances)


# Golden values: two independent public implementations of matrix factorization, agreed to the digits shown.


@pytest.mark.parametrize(
    ("steps", "mean", "largest", "size"),
    [
        (16, 1.796814, 1.943879, 1.394231),
        (64, 2.229676, 2.388848, 1.545590),
        (256, 2.668782, 2.831050, 1.682572),
        (1024, 3.109790, 3.272554, 1.809020),
    ],
)
def test_the_square_root_has_its_published_errors(steps, mean, largest, size):
    strategy = square_root(steps)
    assert mean_error(strategy) == pytest.approx(mean, abs=6e-7)
    assert max_error(strategy) == pytest.approx(largest, abs=6e-7)
    assert sensitivity(strategy, ONCE) == pytest.approx(size, abs=6e-7)


def test_the_square_root_is_one_and_its_inverse_has_the_published_coefficients():
    strategy = square_root(32)
    assert np.allclose(strategy.matrix() @ strategy.matrix(), np.tril(np.ones((32, 32))))
    assert strategy.noise_column()[:5].tolist() == pytest.approx([1, -0.5, -0.125, -0.0625, -0.0390625])
    inverse = BandedInverse.square_root(bands=5, steps=32)
    assert inverse.coefficients == pytest.approx((1, -0.5, -0.125, -0.0625, -0.0390625))


@pytest.mark.parametrize(
    ("steps", "bands", "mean"),
    [(64, 8, 2.663975), (256, 16, 3.637574), (1024, 16, 6.342793), (1024, 64, 4.065913)],
)
def test_optimal_bands_have_their_published_errors(steps, bands, mean):
    strategy = optimize_banded(bands, steps=steps)
    assert mean_error(strategy) == pytest.approx(mean, abs=6e-7)
    assert sensitivity(strategy, ONCE) == pytest.approx(1.0)
    if bands == 8:
        assert max_error(strategy) == pytest.approx(3.447052, abs=6e-7)


@pytest.mark.parametrize(("buffers", "largest"), [(1, 3.850205), (2, 3.321261), (3, 3.269918), (4, 3.265380)])
def test_optimal_buffers_have_their_published_errors(buffers, largest):
    strategy = optimize_buffered(buffers, steps=1000)
    assert strategy.buffers == buffers
    assert max_error(strategy) == pytest.approx(largest, abs=1.1e-6)


@pytest.mark.parametrize(("steps", "epochs", "mean"), [(16, 1, 1.689406), (64, 1, 2.099869), (64, 4, 4.407855)])
def test_dense_optima_are_as_good_as_the_published_ones(steps, epochs, mean):
    strategy, participation = optimize_dense(steps, epochs=epochs), FixedEpochOrder(steps_per_epoch=steps // epochs)
    assert sensitivity(strategy, participation) == pytest.approx(1.0, abs=1e-9)
    # The published ones come from an iteration that was ended a little before the optimum.
    assert mean * (1 - 1e-5) < mean_error(strategy, participation) < mean + 6e-7


def test_several_participations_have_their_published_errors():
    participation = MinSeparation(min_separation=16, participations=4)
    assert sensitivity(square_root(64), participation) == pytest.approx(3.960620, abs=6e-7)
    assert mean_error(square_root(64), participation) == pytest.approx(5.713613, abs=6e-7)
    assert sensitivity(optimize_banded(16, steps=64), participation) == pytest.approx(2.0)
    assert mean_error(optimize_banded(16, steps=64), participation) == pytest.approx(4.700109, abs=6e-7)


@pytest.mark.parametrize(
    ("steps", "mean", "largest"), [(1024, 5.649876, 7.989459), (64, 3.652307, math.sqrt(7 * 3.795495))]
)
def test_the_refined_tree_has_its_published_errors_at_the_nodes_sensitivity(steps, mean, largest):
    variances = prefix_variances(BinaryTree(steps=steps))
    assert tree_sensitivity(steps) * math.sqrt(variances.mean()) == pytest.approx(mean, abs=6e-7)
    # Level h has variance 2^h/(2^(h+1) − 1); the longest prefix has a node of every level below the root.
    levels = steps.bit_length() - 1
    assert variances.max() == pytest.approx(sum(2**h / (2 ** (h + 1) - 1) for h in range(levels)))
    if steps == 1024:
        assert tree_sensitivity(steps) * math.sqrt(variances.max()) == pytest.approx(largest, abs=6e-7)


def nodes_estimates(steps):
    """The tree the slow way: every node has its own noise; estimates from below; prefixes from the largest nodes."""
    names = [(low, 2**h) for h in range(steps.bit_length()) for low in range(0, steps - 2**h + 1, 2**h)]
    units = dict(zip(names, np.eye(len(names)), strict=True))

    def estimate(low, width):
        if width == 1:
            return units[low, 1], 1.0
        left, variance = estimate(low, width // 2)
        right, _ = estimate(low + width // 2, width // 2)
        weight = 2 * variance / (1 + 2 * variance)
        return weight * units[low, width] + (1 - weight) * (left + right), weight

    rows = []
    for end in range(1, steps + 1):
        row, low = np.zeros(len(names)), 0
        for h in reversed(range(end.bit_length())):
            if end >> h & 1:
                row, low = row + estimate(low, 2**h)[0], low + 2**h
        rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize("steps", [1, 2, 7, 8, 13, 32])
def test_one_draw_a_step_gives_the_trees_law(steps):
    slow = nodes_estimates(steps)
    quick = np.tril(np.ones((steps, steps))) @ noise_matrix(BinaryTree(steps=steps))
    assert np.allclose(quick @ quick.T, slow @ slow.T)


STRATEGIES = [
    IndependentNoise(steps=40),
    BandedToeplitz(coefficients=(0.9, 0.4, 0.2, -0.1), steps=40),
    BandedInverse(coefficients=(1.1, -0.5, -0.2), steps=40),
    BufferedToeplitz(decays=(0.9, 0.3), scales=(0.2, 0.1), steps=40),
    BinaryTree(steps=40),
    optimize_dense(40),
]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_variances_are_those_of_an_optimizer_driven_by_the_noise(strategy, momentum):
    assert np.allclose(prefix_variances(strategy, momentum=momentum), worked_out(strategy, momentum))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_matrix_column_and_stream_are_one_strategy(strategy):
    inverse = noise_matrix(strategy)
    assert np.allclose(inverse @ strategy.matrix(), np.eye(40))
    if strategy.column() is not None:
        assert np.allclose(strategy.matrix()[:, 0], strategy.column())
        assert np.allclose(inverse[:, 0], strategy.noise_column())
    rows, columns = np.nonzero(np.abs(strategy.matrix()) > 1e-12)
    assert (rows - columns).max() < strategy.bands
    shorter = strategy.leading(11)
    assert shorter.steps == 11
    assert np.allclose(shorter.matrix(), strategy.matrix()[:11, :11])


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_no_neighbor_of_the_optimal_bands_is_better(objective, momentum):
    error = mean_error if objective == "mean" else max_error
    best = optimize_banded(6, steps=50, objective=objective, momentum=momentum)
    reference = error(best, momentum=momentum)
    generator = np.random.default_rng(0)
    for size in (1e-3, 1e-2, 1e-1):
        for _ in range(20):
            moved = np.asarray(best.coefficients) + size * generator.normal(size=6)
            assert error(BandedToeplitz(coefficients=tuple(moved), steps=50), momentum=momentum) > reference


def test_bands_fitted_to_momentum_are_better_for_it_than_others():
    fitted = mean_error(optimize_banded(8, steps=200, momentum=0.9), momentum=0.9)
    assert fitted < mean_error(optimize_banded(8, steps=200), momentum=0.9)
    assert fitted < mean_error(IndependentNoise(steps=200), momentum=0.9)


def test_no_neighbor_of_the_optimal_buffers_is_better_for_several_participations():
    participation = MinSeparation(min_separation=20, participations=5)
    best = optimize_buffered(2, steps=100, participation=participation, objective="mean")
    reference = mean_error(best, participation)
    assert reference < mean_error(optimize_buffered(2, steps=100, objective="mean"), participation)
    generator = np.random.default_rng(0)
    for _ in range(30):
        decays = np.clip(np.asarray(best.decays) * (1 + 0.01 * generator.normal(size=2)), 0, 1)
        scales = np.asarray(best.scales) * (1 + 0.01 * generator.normal(size=2))
        moved = BufferedToeplitz(decays=tuple(decays), scales=tuple(scales), steps=100)
        assert mean_error(moved, participation) > reference * (1 - 1e-9)


def test_the_dense_optimum_beats_every_other_strategy():
    best = mean_error(optimize_dense(64))
    for other in (square_root(64), optimize_banded(64, steps=64), BinaryTree(steps=64), IndependentNoise(steps=64)):
        assert best < mean_error(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BandedToeplitz(coefficients=(0.0, 1.0), steps=4),
        lambda: BandedToeplitz(coefficients=(1.0,) * 5, steps=4),
        lambda: BandedToeplitz(coefficients=(1.0, math.nan), steps=4),
        lambda: BandedInverse(coefficients=(), steps=4),
        lambda: BufferedToeplitz(decays=(1.1,), scales=(0.1,), steps=4),
        lambda: BufferedToeplitz(decays=(0.5, 0.5), scales=(0.1,), steps=4),
        lambda: BinaryTree(steps=0),
        lambda: optimize_banded(5, steps=4),
        lambda: optimize_banded(2, steps=4, objective="median"),
        lambda: optimize_dense(10, epochs=3),
        lambda: prefix_variances(IndependentNoise(steps=4), momentum=1.0),
        lambda: prefix_variances(BinaryTree(steps=5000)),
    ],
)
def test_arguments_outside_their_range_are_refused(make):
    with pytest.raises(InvalidArgument, match="must be"):
        make()
