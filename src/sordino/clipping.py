"""Per-record clipping: methods that turn squared norms into factors and know their sensitivity.

Every method is scale-free: the bound `max_grad_norm` belongs to the plan and comes with each call.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, cast, final

import torch
from torch import Tensor

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.events import Event
from sordino.randomness import KeyedRNG
from sordino.shapes import Float

__all__ = [
    "AdaClip",
    "AdaClipState",
    "AutomaticClipping",
    "Clipping",
    "FlatClipping",
    "GlobalClipping",
    "GroupedClipping",
    "PsacClipping",
    "QuantileClipping",
    "QuantileThresholds",
    "cap_clip_factors",
    "clipping_from_dict",
    "clipping_kinds",
    "clipping_to_dict",
    "get_clipping",
]


# A norm is a product of at most two lengths, each off by at most 1e-6 relative (sums over blocks of 256 in single
# precision). What cancelling terms add to that is in the bounds that are given.
_SLACK = 2e-6


_KINDS: "dict[str, type[Clipping]]" = {}


def clipping_kinds() -> "dict[str, type[Clipping]]":
    """The methods that are defined so far, by the kind that plan files name them with."""
    return dict(_KINDS)


class Clipping(ABC):
    """How a record's gradient is made small enough: one factor a record, or one for each group of parameters.

    A method knows no bound of its own. The bound `max_grad_norm` C is the plan's, may change from step to step, and is
    given with every call, so that clip factors and noise always read the same number.

    Guarantee: for every method, a record's gradient after clipping has ℓ2 norm at most C over all parameters
    together, and a record whose gradient is not finite contributes exactly zero. A method for which that does not
    hold sets `exact_norms` to False and states its own event in `step_event`.

    A method is known by its `kind` in plan files as soon as its class is defined.
    """

    kind: ClassVar[str]
    exact_norms: ClassVar[bool] = True
    """Whether `clip_factors` reads bounds on the true norms, so that the clipped sum has sensitivity C."""
    plain_sums: ClassVar[bool] = True
    """Whether what gets noise is the sum of the clipped gradients as they are."""
    adapts: ClassVar[bool] = False
    """Whether the clipping norm follows from earlier steps."""

    def __init_subclass__(cls, **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        kind = cls.__dict__.get("kind")
        if kind is None:
            return
        known = _KINDS.get(kind)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise InvalidArgument(f"kind must be a new one, got {kind!r} of {known.__qualname__}. Choose another name.")
        _KINDS[kind] = cls

    def step_event(self, noise_multiplier: float) -> Event | None:  # noqa: ARG002
        """The event of a step with this method where it is not a Gaussian's; None for a Gaussian."""
        return None

    def make_accumulator(self, capture: object, rng: KeyedRNG) -> object | None:  # noqa: ARG002
        """What takes the place of the usual sums, an object of `sordino.training.accumulators`; None for the usual."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """The method as it is written in a report."""

    @abstractmethod
    def clip_factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """One factor ≥ 0 for each squared norm n², with ``factor · n ≤ max_grad_norm``; 0 where n² is not finite.

        Args:
            squared_norms: squared gradient norms n², one per record, or squares of bounds on them; may hold infinities
                and NaN. Clip gradients of a model by the bounds, `GradientCapture.squared_norm_bounds`.
            max_grad_norm: the bound C, finite and > 0, in units of the gradient.
        """

    def groups(self, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
        """The parameters that are clipped together; `sizes` holds the number of entries of each, by name."""
        return (tuple(sizes),)

    def clip_norms(self, sizes: Mapping[str, int], *, max_grad_norm: float) -> tuple[float, ...]:  # noqa: ARG002
        """The bound of each group; the root of the sum of their squares is at most `max_grad_norm`."""
        return (max_grad_norm,)

    @final
    def sensitivity(self, neighboring_relation: NeighboringRelation, *, max_grad_norm: float) -> float:
        """How far one unit moves the clipped sum, in ℓ2 norm: C, or 2C under replace-one."""
        return checks.positive(max_grad_norm=max_grad_norm) * neighboring_relation.sensitivity_factor

    @final
    def options(self) -> dict[str, object]:
        """The method's options by name, as they were given."""
        return {item.name: getattr(self, item.name) for item in fields(self)}  # pyright: ignore[reportArgumentType]


