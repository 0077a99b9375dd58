"""Stages and models that most pipelines are made of (floor 6)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sordino.data import Records
from sordino.estimators.base import PrivateEstimator
from sordino.estimators.rehearsal import rehearse
from sordino.recipes.payment import Payment, Stage
from sordino.training.bills.spending import charged_at
from sordino.training.plan import Plan

__all__ = ["FittedEstimator", "FittedModule", "estimator_stage", "pay_for", "training_stage"]

_CHUNK = 4096


def training_stage(plan: Plan, *, name: str = "training", settings: Mapping[str, object] | None = None) -> Stage:
    """The stage of ``fit(…, plan, transcript=payment)``: one charge a step.

    Example:
        >>> plan = Plan(noise_multiplier=4.0, max_grad_norm=1.0, sample_rate=0.1, steps=3, expected_batch_size=60.0,
        ...             delta=1e-5)
        >>> len(training_stage(plan).charges)
        3
    """
    charges = tuple(charged_at(plan, step) for step in range(plan.steps))
    return Stage(name=name, charges=charges, settings={**(settings or {}), "plan": json.loads(plan.to_json())})


def estimator_stage(estimator: PrivateEstimator, columns: int, *, name: str) -> Stage:
    """The stage of an estimator's fit to records of so many columns."""
    events, _ = rehearse(estimator, columns)
    settings = {
        key: value if isinstance(value, int | float | str | bool | None) else repr(value)
        for key, value in estimator.get_params(deep=False).items()
        if key not in {"random_state", "reproducible", "ledger"}
    }
    return Stage(name=name, charges=events, settings={"estimator": type(estimator).__name__, **settings})


def pay_for(stage: Stage, payment: Payment) -> None:
    """Charge all of a stage at once, before it reads a record."""
    for event in stage.charges:
        payment.charge(event)


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedModule:
    """A torch module with what is done to records before it.

    Args:
        module: features ↦ logits (B, K).
        inputs: records ↦ the module's inputs, each record by itself; None passes features on.
        beside: further tensors that were learned, for the run folder.
    """

    module: nn.Module
    inputs: Callable[[Records], Tensor] | None = None
    beside: Mapping[str, Tensor] | None = None

    @torch.no_grad()
    def logits(self, records: Records) -> npt.NDArray[np.floating]:
        """Scores [n, K], in evaluation mode."""
        features = records.tensors()[0] if self.inputs is None else self.inputs(records)
        device = next(self.module.parameters()).device
        modes = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        try:
            parts = [self.module(chunk.to(device)).double().cpu() for chunk in features.split(_CHUNK)]
        finally:
            for part, mode in modes:
                part.training = mode
        return torch.cat(parts).numpy()

    def tensors(self) -> Mapping[str, Tensor]:
        """The module's state and what was learned beside it."""
        return {**(self.beside or {}), **self.module.state_dict()}


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedEstimator:
    """A classifier of `sordino.estimators` with what is done to records before it.

    Args:
        estimator: fitted, with `predict_proba`.
        rows: records ↦ rows [n, d], each record by itself.
    """

    estimator: PrivateEstimator
    rows: Callable[[Records], npt.NDArray[np.floating]]

    def logits(self, records: Records) -> npt.NDArray[np.floating]:
        """Logarithms of the probabilities [n, K]."""
        found = self.estimator.predict_proba(self.rows(records))  # pyright: ignore[reportAttributeAccessIssue]
        return np.log(np.maximum(found, 1e-300))

    def tensors(self) -> Mapping[str, Tensor]:
        """Every array of numbers that was learned, by name."""
        found = {name: value for name, value in vars(self.estimator).items() if name.endswith("_")}
        arrays = {name: np.asarray(value) for name, value in found.items() if isinstance(value, np.ndarray)}
        return {name: torch.from_numpy(value.copy()) for name, value in arrays.items() if value.dtype.kind in "fib"}
