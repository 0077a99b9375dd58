"""Noise of parts: the stretch of the whole noise that belongs to each, so that it doesn't matter who holds what."""

import itertools

import pytest
import torch

from sordino.errors import InvalidArgument
from sordino.mechanisms import TensorGaussianMechanism
from sordino.mechanisms.tensor_noise import ShardGaussianMechanism, ShardSlice
from sordino.randomness import KeyedRNG

# Around the number of draws that come as one block, 65,536, and the small ones that draw together.
SHAPES = [(3, 5), (7,), (1,), (400, 333), (65_536,), (2, 2), (65_537,), (70_001, 2), ()]


def wholes(dtype):
    return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]


def rows_of(tensor, rank, ranks):
    """The rows of one process, as a split of the first dimension gives them; maybe none."""
    flat = tensor.view(-1)
    rows = tensor.shape[0] if tensor.dim() else 1
    each, width = -(-rows // ranks), tensor.numel() // rows
    first, last = min(rank * each, rows) * width, min((rank + 1) * each, rows) * width
    return flat[first:last].clone(), ShardSlice(first=first, whole=tensor.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_get_the_noise_of_their_place_whatever_the_number_of_processes(dtype):
    mechanism = TensorGaussianMechanism(noise_multiplier=2.0, l2_sensitivity=0.7)
    rng = KeyedRNG()
    expected = wholes(dtype)
    mechanism.add_noise_(expected, rng=rng, step=3)
    for ranks in (1, 2, 3, 5):
        found = []
        for rank in range(ranks):
            held = [rows_of(tensor, rank, ranks) for tensor in wholes(dtype)]
            noise = ShardGaussianMechanism(mechanism=mechanism, parts=tuple(part for _, part in held))
            noise.add_noise_([tensor for tensor, _ in held], rng=rng, step=3)
            found.append([tensor for tensor, _ in held])
        for number, whole in enumerate(expected):
            together = torch.cat([parts[number] for parts in found])
            assert torch.equal(together, whole.view(-1))


def test_noise_on_parts_has_its_variance_and_no_correlation_between_parts_or_steps():
    mechanism = TensorGaussianMechanism(noise_multiplier=1.5, l2_sensitivity=2.0)
    rng = KeyedRNG()
    noise = []
    for step, rank in itertools.product(range(2), range(2)):
        held, part = rows_of(torch.zeros(200_000, 2), rank, 2)
        ShardGaussianMechanism(mechanism=mechanism, parts=(part,)).add_noise_([held], rng=rng, step=step)
        noise.append(held.double() / 3.0)
    spread = (2 / len(noise[0])) ** 0.5
    for one in noise:
        assert abs(float((one**2).mean()) - 1) < 5 * spread
        # The test would see a deviation that is 5 % too large or too small.
        for wrong in (0.95, 1.05):
            assert abs(float((one**2).mean()) / wrong**2 - 1) > 5 * spread
    for one, other in itertools.combinations(noise, 2):
        assert abs(float((one * other).mean())) < 5 / len(one) ** 0.5


def test_a_part_beyond_its_tensor_is_refused():
    noise = ShardGaussianMechanism(
        mechanism=TensorGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0),
        parts=(ShardSlice(first=3, whole=4),),
    )
    with pytest.raises(InvalidArgument, match="parts must lie within"):
        noise.add_noise_([torch.zeros(2)], rng=KeyedRNG(), step=0)