def cap_clip_factors(
    squared_norms: Float[Tensor, "*B"], largest: Float[Tensor, "*B"], factors: Float[Tensor, "*B"]
) -> Float[Tensor, "*B"]:
    """`factors`, lowered to `largest` where they exceed it, and 0 where the squared norm is not finite.

    `largest` is C/(n(1 + 2e-6)): the norms that are given may be too small by rounding.
    """
    # Fails for NaN as well; one operation where isfinite() is four.
    return torch.where(squared_norms.abs() < torch.inf, torch.minimum(factors, largest), 0.0)


def max_clip_factors(norms: Float[Tensor, "*B"], max_grad_norm: float) -> Float[Tensor, "*B"]:
    """The largest factor that is allowed for each norm n: C/(n(1 + 2e-6)), infinite for 0."""
    return checks.positive(max_grad_norm=max_grad_norm) / (norms * (1 + _SLACK))


# ----------------------------------------------------------------------------------------------------------------------
# Flat clipping: one bound on the norm of a record's whole gradient.
# ----------------------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class FlatClipping(Clipping):
    """Scale each record's gradient down so that its ℓ2 norm is at most `max_grad_norm`; leave smaller ones alone.

    Guarantee:
        For every record, ``factor · norm ≤ max_grad_norm``; a record whose gradient is not finite contributes
        exactly zero. Adding or removing one record therefore moves the clipped sum by at most `max_grad_norm`,
        replacing one by at most twice that. See ``docs/proofs/clipping.md``.

    | squared norm n²          | factor                    |
    |--------------------------|---------------------------|
    | 0                        | 1                         |
    | n ≤ C/(1 + 2e-6)         | 1                         |
    | n > C/(1 + 2e-6)         | C/(n(1 + 2e-6))           |
    | tiny (C/n overflows)     | 1                         |
    | infinite, NaN            | 0                         |
    | no records               | an empty tensor           |

    Example:
        >>> import torch
        >>> FlatClipping().clip_factors(torch.tensor([0.25, 4.0, torch.nan], dtype=torch.float64), max_grad_norm=1.0)
        tensor([1.0000, 0.5000, 0.0000], dtype=torch.float64)

    References:
        Abadi et al. 2016, "Deep learning with differential privacy", Algorithm 1.
    """

    kind: ClassVar[str] = "flat"

    def describe(self) -> str:
        """The method as it is written in a report."""
        return "flat clipping"

    def clip_factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """``min(1, C/(n(1 + 2e-6)))``, exactly 0 where n² is not finite; the type of `squared_norms`."""
        largest = checks.positive(max_grad_norm=max_grad_norm) / (1 + _SLACK)
        # 1/n is infinite for n = 0 and 0 for n = ∞; a NaN stays one until the end.
        return squared_norms.abs().rsqrt_().mul_(largest).clamp_(max=1).nan_to_num_(0.0)


# ----------------------------------------------------------------------------------------------------------------------
# Automatic clipping: every gradient gets nearly the same norm, so the bound is no tuning knob.
# ----------------------------------------------------------------------------------------------------------------------


# A gradient shorter than this share of the bound is left shorter: larger factors overflow in single precision.
_LARGEST = 1e30


@final
@dataclass(frozen=True, kw_only=True)
class AutomaticClipping(Clipping):
    """Normalize each record's gradient: factor C/(n + stability). AUTO-S; with `stability` 0 it is AUTO-V.

    When: the bound should not be tuned. `max_grad_norm` only scales the learning rate.

    Guarantee: ``factor · norm ≤ max_grad_norm`` for every record; not finite contributes zero. A zero gradient stays
    zero.

    Args:
        stability: γ ≥ 0 in units of the gradient's norm; keeps small gradients smaller than large ones.

    Example:
        >>> import torch
        >>> AutomaticClipping().clip_factors(torch.tensor([1e-4, 1.0]), max_grad_norm=1.0)
        tensor([50.0000,  0.9901])

    References:
        Bu, Wang, Zha, Karypis 2023, "Automatic clipping", equations 4.1 (AUTO-V) and 4.2 (AUTO-S).
    """

    stability: float = 0.01
    kind: ClassVar[str] = "automatic"

    def __post_init__(self) -> None:
        checks.non_negative(stability=self.stability)

    def describe(self) -> str:
        """The method as it is written in a report."""
        return f"automatic clipping, stability {self.stability:g}" if self.stability else "normalized gradients"

    def clip_factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """``C/(n + γ)``, at most C/(n(1 + 2e-6)) and 1e30; 0 where n² is not finite."""
        norms = squared_norms.clamp(min=0).sqrt()
        factors = (max_grad_norm / (norms + self.stability)).clamp(max=_LARGEST)
        return cap_clip_factors(squared_norms, max_clip_factors(norms, max_grad_norm), factors)


