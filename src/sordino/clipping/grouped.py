"""Group-wise clipping: a bound for every group of parameters."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast, final

import torch
from torch import Tensor

from sordino import checks
from sordino.clipping.methods import (
    AdaClip,
    AutomaticClipping,
    Clipping,
    FlatClipping,
    GlobalClipping,
    PsacClipping,
    clipping_kinds,
)
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.shapes import Float

__all__ = [
    "GroupedClipping",
    "QuantileClipping",
    "QuantileThresholds",
    "clipping_from_dict",
    "clipping_to_dict",
    "get_clipping",
]


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
