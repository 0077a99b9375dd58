"""Keeps every other optimizer away from private parameters.

One hook on all optimizers of the process looks every parameter up before a step. The hook is global because the
optimizer that would break the guarantee is exactly the one that was not passed. It is there only while some
parameter is private: during `fit`, and from ``make_private`` until ``detach``.
"""

from collections.abc import Callable, Iterable
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from sordino.errors import InvalidArgument, NonPrivateStep
from sordino.training.plan import Plan

# Parameter → weak reference to the one optimizer that may step it. Compared by identity, so tensors may be keys.
_OWNERS: dict[Tensor, ReferenceType[Optimizer]] = WeakTensorKeyDictionary()  # pyright: ignore[reportAssignmentType]


_registrations: list[RemovableHandle] = []


def register_private_parameters(parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> None:
    """From now on only `optimizer` may step any of `parameters`; a step of another one raises and changes nothing."""
    owner = ref(optimizer)
    for parameter in parameters:
        _OWNERS[parameter] = owner
    if not _registrations:
        _registrations.append(register_optimizer_step_pre_hook(_refuse_strangers))


def unregister_private_parameters(parameters: Iterable[nn.Parameter]) -> None:
    """Any optimizer may step `parameters` again."""
    for parameter in parameters:
        _OWNERS.pop(parameter, None)
    _remove_unused_hook()


def _remove_unused_hook() -> None:
    if not _OWNERS:
        while _registrations:
            _registrations.pop().remove()


def is_private_parameter(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether any of `parameters` belongs to a private optimizer."""
    return any(parameter in _OWNERS for parameter in parameters)


def _refuse_strangers(optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG001 (torch's signature)
    if not _OWNERS:  # the private models are gone
        _remove_unused_hook()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = _OWNERS.get(parameter)
            if owner is not None and owner() is not optimizer:
                raise NonPrivateStep(
                    f"{type(optimizer).__name__} must not hold parameters that another optimizer trains privately. "
                    "Step the optimizer that was given to make_private, or call engine.detach() first."
                )


# ----------------------------------------------------------------------------------------------------------------------
# Which modules and optimizers a session can take: looked at before anything is hooked.
# ----------------------------------------------------------------------------------------------------------------------


def check_module_and_optimizer(module: nn.Module, optimizer: Optimizer) -> None:
    """Refuse what can't be trained privately in the user's custom loop.

    Raises:
        InvalidArgument: the optimizer evaluates losses by itself or wraps another, or the module is lazy or private
            already.
    """
    if isinstance(optimizer, LBFGS):
        raise InvalidArgument(
            "optimizer must take one gradient a step, got LBFGS, which evaluates the loss several times. Use SGD "
            "or Adam."
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise InvalidArgument(
            f"optimizer must take its own steps, got {type(optimizer).__name__}, which wraps another one. Pass the one "
            "inside, and wrap it afterwards."
        )
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise InvalidArgument(
            "module must have all its parameters, got lazy ones. Call it once on synthetic records of the right shape."
        )
    if is_private_parameter(module.parameters()):
        raise InvalidArgument(
            "module must not be private already, got one that is. Give it to that engine's make_private again, whose ε "
            "adds up, or call detach() on that engine."
        )


def optimizer_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# ----------------------------------------------------------------------------------------------------------------------
# The optimizer and the schedule that `fit` steps: made or checked before anything is read.
# ----------------------------------------------------------------------------------------------------------------------


OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]


def optimizer_for(model: nn.Module, optimizer: Optimizer | OptimizerFactory | None, plan: Plan) -> Optimizer:
    """The user's optimizer, the one that his function makes, or plain SGD.

    Raises:
        InvalidArgument: the model is private already, or the optimizer can't be private, or holds other parameters.
    """
    parameters = list(model.parameters())
    if is_private_parameter(parameters):
        raise InvalidArgument("model must not be private already, got one that is. Call detach() on its engine first.")
    if optimizer is None:
        made: Optimizer = torch.optim.SGD(parameters, lr=1 / plan.step_plan(0).max_grad_norm)
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