@final
@dataclass(frozen=True, kw_only=True)
class PsacClipping(Clipping):
    """Per-sample adaptive clipping: factor C/(n + r/(n + r)), which does not raise tiny gradients as AUTO-S does.

    Guarantee: ``factor · norm ≤ max_grad_norm`` for every record; not finite contributes zero.

    Args:
        stability: r > 0 in units of the gradient's norm.

    Example:
        >>> import torch
        >>> PsacClipping(stability=0.1).clip_factors(torch.tensor([0.0, 1.0]), max_grad_norm=1.0)
        tensor([1.0000, 0.9167])

    References:
        Xia, Shen, Yao, Fu, Xu, Xu, Fu 2023, "Differentially private learning with per-sample adaptive clipping".
    """

    stability: float = 0.1
    kind: ClassVar[str] = "psac"

    def __post_init__(self) -> None:
        checks.positive(stability=self.stability)

    def describe(self) -> str:
        """The method as it is written in a report."""
        return f"per-sample adaptive clipping, stability {self.stability:g}"

    def clip_factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """``C/(n + r/(n + r))``, at most C/(n(1 + 2e-6)); 0 where n² is not finite."""
        norms = squared_norms.clamp(min=0).sqrt()
        factors = max_grad_norm / (norms + self.stability / (norms + self.stability))
        return cap_clip_factors(squared_norms, max_clip_factors(norms, max_grad_norm), factors)


# ----------------------------------------------------------------------------------------------------------------------
# Global clipping: a gradient counts whole or not at all.
# ----------------------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class GlobalClipping(Clipping):
    """Keep every gradient up to the threshold, all scaled alike, and drop the others: factor C/(ρC) if n ≤ ρC, else 0.

    When: the direction of the mean gradient matters more than every record's say. The tangent kernel of the clipped
    dynamics stays symmetric and positive semi-definite, and large thresholds leave a model better calibrated.

    Guarantee: ``factor · norm ≤ max_grad_norm`` for every record; not finite contributes zero.

    Args:
        threshold: ρ > 0, the norm up to which gradients count, as a multiple of `max_grad_norm`; 1 keeps them as
            they are, larger ones shrink all by 1/ρ and drop fewer.

    Example:
        >>> import torch
        >>> GlobalClipping(threshold=2.0).clip_factors(torch.tensor([0.25, 1.0, 9.0]), max_grad_norm=1.0)
        tensor([0.5000, 0.5000, 0.0000])

    References:
        Bu, Wang, Long 2023, "On the convergence and calibration of deep learning with differential privacy", section 4.
    """

    threshold: float = 1.0
    kind: ClassVar[str] = "global"

    def __post_init__(self) -> None:
        checks.positive(threshold=self.threshold)

    def describe(self) -> str:
        """The method as it is written in a report."""
        return f"global clipping, threshold {self.threshold:g} times the bound"

    def clip_factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """``1/ρ`` where n(1 + 2e-6) ≤ ρC, else 0; 0 where n² is not finite."""
        norms = squared_norms.clamp(min=0).sqrt()
        largest = max_clip_factors(norms, max_grad_norm)
        share = torch.full_like(norms, 1 / self.threshold)
        return cap_clip_factors(squared_norms, largest, torch.where(largest >= share, share, torch.zeros_like(norms)))


