"""Private second moments and covariance of rows with a declared norm.

Rows are clipped, rounded to a grid and multiplied as integers, so the sensitivity holds to the last bit. The product
of the integers runs through floating-point matrix multiplication in blocks small enough that every partial sum is a
whole number below 2⁵³, hence exact.

References:
    Dwork, Talwar, Thakurta, Zhang 2014, "Analyze Gauss", algorithm 1 (symmetric Gaussian noise).
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.events import Event
from sordino.mechanisms.additive import coarse_multiple
from sordino.mechanisms.base import FloatArray, Numbers, observable_release, ratio_at_least, record_matrix
from sordino.mechanisms.calibration import Budget, PureBudget
from sordino.mechanisms.integer_noise import record_bits
from sordino.mechanisms.samplers import discrete_laplace, rounded_gaussian
from sordino.randomness import KeyedRNG, RandomStream

IntegerArray = npt.NDArray[np.int64]

# 2¹³ products of 2²⁰ by 2²⁰ stay below 2⁵³, where float64 counts every whole number.
_BLOCK = 1 << 13
_MOST_BITS = 18


@dataclass(frozen=True, kw_only=True)
class PrivateSecondMoment:
    """XᵀX of rows clipped to ‖x‖₂ ≤ data_norm, plus symmetric exact noise.

    With a Gaussian budget the noise has deviation `scale` on the diagonal and scale/√2 off it, which spends the
    sensitivity of ‖xxᵀ‖_F ≤ data_norm² to the full. With a pure budget the upper triangle gets discrete Laplace
    noise at its ℓ1 sensitivity, data_norm²·(d + 1)/2. The result need not be positive semi-definite.

    Guarantee: one release spends `budget` under the declared relation; under replace-one the sensitivity is √2 times
    (ℓ2) or 2 times (ℓ1) as large. A row with an entry that is not finite adds nothing.

    Args:
        budget: pure or Gaussian.
        data_norm: the largest ℓ2 norm of a row, > 0. Public, never taken from the data.
        columns: number of columns d ≥ 1.
        neighboring_relation: the neighboring relation.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.mechanisms import make_budget
        >>> mechanism = PrivateSecondMoment(budget=make_budget(epsilon=1.0, delta=1e-5), data_norm=1.0, columns=2)
        >>> round(mechanism.scale, 4)
        3.7306
    """

    budget: Budget
    data_norm: float
    columns: int
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.in_range(2.0**-200, 2.0**200, data_norm=self.data_norm, hint="Rescale the rows.")
        checks.integer(1, columns=self.columns)
        _ = self._laplace_ratio if isinstance(self.budget, PureBudget) else self._stddevs

    @cached_property
    def _exponent(self) -> int:
        """The grid of the rows: data_norm is 2^(bits−1) … 2^bits steps, fewer where the noise would leave int64."""
        # The noise is about B·(d + 1)/ε or B·z·√2 squared steps, B the square of the steps in data_norm.
        bits = record_bits(self.budget, self.columns + 1 if self._pure else 2, most=2 * _MOST_BITS) // 2
        return math.frexp(self.data_norm)[1] - bits

    @property
    def _pure(self) -> bool:
        return isinstance(self.budget, PureBudget)

    @cached_property
    def _squared_norm(self) -> int:
        """The largest squared norm of a row of integers."""
        return math.floor((Fraction(self.data_norm) / Fraction(2) ** self._exponent) ** 2)

    @property
    def sensitivity(self) -> float:
        """Frobenius (Gaussian budget) or upper-triangle ℓ1 (pure budget) sensitivity of the matrix."""
        if self._pure:
            return self.data_norm**2 * (self.columns + 1) / 2 * (2 if self._replaces else 1)
        return self.data_norm**2 * (math.sqrt(2) if self._replaces else 1)

    @property
    def _factor(self) -> Fraction:
        """√2 under replace-one, rounded up."""
        return Fraction(math.isqrt(2 << 60) + 1, 1 << 30) if self._replaces else Fraction(1)

    @property
    def _replaces(self) -> bool:
        return self.neighboring_relation is NeighboringRelation.REPLACE_ONE

    @cached_property
    def _stddevs(self) -> tuple[int, int]:
        """Deviation on and off the diagonal, in squared grid steps, rounded up."""
        multiplier = 0.0 if isinstance(self.budget, PureBudget) else self.budget.noise_multiplier
        diagonal = Fraction(multiplier) * self._squared_norm * self._factor
        half_root = Fraction(math.isqrt(1 << 61) + 1, 1 << 31)  # ≥ 1/√2
        return math.ceil(diagonal), math.ceil(diagonal * half_root)

    @cached_property
    def _laplace_ratio(self) -> tuple[int, int]:
        epsilon = self.budget.epsilon if isinstance(self.budget, PureBudget) else math.inf
        # Σ_{i≤j} |x_i x_j| = (‖x‖₁² + ‖x‖₂²)/2 ≤ (d + 1)/2 · ‖x‖₂².
        moved = self._squared_norm * (self.columns + 1) // 2 * (2 if self._replaces else 1)
        return ratio_at_least(Fraction(coarse_multiple(moved)) / Fraction(epsilon))

    @property
    def scale(self) -> float:
        """Gaussian deviation on the diagonal, or Laplace scale of every entry, in squared units of the rows."""
        steps = self._laplace_ratio[0] / self._laplace_ratio[1] if self._pure else float(self._stddevs[0])
        return math.ldexp(steps, 2 * self._exponent)

    @property
    def unit(self) -> float:
        """What one step of `exact` stands for: the square of the step of the rows' grid."""
        return math.ldexp(1.0, 2 * self._exponent)

    def event(self) -> Event:
        """The event of one release."""
        return self.budget.event()

    def exact_value(self, rows: Numbers) -> IntegerArray:
        """XᵀX in squared grid steps before noise, int64 [d, d]. Not private."""
        array = rows if isinstance(rows, np.ndarray) and rows.ndim == 2 else record_matrix(rows, self.columns)[0]
        total = np.zeros((self.columns, self.columns), dtype=np.int64)
        for start in range(0, max(len(array), 1), _BLOCK):  # also of no rows the columns are checked
            block = self._row_integers(array[start : start + _BLOCK])
            total += (block.T @ block).astype(np.int64)
        return total

    @observable_release
    def release(self, rows: Numbers) -> FloatArray:
        """The noisy second moments [d, d], symmetric."""
        noisy = self.exact_value(rows) + self._noise(self.rng.new_stream("second-moment"))
        return np.ldexp(noisy.astype(np.float64), 2 * self._exponent)

    def _row_integers(self, rows: Numbers) -> FloatArray:
        """Rows on the grid as whole floats, each of squared norm ≤ `_squared_norm`."""
        matrix, _ = record_matrix(rows, self.columns, name="rows")
        with np.errstate(all="ignore"):  # data-dependent warnings would tell of extreme entries
            largest = np.maximum(np.abs(matrix).max(axis=1, initial=0.0, keepdims=True), self.data_norm * 2.0**-40)
            norms = largest * np.sqrt(np.square(matrix / largest).sum(axis=1, keepdims=True))
            factors = np.where(norms > self.data_norm, self.data_norm / norms, 1.0)
            scaled = np.ldexp(matrix * factors, -self._exponent)
        steps = np.rint(scaled)
        # Rounding to nearest may leave the ball by a little; such a row is shrunk by 2⁻²⁰ and cut towards zero.
        outside = np.square(steps).sum(axis=1) > self._squared_norm
        steps[outside] = np.trunc(scaled[outside] * (1 - 2.0**-20))
        return steps

    def _noise(self, stream: RandomStream) -> IntegerArray:
        upper, lower = np.triu_indices(self.columns, 1)
        noise = np.zeros((self.columns, self.columns), dtype=np.int64)
        if self._pure:
            diagonal = discrete_laplace(*self._laplace_ratio, self.columns, stream)
            off_diagonal = discrete_laplace(*self._laplace_ratio, len(upper), stream)
        else:
            diagonal = rounded_gaussian(self._stddevs[0], self.columns, stream)
            off_diagonal = rounded_gaussian(self._stddevs[1], len(upper), stream)
        noise[upper, lower] = noise[lower, upper] = off_diagonal
        np.fill_diagonal(noise, diagonal)
        return noise


