"""Group-wise clipping: a bound for every group of parameters (floor 1, clipping)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from sordino import checks
from sordino.clipping.clipping import Clipping
from sordino.clipping.flat import FlatClipping
from sordino.clipping.quantile import QuantileClipping
from sordino.errors import InvalidArgument

__all__ = ["GroupedClipping"]

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
        >>> [round(bound, 4) for bound in clipping.thresholds({"0.weight": 6, "2.weight": 4}, max_grad_norm=1.0)]
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

    @property
    def words(self) -> str:
        """The method as it is written in a report."""
        by = f"each {self.by}" if isinstance(self.by, str) else f"{len(self.by)} named groups"
        weights = self.weights if isinstance(self.weights, str) else "given"
        return f"{self.inner.words} of {by}, {weights} bounds"

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

    def thresholds(self, sizes: Mapping[str, int], *, max_grad_norm: float) -> tuple[float, ...]:
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

    def factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """The factors of one group whose bound is `max_grad_norm`."""
        return self.inner.factors(squared_norms, max_grad_norm=max_grad_norm)
