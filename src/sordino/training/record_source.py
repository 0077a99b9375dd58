"""Where a run's records come from: tensors in memory, or any map-style dataset with its collate function."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from sordino import checks
from sordino.data import MappedArrays
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, LossShapeError
from sordino.sampling import Microbatch, even_borders
from sordino.training.collation import BatchLayout, Collation, inconsistent_batch_error
from sordino.training.plan import Plan
from sordino.training.probing.padding import Padding
from sordino.training.pytree import map_tensors


class RecordSource(Protocol):
    """Records by position. A batch is a tuple: the arguments that the loss gets after the model."""

    @property
    def padding(self) -> Padding | None:
        """How batches follow their longest record; None where they don't."""
        ...

    def __len__(self) -> int:
        """Number of records."""
        ...

    def structure(self) -> tuple[object, ...] | None:
        """A batch that shows what batches look like, or None when that would mean reading a record."""
        ...

    def read(self, indices: np.ndarray, *, device: torch.device) -> tuple[np.ndarray, tuple[object, ...]]:
        """The records at `indices` (different ones, at least one), in their order, on `device`.

        Returns:
            The indices of those that can be read, and their batch; an empty tuple of none.
        """
        ...


class TensorSource:
    """Equally long tensors, records first.

    Args:
        tensors: each of shape (n, …).
    """

    padding: Padding | None = None

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        if not tensors or any(tensor.dim() == 0 for tensor in tensors):
            raise InvalidArgument("data must hold tensors with the records first, got none or a scalar. Stack them.")
        if any(len(tensor) != len(tensors[0]) for tensor in tensors):
            raise InvalidArgument("data must hold tensors of one length, got different lengths. Give one row a record.")
        self._tensors = tuple(tensor.detach() for tensor in tensors)

    def __len__(self) -> int:
        return len(self._tensors[0])

    def structure(self) -> tuple[object, ...] | None:
        """The shapes and types of a batch, filled with zeros: no record is read."""
        return tuple(tensor.new_zeros((2, *tensor.shape[1:])) for tensor in self._tensors)

    def read(self, indices: np.ndarray, *, device: torch.device) -> tuple[np.ndarray, tuple[object, ...]]:
        """Rows of every tensor; a gapless stretch, such as a full batch, is a view and not a copy."""
        first, last = int(indices[0]), int(indices[-1])
        if last - first + 1 == len(indices) and bool((np.diff(indices) == 1).all()):
            return indices, tuple(tensor[first : last + 1].to(device) for tensor in self._tensors)
        rows = torch.from_numpy(indices)
        return indices, tuple(tensor.index_select(0, rows.to(tensor.device)).to(device) for tensor in self._tensors)


