"""The graphical model against full enumeration, its fit against measured marginals, and its sampler."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.randomness import KeyedRNG
from sordino.synthesis.graphical_model import (
    GraphicalModel,
    JunctionTree,
    NoisyMarginal,
    estimate_total,
    fit_model,
    tree_cells,
)

SIZES = (3, 2, 4, 2, 3)


def joint(sizes, potentials):
    """The whole distribution, cell by cell."""
    logs = np.zeros(sizes)
    for clique, table in potentials.items():
        logs = logs + table.reshape([size if column in clique else 1 for column, size in enumerate(sizes)])
    weights = np.exp(logs)
    return weights / weights.sum(), math.log(weights.sum())


def summed(table, clique):
    return table.sum(axis=tuple(axis for axis in range(table.ndim) if axis not in clique))


def random_potentials(generator, cliques, scale=1.5):
    return {clique: scale * generator.normal(size=[SIZES[column] for column in clique]) for clique in cliques}


cliques_of_columns = st.lists(
    st.sets(st.integers(0, len(SIZES) - 1), min_size=1, max_size=3).map(lambda one: tuple(sorted(one))),
    min_size=1,
    max_size=7,
    unique=True,
)


@given(cliques=cliques_of_columns, seed=st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_every_marginal_is_that_of_full_enumeration(cliques, seed):
    potentials = random_potentials(np.random.default_rng(seed), cliques)
    model = GraphicalModel(SIZES, potentials, total=1.0)
    whole, log_partition = joint(SIZES, potentials)
    assert model.log_partition == pytest.approx(log_partition, abs=1e-9)
    for count in range(len(SIZES) + 1):
        for clique in itertools.combinations(range(len(SIZES)), count):
            np.testing.assert_allclose(model.probabilities(clique), summed(whole, clique), atol=1e-12)


@given(cliques=cliques_of_columns)
@settings(max_examples=60, deadline=None)
def test_a_junction_tree_holds_every_clique_and_has_the_running_intersection_property(cliques):
    tree = JunctionTree.of_cliques(SIZES, cliques)
    assert all(any(set(clique) <= set(known) for known in tree.cliques) for clique in cliques)
    assert set().union(*tree.cliques) == set(range(len(SIZES)))
    assert tree.parents[0] == -1
    for place in range(1, len(tree.cliques)):
        assert tree.parents[place] < place
        before = set().union(*tree.cliques[:place])
        assert set(tree.cliques[place]) & before == set(tree.separator(place))
    assert tree_cells(SIZES, cliques) == sum(math.prod(SIZES[c] for c in clique) for clique in tree.cliques)


def test_pairs_that_form_a_tree_are_never_joined_into_larger_cliques():
    sizes = (40, 2, 2, 40, 3, 30)
    pairs = [(0, 1), (1, 3), (1, 2), (2, 5), (4, 5)]
    assert sorted(JunctionTree.of_cliques(sizes, pairs).cliques) == sorted(pairs)


def test_extreme_potentials_neither_overflow_nor_lose_a_row():
    model = GraphicalModel((2, 2), {(0, 1): np.array([[0.0, -2000.0], [-5000.0, -5001.0]])}, total=1.0)
    assert model.probabilities((0,)).tolist() == [1.0, 0.0]
    assert np.isfinite(model.sample(5, KeyedRNG().new_stream("test"))).all()


@pytest.mark.parametrize("cliques", [[(0, 1), (1, 2), (3, 4)], [(0, 1), (1, 2), (0, 2), (2, 3, 4)]])
def test_a_fit_to_exact_marginals_has_these_marginals_and_the_highest_entropy(cliques):
    whole, _ = joint(SIZES, random_potentials(np.random.default_rng(3), cliques))
    total = 50_000.0
    measured = [NoisyMarginal(clique=clique, counts=total * summed(whole, clique), stddev=0.01) for clique in cliques]
    model = fit_model(SIZES, measured, steps=3000)
    assert model.total == pytest.approx(total)
    for part in measured:
        np.testing.assert_allclose(model.marginal(part.clique), part.counts, atol=1.0)
    # The law has these potentials, so it is itself the one of highest entropy.
    np.testing.assert_allclose(model.probabilities(tuple(range(5))), whole, atol=2e-4)


@pytest.mark.parametrize("stddev", [1.0, 30.0, 300.0])
def test_a_fit_to_noisy_marginals_is_nearer_to_the_truth_than_the_noise(stddev):
    cliques = [(0, 1), (1, 2), (2, 3), (3, 4), (0,), (2,)]
    generator = np.random.default_rng(5)
    whole, _ = joint(SIZES, random_potentials(generator, cliques))
    total = 20_000.0
    measured = [
        NoisyMarginal(clique=clique, counts=exact + stddev * generator.normal(size=exact.shape), stddev=stddev)
        for clique in cliques
        for exact in [total * summed(whole, clique)]
    ]
    model = fit_model(SIZES, measured, steps=500)
    error = np.concatenate(
        [(model.marginal(one.clique) - total * summed(whole, one.clique)).ravel() for one in measured]
    )
    residual = np.concatenate([(model.marginal(one.clique) - one.counts).ravel() for one in measured])
    assert np.sqrt(np.mean(error**2)) < stddev
    assert np.sqrt(np.mean(residual**2)) < 1.3 * stddev
    for part in measured:
        assert (model.marginal(part.clique) >= 0).all()


def test_two_measurements_of_one_marginal_are_averaged_by_their_precision():
    counts = np.array([700.0, 300.0])
    measured = [
        NoisyMarginal(clique=(0,), counts=counts + 90.0, stddev=30.0),
        NoisyMarginal(clique=(0,), counts=counts - 10.0, stddev=10.0),
    ]
    # Weights 1/900 and 1/100: 0.1 · 90 − 0.9 · 10 = 0. The fit may stay a small part of the noise away.
    np.testing.assert_allclose(fit_model((2,), measured, steps=500).marginal((0,)), counts, atol=2.0)


def test_the_number_of_records_is_averaged_by_precision_and_never_below_one():
    parts = [
        NoisyMarginal(clique=(0,), counts=np.array([60.0, 60.0]), stddev=1.0),
        NoisyMarginal(clique=(1,), counts=np.array([50.0, 0.0, 0.0, 0.0]), stddev=1.0),
    ]
    assert estimate_total(parts) == pytest.approx((120 / 2 + 50 / 4) / (1 / 2 + 1 / 4))
    empty = [NoisyMarginal(clique=(0,), counts=np.array([-50.0, -60.0]), stddev=10.0)]
    assert fit_model((2,), empty).total == 1.0


def test_sampled_counts_stay_within_a_few_records_of_their_expectations_on_cliques():
    cliques = [(0, 1), (1, 2), (2, 3, 4)]
    potentials = random_potentials(np.random.default_rng(9), cliques, scale=1.0)
    model, count = GraphicalModel(SIZES, potentials, total=1.0), 5000
    records = model.sample(count, KeyedRNG().new_stream("test"))
    whole, _ = joint(SIZES, potentials)
    drawn = np.zeros(SIZES)
    np.add.at(drawn, tuple(records.T), 1)
    # The root's cells are off by less than 1; each further clique adds at most 1 a group.
    for column in range(5):
        assert np.abs(summed(drawn, (column,)) - count * summed(whole, (column,))).max() < 30
    # All columns together: chi-square of independent draws at most, with 143 degrees of freedom.
    assert ((drawn - count * whole) ** 2 / (count * whole)).sum() < 143 + 6 * math.sqrt(2 * 143)


def test_samples_of_one_record_have_the_models_law():
    potentials = {(0, 1): np.log(np.array([[0.5, 0.1], [0.1, 0.3]]))}
    model = GraphicalModel((2, 2), potentials, total=1.0)
    stream = KeyedRNG().new_stream("test")
    drawn = np.zeros((2, 2))
    for _ in range(4000):
        drawn[tuple(model.sample(1, stream)[0])] += 1
    np.testing.assert_allclose(drawn / 4000, [[0.5, 0.1], [0.1, 0.3]], atol=0.04)
