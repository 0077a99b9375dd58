"""The stream of correlated noise: its law, its state, and that no draw comes twice."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from sordino.errors import InvalidArgument, PrivacyError
from sordino.mechanisms.correlated import (
    BandedInverse,
    BandedToeplitz,
    BinaryTree,
    BufferedToeplitz,
    CorrelatedGaussianMechanism,
    IndependentNoise,
    MinSeparation,
    SingleParticipation,
    noise_matrix,
    optimize_banded,
    optimize_buffered,
    optimize_dense,
)
from sordino.randomness import KeyedRNG

STEPS, SIZE = 24, 4000
STRATEGIES = [
    IndependentNoise(steps=STEPS),
    optimize_banded(5, steps=STEPS),
    BandedInverse.square_root(bands=4, steps=STEPS),
    optimize_buffered(3, steps=STEPS),
    BinaryTree(steps=STEPS),
    optimize_dense(STEPS),
]
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)


def mechanism_with(strategy, **changes):
    values = {"participation": SingleParticipation(), "noise_multiplier": 1.5, "l2_sensitivity": 2.0} | changes
    return CorrelatedGaussianMechanism(strategy=strategy, **values)


def noises(stream, steps, rng, size=SIZE, dtype=torch.float32):
    rows = []
    for step in steps:
        row = torch.zeros(size, dtype=dtype)
        stream.add_noise_([row], rng=rng, step=step)
        rows.append(row.double().numpy())
    return np.array(rows)


def white(rows, stddev):
    """Whether rows are independent normal draws of this deviation: scale within 1.5 %, no two rows correlated.

    24 × 4000 draws fix the deviation to 0.23 %; correlations of two rows have standard error 1.6 %.
    """
    scale = np.sqrt(np.mean(rows**2)) / stddev
    each = np.sqrt(np.mean(rows**2, axis=1)) / stddev
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    return abs(scale - 1) < 0.015 and np.abs(each - 1).max() < 0.08 and np.abs(correlation).max() < 0.1


@each_strategy
def test_the_strategy_whitens_its_noise_and_a_deviation_5_percent_off_is_caught(strategy):
    mechanism = mechanism_with(strategy)
    rows = strategy.matrix() @ noises(mechanism.start(), range(STEPS), KeyedRNG())
    expected = 1.5 * mechanism.sensitivity * 2.0
    assert mechanism.stddev == pytest.approx(expected)
    assert white(rows, expected)
    assert not white(rows, expected * 1.05)
    assert not white(rows, expected * 0.95)


def test_another_strategy_does_not_whiten_it():
    mechanism = mechanism_with(optimize_banded(5, steps=STEPS))
    rows = noises(mechanism.start(), range(STEPS), KeyedRNG())
    for other in (optimize_banded(4, steps=STEPS), IndependentNoise(steps=STEPS), BinaryTree(steps=STEPS)):
        assert not white(other.matrix() @ rows, mechanism.stddev)


def test_scale_follows_the_sensitivity_of_the_participation():
    strategy = BandedToeplitz(coefficients=(1.0, 0.9, 0.8), steps=STEPS)
    for participation in (SingleParticipation(), MinSeparation(min_separation=2), MinSeparation(min_separation=6)):
        mechanism = mechanism_with(strategy, participation=participation)
        rows = strategy.matrix() @ noises(mechanism.start(), range(STEPS), KeyedRNG())
        assert white(rows, 3.0 * mechanism.sensitivity)


@each_strategy
def test_the_stream_is_the_matrix_on_the_draws(strategy, seeded):
    # The same seed and name give the same draws to independent noise, which is the draws themselves.
    plain = mechanism_with(IndependentNoise(steps=STEPS), noise_multiplier=1.0, l2_sensitivity=1.0)
    draws = noises(plain.start(), range(STEPS), seeded(3), size=50, dtype=torch.float64)
    mechanism = mechanism_with(strategy)
    rows = noises(mechanism.start(), range(STEPS), seeded(3), size=50, dtype=torch.float64)
    assert np.allclose(rows, noise_matrix(strategy) @ draws * mechanism.stddev, rtol=1e-9, atol=1e-9)
    single = noises(mechanism.start(), range(STEPS), seeded(3), size=50)
    assert single.shape == rows.shape


@each_strategy
@pytest.mark.parametrize("cut", [1, 9, 16])
def test_a_run_that_goes_on_from_its_state_has_the_law_of_one_run(strategy, cut):
    mechanism, first = mechanism_with(strategy), mechanism_with(strategy).start()
    before = noises(first, range(cut), KeyedRNG())
    text, blob = first.state_json(), save(first.state_tensors())
    second = mechanism.start()
    second.load_state_dict(load(blob), text)
    assert second.next_step == cut
    after = noises(second, range(cut, STEPS), KeyedRNG())
    assert white(strategy.matrix() @ np.vstack([before, after]), mechanism.stddev)


@pytest.mark.parametrize("strategy", STRATEGIES[1:], ids=lambda s: type(s).__name__)
def test_a_run_that_lost_its_buffers_has_another_law(strategy):
    mechanism = mechanism_with(strategy)
    first, second = mechanism.start(), mechanism.start()
    before = noises(first, range(15), KeyedRNG())
    forgotten = {name: torch.zeros_like(value) for name, value in first.state_tensors().items()}
    second.load_state_dict(forgotten, first.state_json())
    after = noises(second, range(15, STEPS), KeyedRNG())
    assert not white(strategy.matrix() @ np.vstack([before, after]), mechanism.stddev)


@each_strategy
def test_a_restored_stream_goes_on_to_the_last_bit(strategy, seeded):
    first = mechanism_with(strategy).start()
    noises(first, range(10), KeyedRNG(), size=30)
    restored = []
    for _ in range(2):
        stream = mechanism_with(strategy).start()
        stream.load_state_dict(first.state_tensors(), first.state_json())
        restored.append(noises(stream, range(10, STEPS), seeded(5), size=30))
    assert np.array_equal(*restored)


@each_strategy
def test_autocast_around_a_step_leaves_its_bits_alone(strategy, seeded):
    mechanism = mechanism_with(strategy)
    plain = noises(mechanism.start(), range(6), seeded(5), size=30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert np.array_equal(noises(mechanism.start(), range(6), seeded(5), size=30), plain)


def test_two_continuations_under_one_key_have_fresh_draws(seeded):
    mechanism, rng = mechanism_with(optimize_banded(5, steps=STEPS)), KeyedRNG()
    first = mechanism.start()
    noises(first, range(10), rng)
    text, tensors = first.state_json(), first.state_tensors()
    rows = [noises(first, range(10, 13), rng)]
    for _ in range(2):
        stream = mechanism.start()
        stream.load_state_dict(tensors, text)
        rows.append(noises(stream, range(10, 13), rng))
    # All share the past; once it is taken off, what is left must be unrelated.
    remembered = np.mean(rows, axis=0)
    fresh = np.vstack([row - remembered for row in rows])
    assert np.abs(np.corrcoef(fresh[::3]) - (1.5 * np.eye(3) - 0.5)).max() < 0.1


def test_steps_come_once_and_in_order():
    mechanism = mechanism_with(optimize_banded(3, steps=4))
    stream, rng, row = mechanism.start(), KeyedRNG(), torch.zeros(5)
    with pytest.raises(PrivacyError, match="step must be 0"):
        stream.add_noise_([row], rng=rng, step=1)
    stream.add_noise_([row], rng=rng, step=0)
    kept = row.clone()
    for step in (0, 2):
        with pytest.raises(PrivacyError, match="step must be 1"):
            stream.add_noise_([row], rng=rng, step=step)
    assert torch.equal(row, kept)
    for step in (1, 2, 3):
        stream.add_noise_([row], rng=rng, step=step)
    with pytest.raises(InvalidArgument, match="below 4"):
        stream.add_noise_([row], rng=rng, step=4)


def test_an_abandoned_step_takes_its_noise_along():
    strategy = BufferedToeplitz(decays=(0.9,), scales=(0.5,), steps=2)
    mechanism = mechanism_with(strategy)
    stream, rng, row = mechanism.start(), KeyedRNG(), torch.zeros(200_000)
    stream.skip_step([row], rng=rng, step=0)
    assert not row.any()
    stream.add_noise_([row], rng=rng, step=1)
    # x₁ = z₁ − ½ z₀.
    assert float(row.double().std()) == pytest.approx(mechanism.stddev * np.sqrt(1.25), rel=0.01)


def test_tensors_of_several_types_and_shapes_have_noise_of_their_own():
    mechanism = mechanism_with(optimize_banded(3, steps=3), noise_multiplier=1.0, l2_sensitivity=1.0)
    stream = mechanism.start()
    makes = [((40, 50), torch.float32), ((2000,), torch.float64), ((), torch.float32), ((2000,), torch.bfloat16)]
    total = [torch.zeros(shape, dtype=torch.float64) for shape, _ in makes]
    for step in range(3):
        values = [torch.zeros(shape, dtype=dtype) for shape, dtype in makes]
        stream.add_noise_(values, rng=KeyedRNG(), step=step)
        assert [value.dtype for value in values] == [dtype for _, dtype in makes]
        total = [old + value.double() for old, value in zip(total, values, strict=True)]
    big = np.stack([total[place].flatten().numpy() for place in (0, 1, 3)])
    assert np.abs(np.corrcoef(big) - np.eye(3)).max() < 0.12
    assert float(total[2]) != 0
    assert {value.dtype for value in stream.state_tensors().values()} == {torch.float32, torch.float64}


def test_other_tensors_in_the_middle_of_a_run_are_refused():
    stream = mechanism_with(optimize_banded(3, steps=3)).start()
    stream.add_noise_([torch.zeros(3), torch.zeros(2)], rng=KeyedRNG(), step=0)
    for others in ([torch.zeros(3)], [torch.zeros(2), torch.zeros(3)], [torch.zeros(3), torch.zeros(2).double()]):
        with pytest.raises(InvalidArgument, match="sizes and types"):
            stream.add_noise_(others, rng=KeyedRNG(), step=1)
    assert stream.next_step == 1


def test_states_of_other_runs_and_damaged_ones_are_refused():
    mechanism = mechanism_with(optimize_banded(3, steps=8))
    first = mechanism.start()
    noises(first, range(4), KeyedRNG(), size=6)
    text, tensors = first.state_json(), first.state_tensors()
    others = (
        mechanism_with(optimize_banded(4, steps=8)),
        mechanism_with(optimize_banded(3, steps=9)),
        mechanism_with(optimize_banded(3, steps=8), noise_multiplier=1.6),
        mechanism_with(optimize_banded(3, steps=8), l2_sensitivity=1.0),
        mechanism_with(optimize_banded(3, steps=8), participation=MinSeparation(min_separation=3)),
    )
    for other in others:
        with pytest.raises(PrivacyError, match="belong to this mechanism"):
            other.start().load_state_dict(tensors, text)
    with pytest.raises(PrivacyError, match="not have been given"):
        first.load_state_dict(tensors, text)
    for damaged in ({}, {name: value[:, :5] for name, value in tensors.items()}):
        with pytest.raises(InvalidArgument, match="can't go on"):
            mechanism.start().load_state_dict(damaged, text)
    with pytest.raises(InvalidArgument, match="state must be"):
        mechanism.start().load_state_dict(tensors, json.dumps({"next_step": 4}))


def test_a_state_from_before_the_first_step_is_a_start():
    mechanism = mechanism_with(optimize_banded(3, steps=8))
    stream = mechanism.start()
    stream.load_state_dict({}, mechanism.start().state_json())
    assert noises(stream, range(2), KeyedRNG(), size=4).all()


def test_a_stream_is_not_copied():
    stream = mechanism_with(optimize_banded(3, steps=8)).start()
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="repeat"):
            duplicate(stream)


def test_without_noise_nothing_is_added_and_steps_still_count():
    stream = mechanism_with(optimize_banded(3, steps=8), noise_multiplier=0.0).start()
    assert not noises(stream, range(3), KeyedRNG(), size=4).any()
    assert stream.next_step == 3
