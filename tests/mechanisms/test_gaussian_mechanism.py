"""The Gaussian mechanism: right scale, right shape, never the same value twice."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from sordino.errors import InvalidArgument
from sordino.events import Gaussian
from sordino.mechanisms import TensorGaussianMechanism, standard_normal
from sordino.randomness import KeyedRNG


def noise_of(mechanism, count, step=0):
    tensor = torch.zeros(count)
    mechanism.add_noise_([tensor], rng=KeyedRNG(), step=step)
    return tensor


def scale_is(noise, stddev):
    # The standard error of the estimated deviation is 1/√(2n) of it: 0.16 % here. 1 % is six of them.
    return abs(float(noise.double().square().mean().sqrt()) / stddev - 1) < 0.01


def test_the_declared_scale_passes_and_one_5_percent_off_is_caught():
    noise = noise_of(TensorGaussianMechanism(noise_multiplier=1.5, l2_sensitivity=2.0), 200_000)
    assert scale_is(noise, 3.0)
    assert not scale_is(noise, 3.0 * 1.05)
    assert not scale_is(noise, 3.0 * 0.95)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_are_normal_to_the_tails(dtype):
    draws = standard_normal(300_001, KeyedRNG().stream("test", step=0), dtype=dtype).numpy()
    assert draws.dtype == (np.float64 if dtype == torch.float64 else np.float32)
    assert stats.kstest(draws, "norm").pvalue > 1e-6
    for quantile in (2.0, 3.0, 4.0):
        expected = 2 * stats.norm.sf(quantile) * len(draws)
        assert abs((np.abs(draws) > quantile).sum() - expected) < 6 * math.sqrt(expected) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_do_not_depend_on_the_number_of_threads(dtype):
    # An odd number of draws, and more blocks than a whole number for each thread.
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            stream = KeyedRNG(seed=5, reproducible=True).stream("test", step=0)
            found.append(torch.cat([standard_normal(count, stream, dtype=dtype) for count in (1_000_003, 8)]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(other, found[0]) for other in found[1:])
    assert len(found[0].unique()) > (0.97 if dtype == torch.float32 else 1) * len(found[0]) - 1


def test_noise_added_in_place_is_the_same_draws_times_the_deviation():
    mechanism = TensorGaussianMechanism(noise_multiplier=3.0, l2_sensitivity=0.5)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        large = torch.zeros(200_001, dtype=dtype)
        mechanism.add_noise_([large], rng=KeyedRNG(seed=2, reproducible=True), step=4)
        stream = KeyedRNG(seed=2, reproducible=True).stream("gaussian", step=4)
        draws = standard_normal(200_001, stream, dtype=dtype)
        torch.testing.assert_close(
            large.to(draws.dtype), 1.5 * draws, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
        )


def test_coordinates_tensors_steps_and_ranks_are_uncorrelated():
    mechanism, rng, count = TensorGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0), KeyedRNG(), 50_000
    rows = []
    for step, rank in ((0, 0), (1, 0), (0, 1)):
        pair = [torch.zeros(count), torch.zeros(count)]
        mechanism.add_noise_(pair, rng=rng, step=step, rank=rank)
        rows += pair
    correlation = np.corrcoef(torch.stack(rows).numpy()) - np.eye(len(rows))
    assert np.abs(correlation).max() < 6 / math.sqrt(count)
    assert abs(np.corrcoef(rows[0][:-1], rows[0][1:])[0, 1]) < 6 / math.sqrt(count)


def test_torch_manual_seed_has_no_part_in_the_noise():
    mechanism = TensorGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0)
    torch.manual_seed(0)
    first = noise_of(mechanism, 8)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state), "noise leaves the user's generator alone"
    assert not torch.equal(first, noise_of(mechanism, 8))


def test_noise_is_added_to_the_value_in_its_own_type():
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        value = torch.full((3, 2), 1000.0, dtype=dtype)
        TensorGaussianMechanism(noise_multiplier=1e-3, l2_sensitivity=1.0).add_noise_([value], rng=KeyedRNG(), step=0)
        assert value.dtype == dtype
        assert (value.double() - 1000).abs().max() < 5


def test_zero_noise_changes_nothing_and_says_so_in_its_event():
    value = torch.ones(4)
    mechanism = TensorGaussianMechanism(noise_multiplier=0.0, l2_sensitivity=1.0)
    mechanism.add_noise_([value], rng=KeyedRNG(), step=0)
    assert torch.equal(value, torch.ones(4))
    assert mechanism.event() == Gaussian(noise_multiplier=0.0)


@pytest.mark.parametrize(
    "arguments", [{"noise_multiplier": -1.0}, {"l2_sensitivity": 0.0}, {"l2_sensitivity": math.inf}]
)
def test_arguments_outside_their_range_are_refused(arguments):
    with pytest.raises(InvalidArgument):
        TensorGaussianMechanism(**({"noise_multiplier": 1.0, "l2_sensitivity": 1.0} | arguments))
