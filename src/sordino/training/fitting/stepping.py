"""The optimizer and the schedule that `fit` steps (floor 3): made or checked before anything is read."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sordino.errors import InvalidArgument
from sordino.training.guard import is_claimed
from sordino.training.plan import Plan

__all__ = ["OptimizerFactory", "optimizer_for", "schedule_for"]

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]


def optimizer_for(model: nn.Module, optimizer: Optimizer | OptimizerFactory | None, plan: Plan) -> Optimizer:
    """The user's optimizer, the one that his function makes, or plain SGD.

    Raises:
        InvalidArgument: the model is private already, or the optimizer can't be private, or holds other parameters.
    """
    parameters = list(model.parameters())
    if is_claimed(parameters):
        raise InvalidArgument("model must not be private already, got one that is. Call detach() on its engine first.")
    if optimizer is None:
        made: Optimizer = torch.optim.SGD(parameters, lr=1 / plan.at(0).max_grad_norm)
    else:
        made = optimizer if isinstance(optimizer, Optimizer) else optimizer(parameters)
    if isinstance(made, LBFGS):
        raise InvalidArgument("optimizer must take one gradient a step, got LBFGS. Use SGD or Adam.")
    own = set(parameters)
    if any(parameter not in own for group in made.param_groups for parameter in group["params"]):
        raise InvalidArgument("optimizer must hold only the model's parameters, got another. Use model.parameters().")
    return made


def schedule_for(
    optimizer: Optimizer, scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None
) -> LRScheduler | None:
    """The user's schedule, or the one that his function makes.

    Raises:
        InvalidArgument: it depends on a loss, or is another optimizer's.
    """
    made = scheduler if scheduler is None or isinstance(scheduler, LRScheduler) else scheduler(optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise InvalidArgument(
            "scheduler must not depend on a loss, got ReduceLROnPlateau. Fix the schedule in advance."
        )
    if made is not None and made.optimizer is not optimizer:
        raise InvalidArgument("scheduler must be the optimizer's, got another's. Build it from the same optimizer.")
    return made
