"""A commitment to the batch that a step drew (floor 3).

Amplification by sampling holds because nobody knows which records a batch holds. A plain hash would give that away:
whoever guesses a batch, or how many records there are, could check the guess. So the hash is keyed with a stream of the
run's own secret key, one for every step. Without the key it is as good as random; whoever kept the key can show
later which batch was drawn, and nobody can show another one.

References:
    RFC 7693 (BLAKE2 with a key).
"""

import hashlib

import numpy as np

from sordino.randomness import Randomness

__all__ = ["commitment_to"]

_BYTES = 32


def commitment_to(indices: np.ndarray, *, step: int, randomness: Randomness) -> str:
    """The commitment to batch `step`, 64 hexadecimal digits whatever the batch holds.

    Guarantee: without the key of `randomness` the digits can't be told from random ones, whatever the indices are, as
    long as keyed BLAKE2b is a pseudorandom function.

    Args:
        indices: int64 positions, shape (b,), sorted.
        step: number of the step.
        randomness: that of the segment.
    """
    key = bytearray(_BYTES)
    randomness.stream("commitment", step=step).fill(memoryview(key))
    content = np.ascontiguousarray(indices, dtype="<i8")
    return hashlib.blake2b(content.data, key=bytes(key), digest_size=_BYTES).hexdigest()
