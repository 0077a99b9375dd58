"""The Laplace mechanism on numpy values, in floating point.

For values whose last bits matter use `DiscreteLaplaceMechanism`.

References:
    Dwork, McSherry, Nissim, Smith 2006, proposition 1. Mironov 2012 (what floating point leaks).
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.events import DiscreteGaussian, DiscreteLaplace, Event, Gaussian, Laplace, PureDP, ZeroConcentratedDP
from sordino.mechanisms.base import (
    FloatArray,
    Grid,
    Numbers,
    Released,
    check_dimension,
    finite_array,
    observable_release,
    ratio_at_least,
    whole_array,
)
from sordino.mechanisms.calibration import (
    Budget,
    PureBudget,
    analytic_noise_multiplier,
    classical_noise_multiplier,
)
from sordino.mechanisms.samplers import (
    LARGEST_STDDEV,
    discrete_gaussian,
    discrete_laplace,
    gamma,
    laplace,
    normal,
    rounded_gaussian,
    unit_ball_point,
)
from sordino.randomness import KeyedRNG


@dataclass(frozen=True, kw_only=True)
class LaplaceMechanism:
    """Adds Laplace noise of scale l1_sensitivity/epsilon to every entry of a value, in floating point.

    Guarantee: one release is ``Laplace(1/epsilon)``, hence ε-private with δ = 0, when one privacy unit moves the
    value by at most `l1_sensitivity` in ℓ1 norm. An entry that is not finite is released as if it were 0.

    Args:
        epsilon: > 0.
        l1_sensitivity: > 0, under the declared relation.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = LaplaceMechanism(epsilon=0.5, l1_sensitivity=2.0)
        >>> mechanism.scale, mechanism.release([1.0, 2.0]).shape
        (4.0, (2,))
    """

    epsilon: float
    l1_sensitivity: float
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.positive(l1_sensitivity=self.l1_sensitivity)
        checks.positive(scale=self.l1_sensitivity / self.epsilon, hint="Rescale the value.")

    @property
    def scale(self) -> float:
        """Scale b of the noise, density ∝ e^{−|z|/b}; its standard deviation is √2·b."""
        return self.l1_sensitivity / self.epsilon

    def event(self) -> Event:
        """The event of one release."""
        return Laplace(noise_multiplier=1.0 / self.epsilon)

    @observable_release
    def release(self, value: Numbers) -> Released:
        """The value plus noise, same shape."""
        array = finite_array(value)
        noise = laplace(array.size, self.rng.new_stream("laplace"))
        return (array + self.scale * noise.reshape(array.shape))[()]


# ----------------------------------------------------------------------------------------------------------------------
# The K-norm mechanism: pure privacy with noise shaped like the norm in which the value moves.
#
# References:
#     Hardt, Talwar 2010, "On the geometry of differential privacy" (density and sampler).
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KNormMechanism:
    """Adds noise of density ∝ exp(−epsilon·‖z‖/sensitivity) for the ℓ1, ℓ2 or ℓ∞ norm, in floating point.

    Where the sensitivity is known in ℓ2 or ℓ∞, this adds far less noise than Laplace noise at the ℓ1 sensitivity
    that follows from it.

    Guarantee: one release is ε-private with δ = 0 when one privacy unit moves the value by at most `sensitivity` in
    the named norm. An entry that is not finite is released as if it were 0.

    Args:
        epsilon: > 0.
        sensitivity: > 0, in the norm `norm`, under the declared relation.
        norm: 1, 2 or ``math.inf``.
        dimension: number of entries k of every value, ≥ 1: its ``size``. Public: the noise grows with it.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = KNormMechanism(epsilon=1.0, sensitivity=1.0, norm=2, dimension=3)
        >>> mechanism.release([0.0, 1.0, 2.0]).shape
        (3,)
    """

    epsilon: float
    sensitivity: float
    norm: float
    dimension: int
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.positive(sensitivity=self.sensitivity)
        checks.one_of((1, 2, math.inf), norm=self.norm, hint="Give a number: 2 for ℓ2, math.inf for ℓ∞.")
        checks.integer(1, dimension=self.dimension)
        checks.positive(scale=self.sensitivity / self.epsilon, hint="Rescale the value.")

    @property
    def scale(self) -> float:
        """Δ/ε: the norm of the noise is Gamma(dimension, scale)."""
        return self.sensitivity / self.epsilon

    def event(self) -> Event:
        """The event of one release: for ℓ1 and in one dimension the noise is Laplace noise."""
        if self.norm == 1 or self.dimension == 1:
            return Laplace(noise_multiplier=1.0 / self.epsilon)
        return PureDP(epsilon=self.epsilon)

    def noise(self) -> npt.NDArray[np.float64]:
        """One draw of the noise: r·u with r ~ Gamma(k + 1, Δ/ε) and u uniform in the unit ball of the norm."""
        stream = self.rng.new_stream("k-norm")
        radius = self.scale * gamma(self.dimension + 1, stream)
        return radius * unit_ball_point(self.dimension, self.norm, stream)

    @observable_release
    def release(self, value: Numbers) -> Released:
        """The value plus noise, same shape."""
        array = finite_array(value)
        check_dimension(array, self.dimension)
        return (array + self.noise().reshape(array.shape))[()]


# ----------------------------------------------------------------------------------------------------------------------
# The Gaussian mechanism on numpy values: in floating point, and exactly, on an integer grid.
#
# References:
#     Balle, Wang 2018, theorem 8 (calibration). Mironov 2012 (what floating point leaks).
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GaussianMechanism:
    """Adds N(0, (noise_multiplier · l2_sensitivity)²) to every entry of a numpy value, in floating point.

    For values whose last bits matter use `GridGaussianMechanism`.

    Guarantee: one release is ``Gaussian(noise_multiplier)`` when one privacy unit moves the value by at most
    `l2_sensitivity` in ℓ2 norm. An entry that is not finite is released as if it were 0.

    Args:
        noise_multiplier: standard deviation over sensitivity, > 0.
        l2_sensitivity: > 0, under the declared relation.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = GaussianMechanism.from_budget(epsilon=1.0, delta=1e-5, l2_sensitivity=2.0)
        >>> round(mechanism.stddev, 4), mechanism.release([1.0, 2.0]).shape
        (7.4613, (2,))
    """

    noise_multiplier: float
    l2_sensitivity: float
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(noise_multiplier=self.noise_multiplier)
        checks.positive(l2_sensitivity=self.l2_sensitivity)

    @classmethod
    def from_budget(
        cls,
        *,
        epsilon: float,
        delta: float,
        l2_sensitivity: float,
        calibration: str = "analytic",
        rng: KeyedRNG | None = None,
    ) -> "GaussianMechanism":
        """The mechanism with the least noise that is (ε, δ)-private; ``classical`` is refused for ε ≥ 1."""
        checks.one_of(("analytic", "classical"), calibration=calibration)
        calibrate = analytic_noise_multiplier if calibration == "analytic" else classical_noise_multiplier
        return cls(
            noise_multiplier=calibrate(epsilon=epsilon, delta=delta),
            l2_sensitivity=l2_sensitivity,
            rng=rng or KeyedRNG(),
        )

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on each entry."""
        return self.noise_multiplier * self.l2_sensitivity

    def event(self) -> Event:
        """The event of one release."""
        return Gaussian(noise_multiplier=self.noise_multiplier)

    @observable_release
    def release(self, value: Numbers) -> Released:
        """The value plus noise, same shape."""
        array = finite_array(value)
        noise = normal(array.size, self.rng.new_stream("array-gaussian"))
        return (array + self.stddev * noise.reshape(array.shape))[()]


