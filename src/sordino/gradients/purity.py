"""Whether a call did nothing but compute: no random numbers drawn, no buffer changed (floor 1, gradients).

The functional fallback runs a module again. A module that draws random numbers would give other numbers then, and
one that changes buffers stores what it saw of the records without noise.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sordino.errors import UnsupportedModule

__all__ = [
    "Fingerprint",
    "Place",
    "attribute_values",
    "held_attributes",
    "put_attributes",
    "restore_attributes",
]

# What nn.Module itself keeps in its dictionary.
_OWN = frozenset(vars(nn.Module()))
# A leaf of an attribute of a module: the module, the attribute's name, the leaf's number.
Place = tuple[nn.Module, str, int]
_Held = dict[tuple[nn.Module, str], object]


def held_attributes(module: nn.Module) -> _Held:
    """The attributes of `module` and of those inside it that hold tensors, containers copied."""
    return {
        (inner, key): tree_map(lambda leaf: leaf, value)
        for inner in module.modules()
        for key, value in vars(inner).items()
        if key not in _OWN and any(isinstance(leaf, Tensor) for leaf in _leaves(value))
    }


def restore_attributes(held: _Held) -> None:
    """Set attributes to what `held_attributes` found."""
    for (module, key), value in held.items():
        vars(module)[key] = tree_map(lambda leaf: leaf, value)


def attribute_values(places: Iterable[Place]) -> list[object]:
    """What the attributes hold now."""
    return [_leaves(vars(module)[key])[number] for module, key, number in places]


def put_attributes(places: Sequence[Place], values: Sequence[object]) -> None:
    """Replace what the attributes hold."""
    for (module, key, number), value in zip(places, values, strict=True):
        leaves, spec = tree_flatten(vars(module)[key])
        leaves[number] = value
        vars(module)[key] = tree_unflatten(leaves, spec)


def _leaves(value: object) -> list[object]:
    if isinstance(value, Tensor):
        return [value]
    return tree_flatten(value)[0] if isinstance(value, list | tuple | dict) else []


class Fingerprint:
    """The state of the random generators and of a module's buffers before a call."""

    def __init__(self, module: nn.Module) -> None:
        self._generators = _generator_states(module)
        self._buffers = _buffer_versions(module)
        self._held = held_attributes(module)

    def rewind(self, module: nn.Module) -> None:
        """Put random generators and attributes back to what they were, so that the call can be made again."""
        for place in held_attributes(module):
            if place not in self._held:
                del vars(place[0])[place[1]]
        restore_attributes(self._held)
        torch.set_rng_state(self._generators[0])
        if len(self._generators) > 1:
            torch.cuda.set_rng_state(self._generators[1], _device(module))

    def kept_tensors(self, module: nn.Module, records: int) -> list[Place]:
        """Where the call kept floating tensors, each with the records first, in attributes."""
        found: list[Place] = []
        for (inner, key), value in held_attributes(module).items():
            before = {id(leaf) for leaf in _leaves(self._held.get((inner, key)))}
            found += [
                (inner, key, number)
                for number, leaf in enumerate(_leaves(value))
                if isinstance(leaf, Tensor)
                and id(leaf) not in before
                and leaf.is_floating_point()
                and leaf.dim() > 0
                and leaf.shape[0] == records
            ]
        return found

    def check_buffers(self, module: nn.Module, label: str) -> None:
        """Refuse when the call changed buffers.

        Raises:
            UnsupportedModule: named by `label`.
        """
        changed = {name for name, *_ in {*_buffer_versions(module)} ^ {*self._buffers}}
        if changed:
            raise UnsupportedModule(
                f"{label} must leave its buffers alone in training, got a change of {', '.join(sorted(changed))}. "
                "Statistics of records can't be stored without noise: call .eval() on it or replace it."
            )

    def check(self, module: nn.Module, label: str) -> None:
        """Refuse when the call drew random numbers or changed buffers.

        Raises:
            UnsupportedModule: named by `label`.
        """
        self.check_buffers(module, label)
        states = _generator_states(module)
        if any(not torch.equal(old, new) for old, new in zip(self._generators, states, strict=True)):
            raise UnsupportedModule(
                f"{label} must be deterministic to be run again per record, got random numbers in its forward pass. "
                "Set its dropout to 0, or apply nn.Dropout outside it."
            )


def _generator_states(module: nn.Module) -> list[Tensor]:
    states = [torch.get_rng_state()]
    device = _device(module)
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _device(module: nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _buffer_versions(module: nn.Module) -> list[tuple[str, int, int]]:
    return [(name, id(buffer), buffer._version) for name, buffer in module.named_buffers()]
