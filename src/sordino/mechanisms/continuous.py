"""Floating-point draws: normal, Laplace, exponential, Gumbel, Gamma, points of unit balls (floor 1).

These are the usual transforms of 52-bit uniforms. Their results protect against everyone who reads values as real
numbers; the last bits of a released float can tell more (Mironov 2012). Mechanisms that use them say so; the
integer-grid mechanisms don't have this gap.

References:
    Box, Muller 1958. Devroye 1986, "Non-uniform random variate generation", sections II.2 and V.4.
"""

import math

import numpy as np
import numpy.typing as npt

from sordino.randomness import Stream

__all__ = ["exponential", "gamma", "gumbel", "laplace", "normal", "unit_ball_point"]

FloatArray = npt.NDArray[np.float64]


def exponential(count: int, stream: Stream) -> FloatArray:
    """`count` standard exponential draws, −ln U."""
    return -np.log(stream.uniform(count))


def laplace(count: int, stream: Stream) -> FloatArray:
    """`count` Laplace draws of scale 1: the difference of two exponentials."""
    return exponential(count, stream) - exponential(count, stream)


def gumbel(count: int, stream: Stream) -> FloatArray:
    """`count` standard Gumbel draws, −ln E for an exponential E."""
    return -np.log(exponential(count, stream))


def normal(count: int, stream: Stream) -> FloatArray:
    """`count` standard normal draws by Box–Muller; the tail reaches 8.5 standard deviations."""
    half = (count + 1) // 2
    radius = np.sqrt(2.0 * exponential(half, stream))
    angle = 2.0 * math.pi * stream.uniform(half)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def gamma(shape: int, stream: Stream) -> float:
    """One Gamma(shape, 1) draw for a whole shape: the sum of as many exponentials."""
    return float(exponential(shape, stream).sum())


def unit_ball_point(dimension: int, norm: float, stream: Stream) -> FloatArray:
    """A uniform point of {z : ‖z‖ ≤ 1} in ℝ^dimension for the ℓ1, ℓ2 or ℓ∞ norm (1, 2 or math.inf)."""
    if norm == math.inf:
        return 2.0 * stream.uniform(dimension) - 1.0
    if norm == 1:
        # |z| and the slack 1 − ‖z‖₁ are exponentials over their sum: a uniform point of the simplex.
        parts = exponential(dimension + 1, stream)
        signs = np.where(stream.uniform(dimension) < 0.5, -1.0, 1.0)
        return signs * parts[:dimension] / parts.sum()
    direction = normal(dimension, stream)
    radius = float(stream.uniform(1)[0]) ** (1.0 / dimension)
    return radius * direction / float(np.linalg.norm(direction))
