"""Keeps every other optimizer away from private parameters (floor 3).

One hook on all optimizers of the process looks every parameter up before a step. The hook is global because the
optimizer that would break the guarantee is exactly the one that nobody handed over.
"""

from collections.abc import Iterable
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from sordino.errors import UnprivateStep

__all__ = ["claim", "is_claimed", "release"]

# Parameter → weak reference to the one optimizer that may step it. Compared by identity, so tensors may be keys.
_OWNERS: dict[Tensor, ReferenceType[Optimizer]] = WeakTensorKeyDictionary()  # pyright: ignore[reportAssignmentType]


_registrations: list[object] = []


def claim(parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> None:
    """From now on only `optimizer` may step any of `parameters`; a step of another one raises and changes nothing."""
    owner = ref(optimizer)
    for parameter in parameters:
        _OWNERS[parameter] = owner
    if not _registrations:
        _registrations.append(register_optimizer_step_pre_hook(_refuse_strangers))


def release(parameters: Iterable[nn.Parameter]) -> None:
    """Any optimizer may step `parameters` again."""
    for parameter in parameters:
        _OWNERS.pop(parameter, None)


def is_claimed(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether any of `parameters` belongs to a private optimizer."""
    return any(parameter in _OWNERS for parameter in parameters)


def _refuse_strangers(optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG001 (torch's signature)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = _OWNERS.get(parameter)
            if owner is not None and owner() is not optimizer:
                raise UnprivateStep(
                    f"{type(optimizer).__name__} must not hold parameters that another optimizer trains privately. "
                    "Step the optimizer that was given to make_private, or call engine.detach() first."
                )
