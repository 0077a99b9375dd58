"""Strategies of correlated noise whose matrix is Toeplitz: independent, banded, banded inverse, buffered.

A strategy is an invertible lower-triangular matrix C, steps × steps. The noise of the steps is X = C⁻¹Z for
white Z, so that the noisy gradients are C⁻¹(CG + Z): private as the Gaussian mechanism on CG, useful because sums
of the rows of X cancel. C⁻¹Z is never computed from matrices: each strategy says, for every step, how the step's noise
comes from one fresh draw and a few buffers (`Recurrence`).

References:
    Denisov et al. 2022 (the mechanism). Choquette-Choo et al. 2023 (bands). Dvijotham et al. 2024; McMahan et
    al. 2024 (buffers). Kalinin, McKenna, Upadhyay, Lampert 2025 (banded inverse).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = [
    "BandedInverse",
    "BandedToeplitz",
    "BufferedToeplitz",
    "FloatArray",
    "IndependentNoise",
    "Recurrence",
    "Strategy",
    "noise_matrix",
    "prefix_workload",
    "ratio",
    "series_product",
    "square_root_coefficients",
    "strategy_digest",
    "toeplitz",
]


# ----------------------------------------------------------------------------------------------------------------------
# Power series: first columns of lower-triangular Toeplitz matrices, their products and inverses.
#
# A lower-triangular Toeplitz matrix is its first column; products of such matrices multiply the columns as power
# series.
# ----------------------------------------------------------------------------------------------------------------------


FloatArray = npt.NDArray[np.float64]


def prefix_workload(steps: int, *, momentum: float = 0.0) -> FloatArray:
    """First column of the map from the steps' gradients to the model's positions, at learning rate 1.

    Plain steps add the gradients up: all ones. With heavy-ball momentum β entry k is 1 + β + … + β^k.

    Args:
        steps: ≥ 1.
        momentum: β in [0, 1).
    """
    checks.integer(1, steps=steps)
    checks.in_range(0.0, 1.0 - 1e-9, momentum=momentum)
    return np.cumsum(momentum ** np.arange(steps, dtype=np.float64))


def series_product(first: FloatArray, second: FloatArray, steps: int) -> FloatArray:
    """The first `steps` coefficients of the product of two series."""
    from scipy.signal import fftconvolve

    return fftconvolve(first[:steps], second[:steps])[:steps]


def ratio(numerator: FloatArray, denominator: FloatArray, steps: int) -> FloatArray:
    """The first `steps` coefficients of numerator/denominator, by the recursion; denominator[0] ≠ 0."""
    from scipy.signal import lfilter

    unit = np.zeros(steps)
    unit[0] = 1.0
    return np.asarray(lfilter(numerator[:steps], denominator[:steps], unit), dtype=np.float64)


def toeplitz(column: FloatArray) -> FloatArray:
    """The lower-triangular Toeplitz matrix with this first column."""
    gaps = np.subtract.outer(np.arange(len(column)), np.arange(len(column)))
    return np.where(gaps >= 0, column[np.maximum(gaps, 0)], 0.0)


# ----------------------------------------------------------------------------------------------------------------------
# Strategies of correlated noise whose matrix is Toeplitz: independent, banded, banded inverse, buffered.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Recurrence:
    """One step of x = C⁻¹z over buffers S of shape (m, d): x = gain·z + readᵀS, then S is brought forward.

    Args:
        gain: factor of the fresh draw z.
        read: m weights of the buffers in x.
        slot: the buffer that is overwritten, or None.
        keep: what it is overwritten with: ``noise`` is x, ``draw`` is z.
        carry: m weights of the old buffers that are added to what is kept; None adds nothing.
        decay: m factors: every buffer becomes decay·S + x; None leaves them.
    """

    gain: float
    read: FloatArray
    slot: int | None = None
    keep: str = "noise"
    carry: FloatArray | None = None
    decay: FloatArray | None = None


@runtime_checkable
class Strategy(Protocol):
    """What every strategy knows."""

    @property
    def steps(self) -> int:
        """Number of rows and columns."""
        ...

    @property
    def bands(self) -> int:
        """C[i, j] = 0 for i − j ≥ bands."""
        ...

    @property
    def buffers(self) -> int:
        """How many past tensors the stream holds."""
        ...

    def column(self) -> FloatArray | None:
        """First column of C if C is Toeplitz, otherwise None."""
        ...

    def noise_column(self) -> FloatArray | None:
        """First column of C⁻¹ if C is Toeplitz, otherwise None."""
        ...

    def matrix(self) -> FloatArray:
        """C, shape (steps, steps)."""
        ...

    def recurrence(self, step: int) -> Recurrence:
        """How the noise of `step` is made."""
        ...

    def leading(self, steps: int) -> "Strategy":
        """The strategy of the first `steps` steps: the leading block of C."""
        ...

    def numbers(self) -> FloatArray:
        """All numbers that define C, besides its kind and steps."""
        ...


def noise_matrix(strategy: Strategy) -> FloatArray:
    """C⁻¹ as the stream makes it, row by row from the recurrence: shape (steps, steps)."""
    identity = np.eye(strategy.steps)
    rows, buffers = np.zeros_like(identity), np.zeros((strategy.buffers, strategy.steps))
    for step, draw in enumerate(identity):
        rule = strategy.recurrence(step)
        rows[step] = rule.gain * draw + rule.read @ buffers
        if rule.decay is not None:
            buffers = rule.decay[:, None] * buffers + rows[step]
        elif rule.slot is not None:
            kept = rows[step] if rule.keep == "noise" else draw
            buffers[rule.slot] = kept if rule.carry is None else kept + rule.carry @ buffers
    return rows


def strategy_digest(strategy: Strategy) -> str:
    """A hash of the strategy's kind, size and numbers: a saved stream must not go on under another matrix."""
    text = f"{type(strategy).__name__} {strategy.steps} ".encode()
    return hashlib.blake2b(text + strategy.numbers().astype("<f8").tobytes(), digest_size=16).hexdigest()


