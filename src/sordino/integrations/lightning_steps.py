"""A LightningModule's training step as one module, run on the chunks of a logical batch (floor 4, integrations)."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino.errors import LossShapeError, SordinoError
from sordino.integrations.lightning_packages import LightningModule, Trainer
from sordino.integrations.logical_batches import LogicalBatch

__all__ = ["TrainingStep", "asks_for_last_checkpoint", "internal", "run_chunks", "run_closure"]


def internal(owner: object, name: str) -> Any:
    """What Lightning keeps to itself, and a trainer that is to be private can't do without.

    Raises:
        SordinoError: this version of Lightning has no such thing.
    """
    found = getattr(owner, name, internal)
    if found is internal:
        raise SordinoError(
            f"lightning must be a version whose {type(owner).__name__} has {name}, got one without. Install 2.5 to 2.6."
        )
    return found


def asks_for_last_checkpoint(trainer: Trainer) -> bool:
    """Whether ``fit`` was called with ``ckpt_path="last"``: without one Lightning begins anew."""
    if trainer.ckpt_path is not None:
        return False
    frame, fit = inspect.currentframe(), type(trainer).fit.__code__
    while frame is not None:
        if frame.f_code is fit:
            return frame.f_locals.get("ckpt_path") == "last"
        frame = frame.f_back
    return False


class TrainingStep(nn.Module):
    """The whole training step as a module, so that everything in it is tried on made-up records.

    Args:
        module: the user's.
        step: its own ``training_step``.
    """

    def __init__(self, module: LightningModule, step: Callable[..., object]) -> None:
        super().__init__()
        self.module = module
        self._step = step
        # Not numbers of its own: a module's numbers are part of what a proof is good for, and these count batches.
        self.rest: tuple[object, ...] = ()

    def forward(self, batch: object) -> Tensor:
        """The loss that ``training_step`` returns, a mean over the records or one a record."""
        output = self._step(batch, *self.rest)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise LossShapeError(
                "training_step must return a loss for every batch, a mean or one a record, got none. A record whose "
                "loss is not finite counts for nothing; return it."
            )
        return loss if loss.dim() == 0 else loss.mean()


def run_chunks(
    trainer: Trainer,
    root: TrainingStep,
    optimizer: Optimizer,
    batch: LogicalBatch,
    rest: tuple[object, ...],
    *,
    shows: bool,
) -> float | None:
    """Forward and backward of all chunks; the step that follows completes the logical batch.

    Args:
        trainer: places chunks on its device and gives the precision.
        root: the private module.
        optimizer: its own.
        batch: the logical batch.
        rest: further arguments of the training step.
        shows: whether the loss is wanted.

    Returns:
        The mean loss, which is private, or None.
    """
    strategy, module, total, chunks = trainer.strategy, cast("LightningModule", root.module), 0.0, 0
    root.rest = rest
    for chunk in batch:
        converted = trainer.precision_plugin.convert_input(chunk)
        converted = internal(module, "_on_before_batch_transfer")(converted, dataloader_idx=0)
        placed = strategy.batch_to_device(converted, dataloader_idx=0)
        with trainer.precision_plugin.train_step_context():
            loss = root(placed)
        module.backward(loss)
        chunks += 1
        if not batch.is_complete:
            # Adds this chunk to the sum; parameters change at the last one only, which Lightning's own step does.
            optimizer.step()
        if shows:
            total += float(loss.detach())
    return total / chunks if shows else None


def run_closure(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before the engine's hook: run what Lightning wants to run inside the step."""
    del optimizer
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is not None:
        with torch.enable_grad():
            closure()
    return args[:1], {name: value for name, value in kwargs.items() if name != "closure"}
