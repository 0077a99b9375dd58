"""What a module holds, compared around a forward pass and put back (floor 3).

A forward pass that writes into the module stores what it saw of the records, and nobody clips or adds noise to that.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sordino.errors import CoupledRecords
from sordino.gradients.passes import fingerprint
from sordino.training.structure import tensors_in

__all__ = ["ModuleState", "attributes_kept", "exports_by_hooks", "fingerprint_of", "tensor_attributes"]

_REMEDY = (
    "what a module stores of records is released without noise. Turn the statistics off, call .eval() on that layer, "
    "or initialise it from public data before making the model private"
)
# Bytes of frozen weights and buffers that are kept however little is trained.
_ROOM = 1 << 24
_OF_TORCH = frozenset(vars(nn.Module()))


@dataclass(frozen=True, kw_only=True)
class _Held:
    """A parameter or buffer: the object, its memory, how often torch changed it, its value or a fingerprint if kept."""

    tensor: Tensor
    memory: Tensor
    version: int
    value: Tensor | None
    fingerprint: Tensor | None

    def is_unchanged(self, now: Tensor | None) -> bool:
        if now is None or now is not self.tensor or now.data_ptr() != self.memory.data_ptr():
            return False
        # Rewriting .data goes past the version, so that only the values can tell.
        if self.value is not None:
            return _same_bits(self.value, now.detach())
        if self.fingerprint is not None and not torch.equal(self.fingerprint, fingerprint(now)):
            return False
        return now._version == self.version


class ModuleState:
    """All parameters and buffers of a module at one moment.

    Args:
        module: whose they are.
        values: also look at the values: it finds what is written past torch's version count, and lets `refuse_changes`
            put things back. Costs the memory of the trained parameters once; of large frozen weights beside them only
            a fingerprint is kept.
    """

    def __init__(self, module: nn.Module, *, values: bool = True) -> None:
        self._module = module
        trained = sum(tensor.nbytes for _, tensor in _tensors(module) if tensor.requires_grad)
        # So much of what is not trained is kept beside it.
        self._room = max(trained, _ROOM)
        self._held = {name: self._hold(tensor, values=values) for name, tensor in _tensors(module)}

    def _hold(self, tensor: Tensor, *, values: bool) -> _Held:
        value = bits = None
        if values:
            is_kept = tensor.requires_grad or tensor.nbytes <= self._room
            bits = None if is_kept else fingerprint_of(tensor)
            if bits is None:
                value = tensor.detach().clone()
                self._room -= 0 if tensor.requires_grad else tensor.nbytes
        return _Held(tensor=tensor, memory=tensor.detach(), version=tensor._version, value=value, fingerprint=bits)

    def refuse_changes(self) -> None:
        """Put back what changed since, and refuse it.

        Raises:
            CoupledRecords: names the parameters and buffers that changed.
        """
        names = self.restore()
        if names:
            raise CoupledRecords(
                f"parameters and buffers must not change in a training forward pass, got changes of "
                f"{', '.join(sorted(names))}: {_REMEDY}. Large frozen weights among them are not put back: load them "
                "anew."
            )

    def restore(self) -> list[str]:
        """Put back what changed, and name it."""
        now = dict(_tensors(self._module))
        changed = [name for name, held in self._held.items() if not held.is_unchanged(now.get(name))]
        changed += [name for name in now if name not in self._held]
        for name in changed:
            owner, _, attribute = name.rpartition(".")
            module = self._module.get_submodule(owner)
            if name not in self._held:
                delattr(module, attribute)
                continue
            held = self._held[name]
            if held.value is not None:
                held.memory.copy_(held.value)
                held.tensor.data = held.memory
            if now.get(name) is not held.tensor:
                setattr(module, attribute, held.tensor)
        return changed


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def fingerprint_of(tensor: Tensor) -> Tensor | None:
    """A few numbers that tell a tensor's bits; None for a kind of tensor whose bits can't be read in place."""
    try:
        return fingerprint(tensor)
    except (RuntimeError, KeyError):
        return None


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Python attributes of all submodules are after the block what they were before it.

    Tensors, lists, dicts and sets get back their contents too; what lies deeper is the user's own.
    """
    kept = [
        (vars(part), name, value, _contents(value))
        for part in module.modules()
        for name, value in vars(part).items()
        if name not in _OF_TORCH
    ]
    names = {id(vars(part)): set(vars(part)) for part in module.modules()}
    try:
        yield
    finally:
        for part in module.modules():
            attributes = vars(part)
            for name in [name for name in attributes if name not in names.get(id(attributes), attributes)]:
                del attributes[name]
        for attributes, name, value, contents in kept:
            _put_back(value, contents)
            attributes[name] = value


def tensor_attributes(module: nn.Module) -> dict[tuple[int, int], Tensor]:
    """Tensors in plain attributes of all submodules, and in lists and dicts there, by whose they are and which."""
    found: dict[tuple[int, int], Tensor] = {}
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in _OF_TORCH:
                found.update({(id(part), id(tensor)): tensor for tensor in tensors_in(value)})
    return found


def exports_by_hooks(module: nn.Module) -> bool:
    """Whether somebody else's forward hooks see what flows through the module."""
    hooks = (hook for part in module.modules() for hook in vars(part)["_forward_hooks"].values())
    return any(not type(hook).__module__.startswith("sordino.") for hook in hooks)


def _contents(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if type(value) in {list, dict, set} else None


def _put_back(value: object, contents: object) -> None:
    if isinstance(value, Tensor) and isinstance(contents, Tensor):
        if not _same_bits(value.detach(), contents):
            value.data = contents
    elif isinstance(value, list) and isinstance(contents, list):
        value[:] = contents
    elif isinstance(value, dict | set) and isinstance(contents, dict | set):
        value.clear()
        value.update(contents)
