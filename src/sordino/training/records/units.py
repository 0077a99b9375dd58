"""Users, groups and micro-batches as what is clipped and protected (floor 3): a unit's records are one gradient."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from sordino import checks
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, LossShapeError
from sordino.sampling import Chunk, even_borders
from sordino.training.plan import Plan
from sordino.training.records.source import Source

__all__ = ["UnitChunk", "UnitSource", "UnitTable", "Units", "by_unit", "microbatches"]

_COMBINED = ("mean", "sum")


@dataclass(frozen=True, kw_only=True, eq=False)
class Units:
    """Which unit each record belongs to; for ``fit(…, units=…)`` and ``make_private(…, units=…)``.

    When: one person gave several records and the whole of them is to be protected. Batches are then drawn from units,
    `expected_batch_size` counts units, and a unit's records make one gradient that is clipped once.

    Guarantee: a unit's contribution to a step is a function of its own records, clipped to the plan's bound. So the
    events of a plan hold for units as they hold for records: adding, removing or replacing a unit with all its
    records is one step of the plan's relation.

    Args:
        of: the unit of each record, from 0 to `count` − 1, in the records' order. A record of any other unit
            contributes nothing, silently: whose a record is, is private.
        count: number of units, public; some may have no records.
        most_records: only a unit's first `most_records` records in the data's order count, ≥ 1; None takes all.
            It bounds time and memory, never the guarantee.
        combine: "mean" or "sum" of the losses of a unit's records.

    Example:
        >>> units = Units(of=[0, 1, 1, 3], count=4)
        >>> units.count, units.combine
        (4, 'mean')

    References:
        McMahan, Ramage, Talwar, Zhang 2018, "Learning differentially private recurrent language models" (users).
    """

    of: Sequence[int] | np.ndarray | Tensor
    count: int
    most_records: int | None = None
    combine: str = "mean"
    protects_records: bool = False

    def __post_init__(self) -> None:
        checks.integer(1, count=self.count)
        if self.most_records is not None:
            checks.integer(1, most_records=self.most_records)
        checks.one_of(_COMBINED, combine=self.combine)
        of = self.of.cpu().numpy() if isinstance(self.of, Tensor) else np.asarray(self.of)
        if of.ndim != 1 or (of.size and not np.issubdtype(of.dtype, np.integer)):
            raise InvalidArgument("of must be one integer per record, got something else. Number the units from 0.")
        object.__setattr__(self, "of", of.astype(np.int64))

    def check(self, plan: Plan) -> None:
        """Refuse a plan that does not say what is protected here.

        Raises:
            InvalidArgument: its unit is one example for users, or micro-batches come with another relation than
                replace-one.
        """
        if not self.protects_records:
            if plan.privacy_unit is PrivacyUnit.EXAMPLE:
                raise InvalidArgument(
                    "privacy_unit must be user or client with units, got 'example'. Say whose records belong together."
                )
            return
        if plan.privacy_unit is not PrivacyUnit.EXAMPLE:
            raise InvalidArgument(
                f"privacy_unit must be example with micro-batches, got {plan.privacy_unit.value!r}. Give Units."
            )
        if plan.neighboring_relation is not NeighboringRelation.REPLACE_ONE:
            raise InvalidArgument(
                f"neighboring_relation must be replace_one with micro-batches, got "
                f"{plan.neighboring_relation.value!r}: a record more or less changes its group's gradient by up to "
                "twice the clipping norm. Use 'replace_one', or clip records one by one."
            )


def microbatches(records: int, *, size: int) -> Units:
    """Fixed groups of `size` neighbouring records, whose mean gradient is clipped as one.

    When: a method is to be compared with one that clips micro-batches. It costs accuracy: the noise is that of 2C on
    each group instead of C on each record.

    Guarantee: the group of a record depends on its number alone. Replacing a record replaces one group's clipped
    gradient and moves the sum by at most 2C; so does emptying it. The plan must therefore be under replace-one.

    Args:
        records: number of records, public.
        size: records a group, ≥ 1.

    Example:
        >>> microbatches(5, size=2).of.tolist()
        [0, 0, 1, 1, 2]
    """
    records, size = checks.integer(1, records=records), checks.integer(1, size=size)
    return Units(of=np.arange(records) // size, count=-(-records // size), protects_records=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitChunk(Chunk):
    """A part of a logical batch of units: records one after the other, those of one unit together.

    Args:
        units: int64 number of the unit of each record; it never falls.
        weights: what each record's gradient counts for in its unit's.
    """

    units: np.ndarray
    weights: np.ndarray

    def only(self, places: list[int]) -> "UnitChunk":
        """The same chunk with only some of its records."""
        parts = {"indices": self.indices[places], "units": self.units[places], "weights": self.weights[places]}
        return replace(self, **parts)


class UnitTable:
    """The records of each unit, in the data's order.

    Args:
        units: which records belong together.
        of: the unit of each record at hand.
    """

    def __init__(self, units: Units, of: np.ndarray) -> None:
        self.units = units
        # Whose a record is, is private: one of a unit that nobody declared raises nothing and contributes nothing.
        declared = np.flatnonzero((of >= 0) & (of < units.count))
        self.order = declared[np.argsort(of[declared], kind="stable")]
        counts = np.bincount(of[declared], minlength=units.count)
        self.starts = np.cumsum(counts) - counts
        self.sizes = counts if units.most_records is None else np.minimum(counts, units.most_records)

    def chunks(self, drawn: np.ndarray, *, step: int, parts: int = 1) -> Iterator[UnitChunk]:
        """The records of the drawn units in exactly `parts` parts of nearly equal size, which may be empty."""
        sizes = self.sizes[drawn]
        turns = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        records = self.order[np.repeat(self.starts[drawn], sizes) + turns]
        weights = np.repeat(1 / np.maximum(sizes, 1) if self.units.combine == "mean" else np.ones(len(sizes)), sizes)
        owners = np.repeat(drawn, sizes)
        for number, (start, end) in enumerate(even_borders(len(records), parts)):
            part = slice(start, end)
            yield UnitChunk(
                step=step,
                chunk=number,
                is_last=number == parts - 1,
                indices=records[part],
                units=owners[part],
                weights=weights[part],
            )


class UnitSource:
    """Units by number. A batch is a table of weights, shape (units, turns), and the batches of the turns: in turn k the
    k-th record of every unit, or its first again, with weight 0, once it has no more.

    So a unit is one row in every call of the model, and what is captured in all calls is clipped together.

    Args:
        source: of the records.
        units: which belong together.

    Raises:
        InvalidArgument: `units` is for another number of records.
    """

    padding = None

    def __init__(self, source: Source, units: Units) -> None:
        of = np.asarray(units.of)
        if len(of) != len(source):
            raise InvalidArgument("units must name one unit per record of the data, got another number of records.")
        self._source, self._units = source, units
        table = UnitTable(units, of)
        self._order, self._starts, self._sizes = table.order, table.starts, table.sizes

    def __len__(self) -> int:
        return self._units.count

    def present(self, indices: np.ndarray) -> np.ndarray:
        """Those of the units that have records: the others are as good as not there."""
        return indices[self._sizes[indices] > 0]

    def structure(self) -> tuple[object, ...] | None:
        """One turn of what batches of the records look like."""
        inner = self._source.structure()
        return None if inner is None else (torch.ones(2, 1), inner)

    def read(self, indices: np.ndarray, *, device: torch.device) -> tuple[np.ndarray, tuple[object, ...]]:
        """The weights and the turns of the units at `indices`, none of them without records.

        A unit of which a record can't be read is left out.
        """
        batch = self._read(indices, device)
        if batch is None:
            indices = indices[[self._read(indices[i : i + 1], device) is not None for i in range(len(indices))]]
            batch = self._read(indices, device) if len(indices) else ()
        return indices, batch or ()

    def _read(self, indices: np.ndarray, device: torch.device) -> tuple[object, ...] | None:
        sizes, starts = self._sizes[indices], self._starts[indices]
        turns = np.arange(int(sizes.max()))
        has = turns < sizes[:, None]
        places = starts[:, None] + np.where(has, turns, 0)
        weights = has / sizes[:, None] if self._units.combine == "mean" else has.astype(float)
        read = [self._source.read(self._order[places[:, turn]], device=device) for turn in turns]
        if any(len(found) < len(indices) for found, _ in read):
            return None
        rounds = [batch for _, batch in read]
        return (torch.from_numpy(weights).to(device, torch.float32), *rounds)


def by_unit(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss of units on the batches of `UnitSource`: one value per unit."""

    def of_units(model: nn.Module, weights: Tensor, *turns: tuple[object, ...]) -> Tensor:
        total = torch.zeros(())
        for turn, batch in enumerate(turns):
            losses = loss(model, *batch)
            if not isinstance(losses, Tensor) or losses.shape != (len(weights),):
                raise LossShapeError(
                    "loss must be a tensor of shape (records,), one value per record, got another. "
                    'Use reduction="none" and average over everything but the records.'
                )
            part = weights[:, turn].to(losses.dtype) * losses
            total = part if turn == 0 else total + part
        return total

    return of_units
