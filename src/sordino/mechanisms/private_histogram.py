"""A private histogram over declared bins (floor 1)."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.events import Event
from sordino.mechanisms.budgets import Budget
from sordino.mechanisms.integer_noise import IntegerNoise
from sordino.mechanisms.releases import recordable
from sordino.mechanisms.values import category_codes, numeric
from sordino.randomness import Randomness

__all__ = ["PrivateHistogram"]

IntegerArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PrivateHistogram:
    """Counts of records in each declared bin plus exact whole-number noise; counts may be negative.

    Bins are intervals between `edges` (closed below, open above, the last closed) or `categories`. Every bin is
    released, the empty ones too: which bins hold records is private.

    Guarantee: one release spends `budget`. A record lies in at most one bin, so it changes one count by 1, and two
    counts under replace-one.

    Args:
        budget: pure (geometric noise) or Gaussian, for all bins together.
        edges: rising numbers, one more than there are bins. Public, never the data's own extremes.
        categories: or the bins by name. Public, never read from the data.
        outside: what happens to a number beyond the edges: ``drop`` or ``clip`` to the nearest bin. A value that is
            no category, or is not a number, is always dropped.
        relation: the neighbouring relation.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.mechanisms import budget
        >>> mechanism = PrivateHistogram(budget=budget(epsilon=100.0), categories=("a", "b", "c"))
        >>> mechanism.release(["a", "c", "c", "?"]).tolist()
        [1, 0, 2]
    """

    budget: Budget
    edges: tuple[float, ...] | None = None
    categories: tuple[Hashable, ...] | None = None
    outside: str = "drop"
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.one_of(("drop", "clip"), outside=self.outside)
        if (self.edges is None) == (self.categories is None):
            raise MissingDeclaration("edges must be given, or categories, and not both. Declare the bins.")
        if self.edges is not None and not (
            len(self.edges) > 1 and np.isfinite(self.edges).all() and (np.diff(self.edges) > 0).all()
        ):
            raise InvalidArgument(f"edges must be at least two rising numbers, got {self.edges!r}. Declare them so.")
        if self.categories is not None and len(set(self.categories)) != max(len(self.categories), 1):
            raise InvalidArgument(
                f"categories must be different and at least one, got {self.categories!r}. Declare each once."
            )

    @property
    def bins(self) -> int:
        """Number of bins."""
        return len(self.categories) if self.categories is not None else len(self.edges or ()) - 1

    @cached_property
    def noise(self) -> IntegerNoise:
        """What is added."""
        moved = 2 if self.relation is NeighboringRelation.REPLACE_ONE and self.bins > 1 else 1
        return IntegerNoise(sensitivities=(1,) * self.bins, moved=moved, budget=self.budget)

    def event(self) -> Event:
        """The event of one release."""
        return self.noise.event()

    def exact(self, values: Iterable[object]) -> IntegerArray:
        """The counts before noise [bins]. Not private."""
        places = self._places(values) if self.categories is None else category_codes(values, self.categories)
        return np.bincount(places[places >= 0], minlength=self.bins).astype(np.int64)

    @recordable
    def release(self, values: Iterable[object]) -> IntegerArray:
        """The noisy counts [bins], int64, in the order of the bins."""
        return self.exact(values) + self.noise.draw(self.randomness.fresh("histogram"))

    def _places(self, values: Iterable[object]) -> IntegerArray:
        edges = np.array(self.edges)
        listed = values if isinstance(values, np.ndarray) else list(values)
        numbers = numeric(listed, "values")
        if numbers.ndim != 1:
            raise InvalidArgument(f"values must be a vector, got {numbers.ndim} dimensions. Flatten them.")
        places = np.searchsorted(edges, numbers, side="right") - 1
        places[numbers == edges[-1]] = self.bins - 1
        beyond = ~((numbers >= edges[0]) & (numbers <= edges[-1]))
        places = np.clip(places, 0, self.bins - 1)
        places[beyond if self.outside == "drop" else np.isnan(numbers)] = -1
        return places.astype(np.int64)