# ----------------------------------------------------------------------------------------------------------------------
# AdaClip: gradients are centered and scaled entry by entry before they are clipped.
# ----------------------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class AdaClip(Clipping):
    """Clip w = (g − a)/b to norm 1, add noise to Σ w, and go back: less noise where gradients are small.

        w_i = (g_i − a)/b,   w̃ = Σ_i w_i·min(1, 1/‖w_i‖) + N(0, (z·Δ)² I),   g̃ = a + b·w̃/B                     (1)

    With b the same for all entries and a = 0 this is flat clipping at b, which is how a run begins. Noise reaches entry
    j as z·b_j/B. For a total Σ b_j² = d·C², that of flat clipping at C = `max_grad_norm`, E‖w‖² is least at

        b_j = C·√(d·s_j / Σ_k s_k),     s_j² the variance of entry j.                                            (2)

    When: entries differ much in scale. Each record's gradient is formed apart: slower than flat clipping by far.

    Guarantee:
        Every record adds a vector of norm at most 1 to Σ w, so that a step is ``Gaussian(noise_multiplier)``, whatever
        a and b are, as long as they are fixed before the step: they follow from released g̃ alone. Nothing else is
        released. See ``docs/proofs/adaclip.md``.

    Args:
        mean_decay: β₁ in [0, 1) of a ← β₁ a + (1 − β₁) g̃.
        variance_decay: β₂ in [0, 1) of u ← β₂ u + (1 − β₂)[(g̃ − a)² − (z Δ b/B)²], of which s² is the positive part.
        smallest: s is at least this times its root mean square, in (0, 1].
        largest: s is at most this times its root mean square, ≥ 1.

    Raises:
        InvalidArgument: a value is out of its range.

    Example:
        >>> AdaClip().describe()
        'AdaClip'

    References:
        Pichapati, Suresh, Yu, Reddi, Kumar 2019, "AdaClip: adaptive clipping for private SGD", theorem 2, algorithm 2.
        There the variance's estimate is cut before it is averaged, and the scale of b is that of s; here the average is
        cut, which leaves less bias, and the plan's clipping norm gives the scale.
    """

    mean_decay: float = 0.99
    variance_decay: float = 0.99
    smallest: float = 0.1
    largest: float = 10.0
    kind: ClassVar[str] = "adaclip"
    plain_sums: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checks.probability(one=False, mean_decay=self.mean_decay)
        checks.probability(one=False, variance_decay=self.variance_decay)
        checks.probability(zero=False, smallest=self.smallest)
        if not checks.positive(largest=self.largest) >= 1:
            raise InvalidArgument(f"largest must be ≥ 1, got {self.largest!r}. It is a multiple of the mean scale.")

    def describe(self) -> str:
        """The method as it is written in a report."""
        return "AdaClip"

    def clip_factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """Those of flat clipping; in (1) the norms are those of w and the bound is 1."""
        return FlatClipping().clip_factors(squared_norms, max_grad_norm=max_grad_norm)

    def init_state(self, sizes: Sequence[int]) -> "AdaClipState":
        """The transform before the first step; `sizes` are the numbers of entries of the parameters."""
        return AdaClipState(self, [torch.zeros(size, dtype=torch.float64) for size in sizes])


class AdaClipState:
    """a and b of (1) and (2) in one run: functions of released gradients, so they may be published.

    Args:
        clipping: the method.
        zeros: one vector of zeros for each parameter.
    """

    def __init__(self, clipping: AdaClip, zeros: Sequence[Tensor]) -> None:
        self._clipping = clipping
        self.mean = [part.clone() for part in zeros]
        self.variance = [part.clone() for part in zeros]

    def scale(self, max_grad_norm: float) -> list[Tensor]:
        """The scale b of (2), one vector a parameter; C everywhere while nothing is known."""
        entries = sum(part.numel() for part in self.variance)
        square = sum((float(part.clamp_min(0).sum()) for part in self.variance), 0.0) / max(1, entries)
        if square <= 0:
            return [torch.full_like(part, max_grad_norm) for part in self.variance]
        root = square**0.5
        low, high = self._clipping.smallest * root, self._clipping.largest * root
        spread = [part.clamp_min(0).sqrt().clamp(low, high) for part in self.variance]
        total = sum(float(part.sum()) for part in spread)
        return [max_grad_norm * (part * (entries / total)).sqrt() for part in spread]

    def update(self, released: Sequence[Tensor], noise: Sequence[Tensor]) -> None:
        """Take in a released gradient g̃; `noise` is the standard deviation z·Δ·b/B of its entries."""
        kept, remembered = self._clipping.variance_decay, self._clipping.mean_decay
        for index, (gradient, stddev) in enumerate(zip(released, noise, strict=True)):
            excess = (gradient - self.mean[index]).square() - stddev.square()
            self.variance[index] = kept * self.variance[index] + (1 - kept) * excess
            self.mean[index] = remembered * self.mean[index] + (1 - remembered) * gradient


# ----------------------------------------------------------------------------------------------------------------------
# Group-wise clipping: a bound for every group of parameters.
# ----------------------------------------------------------------------------------------------------------------------


