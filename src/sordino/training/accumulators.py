"""The clipping bounds of one run: which parameters are clipped together, to what, and what bounds learn."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from sordino.clipping import QuantileClipping, QuantileThresholds
from sordino.errors import InvalidArgument, NonPrivateStep
from sordino.gradients import Contributions, Recorder
from sordino.gradients.backward_strategies import GroupwiseInBackward, NormsInBackward, TwoPassBackward
from sordino.gradients.numerics import read_numbers
from sordino.mechanisms import TensorGaussianMechanism
from sordino.shapes import Float
from sordino.training.noisy_releases import LossSum
from sordino.training.plan import StepPlan


class LossAccumulator(ABC):
    """Clipped sums that a clipping method takes of model and loss itself, without recorded gradients.

    The base of what `Clipping.make_accumulator` may return for trainings by `sordino.fit`. The noise on the sums is the
    step's own, and nothing is carried from step to step.
    """

    def __init__(self) -> None:
        self._now: StepPlan | None = None

    @property
    def step_plan(self) -> StepPlan:
        """The values of the open logical batch."""
        assert self._now is not None
        return self._now

    def begin(self, now: StepPlan) -> None:
        """Take the values of a logical batch."""
        self._now = now

    @abstractmethod
    def sums(
        self, loss: Callable[..., Tensor], batch: tuple[object, ...], *, records: int
    ) -> dict[nn.Parameter, Tensor]:
        """The clipped sums of a chunk of at least one record; records that are not finite add nothing."""

    def add(self, into: dict[nn.Parameter, Tensor], *, records: int) -> None:  # noqa: ARG002
        """Refused for a chunk with records: norms are not read from recordings."""
        if records:
            name = type(self.step_plan.clipping).__name__
            raise InvalidArgument(
                f"clipping must be by exact norms in a loop of your own, got {name}. Train with sordino.fit, or use "
                "FlatClipping."
            )

    def mechanism(self) -> tuple[TensorGaussianMechanism, list[Tensor]]:
        """The noise for the clipped sum; nothing else is released."""
        return self.step_plan.mechanism, []

    def partial_sums(self) -> list[Tensor]:
        """Sums that are kept here: none."""
        return []

    def update_clip_norms(self, released: Sequence[Tensor]) -> None:  # noqa: ARG002
        """Nothing: the bound is the plan's."""
        return

    def state_dict(self) -> dict[str, object]:
        """Nothing is carried from step to step."""
        return {"bounds": None}

    def load_state_dict(self, state: Mapping[str, object]) -> None:  # noqa: ARG002
        """Nothing is carried from step to step."""
        return


