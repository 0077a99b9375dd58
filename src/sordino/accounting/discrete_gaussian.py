"""The discrete Gaussian's privacy loss without a cut: its distribution, its transform, and sampled moments.

P(x) ∝ e^{−x²/2σ²} on the integers, Q is P moved by S: L(x) = S(S − 2x)/2σ², unbounded. Tilting by e^{sL} only moves the
center, so that with θ(t) = Σ_x e^{−(x+t)²/2σ²}

    K(s) = s(s+1)S²/2σ² + log θ(sS) − log θ(0),      θ(t) = σ√(2π) Σ_k e^{−2π²σ²k² + 2πikt}   (Poisson summation),

exactly, at every real order and on every vertical line. θ(t) ≤ θ(0) at real t: the Gaussian's moments are an upper
bound (Canonne, Kamath and Steinke 2020, theorem 4).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sordino.accounting.gaussian_mixtures import FloatArray
from sordino.accounting.mgf import UNIT_ROUNDOFF, ComplexArray, CumulantValues
from sordino.errors import AccountingError, UnsupportedEvent

_FARTHEST = 38.0  # standard deviations at which e^{−x²/2σ²} leaves the doubles
_LARGEST_LISTED = 13_000.0  # standard deviation up to which integers are listed
_LARGEST_LOSS = 700.0  # e^L must be a double
_LARGEST_SENSITIVITY = 2_000_000
_LARGEST_SHIFT = 100_000.0  # order · sensitivity up to which sampled moments are summed


def _reciprocal_terms(stddev: float) -> FloatArray:
    """e^{−2π²σ²k²} for k = 1, 2, …, as long as they count; for σ ≥ 1/2."""
    k = np.arange(1, 8, dtype=np.float64)
    return np.exp(-2 * (math.pi * stddev * k) ** 2)


@dataclass(frozen=True, kw_only=True)
class DiscreteGaussianPLD:
    """The loss's distribution, with tails of full relative accuracy; `reach` only says where a lattice should end."""

    stddev: float
    sensitivity: int
    reach: float = 15.0
    infinite: float = 0.0

    def require_listable(self) -> None:
        """Raise `UnsupportedEvent` for too many integers to list, or losses whose exponentials are no doubles."""
        if self.stddev > _LARGEST_LISTED or self.sensitivity > _LARGEST_SENSITIVITY:
            raise UnsupportedEvent(
                f"stddev must be ≤ {_LARGEST_LISTED:g} and sensitivity ≤ {_LARGEST_SENSITIVITY} for the "
                f"distribution of a discrete Gaussian's loss, got {self.stddev!r} and {self.sensitivity}. "
                "Use the rdp accountant."
            )
        if max(map(abs, self.support)) > _LARGEST_LOSS:
            raise UnsupportedEvent(
                f"losses must be ≤ {_LARGEST_LOSS:g} for their distribution, got larger ones. Use the rdp accountant."
            )

    @property
    def support(self) -> tuple[float, float]:
        """The losses of the integers within `reach` standard deviations of 0 or of the sensitivity."""
        most = math.ceil(self.reach * self.stddev) + self.sensitivity
        return self._loss(most), self._loss(-most)

    def _loss(self, x: int) -> float:
        return self.sensitivity * (self.sensitivity - 2 * x) / (2 * self.stddev**2)

    @property
    def atoms(self) -> tuple[float, ...]:
        """The losses nearest to 0; all others are whole multiples of their distance away."""
        middle = self.sensitivity // 2
        return tuple(sorted(self._loss(x) for x in range(middle - 2, middle + 4)))

    @cached_property
    def _below(self) -> tuple[int, FloatArray]:
        """(x₀, P(X ≤ x₀ + k)), summed from the far tail, in extended precision where the machine has it."""
        most = math.ceil(_FARTHEST * self.stddev)
        x = np.arange(-most, most + 1, dtype=np.longdouble)
        mass = np.exp(-((x / np.longdouble(self.stddev)) ** 2) / 2)
        total = mass[:most].sum() * 2 + mass[most]
        return -most, np.asarray(np.cumsum(mass) / total, dtype=np.float64)

    def _at_most(self, x: FloatArray) -> FloatArray:
        """P(X ≤ x) at whole x."""
        first, below = self._below
        index = np.clip(x - first, -1, below.size - 1).astype(np.int64)
        return np.where(index < 0, 0.0, below[np.maximum(index, 0)])

    def _edge(self, loss: FloatArray) -> FloatArray:
        """The smallest whole x with L(x) ≤ l."""
        x = self.sensitivity / 2 - loss * (self.stddev * self.stddev / self.sensitivity)
        # An edge that is an atom up to rounding is that atom: its mass lies at or below it.
        near = np.rint(x)
        return np.where(np.abs(x - near) <= 1e-9 * np.maximum(1.0, np.abs(x)), near, np.ceil(x))

    def upper(self, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
        """L > l where x < edge; under Q, X is moved by the sensitivity."""
        edge = self._edge(loss)
        return self._at_most(edge - 1), self._at_most(edge - 1 - self.sensitivity)

    def lower(self, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
        """P(X ≥ e) = P(X ≤ −e)."""
        edge = self._edge(loss)
        return self._at_most(-edge), self._at_most(self.sensitivity - edge)


@dataclass(frozen=True, kw_only=True)
class DiscreteGaussianTransform:
    """K(s) by the formula of this file: no cut at any order."""

    stddev: float
    sensitivity: int
    largest_loss: float = math.inf
    decays: bool = False

    @property
    def square(self) -> float:
        """μ² = S²/σ²."""
        ratio = self.sensitivity / self.stddev
        return ratio * ratio

    def fraction(self, lam: float) -> tuple[float, float]:
        """λS modulo 1 in [−½, ½], and its rounding error."""
        product = lam * self.sensitivity
        return math.remainder(product, 1.0), 2 * UNIT_ROUNDOFF * product

    def moments(self, lam: float, *, certified: bool = True) -> CumulantValues:  # noqa: ARG002
        """K with its rounding error; where λS has no fraction left in doubles, the error is all that θ can move."""
        square = self.square
        continuous = lam * (lam + 1) * square / 2
        fraction, off = self.fraction(lam)
        if self.stddev >= 1:
            terms = _reciprocal_terms(self.stddev)
            k = np.arange(1, terms.size + 1)
            moved = math.log1p(2 * float(terms @ np.cos(2 * math.pi * k * fraction)))
            moved -= math.log1p(2 * float(terms.sum()))
            slope = 4 * math.pi * float(terms @ k)
            mean, variance = (lam + 0.5) * square, square
        else:
            x, weights = self.near(fraction)
            moved = self._log_theta(fraction) - self._log_theta(0.0)
            slope = 0.5 / self.stddev**2
            # x counts from the whole number next to −λS: L = S²(λ + ½)/σ² − S(x + f)/σ² with f the fraction.
            losses = -(x + fraction) * self.sensitivity / self.stddev**2
            mean = (lam + 0.5) * square + float(weights @ losses)
            variance = float(weights @ losses**2) - float(weights @ losses) ** 2
        widest = min(slope * off, slope)
        error = 16 * UNIT_ROUNDOFF * (continuous + abs(moved) + 1e-3 * min(1.0, continuous)) + widest
        return CumulantValues(
            log_mgf=max(0.0, continuous + moved), error=error, mean=mean, variance=max(variance, 1e-300)
        )

    def near(self, fraction: float) -> tuple[FloatArray, FloatArray]:
        """Whole numbers near 0, and their shares of θ(f); for σ < 1."""
        x = np.arange(-14, 15, dtype=np.float64)
        exponent = -((x + fraction) ** 2) / (2 * self.stddev**2)
        weights = np.exp(exponent - exponent.max())
        return x, weights / weights.sum()

    def _log_theta(self, fraction: float) -> float:
        x = np.arange(-14, 15, dtype=np.float64)
        exponent = -((x + fraction) ** 2) / (2 * self.stddev**2)
        peak = float(exponent.max())
        return peak + math.log(float(np.exp(exponent - peak).sum()))

    def line(self, lam: float, largest_u: float, tolerance: float) -> "DiscreteGaussianLine":  # noqa: ARG002
        """The loss tilted by e^{λL}: a discrete Gaussian around −λS."""
        return DiscreteGaussianLine(transform=self, lam=lam, moments=self.moments(lam))


@dataclass(frozen=True, kw_only=True)
class DiscreteGaussianLine:
    """φ_c(u) of the tilted loss, which has the period 2πσ²/S up to its phase."""

    transform: DiscreteGaussianTransform
    lam: float
    moments: CumulantValues

    @property
    def size(self) -> int:
        """Terms of one evaluation."""
        return 5 if self.transform.stddev >= 1 else 29

    def characteristic(self, u: FloatArray) -> tuple[ComplexArray, FloatArray]:
        """Σ_k e^{−½σ²(v − 2πk)²} e^{−2πikλS} around k = v/2π with v = uS/σ², or the few atoms where σ < 1."""
        one = self.transform
        fraction, off = one.fraction(self.lam)
        offset = u * ((self.lam + 0.5) * one.square - self.moments.mean)
        if one.stddev < 1:
            x, weights = one.near(fraction)
            losses = -(x + fraction) * one.sensitivity / one.stddev**2
            phi = np.exp(1j * np.multiply.outer(u, losses)) @ weights.astype(np.complex128)
            reach = float(np.max(np.abs(losses)))
            error = UNIT_ROUNDOFF * (256 + 8 * u * reach) + off * (
                1 / one.stddev**2 + u * one.sensitivity / one.stddev**2
            )
        else:
            v = u * (one.sensitivity / one.stddev**2)
            whole = np.rint(v / (2 * math.pi))
            phi = np.zeros(u.size, dtype=np.complex128)
            for near in range(-2, 3):
                k = whole + near
                # e^{−2πikf} e^{−½σ²(v − 2πk)²}: the fraction of λS is all that its phase needs.
                exponent = -((one.stddev * (v - 2 * math.pi * k)) ** 2) / 2
                phi += np.exp(exponent - 2j * math.pi * k * fraction)
            terms = _reciprocal_terms(one.stddev)
            k = np.arange(1, terms.size + 1)
            phi /= 1 + 2 * float(terms @ np.cos(2 * math.pi * k * fraction))
            # A rounding of v moves the exponent by σ²|v − 2πk|·v·u₀, and σ|v − 2πk| e^{−…} is below 1.
            error = UNIT_ROUNDOFF * (64 + 16 * one.stddev * v) + 2 * math.pi * off * (np.abs(whole) + 2)
        phi = phi * np.exp(1j * offset)
        return np.log(np.where(phi == 0, 1e-300, phi)), np.asarray(error + 4 * UNIT_ROUNDOFF * np.abs(offset))

    def decay(self) -> Callable[[float], float]:
        """Atoms do not decay."""
        return _no_decay


def _no_decay(_: float) -> float:
    return 0.0


def sampled_discrete_gaussian_moments(
    stddev: float, sensitivity: int, sample_rate: float, *, removing: bool
) -> Callable[[float], float]:
    """λ ↦ upper bound on K(λ) of a Poisson sample before a discrete Gaussian, by summing over all integers that count.

    removing: E_Q (1 − q + q e^L)^{λ+1};   adding: E_P (1 − q + q e^{−L})^{−λ}, L the loss without sampling.

    Raises:
        UnsupportedEvent: more integers than can be listed.
        AccountingError: by the function returned, where the sum would be too long.
    """
    if stddev > _LARGEST_LISTED or sensitivity > _LARGEST_SHIFT:
        raise UnsupportedEvent(
            f"stddev must be ≤ {_LARGEST_LISTED:g} and sensitivity ≤ {_LARGEST_SHIFT:g} for a sampled discrete "
            f"Gaussian, got {stddev!r} and {sensitivity}. Use a Gaussian."
        )
    rate, square = sample_rate, stddev * stddev
    far = math.ceil(40 * stddev) + 2 * sensitivity
    log_normal = _log_sum(-(np.arange(-far, far + 1, dtype=np.float64) ** 2) / (2 * square))

    def bound(lam: float) -> float:
        # log(1 − q + q e^{±L}) has slopes of at most S/σ² in x, so that beyond −λS the summand falls at least as the
        # noise does: what lies 40σ farther is below e^{−800} of a term that is in the sum.
        if not lam * sensitivity < _LARGEST_SHIFT:
            raise AccountingError(
                f"order · sensitivity must be below {_LARGEST_SHIFT:g} for a sampled discrete Gaussian, got order "
                f"{lam + 1:g}: the sum would be too long. Use a lower order, or the pld accountant."
            )
        x = np.arange(-far - math.ceil(lam * sensitivity), far + 1, dtype=np.float64)
        loss = sensitivity * (sensitivity - 2 * x) / (2 * square)
        if removing:
            mixed = np.logaddexp(math.log1p(-rate), math.log(rate) + loss)
            exponent = -((x - sensitivity) ** 2) / (2 * square) + (lam + 1) * mixed
        else:
            mixed = np.logaddexp(math.log1p(-rate), math.log(rate) - loss)
            exponent = -(x * x) / (2 * square) - lam * mixed
        value = _log_sum(exponent) - log_normal
        size = 1 + float(np.max(np.abs(exponent[exponent > exponent.max() - 100])))
        return max(0.0, value) + 64 * UNIT_ROUNDOFF * size

    return bound


def _log_sum(exponent: FloatArray) -> float:
    peak = float(exponent.max())
    return peak + math.log(float(np.exp(exponent - peak).sum()))
