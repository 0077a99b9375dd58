"""AdaClip in a private step (floor 3): records are transformed and clipped one by one; what is released is
transformed back.
"""

from collections.abc import Mapping, Sequence
from typing import Self, cast

import torch
from torch import Tensor, nn

from sordino.clipping import AdaClip, AdaClipState, ProjectedClipping
from sordino.errors import InvalidArgument, UnprivateStep
from sordino.gradients import Contributions, Recorder
from sordino.mechanisms import GaussianMechanism
from sordino.randomness import Randomness
from sordino.training.plan import Plan
from sordino.training.step_plan import StepPlan
from sordino.training.sums.bounds import Bounds
from sordino.training.sums.jl import ProjectedSums
from sordino.training.sums.secure import IntegerSums
from sordino.training.sums.unit_sums import UnitSums

__all__ = ["AdaClipSums", "bounds_for", "check_bounds"]


def bounds_for(
    capture: Contributions, plan: Plan, randomness: Randomness, *, by_unit: bool = False
) -> "Bounds | AdaClipSums | IntegerSums | ProjectedSums | UnitSums":
    """What clips the chunks of a run; `by_unit` says that rows are records, to be put together unit by unit.

    Raises:
        InvalidArgument: the clipping doesn't go with the plan's noise or relation, or not with rows of units.
    """
    check_bounds(plan, by_unit=by_unit)
    if by_unit:
        return UnitSums(capture)
    if isinstance(plan.clipping, AdaClip):
        return AdaClipSums(capture)
    if isinstance(plan.clipping, ProjectedClipping):
        if not isinstance(capture, Recorder):
            raise InvalidArgument(
                "clipping must look at the contributions that come in, got ProjectedClipping, which projects gradients "
                "of a loss. Use FlatClipping."
            )
        return ProjectedSums(capture, randomness)
    return IntegerSums(capture) if plan.secure_noise else Bounds(capture)


def check_bounds(plan: Plan, *, by_unit: bool = False) -> None:
    """Refuse what `bounds_for` has no sums for.

    Raises:
        InvalidArgument: the clipping doesn't go with the plan's noise, or not with rows of units.
    """
    special = isinstance(plan.clipping, AdaClip | ProjectedClipping)
    if by_unit and (special or plan.secure_noise):
        got = type(plan.clipping).__name__ if special else "secure noise"
        raise InvalidArgument(
            f"units must be None with {got} in a loop of your own: its sums are made record by record. Use "
            "FlatClipping, or train with sordino.fit."
        )
    if special and (plan.noise is not None or plan.secure_noise):
        raise InvalidArgument(
            f"clipping must be another one with correlated or secure noise, got {type(plan.clipping).__name__}. Use "
            "FlatClipping, or independent noise."
        )


