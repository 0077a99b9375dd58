"""What every clipping method is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, final

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
    "PsacClipping",
    "cap_clip_factors",
    "clipping_kinds",
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
    return torch.where(squared_norms.isfinite(), torch.minimum(factors, largest), torch.zeros_like(factors))


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
        norms = squared_norms.clamp(min=0).sqrt()
        return cap_clip_factors(squared_norms, max_clip_factors(norms, max_grad_norm), torch.ones_like(norms))


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
        for place, (gradient, stddev) in enumerate(zip(released, noise, strict=True)):
            excess = (gradient - self.mean[place]).square() - stddev.square()
            self.variance[place] = kept * self.variance[place] + (1 - kept) * excess
            self.mean[place] = remembered * self.mean[place] + (1 - remembered) * gradient
