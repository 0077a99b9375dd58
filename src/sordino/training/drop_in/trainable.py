"""Which modules and optimizers a session can take (floor 3): looked at before anything is hooked."""

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from sordino.errors import InvalidArgument
from sordino.training.guard import is_claimed

__all__ = ["check_trainable", "held_by"]


def check_trainable(module: nn.Module, optimizer: Optimizer) -> None:
    """Refuse what can't be trained privately in the user's own loop.

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
            "module must have all its parameters, got lazy ones. Call it once on made-up records of the right shape."
        )
    if is_claimed(module.parameters()):
        raise InvalidArgument(
            "module must not be private already, got one that is. Give it to that engine's make_private again, whose ε "
            "adds up, or call detach() on that engine."
        )


def held_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
