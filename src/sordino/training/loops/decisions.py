"""Whose code is asking for the truth of a private value (floor 3)."""

import inspect
import site
import sysconfig
from pathlib import Path

import torch
from torch.optim import Optimizer

from sordino.errors import UnprivateStep
from sordino.training.guard import is_claimed

__all__ = ["refuse_decision", "refuse_steering"]

# Code of libraries may check what it is given (a distribution its parameters); the loop's own may not branch.
_LIBRARIES = (
    *site.getsitepackages(),
    sysconfig.get_paths()["stdlib"],
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent.parent),
)
# Frames through which every call of a taped tensor or number goes.
_SCHEDULERS = str(Path(torch.__file__).parent / "optim" / "lr_scheduler.py")
_BETWEEN = (str(Path(__file__).parent), str(Path(torch.__file__).parent / "_tensor.py"))


def refuse_decision() -> None:
    """Refuse a branch on values of the batch in the user's own code.

    Raises:
        UnprivateStep: the caller is not a library's code.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_LIBRARIES):
        return
    raise UnprivateStep(
        "between the loader's batch and optimizer.step the loop must not decide by private values (if, while or assert "
        "on a tensor of the batch or a number read from it), got such a decision: it would let one record change what "
        "all others do. A record whose loss is not finite counts for nothing, so no check is needed; make other "
        "checks in the data set, or after the step."
    )


def refuse_steering() -> None:
    """Refuse a learning-rate scheduler that reads a number of the batches that its optimizer trains on privately.

    Raises:
        UnprivateStep: the caller is such a scheduler.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename != _SCHEDULERS:
        return
    optimizer = getattr(frame.f_locals.get("self"), "optimizer", None)
    held = [p for group in optimizer.param_groups for p in group["params"]] if isinstance(optimizer, Optimizer) else []
    if is_claimed(held):
        raise UnprivateStep(
            "scheduler must not depend on losses of private batches (ReduceLROnPlateau), got a number read from one: "
            "the learning rate would tell of records without noise. Fix the schedule in advance, or step it on public "
            "validation data."
        )
