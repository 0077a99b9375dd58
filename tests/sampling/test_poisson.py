"""Poisson sampling: inclusion is right, independent, secret and repeatable only on purpose."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.errors import InvalidArgument
from sordino.events import Gaussian, PoissonSampled
from sordino.randomness import KeyedRNG
from sordino.sampling import PoissonSampling

GAUSSIAN = Gaussian(noise_multiplier=1.0)


def masks(sample_rate, population, steps):
    sampler, rng = PoissonSampling(sample_rate=sample_rate), KeyedRNG()
    drawn = np.zeros((steps, population), dtype=bool)
    for step in range(steps):
        drawn[step, sampler.draw(dataset_size=population, step=step, rng=rng)] = True
    return drawn


@pytest.mark.parametrize("sample_rate", [0.2, 0.5, 0.9])
def test_every_record_joins_at_the_declared_rate(sample_rate):
    drawn = masks(sample_rate, 200, 4000)
    # 800 000 Bernoulli draws in all; six standard deviations.
    tolerance = 6 * np.sqrt(sample_rate * (1 - sample_rate) / drawn.size)
    assert abs(drawn.mean() - sample_rate) < tolerance
    assert abs(drawn.mean() - 1.05 * sample_rate) > tolerance, "a rate that is 5 % wrong would not pass"
    each = 6 * np.sqrt(sample_rate * (1 - sample_rate) / 4000)
    assert np.abs(drawn.mean(0) - sample_rate).max() < each


def test_records_and_steps_are_uncorrelated():
    drawn = masks(0.3, 20, 5000).astype(float)
    by_record = np.corrcoef(drawn.T) - np.eye(20)
    assert np.abs(by_record).max() < 6 / np.sqrt(5000)
    lagged = np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]
    assert abs(lagged) < 6 / np.sqrt(drawn.size)


def test_the_batch_size_is_binomial():
    sizes = masks(0.1, 100, 4000).sum(1)
    assert abs(sizes.mean() - 10) < 6 * 3 / np.sqrt(4000)
    assert 0.9 < sizes.var() / 9 < 1.1


@given(
    population=st.integers(0, 300),
    sample_rate=st.one_of(st.just(1.0), st.just(1e-9), st.floats(1e-4, 1.0)),
    step=st.integers(0, 10**9),
)
def test_a_batch_is_sorted_distinct_and_inside_the_data_set(population, sample_rate, step):
    sampler = PoissonSampling(sample_rate=sample_rate)
    indices = sampler.draw(dataset_size=population, step=step, rng=KeyedRNG(seed=3, reproducible=True))
    assert indices.dtype == np.int64
    assert (np.diff(indices) > 0).all()
    assert not len(indices) or (indices[0] >= 0 and indices[-1] < population)
    if sample_rate == 1:
        assert len(indices) == population


def test_a_batch_may_be_empty_and_a_rate_of_one_is_the_whole_data_set():
    drawn = masks(0.05, 20, 400).sum(1)
    assert (drawn == 0).any()
    assert PoissonSampling(sample_rate=1.0).event(GAUSSIAN) == GAUSSIAN
    assert PoissonSampling(sample_rate=1.0).describe() == "full batches"


def test_the_event_carries_the_rate_that_is_drawn():
    assert PoissonSampling(sample_rate=0.25).event(GAUSSIAN) == PoissonSampled(sample_rate=0.25, event=GAUSSIAN)


def test_the_same_seed_repeats_and_fresh_randomness_does_not():
    sampler = PoissonSampling(sample_rate=0.5)
    seeded = [sampler.draw(dataset_size=200, step=7, rng=KeyedRNG(seed=1, reproducible=True)) for _ in range(2)]
    assert np.array_equal(*seeded)
    fresh = [sampler.draw(dataset_size=200, step=7, rng=KeyedRNG()) for _ in range(2)]
    assert not np.array_equal(*fresh)


def test_batches_are_the_draws_of_their_steps():
    sampler, rng = PoissonSampling(sample_rate=0.5), KeyedRNG(seed=1, reproducible=True)
    batches = list(sampler.batches(dataset_size=30, first_step=4, steps=3, rng=rng))
    for step, batch in zip((4, 5, 6), batches, strict=True):
        assert np.array_equal(batch, sampler.draw(dataset_size=30, step=step, rng=rng))
    assert sampler.num_charges(3) == 3


@pytest.mark.parametrize("sample_rate", [0.0, -0.1, 1.1, float("nan"), "0.1", True])
def test_a_rate_outside_its_range_is_refused(sample_rate):
    with pytest.raises(InvalidArgument, match="sample_rate must be"):
        PoissonSampling(sample_rate=sample_rate)