@dataclass(frozen=True, kw_only=True)
class GridGaussianMechanism:
    """Gaussian noise, exactly rounded to an integer grid: what is released has no low bits that could tell.

    The value is rounded to the grid, which raises its ℓ2 sensitivity to Δ + step·√dimension; the noise is drawn by
    integer comparisons alone, and is post-processing of real Gaussian noise (`rounded_gaussian`).

    Guarantee: one release is ``Gaussian(noise_multiplier)`` when one privacy unit moves the value by at most
    `l2_sensitivity` in ℓ2 norm. An entry that is not finite is released as if it were 0.

    Args:
        noise_multiplier: standard deviation over sensitivity, > 0.
        l2_sensitivity: > 0, under the declared relation, before rounding.
        dimension: number of entries of every value, ≥ 1. Public.
        granularity: step of the grid, a power of two; by default about 2⁻³⁰ of the sensitivity.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = GridGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0, dimension=3, granularity=0.125)
        >>> bool((mechanism.release([0.1, 0.2, 0.3]) * 8 % 1 == 0).all())
        True
    """

    noise_multiplier: float
    l2_sensitivity: float
    dimension: int = 1
    granularity: float | None = None
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(noise_multiplier=self.noise_multiplier)
        checks.positive(l2_sensitivity=self.l2_sensitivity)
        checks.integer(1, dimension=self.dimension)
        checks.in_range(1, LARGEST_STDDEV, grid_stddev=self.grid_stddev, hint="Choose a coarser granularity.")

    @property
    def grid(self) -> Grid:
        """Where values live after rounding."""
        if self.granularity is not None:
            return Grid.of_step(self.granularity)
        return Grid.below(self.l2_sensitivity * max(2.0**-30, self.noise_multiplier * 2.0**-48))

    @property
    def grid_stddev(self) -> int:
        """Standard deviation of the noise in grid steps, rounded up."""
        # The root is rounded up to an integer's and the products are exact fractions, so nothing is rounded down.
        rounding = math.isqrt(self.dimension - 1) + 1
        sensitivity = Fraction(self.l2_sensitivity) / Fraction(self.grid.step) + rounding
        return math.ceil(Fraction(self.noise_multiplier) * sensitivity)

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on each entry."""
        return self.grid_stddev * self.grid.step

    def event(self) -> Event:
        """The event of one release."""
        return Gaussian(noise_multiplier=self.noise_multiplier)

    @observable_release
    def release(self, value: Numbers) -> Released:
        """The value, rounded to the grid, plus noise on the grid; same shape, float64."""
        integers = self.grid.integers(value)
        check_dimension(integers, self.dimension)
        noise = rounded_gaussian(self.grid_stddev, integers.size, self.rng.new_stream("grid-gaussian"))
        return self.grid.values(np.asarray(integers + noise.reshape(integers.shape)))[()]


# ----------------------------------------------------------------------------------------------------------------------
# The discrete Gaussian mechanism: exact, on integers or on an integer grid.
#
# It has the same zCDP and Rényi bounds as Gaussian noise of the same multiplier and releases integers. Where the ε–δ
# curve of a vector release matters, `GridGaussianMechanism` is tighter: its event is the Gaussian's own.
#
# References:
#     Canonne, Kamath, Steinke 2020, theorem 4 (zCDP), algorithm 3 (sampler).
# ----------------------------------------------------------------------------------------------------------------------


# Above this many grid steps the exact distribution has more atoms than an accountant wants to list.
_LARGEST_LISTED = 4096.0


@dataclass(frozen=True, kw_only=True)
class DiscreteGaussianMechanism:
    """Adds integers with P(x) ∝ exp(−x²/(2σ²)) on a grid, σ = noise_multiplier · sensitivity. Exact.

    With `integers` the values are integers and the grid is ℤ: nothing is rounded. Otherwise the value is rounded to
    the grid, which raises its ℓ2 sensitivity to Δ₂ + step·√dimension.

    Guarantee: one release is 1/(2·noise_multiplier²)-zCDP when one privacy unit moves the value by at most
    `l2_sensitivity` in ℓ2 norm; ``DiscreteGaussian`` for a single number. An entry that is not finite is released as
    if it were 0.

    Args:
        noise_multiplier: σ over sensitivity, > 0.
        l2_sensitivity: > 0, under the declared relation, before rounding.
        dimension: number of entries of every value, ≥ 1. Public.
        granularity: step of the grid, a power of two; by default about 2⁻³⁰ of the sensitivity. 1 with `integers`.
        integers: whether values are integers.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = DiscreteGaussianMechanism(noise_multiplier=2.0, l2_sensitivity=1.0, integers=True)
        >>> mechanism.event()
        DiscreteGaussian(stddev=2.0, sensitivity=1)
    """

    noise_multiplier: float
    l2_sensitivity: float
    dimension: int = 1
    granularity: float | None = None
    integers: bool = False
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(noise_multiplier=self.noise_multiplier)
        checks.positive(l2_sensitivity=self.l2_sensitivity)
        checks.integer(1, dimension=self.dimension)
        if self.integers:
            checks.one_of((None, 1.0), granularity=self.granularity, hint="Integers live on the grid of step 1.")
            checks.in_range(1.0, math.inf, l2_sensitivity=self.l2_sensitivity, hint="An integer moves by 1 or not.")
        checks.in_range(2.0**-20, 2.0**50, grid_stddev=self.stddev / self.grid.step, hint="Change the granularity.")

    @property
    def grid(self) -> Grid:
        """Where values live after rounding."""
        if self.integers:
            return Grid(exponent=0)
        if self.granularity is not None:
            return Grid.of_step(self.granularity)
        return Grid.below(self.l2_sensitivity * max(2.0**-30, self.noise_multiplier * 2.0**-48))

    @property
    def grid_sensitivity(self) -> Fraction:
        """ℓ2 sensitivity in grid steps after rounding; whole for a single number."""
        exact = Fraction(self.l2_sensitivity) / Fraction(self.grid.step)
        if self.dimension == 1:
            return Fraction(math.floor(exact) + (0 if self.integers else 1))
        return exact + (0 if self.integers else math.isqrt(self.dimension - 1) + 1)

    @property
    def ratio(self) -> tuple[int, int]:
        """σ in grid steps as a ratio of integers, rounded up."""
        return ratio_at_least(Fraction(self.noise_multiplier) * self.grid_sensitivity)

    @property
    def stddev(self) -> float:
        """σ in the value's own unit; the standard deviation is at most that."""
        return self.ratio[0] / self.ratio[1] * self.grid.step

    def event(self) -> Event:
        """The event of one release."""
        stddev = self.ratio[0] / self.ratio[1]
        if self.dimension == 1 and stddev <= _LARGEST_LISTED:
            return DiscreteGaussian(stddev=stddev, sensitivity=int(self.grid_sensitivity))
        return ZeroConcentratedDP(rho=0.5 / self.noise_multiplier**2)

    @observable_release
    def release(self, value: Numbers) -> Released | np.int64 | npt.NDArray[np.int64]:
        """The value on the grid plus noise, same shape: int64 with `integers`, otherwise float64."""
        whole = whole_array(value) if self.integers else self.grid.integers(value)
        check_dimension(whole, self.dimension)
        noise = discrete_gaussian(*self.ratio, whole.size, self.rng.new_stream("discrete-gaussian"))
        noisy = np.asarray(whole + noise.reshape(whole.shape))
        return noisy[()] if self.integers else self.grid.values(noisy)[()]