class DatasetSource:
    """A map-style dataset: ``dataset[i]`` is one record, `collate_fn` makes a batch of a list of them.

    Args:
        dataset: with ``__getitem__`` and ``__len__``.
        collate_fn: torch's default when None. A tuple or list that it returns is unpacked into the loss's arguments.
            It is tried on synthetic items when the first batch is read: each row must come from its own record.
        may_pad: whether batches may follow their longest record, where that changes no other record's gradient.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        collate_fn: Callable[[list[object]], object] | None = None,
        *,
        may_pad: bool = True,
    ) -> None:
        self._dataset = dataset
        self._collate = default_collate if collate_fn is None else collate_fn
        self._layout: BatchLayout | None = None
        self.padding: Padding | None = None
        self._may_pad = may_pad

    def __len__(self) -> int:
        return len(cast(Sized, self._dataset))

    def structure(self) -> tuple[object, ...] | None:
        """Unknown until a record is read."""
        return None

    def read(self, indices: np.ndarray, *, device: torch.device) -> tuple[np.ndarray, tuple[object, ...]]:
        """The collated records.

        Raises:
            CoupledRecords: a row of a batch depends on another record, or the batch's shape does.
        """
        found, items = readable(self._dataset, indices.tolist())
        if items and self._layout is None:
            collation = Collation(self._collate, items[0])
            self._layout, self.padding = collation.layout, collation.padding if self._may_pad else None
        if not items or self._layout is None:
            return indices[:0], ()
        kept, batch = collated(self._collate, items)
        if not kept:
            return indices[:0], ()
        self._layout.check(batch, len(kept), self.padding)
        batch = map_tensors(lambda tensor: tensor.to(device), batch)
        return indices[found][kept], tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def make_record_source(
    data: Sequence[Tensor] | Dataset[object],
    collate_fn: Callable[[list[object]], object] | None = None,
    *,
    may_pad: bool = True,
) -> RecordSource:
    """The source for what `fit` was given.

    Raises:
        InvalidArgument: neither tensors nor a dataset of known length.
    """
    check_not_data_frame(data, "data")
    if isinstance(data, TensorDataset) and collate_fn is None:
        return TensorSource(data.tensors)
    if isinstance(data, Dataset) or _is_map_style(data):
        if isinstance(data, IterableDataset) or not isinstance(data, Sized):
            raise InvalidArgument(
                "data must be a map-style dataset of known length, got one that can only be iterated. "
                "Private batches are drawn by position. Write the records to disk once (sordino.data.mapped_table or "
                "MappedArrays); `sordino explain data` names what else remains for a stream."
            )
        return DatasetSource(cast("Dataset[object]", data), collate_fn, may_pad=may_pad)
    if isinstance(data, tuple | list) and all(isinstance(part, Tensor) for part in data):
        if collate_fn is not None:
            raise InvalidArgument("collate_fn must be None for tensors, got a function. Give a dataset, or drop it.")
        return TensorSource(data)
    raise InvalidArgument(
        f"data must be a tuple of tensors or a map-style dataset, got {type(data).__name__}. "
        "Give (features, labels), or a torch Dataset."
    )


def fetch_items(dataset: Dataset[object], indices: list[int]) -> list[object]:
    """The items at `indices`, each by a call of its own: `__getitems__` could let records of one call meet.

    What a record's code raises goes through; `readable` leaves such records out.
    """
    if type(dataset) is MappedArrays:
        return list(dataset.__getitems__(indices))
    fetch_many = cast("Callable[[list[int]], list[object]] | None", getattr(dataset, "__getitems__", None))
    if fetch_many is not None:
        return [fetch_many([index])[0] for index in indices]
    return [dataset[index] for index in indices]


def readable(dataset: Dataset[object], indices: list[int]) -> tuple[list[int], list[object]]:
    """Which of `indices` can be read, by their position in the list, and their items.

    A record whose code raises counts as a record that is not there, as one without a finite gradient does: neither
    which record it was nor that there was one is shown. What the machine raises (a file or memory that is not there)
    ends the run.
    """
    try:
        return list(range(len(indices))), fetch_items(dataset, indices)
    except (OSError, MemoryError):
        raise
    except Exception:  # noqa: S110 (the record at fault is looked for below)
        pass
    found: list[int] = []
    items: list[object] = []
    for position, index in enumerate(indices):
        try:
            item = fetch_items(dataset, [index])[0]
        except (OSError, MemoryError):
            raise
        except Exception:  # noqa: S112
            continue
        found.append(position)
        items.append(item)
    return found, items


def collated(collate_fn: Callable[[list[object]], object], items: list[object]) -> tuple[list[int], object]:
    """Which items are in the batch, by their position in the list, and the batch; None of no items.

    An item on which `collate_fn` fails alone is left out.

    Raises:
        CoupledRecords: items that run alone fail together.
    """
    kept = list(range(len(items)))
    batch, runs = _tried(collate_fn, items)
    if not runs:
        kept = [index for index, item in enumerate(items) if _tried(collate_fn, [item])[1]]
        batch, runs = _tried(collate_fn, [items[index] for index in kept]) if kept else (None, True)
    # Outside of any handler, so that no exception that quotes a record hangs on to this one.
    if not runs:
        raise inconsistent_batch_error()
    return kept, batch


def _tried(collate_fn: Callable[[list[object]], object], items: list[object]) -> tuple[object, bool]:
    """The batch, and whether there is one. Items are copied: a second attempt must find them as they were."""
    try:
        return collate_fn(list(items)), True
    except (OSError, MemoryError):
        raise
    except Exception:
        return None, False


def check_no_repeated_units(dataset: object) -> None:
    """Refuse a dataset in which a record stands twice, as far as torch's own `Subset` and `ConcatDataset` show it.

    Raises:
        InvalidArgument: one does: each of its places is drawn by itself, so it would count twice.
    """
    if type(dataset) not in {ConcatDataset, Subset}:
        return
    origins = _origins(dataset, {})
    if len(np.unique(origins)) != len(origins):
        raise InvalidArgument(
            "dataset must hold each record once, got a Subset or ConcatDataset with a record at several places: "
            "it would be drawn, and count, several times. Name each record once, or pass units= that say which "
            "places are whose."
        )


def _origins(dataset: object, sources: dict[int, range]) -> np.ndarray:
    """A number for each record in its own order, the same for the same record of one of the `sources`."""
    if type(dataset) is ConcatDataset:
        return np.concatenate([_origins(part, sources) for part in dataset.datasets])
    if type(dataset) is Subset:
        return _origins(dataset.dataset, sources)[np.asarray(dataset.indices, dtype=np.int64)]
    first = sum(map(len, sources.values()))
    numbers = sources.setdefault(id(dataset), range(first, first + len(cast("Sized", dataset))))
    return np.arange(numbers.start, numbers.stop)


def check_not_data_frame(data: object, name: str) -> None:
    """Refuse a table of pandas, Polars or Arrow: by number it gives columns, or nothing, and no records.

    Raises:
        InvalidArgument: it is one. Nothing of it is read.
    """
    kind = type(data)
    frame = (hasattr(kind, "dtypes") or hasattr(kind, "schema")) and hasattr(kind, "columns")
    if frame and not isinstance(data, Dataset):
        raise InvalidArgument(
            f"{name} must be tensors or a torch Dataset, got a {kind.__name__} of {kind.__module__.partition('.')[0]}. "
            "Encode it by a declared schema: `records = schema.encode(frame)`, then `records.tensors()`."
        )


def _is_map_style(data: object) -> bool:
    """Whether something that is no torch `Dataset` still gives records by number."""
    others = (Tensor, np.ndarray, Sequence, Mapping)
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, others)


# ----------------------------------------------------------------------------------------------------------------------
# Users, groups and micro-batches as what is clipped and protected: a unit's records are one gradient.
# ----------------------------------------------------------------------------------------------------------------------


_COMBINED = ("mean", "sum")


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitAssignment:
    """Which unit each record belongs to; for ``fit(…, units=…)`` and ``make_private(…, units=…)``.

    When: one person gave several records and the whole of them is to be protected. Batches are then drawn from units,
    `expected_batch_size` counts units, and a unit's records make one gradient that is clipped once.

    Guarantee: a unit's contribution to a step is a function of its own records, clipped to the plan's bound. So the
    events of a plan hold for units as they hold for records: adding, removing or replacing a unit with all its
    records is one step of the plan's relation.

    Args:
        unit_ids: the unit of each record, from 0 to `num_units` − 1, in the records' order. A record of any other unit
            contributes nothing, silently: whose a record is, is private.
        num_units: number of units, public; some may have no records.
        max_records_per_unit: only a unit's first `max_records_per_unit` records in the data's order count, ≥ 1; None
            takes all. It bounds time and memory, never the guarantee.
        combine: "mean" or "sum" of the losses of a unit's records.

    Example:
        >>> units = UnitAssignment(unit_ids=[0, 1, 1, 3], num_units=4)
        >>> units.num_units, units.combine
        (4, 'mean')

    References:
        McMahan, Ramage, Talwar, Zhang 2018, "Learning differentially private recurrent language models" (users).
    """

    unit_ids: Sequence[int] | np.ndarray | Tensor
    num_units: int
    max_records_per_unit: int | None = None
    combine: str = "mean"
    protects_records: bool = False

    def __post_init__(self) -> None:
        checks.integer(1, num_units=self.num_units)
        if self.max_records_per_unit is not None:
            checks.integer(1, max_records_per_unit=self.max_records_per_unit)
        checks.one_of(_COMBINED, combine=self.combine)
        of = self.unit_ids.cpu().numpy() if isinstance(self.unit_ids, Tensor) else np.asarray(self.unit_ids)
        if of.ndim != 1 or (of.size and not np.issubdtype(of.dtype, np.integer)):
            raise InvalidArgument(
                "unit_ids must be one integer per record, got something else. Number the units from 0."
            )
        object.__setattr__(self, "unit_ids", of.astype(np.int64))

    def check(self, plan: Plan) -> None:
        """Refuse a plan that does not say what is protected here.

        Raises:
            InvalidArgument: its unit is one record for users, or micro-batches come with another relation than
                replace-one.
        """
        if not self.protects_records:
            if plan.privacy_unit is PrivacyUnit.RECORD:
                raise InvalidArgument(
                    "privacy_unit must be user or client with units, got 'record'. Say whose records belong together."
                )
            return
        if plan.privacy_unit is not PrivacyUnit.RECORD:
            raise InvalidArgument(
                f"privacy_unit must be record with micro-batches, got {plan.privacy_unit.value!r}. Give UnitAssignment."
            )
        if plan.neighboring_relation is not NeighboringRelation.REPLACE_ONE:
            raise InvalidArgument(
                f"neighboring_relation must be replace_one with micro-batches, got "
                f"{plan.neighboring_relation.value!r}: a record more or less changes its group's gradient by up to "
                "twice the clipping norm. Use 'replace_one', or clip records one by one."
            )


def record_groups(records: int, *, size: int) -> UnitAssignment:
    """Fixed groups of `size` neighboring records, whose mean gradient is clipped as one.

    When: a method is to be compared with one that clips micro-batches. It costs accuracy: the noise is that of 2C on
    each group instead of C on each record.

    Guarantee: the group of a record depends on its number alone. Replacing a record replaces one group's clipped
    gradient and moves the sum by at most 2C; so does emptying it. The plan must therefore be under replace-one.

    Args:
        records: number of records, public.
        size: records a group, ≥ 1.

    Example:
        >>> record_groups(5, size=2).unit_ids.tolist()
        [0, 0, 1, 1, 2]
    """
    records, size = checks.integer(1, records=records), checks.integer(1, size=size)
    return UnitAssignment(unit_ids=np.arange(records) // size, num_units=-(-records // size), protects_records=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitMicrobatch(Microbatch):
    """A part of a logical batch of units: records one after the other, those of one unit together.

    Args:
        units: int64 number of the unit of each record; it never falls.
        weights: what each record's gradient counts for in its unit's.
    """

    units: np.ndarray
    weights: np.ndarray

    def only(self, positions: list[int]) -> "UnitMicrobatch":
        """The same chunk with only some of its records."""
        parts = {"indices": self.indices[positions], "units": self.units[positions], "weights": self.weights[positions]}
        return replace(self, **parts)


class UnitIndex:
    """The records of each unit, in the data's order.

    Args:
        units: which records belong together.
        of: the unit of each record at hand.
    """

    def __init__(self, units: UnitAssignment, of: np.ndarray) -> None:
        self.units = units
        # Whose a record is, is private: one of an undeclared unit raises nothing and contributes nothing.
        declared = np.flatnonzero((of >= 0) & (of < units.num_units))
        self.order = declared[np.argsort(of[declared], kind="stable")]
        counts = np.bincount(of[declared], minlength=units.num_units)
        self.starts = np.cumsum(counts) - counts
        self.sizes = counts if units.max_records_per_unit is None else np.minimum(counts, units.max_records_per_unit)

    def chunks(self, drawn: np.ndarray, *, step: int, parts: int = 1) -> Iterator[UnitMicrobatch]:
        """The records of the drawn units in exactly `parts` parts of nearly equal size, which may be empty."""
        sizes = self.sizes[drawn]
        turns = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        records = self.order[np.repeat(self.starts[drawn], sizes) + turns]
        weights = np.repeat(1 / np.maximum(sizes, 1) if self.units.combine == "mean" else np.ones(len(sizes)), sizes)
        owners = np.repeat(drawn, sizes)
        for number, (start, end) in enumerate(even_borders(len(records), parts)):
            part = slice(start, end)
            yield UnitMicrobatch(
                step=step,
                index=number,
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

    def __init__(self, source: RecordSource, units: UnitAssignment) -> None:
        of = np.asarray(units.unit_ids)
        if len(of) != len(source):
            raise InvalidArgument("units must name one unit per record of the data, got another number of records.")
        self._source, self._units = source, units
        table = UnitIndex(units, of)
        self._order, self._starts, self._sizes = table.order, table.starts, table.sizes

    def __len__(self) -> int:
        return self._units.num_units

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
        positions = starts[:, None] + np.where(has, turns, 0)
        weights = has / sizes[:, None] if self._units.combine == "mean" else has.astype(float)
        read = [self._source.read(self._order[positions[:, turn]], device=device) for turn in turns]
        if any(len(found) < len(indices) for found, _ in read):
            return None
        rounds = [batch for _, batch in read]
        return (torch.from_numpy(weights).to(device, torch.float32), *rounds)


def per_unit_loss(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
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
