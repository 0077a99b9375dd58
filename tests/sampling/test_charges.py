"""How often a sampler says that it is charged, against how often a record takes part in what it draws."""

import numpy as np
import pytest

from sordino.errors import InvalidArgument
from sordino.events import Gaussian, PoissonSampled
from sordino.randomness import KeyedRNG
from sordino.sampling import (
    CyclicPoissonSampling,
    FixedBatchSampling,
    RandomAllocationSampling,
    ScheduledPoissonSampling,
    ShuffledSampling,
    even_borders,
    split_evenly,
)

ONE = Gaussian(noise_multiplier=1.0)
RECORDS = 30


def takes_part(sampler, steps, seed, first_step=0):
    """For each record, in how many of the steps' batches it is."""
    rng = KeyedRNG(seed=seed, reproducible=True)
    drawn = list(sampler.batches(dataset_size=RECORDS, first_step=first_step, steps=steps, rng=rng))
    assert len(drawn) == steps
    return np.bincount(np.concatenate(drawn), minlength=RECORDS)


@pytest.mark.parametrize("steps", range(1, 14))
@pytest.mark.parametrize(
    "sampler",
    [
        CyclicPoissonSampling(groups=4, sample_rate=0.25),  # of its group every record is drawn
        FixedBatchSampling(steps_per_epoch=4),
        FixedBatchSampling(steps_per_epoch=1),
        ShuffledSampling(steps_per_epoch=4),
        RandomAllocationSampling(steps_per_epoch=4, participations=1),
    ],
    ids=lambda sampler: sampler.describe(),
)
def test_the_number_of_charges_is_the_most_that_a_record_takes_part(sampler, steps):
    most = max(takes_part(sampler, steps, seed).max() for seed in range(3))
    assert most == sampler.num_charges(steps)


@pytest.mark.parametrize("steps", [1, 3, 4, 5, 9])
def test_an_allocation_to_several_batches_is_charged_once_for_all_of_them(steps):
    sampler = RandomAllocationSampling(steps_per_epoch=4, participations=2)
    assert max(takes_part(sampler, steps, seed).max() for seed in range(9)) <= 2 * sampler.num_charges(steps)
    assert takes_part(sampler, 8, 0).tolist() == [2 * sampler.num_charges(8)] * RECORDS


def test_a_cycle_draws_each_group_at_the_rate_that_its_event_states():
    sampler = CyclicPoissonSampling(groups=3, sample_rate=0.1)
    event = sampler.event(ONE)
    assert isinstance(event, PoissonSampled)
    assert event.sample_rate == pytest.approx(0.3)
    counts = takes_part(sampler, 3000, 1)
    # 1000 cycles a record; six standard deviations of a binomial count over all of them.
    expected = 1000 * event.sample_rate * RECORDS
    assert abs(counts.sum() - expected) < 6 * (expected * (1 - event.sample_rate)) ** 0.5
    for step in range(6):
        drawn = sampler.draw(dataset_size=RECORDS, step=step, rng=KeyedRNG(seed=2, reproducible=True))
        assert set(drawn % 3) <= {step % 3}


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8])
def test_fixed_and_cyclic_batches_hold_every_record_once_whatever_the_size(size):
    rng = KeyedRNG(seed=5, reproducible=True)
    for sampler in (CyclicPoissonSampling(groups=3, sample_rate=1 / 3), FixedBatchSampling(steps_per_epoch=3)):
        drawn = np.concatenate(list(sampler.batches(dataset_size=size, first_step=3, steps=3, rng=rng)))
        assert sorted(drawn) == list(range(size))


def test_groups_that_would_be_drawn_above_a_rate_of_one_are_refused():
    with pytest.raises(InvalidArgument, match="groups"):
        CyclicPoissonSampling(groups=4, sample_rate=0.26)


def test_a_schedule_of_rates_draws_each_step_at_its_own_rate_and_is_charged_for_each():
    rates = [0.1, 0.6, 1.0]
    sampler = ScheduledPoissonSampling(rate=lambda step: rates[step % 3])
    rng = KeyedRNG(seed=3, reproducible=True)
    sizes = np.array([len(batch) for batch in sampler.batches(dataset_size=2000, first_step=0, steps=3, rng=rng)])
    assert sampler.num_charges(7) == 7
    for size, rate in zip(sizes, rates, strict=True):
        assert abs(size - 2000 * rate) <= 6 * (2000 * rate * (1 - rate)) ** 0.5


@pytest.mark.parametrize(("records", "parts"), [(0, 3), (1, 3), (7, 3), (9, 3), (10, 1), (2, 5)])
def test_even_parts_hold_all_records_in_order_and_differ_by_one_at_most(records, parts):
    borders = even_borders(records, parts)
    assert [place for start, end in borders for place in range(start, end)] == list(range(records))
    sizes = [end - start for start, end in borders]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    chunks = split_evenly(np.arange(records) + 5, step=4, parts=parts)
    assert [len(chunk.indices) for chunk in chunks] == sizes
    assert [chunk.is_last for chunk in chunks] == [False] * (parts - 1) + [True]
    assert {chunk.step for chunk in chunks} == {4}
