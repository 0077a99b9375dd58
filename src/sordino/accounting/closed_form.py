"""The Gaussian mechanism in closed form, accurate in the far tail and for tiny losses.

With μ = sensitivity / standard deviation, a = ε/μ − μ/2 and b = ε/μ + μ/2 (Balle and Wang 2018, theorem 8),

    δ(ε) = Φ(−a) − e^ε Φ(−b) = φ(a) (m(a) − m(b)),        m(t) = Φ(−t)/φ(t), the Mills ratio,

because e^ε φ(b) = φ(a). The second form has no overflow and keeps its relative accuracy at δ = 1e-300; the
difference of Mills ratios cancels only when μ is tiny, where −m′ is convex and Hermite–Hadamard brackets it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sordino.accounting.gaussian_mixtures import FloatArray, MixturePair
from sordino.errors import AccountingError

_UNIT = 2.0**-53
# erfcx and erfc are accurate to a few ulp; the factor leaves an order of magnitude.
_SPECIAL_ERROR = 32 * _UNIT
_TINY_MU = 1e-4
# Beyond it ε is above 5e11, and what is left of double precision says nothing about δ.
_HUGE_MU = 1e6


def _normal_cdf(t: float) -> float:
    return math.erfc(-t / math.sqrt(2)) / 2


def _mills(t: float) -> float:
    from scipy.special import erfcx  # here, because importing scipy.special costs a fifth of a second

    return math.sqrt(math.pi / 2) * float(erfcx(t / math.sqrt(2)))


def _minus_mills_slope(t: float) -> tuple[float, float]:
    """Bounds on −m′(t) = 1 − t·m(t), which is positive, decreasing and convex."""
    value = 1 - t * _mills(t)
    error = _SPECIAL_ERROR * (1 + abs(t * _mills(t)))
    return max(0.0, value - error), value + error


def _mills_difference(a: float, mu: float) -> tuple[float, float]:
    if mu < _TINY_MU:
        middle, _ = _minus_mills_slope(a + mu / 2)
        ends = (_minus_mills_slope(a)[1] + _minus_mills_slope(a + mu)[1]) / 2
        return mu * middle, mu * ends
    value = _mills(a) - _mills(a + mu)
    error = _SPECIAL_ERROR * (1 + abs(a)) * _mills(a)
    return max(0.0, value - error), value + error


def gaussian_delta(epsilon: float, mu: float) -> tuple[float, float]:
    """Bounds on δ(ε) of a μ-GDP (Gaussian) mechanism, for any real ε.

    Example:
        >>> lower, upper = gaussian_delta(1.0, 1 / 3.730631634815942)
        >>> lower <= 1e-5 <= upper
        True
    """
    if mu == 0:
        exact = max(0.0, -math.expm1(epsilon))
        return exact, exact
    a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    # Rounding of a enters φ(a) as a·Δa and of b − a = μ not at all, because the difference is taken at a + μ.
    relative = _SPECIAL_ERROR * (2 + abs(a) * (abs(epsilon / mu) + mu))
    if a < -1:
        first, second = _normal_cdf(-a), math.exp(-a * a / 2) / math.sqrt(2 * math.pi) * _mills(b)
        if b < 0:
            first, second = _normal_cdf(-a), math.exp(epsilon) * _normal_cdf(-b)
        # Rounding of a moves Φ(−a) by no more than the density there.
        moved = _SPECIAL_ERROR * (abs(epsilon / mu) + mu)
        nearest = math.exp(-(max(0.0, abs(a) - moved) ** 2) / 2)
        error = _SPECIAL_ERROR * 2 * first + moved * nearest + relative * second
        lower, upper = first - second - error, first - second + error
    else:
        density = math.exp(-a * a / 2) / math.sqrt(2 * math.pi)
        low, high = _mills_difference(a, mu)
        lower, upper = density * low * (1 - relative), density * high * (1 + relative) + 5e-324
    return min(1.0, max(0.0, lower)), min(1.0, max(0.0, upper))


def gaussian_epsilon(delta: float, mu: float) -> tuple[float, float]:
    """Bounds on the ε ≥ 0 at which a μ-GDP mechanism has the given δ.

    Example:
        >>> lower, upper = gaussian_epsilon(1e-5, 1.0)
        >>> lower <= 4.377178095681225 <= upper and upper - lower < 1e-11
        True
    """
    if mu == 0:
        return 0.0, 0.0
    if delta == 0:
        return math.inf, math.inf
    if mu > _HUGE_MU:
        # δ(μ²/2 − μ) > Φ(1) − φ(1) > 1/2, and Chernoff's bound; between them lies less than a millionth of ε.
        upper = mu * (mu / 2 + math.sqrt(2 * math.log(1 / delta))) * (1 + 16 * _UNIT)
        return (mu * (mu / 2 - 1) * (1 - 16 * _UNIT) if delta <= 0.5 else 0.0), upper
    return invert_privacy_profile(lambda epsilon: gaussian_delta(epsilon, mu), delta)


# ----------------------------------------------------------------------------------------------------------------------
# From a bounded privacy curve ε ↦ [δ_lower, δ_upper] to a bounded ε at a given δ.
# ----------------------------------------------------------------------------------------------------------------------


_LARGEST_EPSILON = 1e15


def bracket_crossing(above: Callable[[float], bool], low: float, high: float, tolerance: float) -> tuple[float, float]:
    """Bisection of a monotone predicate that holds at `low` and not at `high`: the final bracket.

    Stops at the relative `tolerance`, or when no float lies between the ends.
    """
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high or high - low <= tolerance * abs(high):
            break
        if above(middle):
            low = middle
        else:
            high = middle
    return low, high


def invert_privacy_profile(
    curve: Callable[[float], tuple[float, float]], delta: float, *, tolerance: float = 2e-15
) -> tuple[float, float]:
    """Bounds on the smallest ε ≥ 0 with δ(ε) ≤ `delta`, for a curve that falls with ε.

    The upper end is a point where the *upper* bound of the curve was seen to be ≤ `delta`; the lower end is a
    point where the *lower* bound was seen to be > `delta` (or 0). No smoothness is assumed.

    Example:
        >>> import math
        >>> low, high = invert_privacy_profile(lambda e: (math.exp(-e), math.exp(-e)), 0.5)
        >>> low <= math.log(2) <= high
        True
    """
    if curve(0.0)[1] <= delta:
        return 0.0, 0.0
    high = 1.0
    while curve(high)[1] > delta:
        high *= 2
        if high > _LARGEST_EPSILON:
            raise AccountingError(
                f"delta must be reachable by some ε ≤ {_LARGEST_EPSILON:g}, got {delta!r}. Use a larger δ."
            )
    start = 0.0 if high == 1.0 else high / 2
    below, upper = bracket_crossing(lambda epsilon: curve(epsilon)[1] > delta, start, high, tolerance)
    if curve(below)[0] > delta:
        return below, upper
    # The curve's own width separates its two crossings: walk down from the upper one until the lower bound exceeds δ.
    step = max(upper - below, math.ulp(upper))
    low = below
    while low > 0 and curve(low)[0] <= delta:
        step *= 2
        low = max(0.0, low - step)
    if curve(low)[0] <= delta:
        return 0.0, upper
    lower, _ = bracket_crossing(lambda epsilon: curve(epsilon)[0] > delta, low, upper, tolerance)
    return lower, upper


# ----------------------------------------------------------------------------------------------------------------------
# One step of a Poisson-subsampled Gaussian in closed form.
#
# With D the Gaussian mechanism's curve at μ (Balle, Barthe and Gaboardi 2018, theorem 8; Zhu, Dong and Wang 2022),
#
#     remove   δ(ε) = q · D(log(1 + (e^ε − 1)/q))
#     add      δ(ε) = A · D(log(q e^ε / A)),   A = 1 − (1−q) e^ε,   and 0 when A ≤ 0.
# ----------------------------------------------------------------------------------------------------------------------


def _amplified(epsilon: float, sample_rate: float) -> float:
    """log(1 + (e^ε − 1)/q) without overflow."""
    if epsilon > 30:
        return epsilon - math.log(sample_rate) + math.log1p(-(1 - sample_rate) * math.exp(-epsilon))
    return math.log1p(math.expm1(epsilon) / sample_rate)


def _bracketed(exponent: float, mu: float, error: float) -> tuple[float, float]:
    """D over all exponents within `error` of the one computed."""
    return gaussian_delta(exponent + error, mu)[0], gaussian_delta(exponent - error, mu)[1]


def remove_direction_delta(epsilon: float, sample_rate: float, mu: float) -> tuple[float, float]:
    """Bounds on δ(ε) when the record is in P's dataset, for ε ≥ 0."""
    inner = _amplified(epsilon, sample_rate)
    low, high = _bracketed(inner, mu, 8 * _UNIT * (1 + abs(inner) + epsilon))
    return sample_rate * low * (1 - 4 * _UNIT), sample_rate * high * (1 + 4 * _UNIT)


