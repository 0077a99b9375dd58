"""A loss curve that the budget pays for: the batch's losses are released with its gradients, as one Gaussian.

    (Σ_i ḡ_i, κ Σ_i (min(max(ℓ_i, 0), L) − m)) + N(0, s² I),   Δ² = Δ_g² + κ² L²,   s = z Δ                    (1)
    κ = (Δ_g / L) √(a / (1 − a))   ⇒   Δ = Δ_g / √(1 − a)                                                      (2)

z is the plan's noise multiplier, a the share. The center m is L/2 under replace-one, so that a record's own vector is
no longer than Δ/2, which sampling needs to know, and 0 otherwise. A step is one ``Gaussian(z)`` as without the curve.
See ``docs/proofs/noisy-losses.md``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.mechanisms import TensorGaussianMechanism
from sordino.shapes import Float


@dataclass(frozen=True, kw_only=True)
class LossRelease:
    """Buy the mean loss of every batch, with noise, from the budget of the step.

    When: training should be watched, and the watching may be shown to anyone.

    Guarantee: Σ min(max(ℓ, 0), bound) over the batch is scaled and released with the clipped gradients as *one*
        Gaussian vector, whose sensitivity is that of the joint vector. A step is ``Gaussian(noise_multiplier)`` exactly
        as without the curve; the price is more noise on the gradient, by the factor `noise_factor`. The sum is divided
        by the public expected batch size. Under replace-one each loss is counted from `max_loss` / 2, which is added
        again to the mean. A loss that is not finite is left out of the sum.

    Args:
        max_loss: L > 0; losses are cut to [0, L]. Public: twice the loss of a model that knows nothing is usual.
        budget_fraction: of the step's budget (of 1 / noise_multiplier²) that the losses get, in (0, 1). 0.02 costs 1 %
            more noise on the gradient.

    Raises:
        InvalidArgument: a value is out of its range.

    Example:
        >>> curve = LossRelease(max_loss=2.0, budget_fraction=0.02)
        >>> round(curve.noise_factor, 4), round(curve.stddev(noise_multiplier=1.0, expected_batch_size=500.0), 4)
        (1.0102, 0.0283)

    References:
        Andrew, Thakkar, McMahan, Ramaswamy 2021, theorem 1, for the joint release; the losses are our own.
    """

    max_loss: float
    budget_fraction: float = 0.02

    def __post_init__(self) -> None:
        checks.positive(max_loss=self.max_loss)
        checks.probability(zero=False, one=False, budget_fraction=self.budget_fraction)

    @property
    def noise_factor(self) -> float:
        """By how much the noise on the gradient grows: 1/√(1 − share)."""
        return 1 / math.sqrt(1 - self.budget_fraction)

    def joint_scale(self, sensitivity: float) -> tuple[float, float]:
        """(κ, ℓ2 sensitivity of the joint vector) that extends a vector of ℓ2 sensitivity `sensitivity`, by (2).

        A loss in [0, L] moves its sum by at most L under every relation: added, removed, zeroed out or replaced.
        """
        return sensitivity / self.max_loss * math.sqrt(
            self.budget_fraction / (1 - self.budget_fraction)
        ), sensitivity * self.noise_factor

    def center(self, neighboring_relation: NeighboringRelation) -> float:
        """What is subtracted from each bounded loss before it is summed.

        Under replace-one `bound` / 2: the two values of a record then lie on both sides of nothing, at most half of the
        sensitivity away from it. Otherwise 0: a record is there or not.
        """
        return self.max_loss / 2 if neighboring_relation is NeighboringRelation.REPLACE_ONE else 0.0

    def mean(
        self, noisy: float, *, scale: float, neighboring_relation: NeighboringRelation, expected_batch_size: float
    ) -> float:
        """The mean loss that a released value of κ = `scale` times the sum stands for."""
        return self.center(neighboring_relation) + noisy / scale / expected_batch_size

    def stddev(self, *, noise_multiplier: float, expected_batch_size: float) -> float:
        """Standard deviation of the noise on one point of the curve: z L / (√share · B)."""
        return noise_multiplier * self.max_loss / (math.sqrt(self.budget_fraction) * expected_batch_size)

    def to_dict(self) -> dict[str, object]:
        """The curve as plain JSON types."""
        return {"max_loss": self.max_loss, "budget_fraction": self.budget_fraction}

    @classmethod
    def from_dict(cls, body: object) -> "LossRelease":
        """The curve that `to_dict` described."""
        if not isinstance(body, Mapping) or set(body) != {"max_loss", "budget_fraction"}:
            raise InvalidArgument(
                "loss_release must hold max_loss and budget_fraction, got another body. Check the file."
            )
        return cls(max_loss=body["max_loss"], budget_fraction=body["budget_fraction"])


class LossSum:
    """The bounded losses of one logical batch, added up over its chunks in double precision.

    Args:
        curve: bound and share.
        neighboring_relation: the neighboring relation, which says where losses are counted from.
    """

    def __init__(self, curve: LossRelease, neighboring_relation: NeighboringRelation) -> None:
        self._bound, self._center = curve.max_loss, curve.center(neighboring_relation)
        self._total = torch.zeros(1, dtype=torch.float64)

    def add(self, losses: Float[Tensor, " B"]) -> None:
        """Take in the losses of a chunk; one that is not finite adds nothing."""
        known = losses.detach().double()
        known = torch.where(known.isfinite(), known.clamp(0.0, self._bound) - self._center, 0.0)
        self._total = self._total.to(known.device) + known.sum()

    def scaled(self, scale: float) -> Float[Tensor, " 1"]:
        """κ times the sum, to be released with the gradients."""
        return self._total * scale


# ----------------------------------------------------------------------------------------------------------------------
# The norm of the clipped sum, released from the step's own budget for the next choice.
#
#     (S, κ‖S‖) + N(0, s² I),   Δ² = Δ_S² + κ² Δ_S²,   κ = √(a / (1 − a))   ⇒   Δ = Δ_S / √(1 − a)                   (1)
#
# ‖S‖ moves by no more than S does, so both together are one Gaussian vector of that sensitivity: a step costs what it
# cost before, and the gradient carries more noise, by the factor 1/√(1 − a). a is the share.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NormRelease:
    """Releases ‖S‖ of the clipped sum S with the sum.

    Guarantee: with the mechanism of `joint_scale`, sum and norm together are one ``Gaussian(noise_multiplier)``, by
        (1).

    Args:
        budget_fraction: a of the step's budget 1/z² that the norm gets, in (0, 1). 0.05 costs 2.6 % more noise on the
            gradient.

    Example:
        >>> round(NormRelease(budget_fraction=0.05).noise_factor, 3)
        1.026

    References:
        Hong, Wang, Zhou 2021, "Learning to protect", section 4: there the scheduler reads ‖S‖², whose sensitivity is
        (2B − 1)C²; the norm itself moves by C at most, and its square is post-processing.
    """

    budget_fraction: float

    def __post_init__(self) -> None:
        checks.probability(zero=False, one=False, budget_fraction=self.budget_fraction)

    @property
    def noise_factor(self) -> float:
        """The factor by which the noise on the gradient grows."""
        return 1 / math.sqrt(1 - self.budget_fraction)

    def joint_scale(self, mechanism: object, totals: Sequence[Tensor]) -> tuple[TensorGaussianMechanism, Tensor]:
        """The noise for the sum and its norm together, and the scaled norm, one number in double precision.

        Raises:
            InvalidArgument: the sum isn't noised by one Gaussian of the step: AdaClip, secure or correlated noise.
        """
        if not isinstance(mechanism, TensorGaussianMechanism):
            raise InvalidArgument(
                "norm_budget_fraction must be None with AdaClip, secure or correlated noise, got a share: the norm "
                "is released "
                "as one Gaussian with the sum. Use flat clipping and independent noise."
            )
        # Where the sum is: it is looked at when it is released.
        squares = torch.stack([total.double().square().sum().to(totals[0].device) for total in totals])
        norm = squares.sum()[None].sqrt_() * self._scale
        wider = mechanism.l2_sensitivity * self.noise_factor
        return TensorGaussianMechanism(noise_multiplier=mechanism.noise_multiplier, l2_sensitivity=wider), norm

    def released_norm(self, noisy: Tensor, *, expected_batch_size: float) -> float:
        """The norm of the mean gradient that was released."""
        return float(noisy) / self._scale / expected_batch_size

    @property
    def _scale(self) -> float:
        return math.sqrt(self.budget_fraction / (1 - self.budget_fraction))
