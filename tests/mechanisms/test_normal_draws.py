"""Draws from chosen bits: what the rarest words become, and that every place has bits of its own."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from sordino.mechanisms import TensorGaussianMechanism, standard_normal, tensor_noise
from sordino.mechanisms.tensor_noise import _end_idle_threads, add_normal_, idle_threads_ended
from sordino.randomness import KeyedRNG, RandomStream

# Draws of one block.
BLOCK = 1 << 18


class ChosenWords(RandomStream):
    """A stream whose near bits are the words `value`; those far behind are its own."""

    def __init__(self, key, value, position=0):
        super().__init__(key, position=position)
        self.value, self.key = value, key

    def fill(self, buffer):
        np.frombuffer(buffer.cast("B"), np.uint32)[:] = self.value
        self.skip(len(buffer.cast("B")))

    def key_and_position(self):
        # Compiled code that would make the bits of the key reads the words instead: a word begins at no odd byte.
        return self.key, 1

    def ahead(self, count):
        far = super().ahead(count)
        return far if count > 1 << 64 else ChosenWords(self.key, self.value, far._position)


def chosen(value):
    return ChosenWords(b"k" * 32, value)


def squared_radii(draws):
    """Of the pairs of whole blocks: cosines lie before sines."""
    pairs = draws.double().view(-1, 2, BLOCK // 2)
    return (pairs**2).sum(1).flatten().numpy()


def test_a_word_of_zeros_gets_bits_of_its_own_from_further_on():
    # U is uniform below 2⁻³², so that r²/2 − 32 ln 2 is exponential.
    radii = squared_radii(standard_normal(2 * BLOCK, chosen(0)))
    excess = radii / 2 - 32 * math.log(2)
    assert excess.min() > -1e-4
    assert stats.kstest(excess, "expon").pvalue > 1e-6
    # In single precision one in five meets another; a block that repeated the other's bits would leave half.
    assert len(np.unique(radii)) > 0.72 * len(radii)


def test_small_words_are_where_more_bits_begin():
    few = BLOCK // 64
    below, at = (standard_normal(BLOCK, chosen(value))[:few] for value in (4095, 4096))
    # From 4095 to 4096 the radius goes down by 4.6e-5: a hundred numbers of single precision, and not one more.
    assert 50 < len(below.unique()) < 150
    assert len(at.unique()) == 1
    assert -1e-6 < float(below.min() - at.max()) < float(below.max() - at.max()) < 5e-5


def test_a_word_of_ones_is_not_a_draw_of_zero():
    radii = squared_radii(standard_normal(BLOCK, chosen(2**32 - 1)))
    assert 0 < radii.max() < 1e-6


def test_parts_and_threads_read_the_further_bits_of_their_own_places():
    sizes = [5 * BLOCK + 7, 3, 40_000, BLOCK]
    rows = [torch.zeros(count) for count in sizes]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        add_normal_(rows, chosen(0), stddev=1.0)
    finally:
        torch.set_num_threads(before)
    firsts = [len(row) // 3 for row in rows]
    parts = [torch.zeros(min(first + BLOCK, len(row)) - first) for first, row in zip(firsts, rows, strict=True)]
    starts = [sum(sizes[:number]) + first for number, first in enumerate(firsts)]
    add_normal_(parts, chosen(0), stddev=1.0, starts=starts, count=sum(sizes))
    for part, first, row in zip(parts, firsts, rows, strict=True):
        assert torch.equal(part, row[first : first + len(part)])
    # Half of the draws are sines of zero. Of the others single precision leaves 0.29 different; a block that repeated
    # another's bits would leave 0.26.
    assert len(torch.cat(rows).unique()) > 0.28 * sum(sizes)


def test_tensors_that_are_reached_another_way_get_the_draws_of_their_places():
    shapes = [(700,), (31, 50), (3, 5, 7), (), (0, 4), (40, 60), (2500,)]

    def drawn(*changed):
        tensors = [torch.zeros(shape) for shape in shapes]
        for number, change in changed:
            tensors[number] = change(tensors[number])
        stream = KeyedRNG(seed=1, reproducible=True).stream("test", step=0)
        add_normal_(tensors, stream, stddev=2.0)
        return tensors, stream.uniform(1)

    plain, behind = drawn()
    others, same = drawn(
        (1, lambda t: t.t().contiguous().t()), (5, lambda t: t.to(torch.bfloat16)), (6, torch.Tensor.half)
    )
    assert behind == same
    for one, other in zip(plain, others, strict=True):
        torch.testing.assert_close(other.float(), one, rtol=1e-2 if other.dtype != torch.float32 else 0, atol=0)
    row = 2 * standard_normal(
        sum(tensor.numel() for tensor in plain), KeyedRNG(seed=1, reproducible=True).stream("test", step=0)
    )
    torch.testing.assert_close(torch.cat([tensor.flatten() for tensor in plain]), row, rtol=1e-6, atol=0)


def test_radii_and_angles_of_small_and_of_usual_words_are_independent():
    draws = standard_normal(4 * BLOCK, KeyedRNG().stream("test", step=0)).double().view(-1, 2, BLOCK // 2)
    cosines, sines = draws[:, 0].flatten().numpy(), draws[:, 1].flatten().numpy()
    half = (cosines**2 + sines**2) / 2
    assert stats.kstest(half, "expon").pvalue > 1e-6
    angles = np.arctan2(sines, cosines) / (2 * math.pi) + 0.5
    assert stats.kstest(angles, "uniform").pvalue > 1e-6
    assert abs(np.corrcoef(half, angles)[0, 1]) < 6 / math.sqrt(len(half))


@pytest.mark.parametrize("threads", [1, 4])
def test_tensors_of_all_sizes_have_noise_of_one_scale_and_their_own(threads):
    mechanism, rng = TensorGaussianMechanism(noise_multiplier=2.0, l2_sensitivity=1.0), KeyedRNG()
    sizes = [3, 70_000, 5 * BLOCK + 1, 11, 300_000, 40_000, 40_000]
    tensors = [torch.zeros(size) for size in sizes]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        mechanism.add_noise_(tensors, rng=rng, step=0)
    finally:
        torch.set_num_threads(before)
    for tensor in tensors:
        if len(tensor) > 1000:
            assert abs(float(tensor.double().square().mean()) / 4 - 1) < 6 * math.sqrt(2 / len(tensor))
    found = torch.cat(tensors)
    assert len(found.unique()) > 0.97 * len(found)


def test_torch_goes_on_after_its_threads_were_ended():
    x = torch.randn(700, 700)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        expected = x @ x
        with idle_threads_ended():
            for _ in range(50):
                _end_idle_threads()
                assert torch.equal(x @ x, expected)
                _end_idle_threads()
                _end_idle_threads()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_threads_are_ended_by_the_library_that_torch_has_loaded():
    library = tensor_noise._openmp()
    if library is None:
        pytest.skip("torch has no OpenMP of its own here")
    assert library.omp_pause_resource_all(1) == 0
