"""Streams that are handed out once: in one object, in many threads, and across a fork."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from sordino.randomness import KeyedRNG


def words(stream):
    return tuple(stream.integers64(4).tolist())


def test_no_two_fresh_streams_of_one_randomness_are_equal():
    rng = KeyedRNG()
    drawn = [words(rng.new_stream(purpose)) for purpose in ("a", "b", "a", "a")]
    assert len(set(drawn)) == 4


def test_fresh_streams_differ_from_named_ones():
    rng = KeyedRNG(seed=1, reproducible=True)
    named = {words(rng.stream("a", step=step)) for step in range(5)}
    assert not named & {words(rng.new_stream("a")) for _ in range(5)}


def test_a_seed_gives_the_same_fresh_streams_in_the_same_order():
    first, second = (KeyedRNG(seed=3, reproducible=True) for _ in range(2))
    assert [words(first.new_stream("x")) for _ in range(3)] == [words(second.new_stream("x")) for _ in range(3)]


def test_threads_never_get_the_same_stream():
    rng, drawn = KeyedRNG(), []

    def draw():
        for _ in range(50):
            drawn.append(words(rng.new_stream("x")))

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(drawn)) == 200


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_continues_with_noise_of_its_own():
    code = """
import os
from sordino.randomness import KeyedRNG
shared = KeyedRNG()
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, shared.new_stream("x").integers64(4).tobytes())
    os._exit(0)
os.wait()
child = os.read(reader, 32)
assert len(child) == 32
assert child != shared.new_stream("x").integers64(4).tobytes()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_fresh_streams_are_uniform_words(count):
    assert KeyedRNG().new_stream("x").integers64(count).shape == (count,)
    assert np.all(KeyedRNG().new_stream("x").uniform(1000) < 1)
