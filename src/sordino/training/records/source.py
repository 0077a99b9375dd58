"""Where a run's records come from (floor 3): tensors in memory, or any map-style data set with its collate function."""

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from sordino.data import MappedArrays
from sordino.errors import InvalidArgument
from sordino.training.probing.padding import Padding
from sordino.training.records.collation import Collation
from sordino.training.records.layout import Layout, stretched
from sordino.training.structure import map_tensors

__all__ = [
    "DatasetSource",
    "Source",
    "TensorSource",
    "collated",
    "fetched",
    "readable",
    "refuse_repeats",
    "source_of",
]


class Source(Protocol):
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
    """A map-style data set: ``dataset[i]`` is one record, `collate` makes a batch of a list of them.

    Args:
        dataset: with ``__getitem__`` and ``__len__``.
        collate: torch's default when None. A tuple or list that it returns is unpacked into the loss's arguments.
            It is tried on made-up items when the first batch is read: each row must come from its own record.
        may_pad: whether batches may follow their longest record, where that changes no other record's gradient.
    """

    def __init__(
        self, dataset: Dataset[object], collate: Callable[[list[object]], object] | None = None, *, may_pad: bool = True
    ) -> None:
        self._dataset = dataset
        self._collate = default_collate if collate is None else collate
        self._layout: Layout | None = None
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


def source_of(
    data: Sequence[Tensor] | Dataset[object],
    collate: Callable[[list[object]], object] | None = None,
    *,
    may_pad: bool = True,
) -> Source:
    """The source for what `fit` was given.

    Raises:
        InvalidArgument: neither tensors nor a data set of known length.
    """
    if isinstance(data, TensorDataset) and collate is None:
        return TensorSource(data.tensors)
    if isinstance(data, Dataset) or _is_map_style(data):
        if isinstance(data, IterableDataset) or not isinstance(data, Sized):
            raise InvalidArgument(
                "data must be a map-style data set of known length, got one that can only be iterated. "
                "Private batches are drawn by position. Write the records to disk once (sordino.data.mapped_table or "
                "MappedArrays); docs/data.md names what else remains for a stream."
            )
        return DatasetSource(cast("Dataset[object]", data), collate, may_pad=may_pad)
    if isinstance(data, tuple | list) and all(isinstance(part, Tensor) for part in data):
        if collate is not None:
            raise InvalidArgument("collate must be None for tensors, got a function. Give a data set, or drop it.")
        return TensorSource(data)
    raise InvalidArgument(
        f"data must be a tuple of tensors or a map-style data set, got {type(data).__name__}. "
        "Give (features, labels), or a torch Dataset."
    )


def fetched(dataset: Dataset[object], places: list[int]) -> list[object]:
    """The items at `places`, each by a call of its own: `__getitems__` could let records of one call meet.

    What a record's code raises goes through; `readable` leaves such records out.
    """
    if type(dataset) is MappedArrays:
        return list(dataset.__getitems__(places))
    fetch_many = cast("Callable[[list[int]], list[object]] | None", getattr(dataset, "__getitems__", None))
    if fetch_many is not None:
        return [fetch_many([place])[0] for place in places]
    return [dataset[place] for place in places]


def readable(dataset: Dataset[object], places: list[int]) -> tuple[list[int], list[object]]:
    """Which of `places` can be read, by their position in the list, and their items.

    A record whose code raises counts as a record that is not there, as one without a finite gradient does: neither is
    it told which, nor that there is one. What the machine raises (a file or memory that is not there) ends the run.
    """
    try:
        return list(range(len(places))), fetched(dataset, places)
    except (OSError, MemoryError):
        raise
    except Exception:  # noqa: S110 (the record at fault is looked for below)
        pass
    found: list[int] = []
    items: list[object] = []
    for position, place in enumerate(places):
        try:
            item = fetched(dataset, [place])[0]
        except (OSError, MemoryError):
            raise
        except Exception:  # noqa: S112
            continue
        found.append(position)
        items.append(item)
    return found, items


def collated(collate: Callable[[list[object]], object], items: list[object]) -> tuple[list[int], object]:
    """Which items are in the batch, by their position in the list, and the batch; None of no items.

    An item on which `collate` fails alone is left out.

    Raises:
        CoupledRecords: items that run alone fail together.
    """
    kept = list(range(len(items)))
    batch, runs = _tried(collate, items)
    if not runs:
        kept = [place for place, item in enumerate(items) if _tried(collate, [item])[1]]
        batch, runs = _tried(collate, [items[place] for place in kept]) if kept else (None, True)
    # Outside of any handler, so that no exception that quotes a record hangs on to this one.
    if not runs:
        raise stretched()
    return kept, batch


def _tried(collate: Callable[[list[object]], object], items: list[object]) -> tuple[object, bool]:
    """The batch, and whether there is one. Items are copied: a second attempt must find them as they were."""
    try:
        return collate(list(items)), True
    except (OSError, MemoryError):
        raise
    except Exception:
        return None, False


def refuse_repeats(dataset: object) -> None:
    """Refuse a data set in which a record stands twice, as far as torch's own `Subset` and `ConcatDataset` show it.

    Raises:
        InvalidArgument: one does: each of its places is drawn by itself, so it would count twice.
    """
    places: dict[int, list[np.ndarray | range]] = {}
    for source, found in _origins(dataset):
        places.setdefault(id(source), []).append(found)
    for parts in places.values():
        if len(parts) == 1 and isinstance(parts[0], range):
            continue
        joined = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
        if len(np.unique(joined)) != len(joined):
            raise InvalidArgument(
                "data set must hold each record once, got a Subset or ConcatDataset with a record at several places: "
                "it would be drawn, and count, several times. Name each record once, or pass units= that say which "
                "places are whose."
            )


def _origins(dataset: object) -> list[tuple[object, np.ndarray | range]]:
    """The data sets that `dataset` is made of, with the positions in them, in its own order."""
    if type(dataset) is ConcatDataset:
        return [origin for part in dataset.datasets for origin in _origins(part)]
    if type(dataset) is Subset:
        chosen, inner = np.asarray(dataset.indices, dtype=np.int64), _origins(dataset.dataset)
        size = sum(len(found) for _, found in inner)
        chosen = np.where(chosen < 0, chosen + size, chosen)
        starts = np.cumsum([0, *(len(found) for _, found in inner)])
        parts = [(source, found, start) for (source, found), start in zip(inner, starts[:-1], strict=True)]
        return [
            (source, np.asarray(found)[chosen[(chosen >= start) & (chosen < start + len(found))] - start])
            for source, found, start in parts
        ]
    return [(dataset, range(len(cast("Sized", dataset))))]


def _is_map_style(data: object) -> bool:
    """Whether something that is no torch `Dataset` still gives records by number."""
    others = (Tensor, np.ndarray, Sequence, Mapping)
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, others)