def square_root_coefficients(count: int) -> tuple[float, ...]:
    """The first coefficients of (1 − x)^(−1/2): 1, 1/2, 3/8, …, C(2k, k)/4^k (Fichtenberger et al. 2023).

    As a whole column they are the square root of the prefix-sum matrix; cut to `count` bands, a good strategy without
    any optimization (Kalinin, Lampert 2024).
    """
    checks.integer(1, count=count)
    return (1.0, *np.cumprod(1 - 1 / (2 * np.arange(1, count, dtype=np.float64))).tolist())


@dataclass(frozen=True, kw_only=True)
class IndependentNoise:
    """C = I: the noise of DP-SGD, a fresh draw every step."""

    steps: int

    def __post_init__(self) -> None:
        checks.integer(1, steps=self.steps)

    @property
    def bands(self) -> int:
        """One: the main diagonal."""
        return 1

    @property
    def buffers(self) -> int:
        """None are needed."""
        return 0

    def column(self) -> FloatArray:
        """First column of C."""
        return _padded((1.0,), self.steps)

    def noise_column(self) -> FloatArray:
        """First column of C⁻¹."""
        return _padded((1.0,), self.steps)

    def matrix(self) -> FloatArray:
        """C."""
        return np.eye(self.steps)

    def recurrence(self, step: int) -> Recurrence:  # noqa: ARG002
        """The draw itself."""
        return Recurrence(gain=1.0, read=np.empty(0))

    def leading(self, steps: int) -> "IndependentNoise":
        """Fewer steps of the same."""
        return replace(self, steps=steps)

    def numbers(self) -> FloatArray:
        """No number is free."""
        return np.empty(0)


