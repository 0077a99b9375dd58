"""Clipping by norms that are estimated from random projections (floor 1, clipping)."""

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from sordino import checks
from sordino.clipping.clipping import Clipping
from sordino.clipping.flat import FlatClipping

__all__ = ["ProjectedClipping"]


@final
@dataclass(frozen=True, kw_only=True)
class ProjectedClipping(Clipping):
    """Flat clipping, with each record's norm estimated by r projections: n̂² = (1/r) Σ_j ⟨g, v_j⟩², v_j ~ N(0, I).

    When: no layer rule fits the model and per-record gradients don't fit the memory. Exact norms from layer rules are
    nearly as fast here, and cost less privacy: see ``docs/optimizers.md``.

    Guarantee:
        Not that of the other methods. The record's true norm after clipping is up to C·√(r/χ²_r), a random multiple of
        C, so a step is ``ProjectedGaussian(noise_multiplier, projections)``, which costs more than a Gaussian; with
        few projections there is no useful guarantee at all. See ``docs/proofs/projected-norms.md``.

    Args:
        projections: r ≥ 1, jvps a step; 50 or more are advisable.

    Example:
        >>> ProjectedClipping(projections=50).words
        'flat clipping by norms estimated from 50 projections'

    References:
        Bu, Gopi, Kulkarni, Lee, Shen, Tantipongpipat 2021, "Fast and memory efficient differentially private-SGD via JL
        projections", algorithm 1.
    """

    projections: int
    kind: ClassVar[str] = "projected"

    def __post_init__(self) -> None:
        checks.integer(1, projections=self.projections)

    @property
    def words(self) -> str:
        """The method as it is written in a report."""
        return f"flat clipping by norms estimated from {self.projections} projections"

    def factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """Those of flat clipping; the squared norms are estimates."""
        return FlatClipping().factors(squared_norms, max_grad_norm=max_grad_norm)
