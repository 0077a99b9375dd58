"""Equal sampled Gaussian steps with hardly any noise, by the number of steps that use the record (floor 1).

With one shift m in standard deviations and w(y) = 1 − q + q e^{my − m²/2}, let k of T steps use the record. Except
with probability T Φ(−y₀) every step lies within y₀ of its own component, so that one of w's two terms is e^{−c} of the
other, c = m²/2 − m y₀, and the loss is, up to T e^{−c}/min(q, 1 − q),

    k(log q + m²/2) + (T − k) log(1 − q) + m√k N(0, 1)          removing,
    k(log q − log(1 − q) + m²/2) + m√k N(0, 1)                  replacing, with half the shift on each side.

Given k that is a Gaussian mechanism's loss with μ = m√k, moved by a constant: δ(ε) is a binomial sum of its closed
form. Where ε is 1e5 or more, the characteristic function decays far too slowly for the contour integral. Adding has
losses of at most −log(1 − q) a step, and so δ = 0 from T times that on.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sordino.accounting.inversion import invert
from sordino.accounting.mixtures import FloatArray, MixturePair
from sordino.errors import AccountingError

__all__ = ["HitCounts"]

_UNIT = 2.0**-53
_SMALLEST_SHIFT = 20.0
_LARGEST_COUNT = 2_000_000
_SEPARATION = 45.0
_LOST = 1e-14  # of δ: counts that are left out
_SPECIAL_ERROR = 64 * _UNIT


@dataclass(frozen=True, kw_only=True)
class HitCounts:
    """T equal steps with a pair of one shift.

    Args:
        rate: q, the probability that a step uses the record.
        shift: m, in standard deviations.
        count: T.
        replacing: whether both sides of the pair are mixtures.
    """

    rate: float
    shift: float
    count: int
    replacing: bool

    @staticmethod
    def of(pairs: tuple[MixturePair, ...], count: int) -> "HitCounts | None":
        """The steps of one pair for each direction, where the shift is large enough; None otherwise."""
        pair = pairs[0]
        if len(pair.upper.parts) != 1 or len(pair.lower.parts) > 1 or count > _LARGEST_COUNT:
            return None
        (part,) = pair.upper.parts
        replacing = bool(pair.lower.parts)
        if not (_SMALLEST_SHIFT <= part.shift <= 1e6 and 1e-12 <= part.weight <= 0.5):
            return None
        return HitCounts(rate=part.weight, shift=part.shift, count=count, replacing=replacing)

    @cached_property
    def _separation(self) -> float:
        """The c for which T e^{−c}/q is negligible."""
        return _SEPARATION + math.log(self.count / self.rate)

    @cached_property
    def _astray(self) -> float:
        """Probability that some step lies far from its component."""
        deviations = self.shift / 2 - self._separation / self.shift
        return self.count * math.erfc(deviations / math.sqrt(2)) / 2 * (1 + 1e-12)

    @cached_property
    def _blur(self) -> float:
        """What the smaller term of w may add to the whole loss; twice that when it is in both sides."""
        return 4 * math.exp(-_SEPARATION)

    @cached_property
    def adding(self) -> float:
        """The largest loss of the other direction; 0 when there is none."""
        return 0.0 if self.replacing else -self.count * math.log1p(-self.rate) * (1 + 1e-12)

    def _terms(self, delta: float) -> tuple[FloatArray, FloatArray, float]:
        """Counts k ≥ 1 with their probabilities, and the relative error of these."""
        from scipy.special import gammaln

        total, smallest = self.count, math.log(_LOST * delta / self.count)
        # P(K ≥ k) ≤ e^{−k} from e² times the mean on.
        most = min(total, math.ceil(max(math.e**2 * total * self.rate, -smallest)))
        k = np.arange(1, most + 1, dtype=np.float64)
        exponent = gammaln(total + 1) - gammaln(k + 1) - gammaln(total - k + 1)
        exponent += k * math.log(self.rate) + (total - k) * math.log1p(-self.rate)
        kept = exponent > smallest
        size = float(gammaln(total + 1)) + total * (abs(math.log(self.rate)) + 1)
        return k[kept], np.exp(exponent[kept]), 64 * _UNIT * (1 + size)

    def _sum(self, epsilon: float, terms: tuple[FloatArray, FloatArray, float]) -> tuple[float, float]:
        """Bounds on Σ_k P(k) · δ_k(ε), rounding included."""
        k, mass, relative = terms
        constant = math.log(self.rate / (1 - self.rate)) * k
        if not self.replacing:
            constant = constant + self.count * math.log1p(-self.rate)
        mu = self.shift * np.sqrt(k)
        moved = self._blur + 32 * _UNIT * (epsilon + np.abs(constant) + mu * mu)
        low = mass @ _gaussian_curve(epsilon - constant + moved, mu)[0]
        high = mass @ _gaussian_curve(epsilon - constant - moved, mu)[1]
        return float(low) * (1 - relative), float(high) * (1 + relative)

    def _curve(self, epsilon: float, terms: tuple[FloatArray, FloatArray, float], lost: float) -> tuple[float, float]:
        low, high = self._sum(epsilon, terms)
        return max(0.0, low - self._astray), min(1.0, high + self._astray + lost)

    def _require(self, epsilon: float, delta: float) -> None:
        if epsilon < self.adding or self._astray > 1e-9 * delta:
            raise AccountingError(
                "noise must be so little that a step shows whether it used the record, got more. Use the contour "
                "accountant."
            )

    def epsilon(self, delta: float) -> tuple[float, float]:
        """Certified bounds on ε at δ, worse direction."""
        self._require(math.inf, delta)
        terms = self._terms(delta)
        low, high = invert(lambda at: self._curve(at, terms, 2 * _LOST * delta), delta)
        self._require(low, delta)
        return low, high

    def delta(self, epsilon: float) -> tuple[float, float]:
        """Certified bounds on δ(ε), worse direction."""
        self._require(epsilon, 1.0)
        goal = 1e-30
        low, high = self._curve(epsilon, self._terms(goal), 2 * _LOST * goal)
        self._require(epsilon, high)
        return low, high


def _gaussian_curve(epsilon: FloatArray, mu: FloatArray) -> tuple[FloatArray, FloatArray]:
    """`gaussian_delta` for arrays, ε/μ + μ/2 > 0."""
    from scipy.special import erfc, erfcx

    a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    relative = _SPECIAL_ERROR * (2 + np.abs(a) * (np.abs(epsilon / mu) + mu))
    density = np.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    far = density * math.sqrt(math.pi / 2) * erfcx(b / math.sqrt(2))
    right = density * math.sqrt(math.pi / 2) * erfcx(np.abs(a) / math.sqrt(2))
    near = np.where(a < 0, erfc(a / math.sqrt(2)) / 2, right)
    error = relative * (near + far)
    return np.clip(near - far - error, 0.0, 1.0), np.clip(near - far + error + 5e-324, 0.0, 1.0)
