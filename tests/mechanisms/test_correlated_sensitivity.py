"""Sensitivity of correlated noise against all participations and all directions of few steps."""

import itertools
import math

import numpy as np
import pytest

from sordino.errors import InvalidArgument
from sordino.mechanisms.correlated import (
    BandedInverse,
    BandedToeplitz,
    BinaryTree,
    BufferedToeplitz,
    CyclicPoisson,
    DenseStrategy,
    FixedEpochOrder,
    IndependentNoise,
    MinSeparation,
    SingleParticipation,
    matrix_sensitivity,
    optimize_dense,
    sensitivity,
    square_root_coefficients,
    tree_sensitivity,
)


def patterns(participation, steps):
    """Every set of steps that the participation's words allow."""
    if isinstance(participation, FixedEpochOrder):
        yield from (tuple(range(j, steps, participation.steps_per_epoch)) for j in range(participation.steps_per_epoch))
        return
    most = participation.max_participations(steps)
    for count in range(1, most + 1):
        for places in itertools.combinations(range(steps), count):
            if all(b - a >= participation.min_separation for a, b in itertools.pairwise(places)):
                yield places


def worst(matrix, participation):
    """The largest change over all participations and all signs of one-dimensional records."""
    largest = 0.0
    for places in patterns(participation, matrix.shape[1]):
        for signs in itertools.product((1.0, -1.0), repeat=len(places) - 1):
            largest = max(largest, float(np.linalg.norm(matrix[:, list(places)] @ np.array((1.0, *signs)))))
    return largest


PARTICIPATIONS = [
    SingleParticipation(),
    MinSeparation(min_separation=1, participations=3),
    MinSeparation(min_separation=2),
    MinSeparation(min_separation=3),
    MinSeparation(min_separation=3, participations=2),
    MinSeparation(min_separation=20),
    FixedEpochOrder(steps_per_epoch=3),
    FixedEpochOrder(steps_per_epoch=5),
]
EXACT = {
    "independent": IndependentNoise(steps=10),
    "square root": BandedToeplitz(coefficients=square_root_coefficients(10), steps=10),
    "three bands": BandedToeplitz(coefficients=(0.8, 0.5, 0.2), steps=10),
    "buffers": BufferedToeplitz(decays=(0.9, 0.5), scales=(0.3, 0.2), steps=9),
    "banded inverse": BandedInverse.square_root(bands=4, steps=10),
    "uneven bands": DenseStrategy(coefficients=np.diag(np.arange(1.0, 9.0)) + np.diag(np.ones(7), -1)),
}


@pytest.mark.parametrize("participation", PARTICIPATIONS, ids=repr)
@pytest.mark.parametrize("name", sorted(EXACT))
def test_sensitivity_is_the_worst_of_all_participations(name, participation):
    strategy = EXACT[name]
    found, true = sensitivity(strategy, participation), worst(strategy.matrix(), participation)
    assert found >= true * (1 - 1e-12)
    exact = name != "uneven bands" or participation.max_participations(8) == 1 or participation.min_separation > 1
    if exact:
        assert found == pytest.approx(true)


@pytest.mark.parametrize("participation", PARTICIPATIONS, ids=repr)
def test_signs_and_shapes_without_a_theorem_are_bounded_from_above(participation):
    generator = np.random.default_rng(0)
    for _ in range(6):
        column = BandedToeplitz(coefficients=(1.0, *generator.normal(size=5)), steps=8)
        full = DenseStrategy(coefficients=np.tril(generator.normal(size=(8, 8)), -1) + np.eye(8))
        for strategy in (column, full, BinaryTree(steps=8)):
            found, true = sensitivity(strategy, participation), worst(strategy.matrix(), participation)
            assert found >= true * (1 - 1e-12)
            if participation.max_participations(8) == 1:
                assert found == pytest.approx(true)


def test_records_of_many_dimensions_move_no_further():
    generator = np.random.default_rng(1)
    matrix = np.tril(generator.normal(size=(9, 9)))
    participation = MinSeparation(min_separation=2, participations=4)
    bound = matrix_sensitivity(matrix, participation)
    for places in patterns(participation, 9):
        change = np.zeros((9, 3))
        directions = generator.normal(size=(len(places), 3))
        change[list(places)] = directions / np.linalg.norm(directions, axis=1, keepdims=True)
        assert np.linalg.norm(matrix @ change) <= bound * (1 + 1e-12)


def test_the_two_searches_agree_with_the_closed_form_on_many_steps():
    strategy = BandedToeplitz(coefficients=square_root_coefficients(128), steps=128)
    for participation in (MinSeparation(min_separation=16, participations=4), FixedEpochOrder(steps_per_epoch=32)):
        closed, searched = sensitivity(strategy, participation), matrix_sensitivity(strategy.matrix(), participation)
        assert closed * (1 - 1e-12) <= searched <= closed * 1.01