# ----------------------------------------------------------------------------------------------------------------------
# Clipping bounds that follow a private quantile of the norms.
# ----------------------------------------------------------------------------------------------------------------------


# How far a bound may move from where it began, as a factor.
_FARTHEST = 1e6


@final
@dataclass(frozen=True, kw_only=True)
class QuantileClipping(Clipping):
    """Let each bound follow the `quantile` of the gradient norms: C ← C · exp(−η(b̃ − γ)), b̃ the noisy share below C.

    When: the scale of the gradients is unknown or changes, and a public guess of the bound would be poor. The plan's
    `max_grad_norm` is where the bound begins.

    Guarantee:
        The clipped sum and the counts of records below their bounds are released together as *one* Gaussian
        mechanism: counts are scaled so that the same noise covers both, and the sensitivity is that of the joint
        vector. A step is ``Gaussian(noise_multiplier)`` exactly as without the counts; what they cost is a larger
        noise on the gradient, z_Δ = (z⁻² − z_b⁻²)^(−1/2). New bounds are computed from released counts only.

    Args:
        quantile: γ in (0, 1), the share of records to be left unclipped.
        learning_rate: η > 0 of the bound's logarithm.
        count_noise: standard deviation of the noise on the count of a batch, in records, > 0; a twentieth of the
            expected batch size is usual. It must exceed noise_multiplier · √G / 2 for G groups (twice that under
            replace-one).
        inner: how gradients are clipped to the bounds; a `GroupedClipping` gives every group its own quantile.

    Raises:
        InvalidArgument: a value is out of its range, or `inner` adapts itself.

    Example:
        >>> QuantileClipping(quantile=0.5, count_noise=12.8).describe()
        'flat clipping at the private 0.5 quantile'

    References:
        Andrew, Thakkar, McMahan, Ramaswamy 2021, "Differentially private learning with adaptive clipping", algorithm 1
        and theorem 1; He et al. 2023, section 3.2 (per-layer quantiles).
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float
    inner: Clipping = field(default_factory=FlatClipping)
    kind: ClassVar[str] = "quantile"
    adapts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.probability(zero=False, one=False, quantile=self.quantile)
        checks.positive(learning_rate=self.learning_rate)
        checks.positive(count_noise=self.count_noise)
        if isinstance(self.inner, QuantileClipping):
            raise InvalidArgument("inner must have fixed bounds, got QuantileClipping. Give FlatClipping().")

    def describe(self) -> str:
        """The method as it is written in a report."""
        return f"{self.inner.describe()} at the private {self.quantile:g} quantile"

    def groups(self, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
        """The groups of `inner`."""
        return self.inner.groups(sizes)

    def clip_norms(self, sizes: Mapping[str, int], *, max_grad_norm: float) -> tuple[float, ...]:
        """The bounds of the first step: those of `inner`."""
        return self.inner.clip_norms(sizes, max_grad_norm=max_grad_norm)

    def clip_factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """The factors of `inner` for one group whose bound is `max_grad_norm`."""
        return self.inner.clip_factors(squared_norms, max_grad_norm=max_grad_norm)

    def init_state(self, thresholds: Sequence[float]) -> "QuantileThresholds":
        """The moving bounds of a run that begins with `thresholds`."""
        return QuantileThresholds(self, thresholds)


class QuantileThresholds:
    """The bounds of a run with `QuantileClipping`: functions of released counts, so they may be published.

    Args:
        clipping: the method.
        start: the bound of each group before the first step.
    """

    def __init__(self, clipping: QuantileClipping, start: Sequence[float]) -> None:
        self._clipping = clipping
        self._start = tuple(checks.positive(start=bound) for bound in start)
        self.values = self._start

    def count_below(self, squared_norms: Float[Tensor, "G B"]) -> Float[Tensor, " G"]:
        """``Σ_b (1[n ≤ C_g] − 1/2)`` for each group: a record moves each entry by at most 1/2 (1 when replaced)."""
        bounds = torch.tensor(self.values, dtype=torch.float64, device=squared_norms.device)[:, None]
        inside = squared_norms.double() <= bounds.square()
        return (inside.to(torch.float64) - 0.5).sum(1)

    def joint_scale(self, neighboring_relation: NeighboringRelation, noise_multiplier: float) -> tuple[float, float]:
        """(scale κ of the counts, ℓ2 sensitivity Δ of the clipped sum and κ times the counts together).

        With noise s = zΔ on every entry, Δ² = f²(Σ_g C_g² + κ²G/4) and κ = s / count_noise:
        s² = z²f²ΣC_g² / (1 − z²f²G / (4 count_noise²)), f = 2 under replace-one and 1 otherwise.

        Raises:
            InvalidArgument: `count_noise` is too small for the noise multiplier: the counts alone would cost more.
        """
        factor, noise = neighboring_relation.sensitivity_factor, self._clipping.count_noise
        total = math.fsum(bound**2 for bound in self.values)
        share = (noise_multiplier * factor) ** 2 * len(self.values) / (4 * noise**2)
        if share >= 1:
            least = noise_multiplier * factor * math.sqrt(len(self.values)) / 2
            raise InvalidArgument(
                f"count_noise must exceed noise_multiplier · √groups / 2 = {least:g}, got {noise:g}. Raise it, or use "
                "fewer groups."
            )
        if noise_multiplier == 0:
            return 1.0, factor * math.sqrt(total + len(self.values) / 4)
        stddev = noise_multiplier * factor * math.sqrt(total / (1 - share))
        return stddev / noise, stddev / noise_multiplier

    def update(self, noisy_counts: Sequence[float], *, expected_batch_size: float) -> None:
        """Move each bound by what was released; `expected_batch_size` is public."""
        moved = []
        for bound, start, count in zip(self.values, self._start, noisy_counts, strict=True):
            share = count / expected_batch_size + 0.5
            exponent = -self._clipping.learning_rate * (share - self._clipping.quantile)
            # The exponent is cut so that no noise can overflow the bound.
            moved.append(min(max(bound * math.exp(min(max(exponent, -50), 50)), start / _FARTHEST), start * _FARTHEST))
        self.values = tuple(moved)


# ----------------------------------------------------------------------------------------------------------------------
# Group-wise clipping: a bound for every group of parameters.
# ----------------------------------------------------------------------------------------------------------------------


_BY = ("parameter", "layer", "block")
_WEIGHTS = ("equal", "proportional")


@final
@dataclass(frozen=True, kw_only=True)
class GroupedClipping(Clipping):
    """Clip each group of parameters by its own bound C_g, with √(Σ_g C_g²) = `max_grad_norm`.

    Guarantee:
        Each group of a record's gradient has norm at most C_g after clipping, so the whole has norm at most C: adding
        or removing one record moves the clipped sum by at most `max_grad_norm`, replacing one by at most twice that.
        The grouping is a function of the parameters' names and sizes, never of data.

    Args:
        by: "layer" puts the parameters of one module together, "parameter" none, "block" those whose names begin with
            the same two parts (``layers.3.``); or groups of the user's own, each a tuple of name prefixes. A parameter
            belongs to the first group that has a matching prefix; those without one form a last group.
        weights: how the bounds C_g relate: "equal" (C/√G), "proportional" to the root of the group's number of
            entries, or one number > 0 per group in the order of the groups' first parameters: C_g = C·w_g/√(Σ w²).
        inner: how a group is clipped to its bound.

    Raises:
        InvalidArgument: `by` or `weights` is unknown or out of range, or `inner` is itself grouped or adapts.

    Example:
        >>> clipping = GroupedClipping(by="layer")
        >>> clipping.groups({"0.weight": 6, "0.bias": 2, "2.weight": 4})
        (('0.weight', '0.bias'), ('2.weight',))
        >>> [round(bound, 4) for bound in clipping.clip_norms({"0.weight": 6, "2.weight": 4}, max_grad_norm=1.0)]
        [0.7071, 0.7071]

    References:
        McMahan et al. 2018, "A general approach to adding differential privacy to iterative training", section 3;
        He et al. 2023, "Exploring the limits of differentially private deep learning with group-wise clipping".
    """

    by: str | tuple[tuple[str, ...], ...] = "layer"
    weights: str | tuple[float, ...] = "equal"
    inner: Clipping = field(default_factory=FlatClipping)
    kind: ClassVar[str] = "grouped"

    def __post_init__(self) -> None:
        if isinstance(self.by, str):
            checks.one_of(_BY, by=self.by, hint="Or give a tuple of groups, each a tuple of name prefixes.")
        else:
            object.__setattr__(self, "by", tuple(tuple(group) for group in self.by))
        if isinstance(self.weights, str):
            checks.one_of(_WEIGHTS, weights=self.weights, hint="Or give one number per group.")
        else:
            object.__setattr__(self, "weights", tuple(checks.positive(weights=weight) for weight in self.weights))
        if isinstance(self.inner, GroupedClipping | QuantileClipping):
            raise InvalidArgument(
                f"inner must be a method without groups and with fixed bounds, got {type(self.inner).__name__}. Give "
                "FlatClipping(), or put the groups inside: QuantileClipping(inner=GroupedClipping())."
            )

    def describe(self) -> str:
        """The method as it is written in a report."""
        by = f"each {self.by}" if isinstance(self.by, str) else f"{len(self.by)} named groups"
        weights = self.weights if isinstance(self.weights, str) else "given"
        return f"{self.inner.describe()} of {by}, {weights} bounds"

    def groups(self, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
        """The names that are clipped together, in the order of their first parameter."""
        found: dict[object, list[str]] = {}
        for name in sizes:
            found.setdefault(self._key(name), []).append(name)
        return tuple(tuple(names) for names in found.values())

    def _key(self, name: str) -> object:
        if not isinstance(self.by, str):
            matching = (number for number, group in enumerate(self.by) if name.startswith(group))
            return next(matching, len(self.by))
        if self.by == "parameter":
            return name
        parts = name.split(".")[:-1]
        return tuple(parts[:2] if self.by == "block" else parts)

    def clip_norms(self, sizes: Mapping[str, int], *, max_grad_norm: float) -> tuple[float, ...]:
        """The bound of each group, rounded down so that their squares never add up to more than C²."""
        checks.positive(max_grad_norm=max_grad_norm)
        groups = self.groups(sizes)
        if isinstance(self.weights, str):
            sized = self.weights == "proportional"
            squares = [float(sum(sizes[name] for name in group)) if sized else 1.0 for group in groups]
        elif len(self.weights) == len(groups):
            squares = [weight**2 for weight in self.weights]
        else:
            raise InvalidArgument(
                f"weights must hold one number per group of parameters, got {len(self.weights)} for {len(groups)} "
                "groups. Count the trained parameters in the order of module.named_parameters()."
            )
        total = math.fsum(squares) * (1 + 1e-12)
        return tuple(max_grad_norm * math.sqrt(square / total) for square in squares)

    def clip_factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """The factors of one group whose bound is `max_grad_norm`."""
        return self.inner.clip_factors(squared_norms, max_grad_norm=max_grad_norm)


# ----------------------------------------------------------------------------------------------------------------------
# Clipping methods by name and as JSON.
# ----------------------------------------------------------------------------------------------------------------------


_NAMES: dict[str, Clipping] = {
    "adaclip": AdaClip(),
    "automatic": AutomaticClipping(),
    "flat": FlatClipping(),
    "global": GlobalClipping(),
    "per_layer": GroupedClipping(by="layer"),
    "psac": PsacClipping(),
}


def get_clipping(name: str | Clipping) -> Clipping:
    """A method by its name with default options, or the method itself.

    Example:
        >>> get_clipping("per_layer").describe()
        'flat clipping of each layer, equal bounds'
    """
    if isinstance(name, Clipping):
        return name
    checks.one_of(_NAMES, clipping=name, hint="Or give an object of sordino.clipping.")
    return _NAMES[name]


def clipping_to_dict(clipping: Clipping) -> dict[str, object]:
    """The method as plain JSON types, with its kind."""
    return {
        "kind": clipping.kind,
        **{
            name: clipping_to_dict(value)
            if isinstance(value, Clipping)
            else [list(part) if isinstance(part, tuple) else part for part in value]
            if isinstance(value, tuple)
            else value
            for name, value in clipping.options().items()
        },
    }


def clipping_from_dict(body: object) -> Clipping:
    """What `clipping_to_dict` wrote. Unknown kinds and options raise `InvalidArgument`."""
    known = clipping_kinds()
    method = known.get(str(body.get("kind"))) if isinstance(body, dict) else None
    if method is None or not isinstance(body, dict):
        raise InvalidArgument(
            f"clipping must be one of {', '.join(sorted(known))} with its options, got another. Check the file, or "
            "import the module that defines the method before the file is read."
        )
    options = {
        name: clipping_from_dict(value) if isinstance(value, dict) else value
        for name, value in body.items()
        if name != "kind"
    }
    try:
        return cast("Callable[..., Clipping]", method)(**options)
    except TypeError as error:
        raise InvalidArgument(
            f"options of {method.kind} clipping must be its own, got others. Check the file."
        ) from error
