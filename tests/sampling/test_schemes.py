"""Batches of fixed size and balls in bins: the statistics of what is drawn, and the event each sampler states."""

import itertools

import numpy as np
import pytest
from scipy import stats

from sordino.errors import InvalidArgument
from sordino.events import Gaussian, RandomAllocation, SampledWithoutReplacement, SampledWithReplacement
from sordino.randomness import KeyedRNG
from sordino.sampling import FixedSizeSampling, RandomAllocationSampling

RNG = KeyedRNG(seed=11, reproducible=True)
ONE = Gaussian(noise_multiplier=1.0)
DRAWS = 6000


def batches(sampler, size: int, steps: int = DRAWS) -> list[np.ndarray]:
    return list(sampler.batches(dataset_size=size, first_step=0, steps=steps, rng=RNG))


def is_uniform(counts) -> bool:
    return stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_subset_of_a_size_is_equally_likely(size):
    sampler = FixedSizeSampling(dataset_size=5, batch_size=size)
    subsets = list(itertools.combinations(range(5), size))
    counts = dict.fromkeys(subsets, 0)
    for batch in batches(sampler, 5):
        assert batch.dtype == np.int64
        counts[tuple(batch.tolist())] += 1
    assert size == 5 or is_uniform(list(counts.values()))


@pytest.mark.parametrize("size", [3, 40, 70, 100])
def test_no_record_is_twice_in_a_batch_and_all_are_equally_often_in_one(size):
    drawn = batches(FixedSizeSampling(dataset_size=100, batch_size=size), 100, 2000)
    assert all(len(batch) == size == len(set(batch.tolist())) for batch in drawn)
    assert all((np.diff(batch) > 0).all() for batch in drawn)
    often = np.bincount(np.concatenate(drawn), minlength=100)
    # A record's count is Binomial(2000, size / 100), and the counts sum to 2000 · size: a scaled chi-square.
    spread = ((often - 20 * size) ** 2).sum() / (2000 * size / 100 * (1 - size / 100) or 1) * 99 / 100
    assert spread < stats.chi2.ppf(1 - 1e-5, 99)


def test_with_replacement_a_record_is_drawn_a_binomial_number_of_times():
    sampler = FixedSizeSampling(dataset_size=4, batch_size=6, with_replacement=True)
    times = np.array([np.bincount(batch, minlength=4) for batch in batches(sampler, 4)])
    assert (times.sum(axis=1) == 6).all()
    for record in range(4):
        seen = np.bincount(times[:, record], minlength=7)
        wanted = stats.binom.pmf(np.arange(7), 6, 1 / 4) * DRAWS
        assert stats.chisquare(np.append(seen[:5], seen[5:].sum()), np.append(wanted[:5], wanted[5:].sum())).pvalue > (
            1e-4
        )


def test_batches_of_different_steps_are_independent_of_each_other_and_of_the_order_in_which_they_are_asked_for():
    sampler = FixedSizeSampling(dataset_size=6, batch_size=2)
    drawn = batches(sampler, 6)
    together = np.mean([0 in one and 0 in other for one, other in itertools.pairwise(drawn)])
    assert together == pytest.approx(1 / 9, abs=5 * (1 / 9 * 8 / 9 / DRAWS) ** 0.5)
    assert (sampler.draw(dataset_size=6, step=17, rng=RNG) == drawn[17]).all()


def test_balls_in_bins_throws_every_record_into_one_uniform_batch_of_an_epoch_by_itself():
    sampler = RandomAllocationSampling(steps_per_epoch=4)
    drawn = batches(sampler, 3, 4 * 3000)
    bins = np.empty((3000, 3), dtype=np.int64)
    for epoch in range(3000):
        members = [batch.tolist() for batch in drawn[4 * epoch : 4 * epoch + 4]]
        assert sorted(itertools.chain(*members)) == [0, 1, 2]
        for number, records in enumerate(members):
            bins[epoch, records] = number
    # All 64 ways in which three records can fall are equally likely, in an epoch and in the next one.
    assert is_uniform(np.bincount(bins @ np.array([16, 4, 1]), minlength=64))
    assert is_uniform(np.bincount(bins[:-1, 0] * 4 + bins[1:, 0], minlength=16))


@pytest.mark.parametrize(("steps", "each"), [(4, 2), (5, 3), (3, 3), (6, 1)])
def test_random_allocation_gives_every_record_a_uniform_subset_of_the_batches(steps, each):
    sampler = RandomAllocationSampling(steps_per_epoch=steps, participations=each)
    drawn = batches(sampler, 500, steps * 8)
    subsets = dict.fromkeys(itertools.combinations(range(steps), each), 0)
    for epoch in range(8):
        taken = [[] for _ in range(500)]
        for number in range(steps):
            for record in drawn[epoch * steps + number].tolist():
                taken[record].append(number)
        for chosen in taken:
            subsets[tuple(chosen)] += 1
    assert len(subsets) == 1 or is_uniform(list(subsets.values()))


def test_each_sampler_states_its_event_and_how_often_it_is_charged():
    without = FixedSizeSampling(dataset_size=50, batch_size=5)
    assert without.event(ONE) == SampledWithoutReplacement(dataset_size=50, sample_size=5, event=ONE)
    again = FixedSizeSampling(dataset_size=50, batch_size=60, with_replacement=True)
    assert again.event(ONE) == SampledWithReplacement(dataset_size=50, sample_size=60, event=ONE)
    assert without.num_charges(7) == 7
    bins = RandomAllocationSampling(steps_per_epoch=5, participations=2)
    assert bins.event(ONE) == RandomAllocation(steps=5, participations=2, epochs=1, event=ONE)
    assert [bins.num_charges(steps) for steps in (0, 1, 5, 6, 10, 11)] == [0, 1, 1, 2, 2, 3]
    assert without.describe() == "fixed-size sampling without replacement, 5 of 50"
    assert again.describe() == "fixed-size sampling with replacement, 60 of 50"
    assert RandomAllocationSampling(steps_per_epoch=5).describe() == "balls in bins, 5 batches an epoch"


def test_batches_of_fixed_size_are_drawn_from_the_stated_number_of_records_only():
    with pytest.raises(InvalidArgument, match="dataset_size must be"):
        FixedSizeSampling(dataset_size=50, batch_size=5).draw(dataset_size=49, step=0, rng=RNG)
    with pytest.raises(InvalidArgument, match="batch_size must be"):
        FixedSizeSampling(dataset_size=50, batch_size=51)
    with pytest.raises(InvalidArgument, match="participations must be"):
        RandomAllocationSampling(steps_per_epoch=5, participations=6)
    assert all(len(batch) == 0 for batch in batches(RandomAllocationSampling(steps_per_epoch=2), 0, 4))
