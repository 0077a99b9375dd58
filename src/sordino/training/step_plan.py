"""The plan's values at one step (floor 3): clip factors, noise, divisor and event come from here."""

from dataclasses import dataclass
from functools import cached_property

from sordino import checks
from sordino.clipping import Clipping, ProjectedClipping
from sordino.definitions import NeighboringRelation
from sordino.events import Event, NoPrivacy, ProjectedGaussian
from sordino.mechanisms import GaussianMechanism
from sordino.mechanisms.grid_sum import GridSumMechanism
from sordino.training.loss_curve import LossCurve

__all__ = ["StepPlan"]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The values of one step, all fixed before the run.

    Args:
        noise_multiplier: noise standard deviation over sensitivity, ≥ 0.
        max_grad_norm: clipping norm C > 0 of one unit's gradient.
        sample_rate: probability in (0, 1] that a unit joins the batch.
        expected_batch_size: public divisor of the noisy sum, > 0.
        clipping: how gradients are clipped to the bound.
        neighboring_relation: which data sets count as neighbours.
        loss_curve: what is released of the losses beside the gradient, or None.
    """

    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float
    expected_batch_size: float
    clipping: Clipping
    neighboring_relation: NeighboringRelation
    loss_curve: LossCurve | None = None

    def __post_init__(self) -> None:
        checks.non_negative(noise_multiplier=self.noise_multiplier)
        checks.positive(max_grad_norm=self.max_grad_norm)
        checks.probability(zero=False, sample_rate=self.sample_rate)
        checks.positive(expected_batch_size=self.expected_batch_size)

    @cached_property
    def sensitivity(self) -> float:
        """How far one unit moves the clipped sum, in ℓ2 norm."""
        return self.clipping.sensitivity(self.neighboring_relation, max_grad_norm=self.max_grad_norm)

    @cached_property
    def mechanism(self) -> GaussianMechanism:
        """The noise on the clipped sum, and on what is released beside it."""
        moved = self.sensitivity if self.loss_curve is None else self.loss_curve.joint(self.sensitivity)[1]
        return GaussianMechanism(noise_multiplier=self.noise_multiplier, l2_sensitivity=moved)

    @property
    def gradient_multiplier(self) -> float:
        """Noise on the clipped sum over its own sensitivity; a loss curve raises it above `noise_multiplier`."""
        return self.noise_multiplier * (1.0 if self.loss_curve is None else self.loss_curve.price)

    def grid_mechanism(self, dimension: int) -> GridSumMechanism:
        """The noise on a clipped sum of whole numbers with `dimension` entries."""
        return GridSumMechanism(
            noise_multiplier=self.noise_multiplier,
            record_norm=self.max_grad_norm,
            dimension=dimension,
            moved=int(self.neighboring_relation.sensitivity_factor),
        )

    @property
    def event(self) -> Event:
        """The event of the step on its batch, before sampling is counted."""
        if self.noise_multiplier == 0:
            return NoPrivacy(reason="noise_multiplier is 0")
        if isinstance(self.clipping, ProjectedClipping):
            return ProjectedGaussian(noise_multiplier=self.noise_multiplier, projections=self.clipping.projections)
        return self.mechanism.event()

    @property
    def gradient_noise(self) -> float:
        """Standard deviation of the noise in each entry of the private gradient: z·Δ/B. AdaClip scales its own."""
        return self.mechanism.stddev / self.expected_batch_size
