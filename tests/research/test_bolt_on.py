"""Permutation descent with noise on its last weights: the sensitivity by brute force, and what is refused."""

import numpy as np
import pytest

from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators.losses import HuberHinge, HuberResidual, Logistic, SmoothMargin, Softmax
from sordino.events import PureDP
from sordino.randomness import KeyedRNG
from sordino.research import BoltOnDescent

LOSSES = [Logistic(), HuberHinge(width=0.2), HuberResidual(threshold=1.0), Softmax(outputs=3), SmoothMargin(outputs=3)]


def targets_of(loss, generator, count):
    if loss.outputs > 1:
        return generator.integers(0, loss.outputs, size=count)
    return generator.choice([-1.0, 1.0], size=count)


def build(loss, **changes):
    given = {"epsilon": 1.0, "delta": 1e-6, "dimension": 2, "passes": 3, "batch_size": 4}
    return BoltOnDescent(loss=loss, **(given | changes))


@pytest.mark.parametrize("share", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_no_replaced_record_moves_the_last_weights_farther(loss, share):
    generator = np.random.default_rng(0)
    mechanism = build(loss, learning_rate=share / loss.curvature)
    zeroed = build(loss, learning_rate=share / loss.curvature, neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    farthest = 0.0
    for count in (1, 5, 11):  # the last batches are smaller
        for _ in range(30):
            rows = generator.normal(size=(count, 2))
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            targets = targets_of(loss, generator, count)
            order, place = generator.permutation(count), generator.integers(count)
            other, others = rows.copy(), targets.copy()
            # A record that pulls the other way, or at random.
            other[place] = -rows[place] if generator.random() < 0.5 else generator.permuted(rows[place])
            others[place] = targets_of(loss, generator, 1)[0]
            ours = mechanism.exact_value(rows, targets, order)
            farthest = max(farthest, np.linalg.norm(ours - mechanism.exact_value(other, others, order)))
            without = rows.copy()
            without[place] = 0.0  # a row of zeros has no gradient
            moved = np.linalg.norm(ours - mechanism.exact_value(without, targets, order))
            assert moved <= zeroed.l2_sensitivity
    assert 0.2 * mechanism.l2_sensitivity < farthest <= mechanism.l2_sensitivity


def test_a_larger_step_than_allowed_drives_two_runs_apart_and_is_refused():
    loss = HuberResidual(threshold=10.0)
    with pytest.raises(InvalidArgument, match="learning_rate must be ≤ 2"):
        build(loss, learning_rate=2.1)
    with pytest.raises(InvalidArgument, match="neighboring_relation must be"):
        build(loss, neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE)


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_noise_has_the_declared_size_and_the_model_learns(delta):
    generator = np.random.default_rng(1)
    rows = generator.normal(size=(4000, 2))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    targets = np.where(rows[:, 0] > 0, 1.0, -1.0)
    mechanism = build(
        Logistic(), delta=delta, epsilon=2.0, batch_size=100, passes=5, rng=KeyedRNG(seed=1, reproducible=True)
    )
    assert isinstance(mechanism.event(), PureDP) == (delta == 0)
    assert mechanism.l2_sensitivity == pytest.approx(2 * 5 * 4.0 / 100, rel=1e-5)
    released = np.stack([mechanism.release(rows, targets)[:, 0] for _ in range(40)])
    assert np.mean((rows @ released.T > 0) == (targets[:, None] > 0)) > 0.85
    exact = mechanism.exact_value(rows, targets, np.arange(4000))[:, 0]
    size = np.sqrt(np.mean(np.sum((released - exact) ** 2, axis=1)))
    if delta == 0:  # ‖noise‖ is Gamma(2, Δ/ε): E‖·‖² = 6(Δ/ε)²
        assert size == pytest.approx(6**0.5 * mechanism.l2_sensitivity / 2.0, rel=0.4)
    else:
        multiplier = mechanism.event().noise_multiplier
        assert size == pytest.approx(2**0.5 * multiplier * mechanism.l2_sensitivity, rel=0.4)