class ClippedSumAccumulator:
    """Clips chunks by the step's plan; adaptive bounds are carried from step to step.

    Guarantee: the sum of a record's clipped gradients has norm at most the plan's bound, or the adapted ones taken
    together. Adapted bounds are functions of what `finish` released.

    Args:
        capture: names the parameters.
    """

    def __init__(self, capture: Contributions) -> None:
        self._capture = capture
        self._recorder = capture if isinstance(capture, Recorder) else None
        self._moving: QuantileThresholds | None = None
        self._names: tuple[tuple[str, ...], ...] = ()
        self._groups: list[list[nn.Parameter]] = []
        self._numbers: list[int] = []
        self._bounds: tuple[float, ...] = ()
        self._counts: Tensor | None = None
        self._now: StepPlan | None = None
        self._saved: tuple[float, ...] | None = None
        self._losses: LossSum | None = None
        self.released_loss: float | None = None

    def begin(self, now: StepPlan) -> None:
        """Fix the groups and bounds of a logical batch."""
        parameters = self._capture.trainable()
        # The groups hold their parameters, so that a number is always that of the same one.
        same = now is self._now and list(map(id, parameters)) == self._numbers
        if same and self._moving is None and now.loss_release is None:
            return
        self._numbers = list(map(id, parameters))
        sizes = {self._capture.names[parameter]: parameter.numel() for parameter in parameters}
        by_name = {self._capture.names[parameter]: parameter for parameter in parameters}
        names = now.clipping.groups(sizes)
        if self._moving is not None and names != self._names:
            raise NonPrivateStep(
                "trained parameters must stay the same while bounds adapt, got others. Unfreeze between runs only."
            )
        self._names, self._now = names, now
        self._groups = [[by_name[name] for name in group] for group in names]
        self._bounds = now.clipping.clip_norms(sizes, max_grad_norm=now.max_grad_norm)
        self._counts = None
        self._losses = None if now.loss_release is None else LossSum(now.loss_release, now.neighboring_relation)
        if isinstance(now.clipping, QuantileClipping):
            if self._moving is None:
                self._moving = now.clipping.init_state(self._bounds)
                self._moving.values = self._saved or self._moving.values
            self._bounds = self._moving.values
            self._moving.joint_scale(now.neighboring_relation, now.gradient_noise_multiplier)
            # Where the norms are: the counts are looked at when they are released.
            device = parameters[0].device if parameters else None
            self._counts = torch.zeros(len(names), dtype=torch.float64, device=device)

    def add(self, into: dict[nn.Parameter, Tensor], *, records: int) -> None:
        """Clip what was recorded and add it to `into`; a chunk of no records adds nothing."""
        assert self._now is not None
        if self._recorder is None:
            self._clip_and_add(into, records)
        elif not self._recorder.sums_in_backward:
            with self._recorder.reading():
                self._clip_and_add(into, records)
        elif records:
            self._recorder.add_backward_sums(into)

    def _clip_and_add(self, into: dict[nn.Parameter, Tensor], records: int) -> None:
        squares = self._capture.squared_norm_bounds(self._groups if len(self._groups) > 1 else None)
        squares = squares[None] if squares.dim() == 1 else squares
        if not records:
            return
        factors = self.clip(squares)
        self._capture.add_weighted_sums(factors if len(self._groups) > 1 else factors[0], into=into, last=True)

    def clip(self, squares: Float[Tensor, "G B"]) -> Float[Tensor, "G B"]:
        """The factors of a chunk's records, which are counted for bounds that adapt: once each."""
        if self._moving is not None and self._counts is not None:
            self._counts += self._moving.count_below(_finite(squares)).to(self._counts.device)
        return self.clip_factors(squares)

    def early(self) -> NormsInBackward:
        """The groups of the open batch, to be measured while the backward pass runs."""
        return NormsInBackward(self._groups)

    def blocks(self) -> GroupwiseInBackward:
        """The groups of the open batch, to be clipped while the backward pass runs."""
        return GroupwiseInBackward(self._groups, self.clip_factors)

    def passes(self, records: int, shared: set[nn.Parameter]) -> TwoPassBackward:
        """The groups of the open batch, to be clipped between two backward passes through `records` that count."""
        return TwoPassBackward(self._groups, self.clip if records else self.clip_factors, shared=shared)

    def clip_factors(self, squares: Float[Tensor, "G B"], groups: Sequence[int] | None = None) -> Float[Tensor, "G B"]:
        """The factor of each record in each group, or in the `groups` with these numbers, from squares of bounds."""
        assert self._now is not None
        bounds = self._bounds if groups is None else [self._bounds[group] for group in groups]
        rule = self._now.clipping.clip_factors
        if len(bounds) == 1:
            return rule(_finite(squares)[0], max_grad_norm=bounds[0])[None]
        rows = zip(_finite(squares), bounds, strict=True)
        return torch.stack([rule(row, max_grad_norm=bound) for row, bound in rows])

    @property
    def groups(self) -> Sequence[Sequence[nn.Parameter]]:
        """The parameters that are clipped together in the open batch."""
        return self._groups

    @property
    def values(self) -> tuple[float, ...]:
        """The bound of each group in the open batch."""
        return self._bounds

    def add_losses(self, losses: Float[Tensor, " B"]) -> None:
        """Take in the losses of a chunk, for the plan's loss curve."""
        if self._losses is not None:
            self._losses.add(losses)

    def mechanism(self) -> tuple[TensorGaussianMechanism, list[Tensor]]:
        """The noise for the clipped sum, and what must be released together with it under the same noise.

        Counts and losses take their shares one after the other: 1/z² is the sum of all shares.
        """
        now = self._now
        assert now is not None
        if self._moving is None and self._losses is None:
            return now.mechanism, []
        sensitivity, extra = now.sensitivity, []
        if self._moving is not None and self._counts is not None:
            scale, sensitivity = self._moving.joint_scale(now.neighboring_relation, now.gradient_noise_multiplier)
            self._counts *= scale
            extra.append(self._counts)
        if now.loss_release is not None and self._losses is not None:
            scale, sensitivity = now.loss_release.joint_scale(sensitivity)
            extra.append(self._losses.scaled(scale))
        return TensorGaussianMechanism(noise_multiplier=now.noise_multiplier, l2_sensitivity=sensitivity), extra

    def partial_sums(self) -> list[Tensor]:
        """Sums that are kept here instead of in `into`: none."""
        return []

    def update_clip_norms(self, released: Sequence[Tensor]) -> None:
        """Move the bounds by what was released, and keep the released loss."""
        now, sensitivity = self._now, 0.0
        if now is None or not released:
            return
        known = read_numbers(released)
        if self._moving is not None:
            scale, sensitivity = self._moving.joint_scale(now.neighboring_relation, now.gradient_noise_multiplier)
            counts = [value / scale for value in known[0]]
            self._moving.update(counts, expected_batch_size=now.expected_batch_size)
        if now.loss_release is not None:
            scale, _ = now.loss_release.joint_scale(sensitivity or now.sensitivity)
            self.released_loss = now.loss_release.mean(
                known[-1][0],
                scale=scale,
                neighboring_relation=now.neighboring_relation,
                expected_batch_size=now.expected_batch_size,
            )

    def state_dict(self) -> dict[str, object]:
        """The adapted bounds, as plain JSON types: they were released, so they are no secret."""
        return {"bounds": self._saved and list(self._saved) if self._moving is None else list(self._moving.values)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from the bounds of `state_dict`, from the next batch on."""
        bounds = state["bounds"]
        self._saved = tuple(map(float, bounds)) if isinstance(bounds, list) else None


def _finite(squares: Float[Tensor, "G B"]) -> Float[Tensor, "G B"]:
    """A record that is not finite in one group contributes zero in all of them."""
    if len(squares) == 1:
        # The same in one operation.
        return squares.nan_to_num(torch.inf, torch.inf, torch.inf)
    return torch.where(squares.isfinite().all(0), squares, torch.inf)


def accumulation_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Sums of half-precision gradients are held in float32."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32
