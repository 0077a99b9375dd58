"""Normal draws compiled by Numba: the bits of their source, the functions that they are, and where they are used."""

import math

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from sordino.mechanisms import TensorGaussianMechanism, standard_normal, tensor_noise
from sordino.randomness import KeyedRNG

pytest.importorskip("numba", reason="Numba is not installed")
from sordino.mechanisms import compiled_noise, compiled_words

LONG = 1 << 16
ONE = np.float32(1.0)
# Half a unit in the last place of a number in [1, 2).
HALF_ULP = 2.0**-24


def stream(seed=3):
    return KeyedRNG(seed=seed, reproducible=True).stream("test", step=0)


def words(count, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


def test_the_kernel_was_compiled_and_accepted():
    assert tensor_noise._compiled_noise() is compiled_noise
    assert compiled_noise.add_pairs.signatures


def test_machine_code_gives_the_bits_of_its_source():
    drawn, scale = words(1 << 21), np.float32(0.7)
    drawn[: 1 << 20] = np.maximum(drawn[: 1 << 20], tensor_noise.SHORT)
    made, rare = np.zeros(len(drawn), np.float32), np.empty((len(drawn) // 2, 3), np.uint32)
    assert compiled_noise.add_pairs(drawn, scale, made, rare) == 0
    first, second = np.split(drawn, 2)
    np.testing.assert_array_equal(made, np.concatenate(compiled_noise.normal_pair(np.float32(first), second, scale)))


def test_the_logarithm_of_every_mantissa_is_right_within_two_units():
    mantissas = np.arange(1 << 23, dtype=np.int32)
    # x in [½, 1), where the logarithm comes close to zero, and in a lower binade.
    for exponent in (126, 100):
        x = (mantissas | np.int32(exponent << 23)).view(np.float32)
        true = np.log(x.astype(np.float64))
        assert (np.abs(compiled_noise.logarithm(x) - true) <= 2.2 * HALF_ULP * np.abs(true)).all()


def test_the_logarithm_holds_down_to_the_smallest_uniform():
    x = np.float32(2.0) ** -np.arange(1, 85, dtype=np.float32)
    np.testing.assert_allclose(compiled_noise.logarithm(x), np.log(x.astype(np.float64)), rtol=2 * HALF_ULP)


def test_cosine_and_sine_go_once_around():
    turns = np.concatenate(
        [words(1 << 20), np.arange(8, dtype=np.uint32) << 29, (np.arange(8, dtype=np.uint32) << 29) - 1]
    )
    angle = 2 * math.pi * turns.view(np.int32).astype(np.float64) * 2.0**-32
    cosine, sine = compiled_noise.cosine_and_sine(turns)
    assert np.abs(cosine - np.cos(angle)).max() <= 2 * HALF_ULP
    assert np.abs(sine - np.sin(angle)).max() <= 2 * HALF_ULP


def test_draws_are_those_of_numpys_functions_up_to_rounding(monkeypatch):
    count = (1 << 18) + 12_345
    compiled = standard_normal(count, stream())
    monkeypatch.setattr(tensor_noise, "_compiled_noise", lambda: None)
    usual = standard_normal(count, stream())
    assert not torch.equal(compiled, usual)
    torch.testing.assert_close(compiled, usual, rtol=1e-5, atol=1e-6)


def test_short_rows_do_without(monkeypatch):
    def fail():
        raise AssertionError("a short row loads no compiler")

    monkeypatch.setattr(tensor_noise, "_compiled_noise", fail)
    standard_normal(LONG - 1, stream())
    standard_normal(LONG, stream(), dtype=torch.float64)
    with pytest.raises(AssertionError, match="short row"):
        standard_normal(LONG, stream())


def test_pairs_that_need_more_bits_are_listed_and_get_zeros():
    drawn = words(4096)
    small = [0, 5, 1500, 2047]
    drawn[small] = [0, 1, tensor_noise.SHORT - 1, 77]
    drawn[:2048][drawn[:2048] == tensor_noise.SHORT] += 1
    drawn[6] = tensor_noise.SHORT
    made, rare = np.zeros(4096, np.float32), np.empty((2048, 3), np.uint32)
    found = compiled_noise.add_pairs(drawn, ONE, made, rare)
    np.testing.assert_array_equal(rare[:found], np.stack([small, drawn[small], drawn[2048:][small]], axis=1))
    assert (made[small] == 0).all()
    assert (made[2048:][small] == 0).all()
    assert made[6] != 0


def test_the_tail_is_the_same_with_and_without_compiled_draws(monkeypatch):
    # Of 2²⁰ pairs one needs more bits, on average.
    bits = np.empty(1 << 18, np.uint32)
    source = stream()
    blocks = [source.fill(bits.data) or bits[: 1 << 17].min() for _ in range(16)]
    assert min(blocks) < tensor_noise.SHORT
    compiled = standard_normal(1 << 22, stream())
    monkeypatch.setattr(tensor_noise, "_compiled_noise", lambda: None)
    usual = standard_normal(1 << 22, stream())
    far = usual.abs() > 5.2
    assert far.any()
    torch.testing.assert_close(compiled[far], usual[far], rtol=1e-5, atol=0)


@pytest.fixture
def instructions():
    if not compiled_words.is_supported():
        pytest.skip("this processor has no instructions for two blocks of AES")


def test_round_keys_are_those_of_the_standard(instructions):
    # FIPS 197, appendix A.3.
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    words_of_keys = compiled_noise.numba.njit(compiled_words.expand)(np.frombuffer(key, np.uint32))
    assert words_of_keys[8:12].tobytes().hex() == "9ba354118e6925afa51a8b5f2067fcde"
    assert words_of_keys[56:].tobytes().hex() == "fe4890d1e6188d0b046df344706c631e"


def test_words_are_those_of_another_library(instructions):
    @compiled_noise.numba.njit
    def made(key, first, out, count):
        return compiled_words.fill(out, compiled_words.expand(key), first, count)

    for first, count in [(0, 1), (1, 64), (3, 700), (2**34 - 5, 1000), (2**61 + 2, 65)]:
        key = words(8, seed=first % 97)
        out = np.zeros(count + 2 * compiled_words.WORDS_AT_ONCE, np.uint32)
        begin = made(key, first, out, count)
        cipher = Cipher(algorithms.AES(key.tobytes()), modes.CTR((first // 4).to_bytes(16, "big"))).encryptor()
        right = np.frombuffer(cipher.update(bytes(4 * (count + 4))), np.uint32)[first % 4 :][:count]
        np.testing.assert_array_equal(out[begin : begin + count], right)


@pytest.mark.parametrize("read", [0, 4, 6, 12, 1 << 40, 1 << 64])
def test_words_made_here_give_the_draws_of_the_streams_words(read, instructions, monkeypatch):
    def draws():
        row, source = torch.zeros(2 * LONG + 4097), stream()
        source.skip(read)
        tensor_noise.add_normal_([row], source, stddev=0.5)
        return row, source.uniform(1)

    row, further = draws()
    monkeypatch.setattr(compiled_noise, "_HAS_INSTRUCTIONS", False)
    without, further_without = draws()
    assert torch.equal(row, without)
    assert further == further_without


def test_words_that_differ_are_not_used(instructions, monkeypatch):
    right = compiled_noise.add_draws
    monkeypatch.setattr(
        compiled_noise, "add_draws", lambda key, first, *rest: right(key, first + (first > 1 << 40), *rest)
    )
    assert not compiled_noise.equals_its_source()


@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_get_the_draws_of_their_positions_however_blocks_fall(threads):
    sizes = [70_001, 3, 300_000, 1, 600_000, 262_144]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        tensors = [torch.zeros(size) for size in sizes]
        mechanism = TensorGaussianMechanism(noise_multiplier=2.0, l2_sensitivity=1.0)
        rng = KeyedRNG(seed=3, reproducible=True)
        mechanism.add_noise_(tensors, rng=rng, step=0)
    finally:
        torch.set_num_threads(before)
    row = torch.zeros(sum(sizes))
    mechanism.add_noise_([row], rng=rng, step=0)
    assert torch.equal(torch.cat(tensors), row)


def test_noise_is_added_to_what_is_there():
    row = torch.full((LONG,), 5.0)
    tensor_noise.add_normal_([row], stream(), stddev=0.5)
    torch.testing.assert_close(row - 5, 0.5 * standard_normal(LONG, stream()), rtol=0, atol=1e-6)


def test_code_that_differs_from_its_source_is_not_used(monkeypatch):
    right = compiled_noise.add_pairs

    def wrong(drawn, stddev, out, rare):
        right(drawn, stddev, out, rare)
        out[-1] = np.nextafter(out[-1], np.float32(9))

    monkeypatch.setattr(compiled_noise, "add_pairs", wrong)
    assert not compiled_noise.equals_its_source()
    usual = tensor_noise._compiled_noise.__wrapped__
    assert usual() is None


def test_interpreted_code_is_not_used(monkeypatch):
    monkeypatch.setattr(compiled_noise.numba.config, "DISABLE_JIT", 1)
    assert not compiled_noise.equals_its_source()