class AdaClipSums:
    """Sums of transformed and clipped gradients, in double precision; stands where `Bounds` does.

    Guarantee: a record moves the sum that noise is added to by at most 1 (2 when replaced); transform and scale follow
    from what earlier steps released.

    Args:
        capture: the model's gradients, record by record.
    """

    def __init__(self, capture: Contributions) -> None:
        self._capture = capture
        self._state: AdaClipState | None = None
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._scale: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._now: StepPlan | None = None
        self._saved: Mapping[str, object] | None = None

    def begin(self, now: StepPlan) -> None:
        """Fix the transform of a logical batch."""
        assert isinstance(now.clipping, AdaClip)
        self._parameters = self._capture.trainable()
        names = [self._capture.names[parameter] for parameter in self._parameters]
        if self._state is None:
            self._state = now.clipping.begin([parameter.numel() for parameter in self._parameters])
            self._load(names)
        elif names != self._names:
            raise UnprivateStep(
                "trained parameters must stay the same while bounds adapt, got others. Unfreeze between runs only."
            )
        self._names, self._now = names, now
        self._scale = [
            part.to(p.device) for part, p in zip(self._state.scale(now.max_grad_norm), self._parameters, strict=True)
        ]
        self._state.mean = [part.to(p.device) for part, p in zip(self._state.mean, self._parameters, strict=True)]
        self._sums = [torch.zeros_like(part) for part in self._scale]

    def add(self, into: dict[nn.Parameter, Tensor], *, records: int) -> None:  # noqa: ARG002
        """Transform and clip what was recorded and add it; a chunk of no records adds nothing.

        `into`, where other sums would go, stays as it is.
        """
        assert self._now is not None
        assert self._state is not None
        for gradients, factor in self._capture.per_record_gradients():
            if not records:
                continue
            count = len(next(iter(gradients.values())))
            rows = [
                (factor * self._rows(gradients, parameter, count) - mean) / scale
                for parameter, mean, scale in zip(self._parameters, self._state.mean, self._scale, strict=True)
            ]
            squares = torch.stack([row.square().sum(1) for row in rows]).sum(0)
            factors = self._now.clipping.factors(squares, max_grad_norm=1.0)
            for total, row in zip(self._sums, rows, strict=True):
                # A record that is not finite has factor 0, and 0 · ∞ would not be 0.
                total += torch.where(factors[:, None] > 0, row * factors[:, None], 0.0).sum(0)

    @staticmethod
    def _rows(gradients: Mapping[nn.Parameter, Tensor], parameter: nn.Parameter, count: int) -> Tensor:
        """The records' gradients as rows; a parameter that was not used has zeros, which are transformed as well."""
        if parameter not in gradients:
            return torch.zeros(count, parameter.numel(), dtype=torch.float64, device=parameter.device)
        return gradients[parameter].reshape(count, -1).double()

    def mechanism(self) -> tuple[Self, list[Tensor]]:
        """The object itself adds the noise; nothing else is released with it."""
        return self, []

    def held(self) -> list[Tensor]:
        """The sums of transformed gradients, which processes may add up before the noise."""
        return self._sums

    def add_noise_(self, tensors: Sequence[Tensor], *, randomness: Randomness, step: int) -> None:
        """Overwrite `tensors` by B·g̃, and learn from it. `step` must never repeat within one `randomness`."""
        assert self._now is not None
        assert self._state is not None
        factor, divisor = self._now.neighboring_relation.sensitivity_factor, self._now.expected_batch_size
        noise = GaussianMechanism(noise_multiplier=self._now.noise_multiplier, l2_sensitivity=factor)
        noise.add_noise_(self._sums, randomness=randomness, step=step)
        released: list[Tensor] = []
        for tensor, total, mean, scale in zip(tensors, self._sums, self._state.mean, self._scale, strict=True):
            released.append(mean + scale * total / divisor)
            tensor.copy_((divisor * released[-1]).view_as(tensor))
        stddev = [noise.stddev * scale / divisor for scale in self._scale]
        self._state.learn([part.cpu() for part in released], [part.cpu() for part in stddev])
        self._sums = []

    def learn(self, released: Sequence[Tensor]) -> None:
        """Nothing beside the gradient was released."""

    def state_dict(self) -> dict[str, object]:
        """The transform: it follows from what was released, so it is no secret."""
        if self._state is None:
            return {"bounds": None, "adaclip": self._saved}
        body = {"names": list(self._names), "mean": list(self._state.mean), "variance": list(self._state.variance)}
        return {"bounds": None, "adaclip": body}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from the transform of `state_dict`, from the next batch on."""
        self._saved = cast("Mapping[str, object] | None", state.get("adaclip"))

    def _load(self, names: list[str]) -> None:
        if self._saved is None or self._state is None:
            return
        if list(cast("list[str]", self._saved["names"])) != names:
            raise InvalidArgument("state must be one of the same trained parameters, got others.")
        self._state.mean = [part.double() for part in cast("list[Tensor]", self._saved["mean"])]
        self._state.variance = [part.double() for part in cast("list[Tensor]", self._saved["variance"])]
