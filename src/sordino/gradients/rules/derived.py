"""Uses of tensors that were computed from parameters alone (floor 1, gradients).

A class token that was expanded, rows of a position table, ``1 + weight``: with q = f(parameters), a rule gives the
per-record gradients of q, and the derivative of f, which is the same for every record, pulls them back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sordino.gradients.rules.parts import direct_rule
from sordino.gradients.rules.rounding import Rounding
from sordino.gradients.rules.rule import LayerRule, Use

__all__ = ["Derived", "DerivedContext", "derived_rule"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Derived:
    """A tensor computed from parameters.

    Args:
        tensor: its value; its graph ends at the leaves.
        leaves: what stands in for each parameter it depends on, by name.
        isometric: it has the entries of one parameter, each once, so that norms of gradients are the same.
        row: the first row, where all rows are equal because of an expansion; None otherwise.
    """

    tensor: Tensor
    leaves: Mapping[str, Tensor]
    isometric: bool
    row: "Derived | None" = None


@dataclass(frozen=True, eq=False, kw_only=True)
class DerivedContext:
    """How a use reads derived tensors: the rule, its context and module, and its parameters in its own names."""

    rule: LayerRule
    module: nn.Module
    context: object
    sources: Mapping[str, Derived]


class _DerivedRule(LayerRule):
    """Large matrices go to the kernels of the rule that reads them; anything else is pulled back and kept."""

    def per_example(self, use: Use, name: str) -> Float[Tensor, "B *shape"]:
        """The gradients of everything derived from `name`, pulled back and added."""
        inner, context = _inner(use)
        shape = (use.records, *use.parameters[name].shape)
        total = torch.zeros(shape, device=use.parameters[name].device)
        for key, source in context.sources.items():
            if name in source.leaves and use.records:
                gradient = _pulled(source, name, context.rule.per_example(inner, key), batched=True)
                total = total + gradient.reshape(shape)
        return total

    def squared_norms(self, use: Use, names: Iterable[str]) -> Float[Tensor, " B"]:
        """By the rule itself where every source has one parameter's entries; otherwise from the gradients."""
        chosen = _keys(use, names)
        if chosen is None:
            return super().squared_norms(use, names)
        inner, context = _inner(use)
        total = context.rule.squared_norms(inner, chosen)
        use.memo.update({_PREFIX + key: value for key, value in inner.memo.items()})
        return total

    def rounding(self, use: Use, names: Iterable[str]) -> Rounding | None:
        """The rule's own; none where kept gradients are weighed."""
        chosen = _keys(use, names)
        inner, context = _inner(use)
        return None if chosen is None else context.rule.rounding(inner, chosen)

    def weighted_sums(
        self, use: Use, names: Iterable[str], weights: Float[Tensor, " B"]
    ) -> dict[str, Float[Tensor, "*shape"]]:
        """Kept gradients are weighed; what the rule sums is pulled back."""
        kept = [name for name in names if name in use.memo or _keys(use, [name]) is None]
        sums = super().weighted_sums(use, kept, weights)
        inner, context = _inner(use)
        others = [name for name in names if name not in sums]
        values = context.rule.weighted_sums(inner, _keys(use, others) or (), weights) if others else {}
        for key, value in values.items():
            (name,) = context.sources[key].leaves
            sums[name] = _pulled(context.sources[key], name, value, batched=False).reshape(use.parameters[name].shape)
        return sums


derived_rule = _DerivedRule()

# Keeps what the inner rule keeps apart from gradients of parameters.
_PREFIX = "of a derived tensor: "


def _inner(use: Use) -> tuple[Use, DerivedContext]:
    context = cast("DerivedContext", use.context)
    memo = {key.removeprefix(_PREFIX): value for key, value in use.memo.items() if key.startswith(_PREFIX)}
    parameters = {
        key: nn.Parameter(source.tensor.detach(), requires_grad=False) for key, source in context.sources.items()
    }
    inner = replace(
        use,
        rule=context.rule,
        module=context.module,
        context=context.context,
        parameters=parameters,
        memo=memo,
        versions=(),
    )
    return inner, context


def _keys(use: Use, names: Iterable[str]) -> frozenset[str] | None:
    """The sources of `names`, when each is one parameter's entries and is read by a rule with kernels of its own."""
    sources = cast("DerivedContext", use.context).sources
    owners = [name for source in sources.values() for name in source.leaves]
    plain = all(source.isometric and len(source.leaves) == 1 for source in sources.values())
    if not plain or len(set(owners)) < len(owners) or cast("DerivedContext", use.context).rule is direct_rule:
        return None
    wanted = set(names)
    return frozenset(key for key, source in sources.items() if wanted.issuperset(source.leaves))


def _pulled(source: Derived, name: str, gradient: Tensor, *, batched: bool) -> Tensor:
    leaf = source.leaves[name]
    if leaf is source.tensor:
        return gradient
    with torch.enable_grad():
        (result,) = torch.autograd.grad(
            source.tensor, leaf, gradient.to(source.tensor.dtype), retain_graph=True, is_grads_batched=batched
        )
    return result
