"""The integer grid that exact mechanisms live on (floor 1): multiples of a power of two.

Multiplying by a power of two is exact in floating point, so rounding to the grid is the only rounding there is. It
moves two values apart by less than one step in each coordinate, which is added to the sensitivity.

References:
    Canonne, Kamath, Steinke 2020, "The discrete Gaussian for differential privacy", section 1.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.mechanisms.values import FloatArray, Numbers, finite_array

__all__ = ["Grid", "ratio_at_least", "whole_array"]

IntegerArray = npt.NDArray[np.int64]

# Values are clamped here (a map that moves no two values apart), so that value + noise stays inside int64.
_LARGEST = 1 << 61


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Multiples of 2^exponent.

    Example:
        >>> grid = Grid(exponent=-2)
        >>> grid.integers(0.8).tolist(), float(grid.values(grid.integers(0.8)))
        (3, 0.75)
    """

    exponent: int

    def __post_init__(self) -> None:
        checks.in_range(-900, 900, exponent=self.exponent, hint="Rescale the value or its sensitivity.")

    @classmethod
    def of_step(cls, granularity: float) -> "Grid":
        """The grid with this step, which must be a power of two."""
        mantissa, exponent = math.frexp(checks.positive(granularity=granularity))
        if mantissa != 0.5:
            raise InvalidArgument(
                f"granularity must be a power of two, got {granularity!r}. "
                f"Use {math.ldexp(1.0, exponent - 1)!r}: only then is dividing by it exact."
            )
        return cls(exponent=exponent - 1)

    @classmethod
    def below(cls, step: float) -> "Grid":
        """The grid with the largest power of two that is at most `step`."""
        return cls(exponent=math.frexp(checks.positive(step=step))[1] - 1)

    @property
    def step(self) -> float:
        """Distance of neighbouring grid points."""
        return math.ldexp(1.0, self.exponent)

    def integers(self, value: Numbers) -> IntegerArray:
        """The nearest grid points as int64 multiples of the step; entries that are not finite are 0."""
        with np.errstate(all="ignore"):  # ±∞ after scaling is clamped; a warning would tell
            scaled = np.rint(np.ldexp(finite_array(value), -self.exponent))
        return np.asarray(np.clip(scaled, -_LARGEST, _LARGEST), dtype=np.int64)

    def values(self, integers: IntegerArray) -> FloatArray:
        """The grid points as floats."""
        return np.asarray(np.ldexp(integers.astype(np.float64), self.exponent))


def whole_array(value: Numbers) -> IntegerArray:
    """An integer value as int64, clamped so that noise can be added."""
    array = np.asarray(value)
    if array.dtype.kind not in "biu":
        raise InvalidArgument(
            f"value must be an array of integers, got dtype {array.dtype}. Use the mechanism for real values."
        )
    if array.dtype.kind == "u":
        array = np.minimum(array, _LARGEST)
    return np.asarray(np.clip(array.astype(np.int64), -_LARGEST, _LARGEST))


def ratio_at_least(scale: Fraction) -> tuple[int, int]:
    """Integers (a, b), b a power of two ≤ 2⁴⁰, with scale ≤ a/b: noise is never less than asked for.

    At most 2⁻³⁰ more, relatively, for scales above 2⁻¹⁰; smaller ones hardly ever give noise other than 0.

    Example:
        >>> ratio_at_least(Fraction(3, 2))[0] / ratio_at_least(Fraction(3, 2))[1]
        1.5
    """
    bits = 0
    while bits < 40 and math.ceil(scale * (1 << bits)) < 1 << 30:
        bits += 1
    denominator = 1 << bits
    numerator = math.ceil(scale * denominator)
    # Small terms make the draws cheaper; a common power of two changes nothing.
    common = math.gcd(numerator, denominator)
    return numerator // common, denominator // common
