"""Filters between the private gradient and any torch optimizer (floor 1, optimizers)."""

from abc import ABC, abstractmethod
from typing import ClassVar, Self, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sordino.errors import InvalidArgument

__all__ = ["Attached", "GradientFilter", "entries_of"]


class GradientFilter(ABC):
    """What is done to each gradient before the optimizer sees it.

    Guarantee: post-processing. A filter reads the gradients in ``.grad`` and what it remembers of earlier ones; when
    those are private, nothing further is spent.
    """

    name: ClassVar[str]

    @abstractmethod
    def filtered(self, gradient: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """The gradient to step with; `memory` is the parameter's own, empty before the first step, and is updated."""

    def attach(self, optimizer: Optimizer) -> "Attached":
        """Filter every gradient that `optimizer` steps with, from now on.

        The memory lies in the optimizer's state, so checkpoints hold it. In a loop with `PrivacyEngine`, attach after
        ``make_private``: the filter must see the gradient that already has its noise.

        Raises:
            InvalidArgument: a filter of this kind is attached already.
        """
        return Attached(self, optimizer)


class Attached:
    """A filter on one optimizer.

    Args:
        rule: what is done.
        optimizer: stays as it is; two hooks are registered.
    """

    def __init__(self, rule: GradientFilter, optimizer: Optimizer) -> None:
        hooks = _hooks(optimizer)
        if any(_attached(hook) is not None and type(_rule_of(hook)) is type(rule) for hook in hooks):
            raise InvalidArgument(
                f"optimizer must have one {type(rule).__name__} at most, got one with it. Call remove() on the first."
            )
        self.rule = rule
        self._pending: dict[Tensor, dict[str, Tensor]] = {}
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Leave later gradients alone."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        self._check_order(optimizer)
        self._pending = {}
        for parameter in _stepped(optimizer):
            memory = dict(entries_of(optimizer, parameter, self.rule.name))
            assert parameter.grad is not None
            parameter.grad = self.rule.filtered(parameter.grad, memory).to(parameter.dtype)
            self._pending[parameter] = memory

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        # Only now: Adam and others take a state with any entry for one that they have begun.
        for parameter, memory in self._pending.items():
            optimizer.state[parameter][self.rule.name] = memory
        self._pending = {}

    def _check_order(self, optimizer: Optimizer) -> None:
        """What runs after a filter must not write the gradient: the engine's hook comes first."""
        mine = False
        for hook in _hooks(optimizer):
            mine = mine or _attached(hook) is self
            if mine and _attached(hook) is None and not getattr(hook, "only_looks", False):
                raise InvalidArgument(
                    f"{type(self.rule).__name__} must be attached after make_private and other hooks of the optimizer, "
                    "got one that was attached before. Call attach later."
                )


def entries_of(optimizer: Optimizer, parameter: Tensor, name: str) -> dict[str, Tensor]:
    """What the filter `name` remembers of a parameter."""
    return cast("dict[str, Tensor]", optimizer.state[parameter].get(name, {}) if parameter in optimizer.state else {})


def _hooks(optimizer: Optimizer) -> list[object]:
    return list(cast("dict[int, object]", vars(optimizer)["_optimizer_step_pre_hooks"]).values())


def _attached(hook: object) -> Attached | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, Attached) else None


def _rule_of(hook: object) -> GradientFilter | None:
    owner = _attached(hook)
    return None if owner is None else owner.rule


def _stepped(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
