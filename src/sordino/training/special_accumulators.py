"""Clipped sums that are formed record by record: in whole numbers, of units in a loop, of transformed gradients."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self, cast

import torch
from torch import Tensor, nn

from sordino.clipping import AdaClip, AdaClipState
from sordino.errors import InvalidArgument, NonPrivateStep
from sordino.gradients import Contributions
from sordino.gradients.numerics import row_squared_norms
from sordino.mechanisms import TensorGaussianMechanism
from sordino.mechanisms.integer_noise import GridSumMechanism
from sordino.randomness import KeyedRNG
from sordino.shapes import Float
from sordino.training.accumulators import ClippedSumAccumulator, LossAccumulator
from sordino.training.plan import Plan, StepPlan

if TYPE_CHECKING:
    from sordino.training.record_source import UnitMicrobatch

_Rows = dict[nn.Parameter, Tensor]


class _SelfReleased:
    """Sums that are kept here and released by the object itself, with nothing else; bounds are the plan's.

    Args:
        capture: the model's gradients, record by record.
    """

    def __init__(self, capture: Contributions) -> None:
        self._capture = capture
        self._now: StepPlan | None = None

    @property
    def _step_plan(self) -> StepPlan:
        """The values of the open logical batch."""
        assert self._now is not None
        return self._now

    def mechanism(self) -> tuple[Self, list[Tensor]]:
        """The object itself adds the noise; nothing else is released with it."""
        return self, []

    def update_clip_norms(self, released: Sequence[Tensor]) -> None:
        """Nothing: the bounds are the plan's."""

    def state_dict(self) -> dict[str, object]:
        """What `ClippedSumAccumulator.state_dict` says of bounds that don't adapt."""
        return {"bounds": None}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Nothing to go on from: the bounds are the plan's."""


def _as_rows(gradients: _Rows, parameter: nn.Parameter, count: int) -> Tensor:
    """The gradients of `count` records as rows, in double precision; zeros of a parameter that was not used."""
    if parameter not in gradients:
        return torch.zeros(count, parameter.numel(), dtype=torch.float64, device=parameter.device)
    return gradients[parameter].reshape(count, -1).double()


# ----------------------------------------------------------------------------------------------------------------------
# The clipped sum of a logical batch in whole numbers: what secure noise is added to.
#
#     v_i = round(f_i · g_i / step),   v_i = 0 unless ‖v_i‖₂ ≤ K (checked on the integers),   Σ_i v_i in int64
#
# Every record's gradient is formed apart, rounded to a public grid and checked again, so nothing that one record does
# can change how another is rounded in the sum. See ``docs/proofs/secure-mode.md``.
# ----------------------------------------------------------------------------------------------------------------------


