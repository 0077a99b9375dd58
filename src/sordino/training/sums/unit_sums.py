"""The clipped sum of units in a loop of one's own (floor 3): a unit's records are rows, its gradient is their sum.

    g_u = Σ_{i of u} w_i ∇ℓ_i,   Σ_u min(1, C/‖g_u‖) g_u                                                         (1)

The loop sees records, in any number of parts; units are put together before anything is clipped.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sordino.errors import InvalidArgument
from sordino.gradients import Contributions
from sordino.mechanisms import GaussianMechanism
from sordino.training.records.units import UnitChunk
from sordino.training.step_plan import StepPlan
from sordino.training.sums.bounds import Bounds

__all__ = ["UnitSums"]

_Rows = dict[nn.Parameter, Tensor]


class UnitSums:
    """Adds the gradients of each unit's records up, in double precision, and clips their sum; stands where `Bounds`
    does.

    Guarantee: a unit with all its records moves the sum by at most the plan's bound, or the adapted ones taken
    together. Norms are those of the very numbers that are summed.

    Args:
        capture: the model's gradients, record by record; each costs a gradient of the whole model.
    """

    def __init__(self, capture: Contributions) -> None:
        self._capture, self._bounds = capture, Bounds(capture)
        self._open: tuple[int, _Rows] | None = None

    def begin(self, now: StepPlan) -> None:
        """Fix the groups and bounds of a logical batch."""
        self._bounds.begin(now)
        self._open = None

    def add(self, into: dict[nn.Parameter, Tensor], *, records: int) -> None:  # noqa: ARG002
        """Refused for a chunk with records: whose they are must be known."""
        if records:
            raise InvalidArgument("units must be known for every record, got a chunk without them. Use `sums`.")

    def sums(self, chunk: UnitChunk) -> _Rows:
        """The clipped sums of the units that end in this chunk; one that may go on is kept until it ends."""
        into: _Rows = {}
        place = 0
        for gradients, factor in self._capture.per_record_gradients():
            count = len(next(iter(gradients.values()))) if gradients else 0
            if not chunk.records or not count:
                continue
            owners = torch.from_numpy(chunk.units[place : place + count])
            weights = torch.from_numpy(chunk.weights[place : place + count]) * factor
            place += count
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

    def _by_unit(
        self, gradients: Mapping[nn.Parameter, Tensor], owners: Tensor, weights: Tensor
    ) -> tuple[list[int], _Rows]:
        """The units of some neighbouring records, and the sum of the records of each; zeros where nothing was used."""
        units, rank = torch.unique_consecutive(owners, return_inverse=True)
        rows: _Rows = {}
        for parameter in self._capture.trainable():
            row = torch.zeros(len(units), parameter.numel(), dtype=torch.float64, device=parameter.device)
            if parameter in gradients:
                parts = gradients[parameter].reshape(len(owners), -1).double()
                row.index_add_(0, rank.to(row.device), parts * weights.to(row.device)[:, None])
            rows[parameter] = row
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

    def mechanism(self) -> tuple[GaussianMechanism, list[Tensor]]:
        """The noise for the clipped sum, and the counts that are released together with it."""
        return self._bounds.mechanism()

    def held(self) -> list[Tensor]:
        """Sums that are kept here: none."""
        return []

    def learn(self, released: Sequence[Tensor]) -> None:
        """Move the bounds by what was released."""
        self._bounds.learn(released)

    def state_dict(self) -> dict[str, object]:
        """The adapted bounds."""
        return self._bounds.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from the bounds of `state_dict`."""
        self._bounds.load_state_dict(state)