@dataclass(frozen=True, kw_only=True)
class PrivateCovariance:
    """The covariance matrix, mean and number of rows clipped to ‖x‖₂ ≤ data_norm, from one release.

    Each row gets one more constant column of data_norm, so its second moments hold the number of rows, their sum and
    their products at once; everything else is post-processing. The matrix is made positive semi-definite.

    Guarantee: one release spends `budget` under the declared relation.

    Args:
        budget: pure or Gaussian.
        data_norm: the largest ℓ2 norm of a row, > 0. Public, never taken from the data.
        columns: number of columns d ≥ 1.
        neighboring_relation: the neighboring relation.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.mechanisms import make_budget
        >>> mechanism = PrivateCovariance(budget=make_budget(epsilon=1.0, delta=1e-5), data_norm=1.0, columns=2)
        >>> mechanism.release([[0.5, 0.5]] * 100).shape
        (2, 2)
    """

    budget: Budget
    data_norm: float
    columns: int
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        _ = self.moments

    @cached_property
    def moments(self) -> PrivateSecondMoment:
        """The release that this one is made of: rows [x, data_norm], of norm ≤ √2·data_norm."""
        return PrivateSecondMoment(
            budget=self.budget,
            # One part in 2⁴⁰ above √2, so that a row on the boundary is not shrunk by a rounding error.
            data_norm=checks.positive(data_norm=self.data_norm) * math.sqrt(2) * (1 + 2.0**-40),
            columns=checks.integer(1, columns=self.columns) + 1,
            neighboring_relation=self.neighboring_relation,
            rng=self.rng,
        )

    def event(self) -> Event:
        """The event of one release."""
        return self.moments.event()

    def release(self, rows: Numbers) -> FloatArray:
        """The noisy covariance matrix [d, d], symmetric, positive semi-definite."""
        matrix, present = record_matrix(rows, self.columns, name="rows")
        with np.errstate(all="ignore"):
            norms = np.linalg.norm(matrix, axis=1, keepdims=True)
            matrix = np.where(norms > self.data_norm, matrix * (self.data_norm / norms), matrix)
        extended = np.concatenate([matrix, np.full((len(matrix), 1), self.data_norm)], axis=1)
        moments = self.moments.release(extended[present])
        size = max(float(moments[-1, -1]) / self.data_norm**2, 1.0)
        mean = moments[:-1, -1] / self.data_norm / size
        values, vectors = np.linalg.eigh(moments[:-1, :-1] / size - np.outer(mean, mean))
        return (vectors * np.maximum(values, 0.0)) @ vectors.T