def add_direction_delta(epsilon: float, sample_rate: float, mu: float) -> tuple[float, float]:
    """Bounds on δ(ε) when the record is in Q's dataset, for ε ≥ 0."""
    # A = q − (1−q)(e^ε − 1) keeps its accuracy for small ε.
    grown = (1 - sample_rate) * math.expm1(min(epsilon, 700.0))
    share = sample_rate - grown
    slack = 4 * _UNIT * (sample_rate + grown)
    if share + slack <= 0:
        return 0.0, 0.0
    # A·D(log(q e^ε/A)) = ∫ (A φ₀ − q e^ε φ₁)₊ grows with A, so A's rounding error is an interval of A.
    high_share = share + slack
    high = high_share * _curve(epsilon, sample_rate, high_share, mu)[1]
    low_share = share - slack
    low = low_share * _curve(epsilon, sample_rate, low_share, mu)[0] if low_share > 0 else 0.0
    return low * (1 - 4 * _UNIT), high * (1 + 4 * _UNIT)


def _curve(epsilon: float, sample_rate: float, share: float, mu: float) -> tuple[float, float]:
    exponent = epsilon + math.log(sample_rate / share)
    return _bracketed(exponent, mu, 8 * _UNIT * (1 + abs(exponent) + epsilon))


def sampled_gaussian_delta(epsilon: float, sample_rate: float, mu: float) -> tuple[float, float]:
    """Bounds on δ(ε), worse direction."""
    removed = remove_direction_delta(epsilon, sample_rate, mu)
    added = add_direction_delta(epsilon, sample_rate, mu)
    return max(removed[0], added[0]), max(removed[1], added[1])