# ----------------------------------------------------------------------------------------------------------------------
# The discrete Laplace and geometric mechanisms: exact pure privacy on integers and on an integer grid.
#
# References:
#     Ghosh, Roughgarden, Sundararajan 2009 (geometric). Canonne, Kamath, Steinke 2020, algorithm 2 (sampler).
# ----------------------------------------------------------------------------------------------------------------------


# A fine grid's sensitivity is made a multiple of a whole number of coarse steps, and this many of them are listed.
_COARSE_STEPS = 256


def coarse_multiple(sensitivity: int) -> int:
    """The sensitivity or a little more: a multiple of ⌈sensitivity/256⌉.

    From 2¹⁶ on it is 256 times that, at most 2⁻⁸ more (2⁻²² at the usual 2³⁰), so that all fine grids have like events.
    """
    step = -(-sensitivity // _COARSE_STEPS)
    return step * (_COARSE_STEPS if sensitivity >= 1 << 16 else -(-sensitivity // step))


def laplace_event(ratio: tuple[int, int], sensitivity: int) -> DiscreteLaplace:
    """The event of one integer that moves by ≤ `sensitivity`, a value of `coarse_multiple`, noise of scale a/b.

    Noise on ℤ is noise on rℤ plus independent noise: dividing the characteristic functions leaves that of the
    difference of two truncated geometric variables. So the mechanism on the fine grid is post-processing of the one
    on the grid of step r with r times less sensitivity and scale, whose few atoms an accountant can list.
    """
    step = -(-sensitivity // _COARSE_STEPS)
    return DiscreteLaplace(scale=ratio[0] / (ratio[1] * step), sensitivity=sensitivity // step)


def _event(ratio: tuple[int, int], sensitivity: int, dimension: int) -> Event:
    """One number has the exact event; for a vector only ε is claimed."""
    if dimension == 1:
        return laplace_event(ratio, sensitivity)
    return PureDP(epsilon=sensitivity * ratio[1] / ratio[0])


@dataclass(frozen=True, kw_only=True)
class GeometricMechanism:
    """Adds two-sided geometric noise, P(x) ∝ exp(−epsilon·|x|/l1_sensitivity), to integers. Exact.

    Guarantee: one release is ε-private with δ = 0 when one privacy unit moves the integer vector by at most
    `l1_sensitivity` in ℓ1 norm; ``DiscreteLaplace`` for a single integer.

    Args:
        epsilon: > 0.
        l1_sensitivity: a whole number ≥ 1, under the declared relation.
        dimension: number of entries of every value, ≥ 1. Public.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> GeometricMechanism(epsilon=1.0, l1_sensitivity=1).release(5).dtype
        dtype('int64')
    """

    epsilon: float
    l1_sensitivity: int = 1
    dimension: int = 1
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.integer(1, l1_sensitivity=self.l1_sensitivity)
        checks.integer(1, dimension=self.dimension)
        checks.in_range(2.0**-20, 2.0**40, scale=self.l1_sensitivity / self.epsilon, hint="Rescale ε or the value.")

    @property
    def ratio(self) -> tuple[int, int]:
        """The scale Δ₁/ε as a ratio of integers, rounded up."""
        return ratio_at_least(Fraction(coarse_multiple(self.l1_sensitivity)) / Fraction(self.epsilon))

    @property
    def scale(self) -> float:
        """Scale t of the noise, P(x) ∝ e^{−|x|/t}."""
        return self.ratio[0] / self.ratio[1]

    def event(self) -> Event:
        """The event of one release."""
        return _event(self.ratio, coarse_multiple(self.l1_sensitivity), self.dimension)

    @observable_release
    def release(self, value: Numbers) -> np.int64 | npt.NDArray[np.int64]:
        """The integers plus noise, same shape, int64."""
        integers = whole_array(value)
        check_dimension(integers, self.dimension)
        noise = discrete_laplace(*self.ratio, integers.size, self.rng.new_stream("geometric"))
        return np.asarray(integers + noise.reshape(integers.shape))[()]


@dataclass(frozen=True, kw_only=True)
class DiscreteLaplaceMechanism:
    """The Laplace mechanism for real values without its floating-point gap: values and noise live on a grid. Exact.

    The value is rounded to the grid, which raises its ℓ1 sensitivity to Δ₁ + step·dimension.

    Guarantee: one release is ε-private with δ = 0 when one privacy unit moves the value by at most `l1_sensitivity`
    in ℓ1 norm. An entry that is not finite is released as if it were 0.

    Args:
        epsilon: > 0.
        l1_sensitivity: > 0, under the declared relation, before rounding.
        dimension: number of entries of every value, ≥ 1. Public.
        granularity: step of the grid, a power of two; by default about 2⁻³⁰ of the sensitivity.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = DiscreteLaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0, granularity=0.25)
        >>> mechanism.grid_sensitivity, float(mechanism.release(0.3)) * 4 % 1
        (5, 0.0)
    """

    epsilon: float
    l1_sensitivity: float
    dimension: int = 1
    granularity: float | None = None
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.positive(l1_sensitivity=self.l1_sensitivity)
        checks.integer(1, dimension=self.dimension)
        checks.in_range(
            2.0**-20, 2.0**50, grid_scale=self.grid_sensitivity / self.epsilon, hint="Choose another granularity."
        )

    @property
    def grid(self) -> Grid:
        """Where values live after rounding."""
        if self.granularity is not None:
            return Grid.of_step(self.granularity)
        return Grid.below(self.l1_sensitivity * max(2.0**-30, 2.0**-48 / self.epsilon))

    @property
    def grid_sensitivity(self) -> int:
        """ℓ1 sensitivity in grid steps after rounding: about Δ₁/step + dimension, a whole number."""
        moved = math.floor(Fraction(self.l1_sensitivity) / Fraction(self.grid.step)) + self.dimension
        return coarse_multiple(moved)

    @property
    def ratio(self) -> tuple[int, int]:
        """The scale in grid steps as a ratio of integers, rounded up."""
        return ratio_at_least(Fraction(self.grid_sensitivity) / Fraction(self.epsilon))

    @property
    def scale(self) -> float:
        """Scale of the noise in the value's own unit."""
        return self.ratio[0] / self.ratio[1] * self.grid.step

    def event(self) -> Event:
        """The event of one release."""
        return _event(self.ratio, self.grid_sensitivity, self.dimension)

    @observable_release
    def release(self, value: Numbers) -> Released:
        """The value, rounded to the grid, plus noise on the grid; same shape, float64."""
        integers = self.grid.integers(value)
        check_dimension(integers, self.dimension)
        noise = discrete_laplace(*self.ratio, integers.size, self.rng.new_stream("discrete-laplace"))
        return self.grid.values(np.asarray(integers + noise.reshape(integers.shape)))[()]


def release_in_l2(value: FloatArray, *, budget: Budget, l2_sensitivity: float, rng: KeyedRNG) -> FloatArray:
    """A value of any shape plus noise for its ℓ2 sensitivity, of the same shape.

    Guarantee: one release is the event of `budget`, under the relation that `l2_sensitivity` holds for. A pure budget
    is spent by `KNormMechanism` in the ℓ2 norm, a Gaussian one by `GaussianMechanism`.

    Args:
        value: computed from private records.
        budget: what the release costs.
        l2_sensitivity: > 0, how far one privacy unit moves `value` in ℓ2 norm.
        rng: where the noise comes from.
    """
    if isinstance(budget, PureBudget):
        pure = KNormMechanism(
            epsilon=budget.epsilon, sensitivity=l2_sensitivity, norm=2, dimension=np.size(value), rng=rng
        )
        return np.asarray(pure.release(value))
    gaussian = GaussianMechanism(noise_multiplier=budget.noise_multiplier, l2_sensitivity=l2_sensitivity, rng=rng)
    return np.asarray(gaussian.release(value))
