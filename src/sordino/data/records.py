"""Records in memory: features, labels, and a data set's train and test split (floor 1)."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32, Int64

from sordino.data.schema import Schema
from sordino.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

__all__ = ["DataSet", "Records", "fixed_order"]


@dataclass(frozen=True, eq=False)
class Records:
    """Records that belong together: row i of `features`, `labels` and `texts` is one record.

    Args:
        features: float32, records first: tables (n, d), images (n, channels, height, width) in [0, 1].
        labels: int64, n of them, each the index of a label of the data set.
        texts: The raw texts of a text data set, when they were asked for; else None.
    """

    features: Float32[np.ndarray, "n ..."]
    labels: Int64[np.ndarray, " n"]
    texts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.features.dtype != np.float32 or self.labels.dtype != np.int64:
            raise InvalidArgument(
                f"records must be float32 features and int64 labels, "
                f"got {self.features.dtype} and {self.labels.dtype}. "
                "Convert them first."
            )
        if self.labels.ndim != 1 or self.features.ndim < 2 or len(self.features) != len(self.labels):
            raise InvalidArgument(
                "records must be features (n, …) with labels (n,), got dimensions "
                f"{self.features.ndim} and {self.labels.ndim} or different lengths. Put the records first."
            )
        if self.texts is not None and len(self.texts) != len(self.labels):
            raise InvalidArgument("texts must be one per record. Give as many texts as labels.")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def record_shape(self) -> tuple[int, ...]:
        """Shape of one record's features: public, unlike the number of records."""
        return self.features.shape[1:]

    def tensors(self) -> "tuple[torch.Tensor, torch.Tensor]":
        """Features and labels as CPU tensors that share this object's memory."""
        import torch  # imported here so that listing data sets stays fast

        return torch.from_numpy(self.features), torch.from_numpy(self.labels)


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set with its public facts.

    Args:
        name: The set's name, or the stem of the user's file.
        train: Records to train on.
        test: Records to measure on, or None: a user's file has no test split unless one is named, since
            accuracy on a random part of private data is itself a release to be paid for.
        labels: The label set; labels of records are indices in it.
        public: Whether the records are public. Only then may statistics without noise be shown.
        source: Where the records come from.
        licence: The licence of the records.
        schema: The declared schema of a table; None for images and texts.
    """

    name: str
    train: Records
    test: Records | None
    labels: tuple[str, ...]
    public: bool
    source: str
    licence: str
    schema: Schema | None

    def __post_init__(self) -> None:
        if self.test is self.train and not self.public:
            raise InvalidArgument(
                "test must be other, public records, got the private training records themselves. "
                "Give test=None, or public records."
            )


def fixed_order(count: int) -> Int64[np.ndarray, " count"]:
    """A fixed order that mixes a sorted public data set: the same in every run, and no source of randomness.

    Position i holds the record whose index has the i-th smallest SHA-256 digest.
    """
    digests = [hashlib.sha256(index.to_bytes(8, "little")).digest() for index in range(count)]
    return np.array(sorted(range(count), key=digests.__getitem__), dtype=np.int64)
