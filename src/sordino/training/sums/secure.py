"""The clipped sum of a logical batch in whole numbers (floor 3): what secure noise is added to.

    v_i = round(f_i · g_i / step),   v_i = 0 unless ‖v_i‖₂ ≤ K (checked on the integers),   Σ_i v_i in int64

Every record's gradient is formed apart, rounded to a public grid and checked again, so nothing that one record does
can change how another is rounded in the sum. See ``docs/proofs/secure-gradient-noise.md``.
"""

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sordino.gradients import Contributions
from sordino.gradients.numerics import row_squared_norms
from sordino.mechanisms.grid_sum import GridSumMechanism
from sordino.randomness import Randomness
from sordino.training.step_plan import StepPlan

__all__ = ["IntegerSums"]

_Gradients = dict[nn.Parameter, Tensor]


class IntegerSums:
    """Clips records one by one, rounds them to the grid of the step, and adds them up without rounding.

    Guarantee: `add_noise_` is one ``Gaussian(noise_multiplier)`` on the records added since `begin`, exactly: sums and
    noise are integers. It takes for granted that a record's gradient, as it was computed, depends on that record
    alone; a chunk of one record makes that so, see the proof.

    Args:
        capture: the model's gradients, record by record.
    """

    def __init__(self, capture: Contributions) -> None:
        self._capture = capture
        self._sums: _Gradients = {}
        self._now: StepPlan | None = None
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
        self._bounds = now.clipping.thresholds(sizes, max_grad_norm=now.max_grad_norm)
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

    def _whole(self, gradients: _Gradients, scale: float) -> dict[nn.Parameter, Float[Tensor, "B n"]]:
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

    def _factors(self, gradients: _Gradients, scale: float) -> list[Float[Tensor, " B"]]:
        """One factor for each group and record; zero in all groups for a record that is not finite in one."""
        assert self._now is not None
        some = next(iter(gradients.values()))
        none = torch.zeros(len(some), dtype=torch.float64, device=some.device)
        squares = [
            scale**2 * sum((row_squared_norms(gradients[p]) for p in group if p in gradients), none)
            for group in self._groups
        ]
        finite = torch.stack(squares).isfinite().all(0)
        return [
            self._now.clipping.factors(torch.where(finite, row, torch.inf), max_grad_norm=bound)
            for row, bound in zip(squares, self._bounds, strict=True)
        ]

    def mechanism(self) -> tuple[Self, list[Tensor]]:
        """The object itself adds the noise; nothing else is released with it."""
        return self, []

    def held(self) -> list[Tensor]:
        """The sums of whole numbers, which processes may add up before the noise."""
        return list(self._sums.values())

    def add_noise_(self, tensors: Sequence[Tensor], *, randomness: Randomness, step: int) -> None:
        """Overwrite `tensors` by the noisy sums, parameter by parameter in the order of `begin`.

        Every number written is a function of the noisy integer: the noisy sum in double precision, then in the type of
        the tensor. `step` must never repeat within one `randomness`.
        """
        assert self._mechanism is not None
        whole = torch.cat([total.flatten().cpu() for total in self._sums.values()])
        noisy = torch.from_numpy(self._mechanism.release(whole.numpy(), randomness=randomness, step=step))
        parts = noisy.split([total.numel() for total in self._sums.values()])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_((part.double() * self._mechanism.grid.step).view_as(tensor))
        self._sums = {}

    def learn(self, released: Sequence[Tensor]) -> None:
        """Nothing: the bounds are the plan's."""

    def state_dict(self) -> dict[str, object]:
        """What `Bounds.state_dict` says of bounds that don't adapt."""
        return {"bounds": None}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Nothing to go on from: the bounds are the plan's."""
