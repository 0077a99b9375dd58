"""Noise that is made on the device of a tensor: the bits of RFC 8439, the law of the draws, one kernel for both."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import stats

from sordino.errors import PrivacyError
from sordino.mechanisms import TensorGaussianMechanism, device_noise, standard_normal, tensor_noise
from sordino.mechanisms.device_noise import add_device_normal_, chacha20_words, normal_draws, refuse_graph_capture
from sordino.mechanisms.tensor_noise import ShardGaussianMechanism, ShardSlice, add_normal_
from sordino.randomness import KeyedRNG

KEY = bytes(range(7, 39))
# RFC 8439, 2.3.2 and appendix A.1: key, block number with the first nonce word above, the second nonce word, words.
VECTORS = [
    (
        bytes(range(32)),
        (0x09000000 << 32) | 1,
        0x4A000000,
        "e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3 "
        "466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2",
    ),
    (
        bytes(32),
        0,
        0,
        "ade0b876 903df1a0 e56a5d40 28bd8653 b819d2bd 1aed8da0 ccef36a8 c70d778b "
        "7c5941da 8d485751 3fe02477 374ad8b8 f4b8436a 1ca11815 69b687c3 8665eeb2",
    ),
    (
        bytes(32),
        1,
        0,
        "bee7079f 7a385155 7c97ba98 0d082d73 a0290fcb 6965e348 3e53c612 ed7aee32 "
        "7621b729 434ee69c b03371d5 d539d874 281fed31 45fb0a51 1f0ae1ac 6f4d794b",
    ),
]


def signed(key):
    return tuple(np.frombuffer(key, "<i4").tolist())


def words_of(text):
    return [int(word, 16) for word in text.split()]


@pytest.fixture
def away(monkeypatch):
    """Every tensor counts as one of another device, whose operations are those of the CPU."""
    monkeypatch.setattr(tensor_noise, "_is_away", lambda tensor: True)


@pytest.mark.parametrize(("key", "block", "nonce", "expected"), VECTORS)
def test_blocks_are_those_of_the_rfc(key, block, nonce, expected):
    words = chacha20_words(signed(key), torch.tensor([block]), nonce=(nonce, 0))
    assert (words[:, 0].long() & 0xFFFFFFFF).tolist() == words_of(expected)


@pytest.mark.parametrize("first", [0, (1 << 32) - 5, (77 << 32) + 3])
def test_words_are_those_of_another_library(first):
    key = np.random.default_rng(first).bytes(32)
    words = chacha20_words(signed(key), torch.arange(first, first + 10), nonce=(1, 0))
    for number in range(10):
        nonce = (first + number).to_bytes(8, "little") + (1).to_bytes(8, "little")
        theirs = Cipher(algorithms.ChaCha20(key, nonce), None).encryptor().update(bytes(64))
        assert words[:, number].numpy().tobytes() == theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_stretch_of_a_row_is_made_without_the_rest(dtype, monkeypatch):
    row = normal_draws(KEY, first=0, count=9000, dtype=dtype)
    monkeypatch.setattr(device_noise, "_AT_ONCE", 2 * device_noise.LANES)
    for first, count in [(0, 1), (1, 5), (2047, 2), (2048, 2048), (1023, 1026), (4100, 4900), (8999, 1)]:
        part = torch.ones(count, dtype=dtype)
        add_device_normal_(part, KEY, first=first, stddev=3.0)
        torch.testing.assert_close(part, 1 + 3 * row[first : first + count])


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t.to(torch.bfloat16),
        lambda t: t.half(),
        lambda t: t[:0],
        lambda t: t[0, 0],
    ],
    ids=["transposed", "strided", "bfloat16", "half", "empty", "no dimension"],
)
def test_tensors_of_every_layout_and_type_get_their_draws(change):
    tensor = change(torch.zeros(40, 60))
    add_device_normal_(tensor, KEY, first=10, stddev=2.0)
    expected = 2 * normal_draws(KEY, first=10, count=tensor.numel()).view(tensor.shape)
    torch.testing.assert_close(tensor, expected.to(tensor.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_are_standard_normal_and_a_spread_that_is_5_percent_off_is_seen(dtype):
    draws = normal_draws(KeyedRNG().stream("test", step=0).device_key(), first=3, count=400_000, dtype=dtype).double()
    assert stats.kstest(draws.numpy(), "norm").pvalue > 1e-6
    spread = math.sqrt(2 / len(draws))
    assert abs(float(draws.square().mean()) - 1) < 6 * spread
    for wrong in (0.95, 1.05):
        assert abs(float((wrong * draws).square().mean()) - 1) > 6 * spread
        assert stats.kstest((wrong * draws).numpy(), "norm").pvalue < 1e-6
    for distance in (1, device_noise.LANES, 2 * device_noise.LANES, 8 * device_noise.LANES, 16 * device_noise.LANES):
        one, other = draws[:-distance], draws[distance:]
        for a, b in ((one, other), (one.square() - 1, other.square() - 1)):
            correlation = float((a * b).mean() / (a.square().mean() * b.square().mean()).sqrt())
            assert abs(correlation) < 6 / math.sqrt(len(one))


def test_small_words_get_further_bits_of_their_own(monkeypatch):
    def first_words_are_zero(key, blocks, *, nonce=(device_noise.DRAWS, 0)):
        found = chacha20_words(key, blocks, nonce=nonce)
        if nonce[0] == device_noise.DRAWS:
            found[0::2] = 0
        return found

    monkeypatch.setattr(device_noise, "chacha20_words", first_words_are_zero)
    draws = normal_draws(KEY, first=0, count=16 * 128 * 40).double().view(-1, 8, 2, 128)
    beyond = draws.square().sum(2).flatten() / 2 - 32 * math.log(2)
    assert stats.kstest(beyond.numpy(), "expon").pvalue > 1e-6
    assert float(draws.square().sum(2).max()) > 6.8**2
    # Where no word counts as short all of these are the logarithm of zero.
    monkeypatch.setattr(device_noise, "SHORT", 0)
    assert not device_noise._single_draws(signed(KEY), torch.arange(4)).isfinite().any()


def test_a_word_of_ones_is_not_a_draw_of_zero(monkeypatch):
    monkeypatch.setattr(device_noise, "chacha20_words", lambda key, blocks, **_: torch.full((16, len(blocks)), -1))
    draws = device_noise._single_draws(signed(KEY), torch.arange(4))
    assert 0 < float(draws.square().max()) < 1e-6


def test_every_place_of_every_stream_has_a_key_of_its_own():
    rng = KeyedRNG(seed=3, reproducible=True)
    keys = set()
    for step in range(3):
        for rank in range(2):
            stream = rng.stream("gaussian", step=step, rank=rank)
            for _ in range(3):
                keys.add(stream.device_key())
                assert stream.device_key() in keys
                stream.skip(8)
    assert len(keys) == 18
    assert rng.stream("gaussian", step=0).device_key() == rng.stream("gaussian", step=0).device_key()
    # What the processor would draw in their place tells nothing of them.
    assert bytes(rng.stream("gaussian", step=0).integers64(4).data) not in keys


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_get_the_noise_of_their_place_whatever_the_number_of_processes(dtype):
    mechanism, rng = TensorGaussianMechanism(noise_multiplier=2.0, l2_sensitivity=0.7), KeyedRNG()
    sizes = [5, 3000, 1, 4099]
    wholes = [torch.zeros(size, dtype=dtype) for size in sizes]
    mechanism.add_noise_(wholes, rng=rng, step=3)
    for ranks in (2, 3):
        bounds = [[size * rank // ranks for rank in range(ranks + 1)] for size in sizes]
        found = []
        for rank in range(ranks):
            held = [torch.zeros(ends[rank + 1] - ends[rank], dtype=dtype) for ends in bounds]
            parts = tuple(ShardSlice(first=ends[rank], whole=size) for ends, size in zip(bounds, sizes, strict=True))
            ShardGaussianMechanism(mechanism=mechanism, parts=parts).add_noise_(held, rng=rng, step=3)
            found.append(held)
        for number, whole in enumerate(wholes):
            torch.testing.assert_close(torch.cat([held[number] for held in found]), whole)


@pytest.mark.usefixtures("away")
def test_tensors_types_and_steps_have_noise_of_one_scale_and_their_own():
    mechanism, rng = TensorGaussianMechanism(noise_multiplier=2.0, l2_sensitivity=1.5), KeyedRNG()
    noise = []
    for step in range(2):
        tensors = [torch.zeros(70_000), torch.zeros(70_000), torch.zeros(70_000, dtype=torch.float64)]
        mechanism.add_noise_(tensors, rng=rng, step=step)
        noise += [tensor.double() / 3.0 for tensor in tensors]
    together = torch.stack(noise)
    products = together @ together.t() / together.shape[1]
    assert float((products - torch.eye(6)).abs().max()) < 6 * math.sqrt(2 / together.shape[1])
    assert float((1.05**2 * products - torch.eye(6)).abs().max()) > 6 * math.sqrt(2 / together.shape[1])


def test_tensors_of_several_devices_draw_from_one_row_without_sharing_draws(monkeypatch):
    monkeypatch.setattr(tensor_noise, "_is_away", lambda tensor: tensor.dim() == 2)
    first, second = torch.zeros(50_000), torch.zeros(1, 50_000)
    stream = KeyedRNG(seed=5, reproducible=True).stream("gaussian", step=0)
    key = stream.device_key()
    add_normal_([first, second], stream, stddev=1.0)
    expected = normal_draws(key, first=50_000, count=50_000)
    torch.testing.assert_close(second[0], expected)
    assert abs(float((first * second[0]).mean())) < 6 / math.sqrt(50_000)
    # The next row has other bits on both.
    assert stream.device_key() != key


def test_a_tensor_without_values_takes_the_way_of_a_device():
    tensor = torch.zeros(3, 5, device="meta")
    add_normal_([tensor], KeyedRNG().stream("gaussian", step=0), stddev=1.0)
    assert standard_normal(7, KeyedRNG().stream("gaussian", step=0), device="meta").device.type == "meta"


def test_a_step_is_refused_while_a_cuda_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(PrivacyError, match="captured as a CUDA graph"):
        refuse_graph_capture(torch.device("cuda", 0))
    refuse_graph_capture(torch.device("cpu"))


# --- the kernel -------------------------------------------------------------------------------------------------------


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton (extra `triton`): its interpreter runs the kernel"
)


def run_apart(*arguments, **environment):
    """A process of its own: whether Triton interprets is settled when it is imported."""
    source = Path(device_noise.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(source), "PYTHONWARNINGS": "ignore"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_triton
def test_the_kernel_has_the_words_of_the_operations_and_their_draws():
    found = run_apart(str(Path(__file__).with_name("interpreted_kernel.py")), TRITON_INTERPRET="1")
    assert found["rfc"] == words_of(VECTORS[0][-1])
    assert found["words"] == [True] * 4
    for dtype, first, count, apart in found["draws"]:
        # Logarithm, cosine and sine of two libraries.
        assert apart < (2e-6 if dtype == "torch.float32" else 1e-14), (dtype, first, count)


@needs_triton
def test_the_kernel_compiles_for_cards_that_are_not_here(tmp_path):
    text = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from sordino.mechanisms.device_noise_kernel import _add_draws as kernel
sizes = []
for double, kind in ((False, "*fp32"), (True, "*fp64")):
    signature = dict.fromkeys(kernel.arg_names, "i32") | {"out": kind, "stddev": "fp32", "rest": "fp32"}
    signature["DOUBLE"] = "constexpr"
    source = ASTSource(fn=kernel, signature=signature, constexprs={"DOUBLE": double})
    sizes.append(len(compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]))
print(json.dumps(sizes))
"""
    assert min(run_apart("-c", text, TRITON_CACHE_DIR=str(tmp_path))) > 10_000


@pytest.mark.parametrize("wrong", ["words", "spread", "tail", "places"])
def test_a_kernel_that_gives_other_draws_is_not_used(wrong, monkeypatch):
    operations, usual = device_noise._add_by_operations_, device_noise.SHORT

    def kernel(flat, key, *, first, stddev):
        key = key[::-1] if wrong == "words" else key
        stddev = 0.999 * stddev if wrong == "spread" else stddev
        first = first + 1 if wrong == "places" else first
        monkeypatch.setattr(device_noise, "SHORT", 0 if wrong == "tail" else usual)
        operations(flat, key, first=first, stddev=stddev)
        monkeypatch.setattr(device_noise, "SHORT", usual)

    assert device_noise.agrees_with_operations(operations, torch.device("cpu"))
    assert not device_noise.agrees_with_operations(kernel, torch.device("cpu"))


def test_the_place_that_kernels_are_tried_at_has_a_short_word():
    tile, place = divmod(device_noise.RARE, 16 * device_noise.LANES)
    row, lane = divmod(place, device_noise.LANES)
    words = chacha20_words(device_noise.PUBLIC_KEY, torch.tensor([tile * device_noise.LANES + lane]))
    assert int(words[row, 0]) == 27
