"""Automatic clipping: every gradient gets nearly the same norm, so the bound is no tuning knob (floor 1, clipping)."""

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from sordino import checks
from sordino.clipping.clipping import Clipping, contributions_within, largest_factors

__all__ = ["AutomaticClipping", "PsacClipping"]

# A gradient shorter than this share of the bound is left shorter: larger factors overflow in single precision.
_LARGEST = 1e30


@final
@dataclass(frozen=True, kw_only=True)
class AutomaticClipping(Clipping):
    """Normalise each record's gradient: factor C/(n + stability). AUTO-S; with `stability` 0 it is AUTO-V.

    When: the bound should not be tuned. `max_grad_norm` only scales the learning rate.

    Guarantee: ``factor · norm ≤ max_grad_norm`` for every record; not finite contributes zero. A zero gradient stays
    zero.

    Args:
        stability: γ ≥ 0 in units of the gradient's norm; keeps small gradients smaller than large ones.

    Example:
        >>> import torch
        >>> AutomaticClipping().factors(torch.tensor([1e-4, 1.0]), max_grad_norm=1.0)
        tensor([50.0000,  0.9901])

    References:
        Bu, Wang, Zha, Karypis 2023, "Automatic clipping", equations 4.1 (AUTO-V) and 4.2 (AUTO-S).
    """

    stability: float = 0.01
    kind: ClassVar[str] = "automatic"

    def __post_init__(self) -> None:
        checks.non_negative(stability=self.stability)

    @property
    def words(self) -> str:
        """The method as it is written in a report."""
        return f"automatic clipping, stability {self.stability:g}" if self.stability else "normalised gradients"

    def factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """``C/(n + γ)``, at most C/(n(1 + 2e-6)) and 1e30; 0 where n² is not finite."""
        norms = squared_norms.clamp(min=0).sqrt()
        factors = (max_grad_norm / (norms + self.stability)).clamp(max=_LARGEST)
        return contributions_within(squared_norms, largest_factors(norms, max_grad_norm), factors)


@final
@dataclass(frozen=True, kw_only=True)
class PsacClipping(Clipping):
    """Per-sample adaptive clipping: factor C/(n + r/(n + r)), which does not raise tiny gradients as AUTO-S does.

    Guarantee: ``factor · norm ≤ max_grad_norm`` for every record; not finite contributes zero.

    Args:
        stability: r > 0 in units of the gradient's norm.

    Example:
        >>> import torch
        >>> PsacClipping(stability=0.1).factors(torch.tensor([0.0, 1.0]), max_grad_norm=1.0)
        tensor([1.0000, 0.9167])

    References:
        Xia, Shen, Yao, Fu, Xu, Xu, Fu 2023, "Differentially private learning with per-sample adaptive clipping".
    """

    stability: float = 0.1
    kind: ClassVar[str] = "psac"

    def __post_init__(self) -> None:
        checks.positive(stability=self.stability)

    @property
    def words(self) -> str:
        """The method as it is written in a report."""
        return f"per-sample adaptive clipping, stability {self.stability:g}"

    def factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """``C/(n + r/(n + r))``, at most C/(n(1 + 2e-6)); 0 where n² is not finite."""
        norms = squared_norms.clamp(min=0).sqrt()
        factors = max_grad_norm / (norms + self.stability / (norms + self.stability))
        return contributions_within(squared_norms, largest_factors(norms, max_grad_norm), factors)
