"""Shuffled epochs are disjoint; chunks are a partition of their batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.events import Gaussian
from sordino.randomness import KeyedRNG
from sordino.sampling import ShuffledSampling, split_into_microbatches

SEEDED = KeyedRNG(seed=5, reproducible=True)


@given(population=st.integers(0, 60), steps_per_epoch=st.integers(1, 9), epoch=st.integers(0, 5))
def test_an_epoch_holds_every_record_once_in_batches_of_nearly_equal_size(population, steps_per_epoch, epoch):
    sampler = ShuffledSampling(steps_per_epoch=steps_per_epoch)
    batches = list(
        sampler.batches(dataset_size=population, first_step=epoch * steps_per_epoch, steps=steps_per_epoch, rng=SEEDED)
    )
    assert sorted(np.concatenate(batches).tolist()) == list(range(population))
    sizes = [len(batch) for batch in batches]
    assert max(sizes) - min(sizes) <= 1


def test_epochs_are_shuffled_anew():
    sampler = ShuffledSampling(steps_per_epoch=2)
    first, _, third, _ = sampler.batches(dataset_size=100, first_step=0, steps=4, rng=KeyedRNG())
    assert not np.array_equal(first, third)


def test_one_epoch_is_one_event_however_many_steps_it_has():
    sampler, event = ShuffledSampling(steps_per_epoch=4), Gaussian(noise_multiplier=1.0)
    assert sampler.event(event) == event
    assert [sampler.num_charges(steps) for steps in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_replacing_a_record_leaves_every_batch_without_it_alone():
    # The batches depend on the number of records only: parallel composition needs nothing else.
    sampler = ShuffledSampling(steps_per_epoch=3)
    one, two = (
        list(sampler.batches(dataset_size=30, first_step=0, steps=3, rng=KeyedRNG(seed=2, reproducible=True)))
        for _ in range(2)
    )
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@given(records=st.integers(0, 40), microbatch_size=st.one_of(st.none(), st.integers(1, 12)))
def test_chunks_are_a_partition_in_order_and_only_the_last_is_last(records, microbatch_size):
    indices = np.arange(100, 100 + records)
    chunks = split_into_microbatches(indices, step=3, microbatch_size=microbatch_size)
    assert np.array_equal(np.concatenate([chunk.indices for chunk in chunks]), indices)
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert {chunk.step for chunk in chunks} == {3}
    if microbatch_size is not None:
        assert max(chunk.num_records for chunk in chunks) <= microbatch_size


def test_an_empty_batch_is_one_empty_chunk():
    (chunk,) = split_into_microbatches(np.empty(0, dtype=np.int64), step=0, microbatch_size=4)
    assert chunk.num_records == 0
    assert chunk.is_last


def test_a_chunk_can_be_renumbered_for_the_step_it_is_handed_out_in():
    (chunk,) = split_into_microbatches(np.arange(3), step=0)
    assert chunk.at_step(9).step == 9
    assert np.array_equal(chunk.at_step(9).indices, chunk.indices)


@pytest.mark.parametrize("microbatch_size", [0, -1, 2.0])
def test_a_microbatch_size_below_one_is_refused(microbatch_size):
    with pytest.raises(ValueError, match="microbatch_size must be"):
        split_into_microbatches(np.arange(3), step=0, microbatch_size=microbatch_size)
