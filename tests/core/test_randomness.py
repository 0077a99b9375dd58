"""The source of all noise: secret by default, keyed by name, never repeated."""

import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from sordino.errors import InvalidArgument
from sordino.randomness import KeyedRNG, RandomStream


def test_the_stream_is_aes_in_counter_mode():
    # NIST SP 800-38A counter mode over zeros is the raw key stream E_k(0), E_k(1), …; here block by block with ECB.
    key = bytes(range(32))
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    expected = b"".join(encryptor.update(counter.to_bytes(16, "big")) for counter in range(5))
    words = RandomStream(key).integers64(10)
    assert words.tobytes() == expected


def test_reading_in_pieces_equals_reading_at_once():
    whole = KeyedRNG(seed=3, reproducible=True).stream("noise", step=0).integers64(300_000)
    stream = KeyedRNG(seed=3, reproducible=True).stream("noise", step=0)
    pieces = np.concatenate([stream.integers64(100_000) for _ in range(3)])
    assert np.array_equal(whole, pieces)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 4096, 5_000_001])
def test_readers_further_on_and_skipped_stretches_give_the_bytes_of_one_reader(count):
    rng = KeyedRNG(seed=3, reproducible=True)
    whole = bytearray(count + 40)
    rng.stream("noise", step=0).fill(memoryview(whole))
    reader, skipper = (rng.stream("noise", step=0) for _ in range(2))
    found = [bytearray(40) for _ in range(3)]
    reader.ahead(count).fill(memoryview(found[0]))
    skipper.skip(count)
    skipper.fill(memoryview(found[1]))
    rest = bytearray(count)
    reader.fill(memoryview(rest))
    reader.fill(memoryview(found[2]))
    assert rest == whole[:count]
    assert all(part == whole[count:] for part in found)


def test_every_part_of_the_name_changes_the_stream():
    rng = KeyedRNG()
    names = [("a", 0, 0, 0), ("b", 0, 0, 0), ("a", 1, 0, 0), ("a", 0, 1, 0), ("a", 0, 0, 1), ("a\x001", 0, 0, 0)]
    draws = {
        rng.stream(purpose, step=step, tensor=tensor, rank=rank).integers64(2).tobytes()
        for purpose, step, tensor, rank in names
    }
    assert len(draws) == len(names)


def test_streams_of_different_steps_ranks_and_tensors_are_uncorrelated():
    rng = KeyedRNG()
    n = 20_000
    draws = np.stack(
        [
            rng.stream("noise", step=step, tensor=tensor, rank=rank).uniform(n)
            for step in range(2)
            for tensor in range(2)
            for rank in range(2)
        ]
    )
    correlations = np.corrcoef(draws)[np.triu_indices(len(draws), k=1)]
    assert np.abs(correlations).max() < 6 / np.sqrt(n)


def test_uniforms_are_uniform_and_never_zero_or_one():
    draws = KeyedRNG().stream("u", step=0).uniform(200_000)
    assert draws.min() > 0
    assert draws.max() < 1
    assert stats.kstest(draws, "uniform").pvalue > 1e-6


def test_the_extreme_words_stay_inside_the_open_interval():
    class Words(RandomStream):
        def integers64(self, count):
            return np.array([0, 2**64 - 1], dtype=np.uint64)

    low, high = Words(bytes(32)).uniform(2)
    assert 0 < low < high < 1


def test_two_runs_differ_without_a_seed_even_in_processes_with_equal_torch_seeds():
    code = (
        "import torch; torch.manual_seed(0)\n"
        "from sordino.randomness import KeyedRNG\n"
        "print(KeyedRNG().stream('noise', step=0).integers64(4).tobytes().hex())"
    )
    outputs = {subprocess.check_output([sys.executable, "-c", code], env=os.environ) for _ in range(2)}
    assert len(outputs) == 2


def test_a_seed_needs_the_explicit_word_and_then_repeats():
    with pytest.raises(InvalidArgument, match="reproducible=True"):
        KeyedRNG(seed=1)
    with pytest.raises(InvalidArgument):
        KeyedRNG(reproducible=True)
    draws = {KeyedRNG(seed=1, reproducible=True).stream("a", step=0).integers64(2).tobytes() for _ in range(2)}
    assert len(draws) == 1


def test_the_key_never_shows_and_never_leaves():
    rng = KeyedRNG()
    assert rng._key.hex() not in repr(rng)
    assert repr(rng._key) not in repr(rng)
    for leave in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            leave(rng)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_processes_never_repeat_a_stream_of_their_parent_or_of_each_other():
    code = """
import os, sys
from sordino.randomness import KeyedRNG
kept = KeyedRNG()
begun = kept.stream("noise", step=1)
begun.integers64(3)
read, write = os.pipe()
for _ in range(2):
    if os.fork() == 0:
        grandchild = os.fork()
        for stream in (kept.stream("noise", step=0), kept.new_stream("x"), begun):
            os.write(write, stream.integers64(4).tobytes())
        if grandchild:
            os.waitpid(grandchild, 0)
        os._exit(0)
for _ in range(2):
    os.wait()
for stream in (kept.stream("noise", step=0), kept.new_stream("x"), begun):
    os.write(write, stream.integers64(4).tobytes())
sys.stdout.write(os.read(read, 65536).hex())
"""
    drawn = bytes.fromhex(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert len(drawn) == 5 * 3 * 32
    assert len({drawn[start : start + 32] for start in range(0, len(drawn), 32)}) == 15
