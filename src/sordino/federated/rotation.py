"""The random rotation that spreads a vector over its coordinates (floor 4, federated): public and orthogonal.

x ↦ H·D·x: D holds independent random signs, H is the Walsh–Hadamard matrix divided by the root of its size. Afterwards
every coordinate has about the root of 1/d of the length, so one step of a grid serves all of them.

References:
    Ailon, Chazelle 2009; Kairouz, Liu, Steinke 2021, "The distributed discrete Gaussian mechanism", section 3.
"""

import numpy as np
import numpy.typing as npt

from sordino.randomness import Stream

__all__ = ["padded_size", "rotate", "rotate_back", "signs"]

Floats = npt.NDArray[np.float64]


def padded_size(dimension: int) -> int:
    """The least power of two that is at least `dimension`."""
    return 1 << max(0, dimension - 1).bit_length()


def signs(size: int, stream: Stream) -> Floats:
    """`size` independent signs ±1."""
    return 1.0 - 2.0 * (stream.integers64(size) & np.uint64(1)).astype(np.float64)


def rotate(vector: Floats, turn: Floats) -> Floats:
    """H·D·x, padded with zeros to the size of `turn`, a power of two.

    Args:
        vector: shape (dimension,).
        turn: the signs, shape (size,).

    Example:
        >>> rotated = rotate(np.array([3.0, 4.0]), np.array([1.0, -1.0]))
        >>> [round(float(entry), 3) for entry in rotated], round(float(np.linalg.norm(rotated)), 9)
        ([-0.707, 4.95], 5.0)
    """
    padded = np.zeros(len(turn))
    padded[: len(vector)] = vector
    return _hadamard(padded * turn)


def rotate_back(vector: Floats, turn: Floats, *, dimension: int) -> Floats:
    """The inverse of `rotate`: D·H·y, the first `dimension` entries."""
    return (_hadamard(vector) * turn)[:dimension]


def _hadamard(vector: Floats) -> Floats:
    """The orthonormal fast Walsh–Hadamard transform, in n·log n additions."""
    out, width = vector.copy(), 1
    while width < len(out):
        pairs = out.reshape(-1, 2, width)
        out = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        width *= 2
    return out / np.sqrt(len(out))