class IntegerAccumulator(_SelfReleased):
    """Clips records one by one, rounds them to the grid of the step, and adds them up without rounding.

    Guarantee: `add_noise_` is one ``Gaussian(noise_multiplier)`` on the records added since `begin`, exactly: sums and
    noise are integers. It takes for granted that a record's gradient, as it was computed, depends on that record
    alone; a chunk of one record makes that so, see the proof.

    Args:
        capture: the model's gradients, record by record.
    """

    def __init__(self, capture: Contributions) -> None:
        super().__init__(capture)
        self._sums: _Rows = {}
        self._mechanism: GridSumMechanism | None = None
        self._groups: list[list[nn.Parameter]] = []
        self._bounds: Sequence[float] = ()

    def begin(self, now: StepPlan) -> None:
        """Fix grid, groups and bounds of a logical batch, from public numbers only."""
        names, parameters = self._capture.names, self._capture.trainable()
        sizes = {names[parameter]: parameter.numel() for parameter in parameters}
        by_name = {names[parameter]: parameter for parameter in parameters}
        self._now = now
        self._groups = [[by_name[name] for name in group] for group in now.clipping.groups(sizes)]
        self._bounds = now.clipping.clip_norms(sizes, max_grad_norm=now.max_grad_norm)
        self._mechanism = now.grid_mechanism(sum(sizes.values()))
        self._sums = {parameter: torch.zeros_like(parameter, dtype=torch.int64) for parameter in parameters}

    def add(self, into: Mapping[nn.Parameter, Tensor], *, records: int) -> None:  # noqa: ARG002
        """Clip, round and check what was recorded, and add it; a chunk of no records adds nothing.

        `into`, where sums of floats would go, stays as it is.
        """
        for gradients, scale in self._capture.per_record_gradients():
            whole = self._whole(gradients, scale)
            if not records:
                continue
            for parameter, rows in whole.items():
                # Whole numbers below 2³² of at most 2¹⁹ records: the partial sums are exact in any order.
                self._sums[parameter] += rows.sum(0).to(torch.int64).view_as(parameter)

    def _whole(self, gradients: _Rows, scale: float) -> dict[nn.Parameter, Float[Tensor, "B n"]]:
        """The records' gradients in grid steps, zero where the norm of the integers is above the bound."""
        assert self._mechanism is not None
        whole: dict[nn.Parameter, Tensor] = {}
        squares = torch.zeros(())
        for group, row in zip(self._groups, self._factors(gradients, scale), strict=True):
            for parameter in group:
                if parameter in gradients:
                    rows = gradients[parameter].reshape(len(row), -1).double()
                    rows *= (row * (scale / self._mechanism.grid.step))[:, None]
                    whole[parameter] = rows.round_()
                    squares = squares + torch.linalg.vector_norm(rows, dim=1).square()
        # Each addition in double precision loses less than one part in 2⁵³; the rest covers roots and products.
        entries = self._mechanism.dimension + 16
        sound = squares * (1 + entries * 2.0**-52) <= float(self._mechanism.largest_norm**2)
        if not bool(sound.all()):
            for rows in whole.values():
                rows[~sound] = 0
        return whole

    def _factors(self, gradients: _Rows, scale: float) -> list[Float[Tensor, " B"]]:
        """One factor for each group and record; zero in all groups for a record that is not finite in one."""
        some = next(iter(gradients.values()))
        none = torch.zeros(len(some), dtype=torch.float64, device=some.device)
        squares = [
            scale**2 * sum((row_squared_norms(gradients[p]) for p in group if p in gradients), none)
            for group in self._groups
        ]
        finite = torch.stack(squares).isfinite().all(0)
        return [
            self._step_plan.clipping.clip_factors(torch.where(finite, row, torch.inf), max_grad_norm=bound)
            for row, bound in zip(squares, self._bounds, strict=True)
        ]

    def partial_sums(self) -> list[Tensor]:
        """The sums of whole numbers, which processes may add up before the noise."""
        return list(self._sums.values())

    def add_noise_(self, tensors: Sequence[Tensor], *, rng: KeyedRNG, step: int) -> None:
        """Overwrite `tensors` by the noisy sums, parameter by parameter in the order of `begin`.

        Every number written is a function of the noisy integer: the noisy sum in double precision, then in the type of
        the tensor. `step` must never repeat within one `rng`.
        """
        assert self._mechanism is not None
        whole = torch.cat([total.flatten().cpu() for total in self._sums.values()])
        noisy = torch.from_numpy(self._mechanism.release(whole.numpy(), rng=rng, step=step))
        parts = noisy.split([total.numel() for total in self._sums.values()])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_((part.double() * self._mechanism.grid.step).view_as(tensor))
        self._sums = {}


# ----------------------------------------------------------------------------------------------------------------------
# The clipped sum of units in a loop of one's own: a unit's records are rows, its gradient is their sum.
#
#     g_u = Σ_{i of u} w_i ∇ℓ_i,   Σ_u min(1, C/‖g_u‖) g_u                                                         (1)
#
# The loop sees records, in any number of parts; units are put together before anything is clipped.
# ----------------------------------------------------------------------------------------------------------------------


