"""Where a run's records come from (floor 3): tensors in memory, or any map-style data set with its collate function."""

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from sordino.errors import InvalidArgument
from sordino.training.probing.padding import Padding
from sordino.training.records.collation import Collation
from sordino.training.records.layout import Layout
from sordino.training.structure import map_tensors

__all__ = ["DatasetSource", "Source", "TensorSource", "fetched", "refuse_repeats", "source_of"]


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

    def batch(self, indices: np.ndarray, *, device: torch.device) -> tuple[object, ...]:
        """The records at `indices` (different ones, at least one), in their order, on `device`."""
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

    def batch(self, indices: np.ndarray, *, device: torch.device) -> tuple[object, ...]:
        """Rows of every tensor; a gapless stretch, such as a full batch, is a view and not a copy."""
        first, last = int(indices[0]), int(indices[-1])
        if last - first + 1 == len(indices) and bool((np.diff(indices) == 1).all()):
            return tuple(tensor[first : last + 1].to(device) for tensor in self._tensors)
        rows = torch.from_numpy(indices)
        return tuple(tensor.index_select(0, rows.to(tensor.device)).to(device) for tensor in self._tensors)


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

    def batch(self, indices: np.ndarray, *, device: torch.device) -> tuple[object, ...]:
        """The collated records.

        Raises:
            CoupledRecords: a row of a batch depends on another record, or the batch's shape does.
        """
        items = fetched(self._dataset, indices.tolist())
        if self._layout is None:
            collation = Collation(self._collate, items[0])
            self._layout, self.padding = collation.layout, collation.padding if self._may_pad else None
        batch = self._collate(items)
        self._layout.check(batch, len(items), self.padding)
        batch = map_tensors(lambda tensor: tensor.to(device), batch)
        return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


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
    """The items at `places`, by one call when the data set offers it."""
    fetch_many = cast("Callable[[list[int]], list[object]] | None", getattr(dataset, "__getitems__", None))
    return list(fetch_many(places)) if fetch_many else [dataset[place] for place in places]


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
