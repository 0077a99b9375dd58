"""Whether a call did nothing but compute: no random numbers drawn, no buffer changed (floor 1, gradients).

The functional fallback runs a module again. A module that draws random numbers would give other numbers then, and
one that changes buffers stores what it saw of the records without noise.
"""

import torch
from torch import Tensor, nn

from sordino.errors import UnsupportedModule

__all__ = ["Fingerprint"]


class Fingerprint:
    """The state of the random generators and of a module's buffers before a call."""

    def __init__(self, module: nn.Module) -> None:
        self._generators = _generator_states(module)
        self._buffers = _buffer_versions(module)

    def rewind(self, module: nn.Module) -> None:
        """Put the random generators back to where they were, so that the call can be made again."""
        torch.set_rng_state(self._generators[0])
        if len(self._generators) > 1:
            torch.cuda.set_rng_state(self._generators[1], _device(module))

    def check_buffers(self, module: nn.Module, label: str) -> None:
        """Refuse when the call changed buffers.

        Raises:
            UnsupportedModule: named by `label`.
        """
        if _buffer_versions(module) != self._buffers:
            raise UnsupportedModule(
                f"{label} must leave its buffers alone in training, got a changed buffer. "
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
