"""What `fit` is given to call, and what it returns (floor 3)."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from sordino.definitions import Guarantee
from sordino.events import Event
from sordino.runs import LossPoint
from sordino.training.plan import Plan

__all__ = ["FitResult", "LossFunction", "Transcript"]


class LossFunction(Protocol):
    """``loss(model, *batch)``: one loss per record, shape (records,)."""

    def __call__(self, model: nn.Module, /, *batch: Tensor) -> Tensor:
        """The losses of the records of one batch, in order."""
        ...


class Transcript(Protocol):
    """Where a run is charged. An exception raised here stops the run before the step touches a record."""

    def append(self, *, step: int, event: Event, epsilon: float) -> None:
        """Charge step `step`, which does `event`; the run has then spent at most `epsilon`."""
        ...


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a run leaves behind.

    Args:
        model: the user's own module, trained in place; with averaging its weights are the averages.
        plan: what was run.
        guarantee: what the steps that were charged guarantee; under a budget that adapts, the budget.
        steps: steps that were finished, those before a resume among them.
        charged_steps: steps that were charged; at most one more than `steps`, not counting repeated ones.
        interrupted: whether Ctrl-C ended the run early; the model is then that of the last finished step.
        seconds: wall-clock time of the run.
        budget_spent: whether a budget that adapts refused a step and so ended the run.
        loss_curve: the noisy mean loss of every finished step, when the plan buys it; otherwise None.
        gradients: "captured" or "one-by-one", as they were taken; see `Performance`.
    """

    model: nn.Module
    plan: Plan
    guarantee: Guarantee
    steps: int
    charged_steps: int
    interrupted: bool
    seconds: float
    budget_spent: bool = False
    loss_curve: tuple[LossPoint, ...] | None = None
    gradients: str = "captured"
