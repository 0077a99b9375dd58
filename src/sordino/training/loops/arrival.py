"""The gradient that arrives at a module's output, compared with that of the declared criterion (floor 3)."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sordino.errors import UnprivateStep
from sordino.training.probing.determinism import generators_used, random_state_kept
from sordino.training.probing.losses import PublicDivisor
from sordino.training.structure import leaves_in, map_leaves

__all__ = ["Arrival", "Criterion", "tensors_within"]

Criterion = Callable[[Tensor, Tensor], Tensor]
"""A loss as a function of (output, target)."""

# Rounding between two ways to compute one loss; a coupling or another loss is far above it.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_HALF = 5e-2
# How deep objects (distributions) are searched for tensors.
_DEPTH = 3


class Arrival:
    """Compares what arrives at one output.

    Args:
        criterion: the declared loss.
        output: what the module returned.
        target: the batch's last part.
    """

    def __init__(self, criterion: Criterion, output: object, target: Tensor) -> None:
        tensors = [tensor for tensor in tensors_within(output) if tensor.requires_grad]
        used: set[str] = set()
        leaves: list[Tensor] = []

        def leaf_of(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            leaves.append(tensor.detach().clone().requires_grad_())
            return leaves[-1]

        with random_state_kept(), generators_used(used), torch.enable_grad(), PublicDivisor():
            loss = criterion(_replaced(leaf_of, output, _DEPTH), target)  # pyright: ignore[reportArgumentType]
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves and loss.requires_grad else ()
        self._expected = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, gradients, strict=False)
        ]
        self._arrived: list[Tensor | None] = [None] * len(tensors)
        # A criterion that draws random numbers can't be repeated.
        self._is_comparable = not used and bool(self._expected)
        for place, tensor in enumerate(tensors):
            tensor.register_hook(lambda gradient, place=place: self._add(place, gradient))

    def _add(self, place: int, gradient: Tensor) -> None:
        before = self._arrived[place]
        self._arrived[place] = gradient.detach().clone() if before is None else before + gradient

    def restart(self) -> None:
        """The backward pass runs once more, and brings the same."""
        self._arrived = [None] * len(self._arrived)

    def check(self) -> None:
        """Compare, once the backward passes are over.

        Raises:
            UnprivateStep: the gradients are not those of the criterion.
        """
        if not self._is_comparable or all(arrived is None for arrived in self._arrived):
            return
        difference = size = 0.0
        for expected, arrived in zip(self._expected, self._arrived, strict=True):
            # Where a record's own gradient is not finite it counts for nothing in any case.
            wanted = expected.double().nan_to_num(0.0, 0.0, 0.0)
            got = torch.zeros_like(wanted) if arrived is None else arrived.double().nan_to_num(0.0, 0.0, 0.0)
            difference += float((wanted - got).square().sum())
            size += float(wanted.square().sum())
        tolerance = max(_TOLERANCE.get(expected.dtype, _TOLERANCE_HALF) for expected in self._expected)
        if not difference**0.5 <= tolerance * size**0.5 + 1e-12:
            raise UnprivateStep(
                "loss must be the declared criterion of (output, target), got other gradients at the module's output. "
                "Call the very function that was passed as criterion=, add nothing to it, and put no hooks on its "
                "input."
            )


def tensors_within(output: object, depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors of what a module returned, also inside objects such as distributions."""
    for leaf in leaves_in(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not callable(leaf):
            for value in vars(leaf).values():
                yield from tensors_within(value, depth - 1)


def _replaced(function: Callable[[Tensor], Tensor], output: object, depth: int) -> object:
    def replaced(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if not depth or not hasattr(leaf, "__dict__") or callable(leaf):
            return leaf
        made = copy.copy(leaf)
        for name, value in vars(leaf).items():
            vars(made)[name] = _replaced(function, value, depth - 1)
        return made

    return map_leaves(replaced, output)