def test_a_column_that_rises_is_not_given_the_closed_form():
    strategy = BandedToeplitz(coefficients=(0.1, 1.0, 1.0), steps=6)
    participation = MinSeparation(min_separation=1)
    first_columns = np.linalg.norm(strategy.matrix().sum(axis=1))
    assert sensitivity(strategy, participation) == pytest.approx(first_columns)
    flat = BandedToeplitz(coefficients=(1.0, -1.0), steps=6)
    # The sum of all columns is (1, 0, …, 0); opposite signs reach far more.
    assert sensitivity(flat, participation) >= worst(flat.matrix(), participation) > 4


def tree_matrix(steps):
    nodes = [(low, 2**h) for h in range(steps.bit_length()) for low in range(0, steps - 2**h + 1, 2**h)]
    matrix = np.zeros((len(nodes), steps))
    for row, (low, width) in enumerate(nodes):
        matrix[row, low : low + width] = 1
    return matrix


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7, 8, 10])
@pytest.mark.parametrize("separation", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("participations", [1, 2, 3, 10])
def test_the_trees_search_finds_the_worst_participation(steps, separation, participations):
    participation = MinSeparation(min_separation=separation, participations=participations)
    matrix = tree_matrix(steps)
    true = max(float(np.sum(matrix[:, list(places)].sum(axis=1) ** 2)) for places in patterns(participation, steps))
    found = tree_sensitivity(steps, separation=separation, participations=participations)
    assert found**2 == pytest.approx(true)


# Golden values of a public implementation, which counts the steps *between* two participations.
@pytest.mark.parametrize(
    ("participations", "between", "steps", "value"), [(1, 7, 8, 4), (3, 3, 9, 11), (3, 2, 7, 9), (8, 2, 24, 88)]
)
def test_the_tree_has_its_published_sensitivities(participations, between, steps, value):
    found = tree_sensitivity(steps, separation=between + 1, participations=participations)
    assert found**2 == pytest.approx(value)
    participation = MinSeparation(min_separation=between + 1, participations=participations)
    assert sensitivity(BinaryTree(steps=steps), participation) <= found


def test_the_law_of_the_tree_is_more_private_than_its_nodes():
    # The noise of the prefixes has covariance K; a record in step j moves all later prefixes by 1.
    steps = 64
    strategy = BinaryTree(steps=steps)
    spread = np.tril(np.ones((steps, steps))) @ np.linalg.inv(strategy.matrix())
    precision = np.linalg.inv(spread @ spread.T)
    true = max(float(precision[j:, j:].sum()) for j in range(steps))
    assert sensitivity(strategy, SingleParticipation()) ** 2 == pytest.approx(true)
    assert true < 0.9 * tree_sensitivity(steps) ** 2


def test_a_long_tree_has_the_bound_of_its_nodes():
    assert sensitivity(BinaryTree(steps=2**20), SingleParticipation()) ** 2 == pytest.approx(21)


def test_cycles_need_as_many_groups_as_bands():
    strategy = BandedToeplitz(coefficients=(0.6, 0.8), steps=10)
    assert sensitivity(strategy, CyclicPoisson(groups=2, sample_rate=0.1)) == pytest.approx(1.0)
    assert sensitivity(strategy, CyclicPoisson(groups=5, sample_rate=0.1)) == pytest.approx(1.0)
    for other in (strategy, optimize_dense(10), BinaryTree(steps=10), BandedInverse.square_root(bands=2, steps=10)):
        with pytest.raises(InvalidArgument, match="bands must be at most groups"):
            sensitivity(other, CyclicPoisson(groups=1, sample_rate=0.1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: MinSeparation(min_separation=0),
        lambda: MinSeparation(min_separation=1, participations=0),
        lambda: FixedEpochOrder(steps_per_epoch=0),
        lambda: CyclicPoisson(groups=0, sample_rate=0.1),
        lambda: CyclicPoisson(groups=11, sample_rate=0.1),
        lambda: CyclicPoisson(groups=2, sample_rate=0.0),
        lambda: DenseStrategy(coefficients=np.ones((3, 3))),
        lambda: DenseStrategy(coefficients=np.zeros((3, 3))),
        lambda: DenseStrategy(coefficients=np.eye(3)[:2]),
        lambda: tree_sensitivity(10**6, separation=5000, participations=200),
        lambda: sensitivity(
            BufferedToeplitz(decays=(1.0,), scales=(-0.1,), steps=4097), MinSeparation(min_separation=2)
        ),
        lambda: sensitivity(BinaryTree(steps=10**6), MinSeparation(min_separation=5000)),
    ],
)
def test_arguments_outside_their_range_are_refused(make):
    with pytest.raises(InvalidArgument, match="must be"):
        make()


def test_ten_groups_of_a_tenth_are_whole_groups():
    assert CyclicPoisson(groups=10, sample_rate=0.1).group_rate == 1.0
    assert math.isclose(CyclicPoisson(groups=5, sample_rate=0.1).group_rate, 0.5)