@dataclass(frozen=True, kw_only=True)
class BandedToeplitz:
    """C has `coefficients` on its main diagonal and the ones below: x_t = (z_t − Σ_j c_j x_{t−j})/c₀.

    The stream holds the last bands − 1 noises. Columns that are `bands` or more apart are orthogonal, which is what
    sampling in cycles needs.

    Args:
        coefficients: c₀ > 0, c₁, …; more than `steps` are refused.
        steps: ≥ 1.

    Example:
        >>> BandedToeplitz(coefficients=(1.0, 0.5), steps=3).matrix().tolist()
        [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.0, 0.5, 1.0]]
    """

    coefficients: tuple[float, ...]
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefficients", _checked(self.coefficients, self.steps))

    @property
    def bands(self) -> int:
        """Number of coefficients."""
        return len(self.coefficients)

    @property
    def buffers(self) -> int:
        """One less than bands."""
        return self.bands - 1

    def column(self) -> FloatArray:
        """First column of C."""
        return _padded(self.coefficients, self.steps)

    def noise_column(self) -> FloatArray:
        """First column of C⁻¹, the reciprocal series."""
        return ratio(np.ones(1), self.numbers(), self.steps)

    def matrix(self) -> FloatArray:
        """C."""
        return toeplitz(self.column())

    def recurrence(self, step: int) -> Recurrence:
        """A ring of past noises; the oldest, just read, is overwritten."""
        first = self.coefficients[0]
        read, slot = _ring(self.coefficients, step)
        return Recurrence(gain=1.0 / first, read=-read / first, slot=slot)

    def leading(self, steps: int) -> "BandedToeplitz":
        """Fewer steps of the same; bands beyond them fall away."""
        return BandedToeplitz(coefficients=self.coefficients[:steps], steps=steps)

    def numbers(self) -> FloatArray:
        """The coefficients."""
        return np.asarray(self.coefficients, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class BandedInverse:
    """C⁻¹ has `coefficients` on its main diagonal and the ones below: x_t = Σ_j m_j z_{t−j}.

    The stream holds the last draws. C itself is a full triangle.

    Args:
        coefficients: m₀ > 0, m₁, …; more than `steps` are refused.
        steps: ≥ 1.
    """

    coefficients: tuple[float, ...]
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefficients", _checked(self.coefficients, self.steps))

    @classmethod
    def square_root(cls, *, bands: int, steps: int) -> "BandedInverse":
        """The inverse of the square root of the prefix-sum matrix, cut to `bands`: 1, −1/2, −1/8, −1/16, …."""
        root = np.asarray(square_root_coefficients(steps))
        return cls(coefficients=tuple(ratio(np.ones(1), root, steps)[:bands].tolist()), steps=steps)

    @property
    def bands(self) -> int:
        """All of them."""
        return self.steps if len(self.coefficients) > 1 else 1

    @property
    def buffers(self) -> int:
        """One less than the coefficients."""
        return len(self.coefficients) - 1

    def column(self) -> FloatArray:
        """First column of C, the reciprocal series."""
        return ratio(np.ones(1), self.numbers(), self.steps)

    def noise_column(self) -> FloatArray:
        """First column of C⁻¹."""
        return _padded(self.coefficients, self.steps)

    def matrix(self) -> FloatArray:
        """C."""
        return toeplitz(self.column())

    def recurrence(self, step: int) -> Recurrence:
        """A ring of past draws; the oldest, just read, is overwritten."""
        read, slot = _ring(self.coefficients, step)
        return Recurrence(gain=self.coefficients[0], read=read, slot=slot, keep="draw")

    def leading(self, steps: int) -> "BandedInverse":
        """Fewer steps of the same."""
        return BandedInverse(coefficients=self.coefficients[:steps], steps=steps)

    def numbers(self) -> FloatArray:
        """The coefficients."""
        return np.asarray(self.coefficients, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class BufferedToeplitz:
    """C's first column is 1, then Σ_i ω_i θ_i^(k−1): a few buffers, each forgetting at its own rate, for any length.

    x_t = z_t − Σ_i ω_i s_i, then s_i ← θ_i s_i + x_t.

    Args:
        decays: θ_i, each in [0, 1].
        scales: ω_i, as many; any sign.
        steps: ≥ 1.

    References:
        Dvijotham et al. 2024, section 3; McMahan, Xu, Zhang 2024, algorithm 1.
    """

    decays: tuple[float, ...]
    scales: tuple[float, ...]
    steps: int

    def __post_init__(self) -> None:
        checks.integer(1, steps=self.steps)
        for decay in self.decays:
            checks.in_range(0.0, 1.0, decays=decay)
        if len(self.decays) != len(self.scales) or not np.isfinite(self.scales).all():
            raise InvalidArgument(
                f"scales must be {len(self.decays)} finite numbers, one for each decay, got {self.scales!r}. Pair them."
            )

    @property
    def bands(self) -> int:
        """All of them."""
        return self.steps if self.decays else 1

    @property
    def buffers(self) -> int:
        """One for each decay."""
        return len(self.decays)

    def column(self) -> FloatArray:
        """First column of C."""
        powers = np.power.outer(np.asarray(self.decays), np.arange(self.steps - 1))
        return np.concatenate([[1.0], np.asarray(self.scales) @ powers])

    def noise_column(self) -> FloatArray:
        """First column of C⁻¹, by the recursion of its rational generating function."""
        above = np.ones(1)
        for decay in self.decays:
            above = np.convolve(above, [1.0, -decay])
        below = above.copy()
        for i, scale in enumerate(self.scales):
            others = np.array([0.0, 1.0])
            for j, decay in enumerate(self.decays):
                if j != i:
                    others = np.convolve(others, [1.0, -decay])
            below += scale * others
        return ratio(above, below, self.steps)

    def matrix(self) -> FloatArray:
        """C."""
        return toeplitz(self.column())

    def recurrence(self, step: int) -> Recurrence:  # noqa: ARG002
        """Every buffer decays and takes the new noise in."""
        return Recurrence(gain=1.0, read=-np.asarray(self.scales), decay=np.asarray(self.decays))

    def leading(self, steps: int) -> "BufferedToeplitz":
        """Fewer steps of the same."""
        return replace(self, steps=steps)

    def numbers(self) -> FloatArray:
        """Decays, then scales."""
        return np.asarray([*self.decays, *self.scales], dtype=np.float64)


def _ring(coefficients: Sequence[float], step: int) -> tuple[FloatArray, int | None]:
    """Weights of a ring of the last values (value t lies in slot t mod size), and the slot of the next one."""
    size = len(coefficients) - 1
    read = np.zeros(size)
    for back in range(1, min(size, step) + 1):
        read[(step - back) % size] = coefficients[back]
    return read, step % size if size else None


def _padded(values: Sequence[float], steps: int) -> FloatArray:
    column = np.zeros(steps)
    column[: len(values)] = values
    return column


def _checked(coefficients: Sequence[float], steps: int) -> tuple[float, ...]:
    checks.integer(1, steps=steps)
    values = tuple(float(value) for value in coefficients)
    if not 1 <= len(values) <= steps or not np.isfinite(values).all() or values[0] <= 0:
        raise InvalidArgument(
            f"coefficients must be 1 to {steps} finite numbers with the first > 0, got {len(values)} of them. "
            "Use at most one for each step."
        )
    return values