class UnitAccumulator:
    """Adds the gradients of each unit's records up, in double precision, and clips their sum.

    Guarantee: a unit with all its records moves the sum by at most the plan's bound, or the adapted ones taken
    together. Norms are those of the very numbers that are summed.

    Args:
        capture: the model's gradients, record by record; each costs a gradient of the whole model.
    """

    def __init__(self, capture: Contributions) -> None:
        self._capture, self._bounds = capture, ClippedSumAccumulator(capture)
        self._open: tuple[int, _Rows] | None = None

    def begin(self, now: StepPlan) -> None:
        """Fix the groups and bounds of a logical batch."""
        self._bounds.begin(now)
        self._open = None

    def add(self, into: dict[nn.Parameter, Tensor], *, records: int) -> None:  # noqa: ARG002
        """Refused for a chunk with records: whose they are must be known."""
        if records:
            raise InvalidArgument("units must be known for every record, got a chunk without them. Use `sums`.")

    def sums(self, chunk: "UnitMicrobatch") -> _Rows:
        """The clipped sums of the units that end in this chunk; one that may go on is kept until it ends."""
        into: _Rows = {}
        first = 0
        for gradients, factor in self._capture.per_record_gradients():
            count = len(next(iter(gradients.values()))) if gradients else 0
            if not chunk.num_records or not count:
                continue
            owners = torch.from_numpy(chunk.units[first : first + count])
            weights = torch.from_numpy(chunk.weights[first : first + count]) * factor
            first += count
            units, rows = self._by_unit(gradients, owners, weights)
            if self._open is not None and self._open[0] == units[0]:
                for parameter, row in self._open[1].items():
                    rows[parameter][:1] += row
            elif self._open is not None:
                self._fold(self._open[1], into)
            self._fold({parameter: row[:-1] for parameter, row in rows.items()}, into)
            self._open = units[-1], {parameter: row[-1:].clone() for parameter, row in rows.items()}
        if chunk.is_last and self._open is not None:
            self._fold(self._open[1], into)
            self._open = None
        return into

    def _by_unit(self, gradients: _Rows, owners: Tensor, weights: Tensor) -> tuple[list[int], _Rows]:
        """The units of some neighboring records, and the sum of the records of each; zeros where nothing was used."""
        units, rank = torch.unique_consecutive(owners, return_inverse=True)
        rows: _Rows = {}
        for parameter in self._capture.trainable():
            parts = _as_rows(gradients, parameter, len(owners))
            row = parts.new_zeros(len(units), parameter.numel())
            rows[parameter] = row.index_add_(0, rank.to(row.device), parts * weights.to(row.device)[:, None])
        return units.tolist(), rows

    def _fold(self, rows: _Rows, into: _Rows) -> None:
        """Clip the sums of whole units and add them to `into`."""
        if not len(next(iter(rows.values()))):
            return
        groups = self._bounds.groups
        squares = torch.stack([torch.stack([rows[p].square().sum(1) for p in group]).sum(0) for group in groups])
        for group, factors in zip(groups, self._bounds.clip(squares), strict=True):
            for parameter in group:
                # A unit that is not finite has factor 0, and 0 · ∞ would not be 0.
                kept = torch.where(factors[:, None] > 0, rows[parameter] * factors[:, None], 0.0)
                total = kept.sum(0).view_as(parameter)
                into[parameter] = into[parameter] + total if parameter in into else total

    def mechanism(self) -> tuple[TensorGaussianMechanism, list[Tensor]]:
        """The noise for the clipped sum, and the counts that are released together with it."""
        return self._bounds.mechanism()

    def partial_sums(self) -> list[Tensor]:
        """Sums that are kept here: none."""
        return []

    def update_clip_norms(self, released: Sequence[Tensor]) -> None:
        """Move the bounds by what was released."""
        self._bounds.update_clip_norms(released)

    def state_dict(self) -> dict[str, object]:
        """The adapted bounds."""
        return self._bounds.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from the bounds of `state_dict`."""
        self._bounds.load_state_dict(state)


# ----------------------------------------------------------------------------------------------------------------------
# AdaClip in a private step: records are transformed and clipped one by one; what is released is transformed back.
# ----------------------------------------------------------------------------------------------------------------------


def make_accumulator(
    capture: Contributions, plan: Plan, rng: KeyedRNG, *, by_unit: bool = False
) -> "ClippedSumAccumulator | AdaClipAccumulator | IntegerAccumulator | LossAccumulator | UnitAccumulator":
    """What clips the chunks of a run; `per_unit_loss` says that rows are records, to be put together unit by unit.

    Raises:
        InvalidArgument: the clipping doesn't go with the plan's noise or relation, or not with rows of units.
    """
    if by_unit:
        return UnitAccumulator(capture)
    if isinstance(plan.clipping, AdaClip):
        return AdaClipAccumulator(capture)
    made = plan.clipping.make_accumulator(capture, rng)
    if made is not None:
        if not isinstance(made, LossAccumulator):
            raise InvalidArgument(
                f"make_accumulator must return None or a LossAccumulator of sordino.training.accumulators, got "
                f"{type(made).__name__} from {type(plan.clipping).__name__}. Derive from it."
            )
        return made
    return IntegerAccumulator(capture) if plan.secure_mode else ClippedSumAccumulator(capture)


class AdaClipAccumulator(_SelfReleased):
    """Sums of transformed and clipped gradients, in double precision.

    Guarantee: a record moves the sum that noise is added to by at most 1 (2 when replaced); transform and scale follow
    from what earlier steps released.

    Args:
        capture: the model's gradients, record by record.
    """

    def __init__(self, capture: Contributions) -> None:
        super().__init__(capture)
        self._state: AdaClipState | None = None
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._scale: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._saved: Mapping[str, object] | None = None

    def begin(self, now: StepPlan) -> None:
        """Fix the transform of a logical batch."""
        assert isinstance(now.clipping, AdaClip)
        self._parameters = self._capture.trainable()
        names = [self._capture.names[parameter] for parameter in self._parameters]
        if self._state is None:
            self._state = now.clipping.init_state([parameter.numel() for parameter in self._parameters])
            self._load(names)
        elif names != self._names:
            raise NonPrivateStep(
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
        assert self._state is not None
        for gradients, factor in self._capture.per_record_gradients():
            if not records:
                continue
            count = len(next(iter(gradients.values())))
            rows = [
                (factor * _as_rows(gradients, parameter, count) - mean) / scale
                for parameter, mean, scale in zip(self._parameters, self._state.mean, self._scale, strict=True)
            ]
            squares = torch.stack([row.square().sum(1) for row in rows]).sum(0)
            factors = self._step_plan.clipping.clip_factors(squares, max_grad_norm=1.0)
            for total, row in zip(self._sums, rows, strict=True):
                # A record that is not finite has factor 0, and 0 · ∞ would not be 0.
                total += torch.where(factors[:, None] > 0, row * factors[:, None], 0.0).sum(0)

    def partial_sums(self) -> list[Tensor]:
        """The sums of transformed gradients, which processes may add up before the noise."""
        return self._sums

    def add_noise_(self, tensors: Sequence[Tensor], *, rng: KeyedRNG, step: int) -> None:
        """Overwrite `tensors` by B·g̃, and learn from it. `step` must never repeat within one `rng`."""
        assert self._state is not None
        now = self._step_plan
        factor, divisor = now.neighboring_relation.sensitivity_factor, now.expected_batch_size
        noise = TensorGaussianMechanism(noise_multiplier=now.noise_multiplier, l2_sensitivity=factor)
        noise.add_noise_(self._sums, rng=rng, step=step)
        released: list[Tensor] = []
        for tensor, total, mean, scale in zip(tensors, self._sums, self._state.mean, self._scale, strict=True):
            released.append(mean + scale * total / divisor)
            tensor.copy_((divisor * released[-1]).view_as(tensor))
        stddev = [noise.stddev * scale / divisor for scale in self._scale]
        self._state.update([part.cpu() for part in released], [part.cpu() for part in stddev])
        self._sums = []

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
