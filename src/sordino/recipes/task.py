"""What a pipeline knows before it sees a record, and what it makes of that (floor 6)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sordino import checks
from sordino.data import Records
from sordino.data.schema import Schema
from sordino.definitions import NeighboringRelation
from sordino.events import Event, Nothing, compose
from sordino.recipes.payment import Payment, Stage

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

__all__ = ["Predictor", "Prepared", "Task"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a pipeline knows before it sees a record: public facts and the budget.

    Args:
        data: name of the data set.
        shape: shape of one record's features.
        classes: number of classes.
        population: number of training records, treated as public.
        schema: the declared schema of a table, or None.
        epsilon: the target for all stages together; None with a setting that fixes the noise.
        delta: δ of all stages together.
        setting: one of the pipeline's settings, or None.
        device: where to train.
    """

    data: str
    shape: tuple[int, ...]
    classes: int
    population: int
    schema: Schema | None
    epsilon: float | None
    delta: float
    setting: str | None = None
    device: str = "cpu"

    @property
    def target(self) -> float:
        """The target ε, for pipelines whose settings don't fix the noise."""
        return checks.positive(epsilon=self.epsilon, hint="Give a target.")


class Predictor(Protocol):
    """What a pipeline's `fit` returns: a model of any kind."""

    def logits(self, records: Records) -> "npt.NDArray[np.floating]":
        """Scores of the classes [n, K], whose softmax are probabilities; each record by itself."""
        ...

    def tensors(self) -> "Mapping[str, Tensor]":
        """All that was learned, by name: it is written to the run folder."""
        ...


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A pipeline that is ready for records.

    Args:
        stages: what will be charged, in order.
        fit: (training records, payment) ↦ model. It pays before it reads.
        training: public facts for the report: model, optimizer, learning rate and the like.
        relation: the neighbouring relation of all events.
    """

    stages: tuple[Stage, ...]
    fit: Callable[[Records, Payment], Predictor]
    training: Mapping[str, object]
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE

    @property
    def charges(self) -> tuple[Event, ...]:
        """All charges in order."""
        return tuple(event for stage in self.stages for event in stage.charges)

    @property
    def event(self) -> Event:
        """Their composition."""
        return compose([event for event in self.charges if not isinstance(event, Nothing)])