def sampled_gaussian_epsilon(delta: float, sample_rate: float, mu: float) -> tuple[float, float]:
    """Bounds on ε at δ, worse direction.

    Example:
        >>> lower, upper = sampled_gaussian_epsilon(1e-5, 0.01, 1.0)
        >>> lower <= 0.19945044779591473 <= upper and upper - lower < 1e-12
        True
    """
    if delta == 0:
        return math.inf, math.inf
    return invert_privacy_profile(lambda epsilon: sampled_gaussian_delta(epsilon, sample_rate, mu), delta)


# ----------------------------------------------------------------------------------------------------------------------
# Equal sampled Gaussian steps with hardly any noise, by the number of steps that use the record.
#
# With one shift m in standard deviations and w(y) = 1 − q + q e^{my − m²/2}, let k of T steps use the record. Except
# with probability T Φ(−y₀) every step lies within y₀ of its own component, so that one of w's two terms is e^{−c} of
# the other, c = m²/2 − m y₀, and the loss is, up to T e^{−c}/min(q, 1 − q),
#
#     k(log q + m²/2) + (T − k) log(1 − q) + m√k N(0, 1)          removing,
#     k(log q − log(1 − q) + m²/2) + m√k N(0, 1)                  replacing, with half the shift on each side.
#
# Given k that is a Gaussian mechanism's loss with μ = m√k, moved by a constant: δ(ε) is a binomial sum of its closed
# form. Where ε is 1e5 or more, the characteristic function decays far too slowly for the contour integral. Adding has
# losses of at most −log(1 − q) a step, and so δ = 0 from T times that on.
# ----------------------------------------------------------------------------------------------------------------------


_SMALLEST_SHIFT = 20.0
_LARGEST_COUNT = 2_000_000
_SEPARATION = 45.0
_LOST = 1e-14  # of δ: counts that are left out
_HIT_COUNTS_SPECIAL_ERROR = 64 * _UNIT


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
    def of(pair: MixturePair, count: int) -> "HitCounts | None":
        """The steps of a pair of removing or replacing, where the shift is large enough; None otherwise."""
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
        low, high = invert_privacy_profile(lambda at: self._curve(at, terms, 2 * _LOST * delta), delta)
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
    relative = _HIT_COUNTS_SPECIAL_ERROR * (2 + np.abs(a) * (np.abs(epsilon / mu) + mu))
    density = np.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    far = density * math.sqrt(math.pi / 2) * erfcx(b / math.sqrt(2))
    right = density * math.sqrt(math.pi / 2) * erfcx(np.abs(a) / math.sqrt(2))
    near = np.where(a < 0, erfc(a / math.sqrt(2)) / 2, right)
    error = relative * (near + far)
    return np.clip(near - far - error, 0.0, 1.0), np.clip(near - far + error + 5e-324, 0.0, 1.0)
