"""Hooks of one module that its copies carry without taking part (floor 3)."""

from collections.abc import Callable

from torch import Tensor, nn

from sordino.errors import UnprivateStep
from sordino.gradients.hooks import untraced

__all__ = ["RootHook", "refuse_copy"]


class RootHook:
    """A hook of one module: a copy of the module carries one that only looks, and pickling drops it.

    Args:
        call: the hook, called as torch calls it but without the module.
        module: whose hook it is.
        on_copy: called in its place, with the module first, when a copy of `module` runs.
    """

    def __init__(
        self, call: Callable[..., object], module: nn.Module, on_copy: Callable[..., None] | None = None
    ) -> None:
        self._call, self._module, self._on_copy = call, module, on_copy

    def __call__(self, module: nn.Module, *arguments: object) -> object:
        """Called by torch."""
        if module is self._module:
            return untraced(self._call, *arguments)
        return None if self._on_copy is None else self._on_copy(module, *arguments)

    def __deepcopy__(self, memo: object) -> "RootHook":
        return self

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return _inert, ()


def refuse_copy(_gradient: Tensor) -> None:
    """A gradient hook for the outputs of a copy that ran on private records."""
    raise UnprivateStep(
        "a copy of a private module must not be trained on private batches, got a backward pass through one: its "
        "gradients are not clipped and have no noise. Train the module itself, or call the copy under torch.no_grad()."
    )


def _inert() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: object) -> None:
    return None
