"""The walk over an autograd graph that finds parameters used in the ordinary way (floor 1, gradients)."""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["leaves_of", "ordinary_uses"]

# Graphs of parameters alone are small.
_MOST_NODES = 10_000
# The nodes that captured layers leave in the graph.
_CAPTURES = frozenset(("_EdgeBackward", "_DirectionBackward"))


def ordinary_uses(loss: Tensor, names: Mapping[Tensor, str]) -> list[str]:
    """Names of the parameters in `names` that would receive an ordinary gradient from `loss`, sorted.

    Captured layers run with their parameters switched off, so every accumulation node of a parameter that is left in
    the graph is a use that no rule captured: `F.linear(x, other.weight)`, weight decay in the loss, a
    parametrization outside its layer.
    """
    found: set[str] = set()
    seen: set[torch.autograd.graph.Node] = set()
    if loss.requires_grad and loss.is_leaf:
        return sorted({names[loss]} if loss in names else ())
    pending = [loss.grad_fn] if loss.grad_fn is not None else []
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and variable in names:
            found.add(names[variable])
        pending.extend(parent for parent, _ in node.next_functions if parent is not None)
    return sorted(found)


def leaves_of(tensor: Tensor) -> list[Tensor] | None:
    """The leaves that `tensor` was computed from, or None where a captured layer, or too much, lies in between."""
    found: dict[int, Tensor] = {}
    seen: set[torch.autograd.graph.Node] = set()
    pending = [tensor.grad_fn] if tensor.grad_fn is not None else []
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > _MOST_NODES or type(node).__name__ in _CAPTURES:
            return None
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        pending.extend(parent for parent, _ in node.next_functions if parent is not None)
    return list(found.values())
