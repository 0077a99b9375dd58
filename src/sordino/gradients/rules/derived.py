"""Uses of tensors that were computed from parameters alone (floor 1, gradients).

A class token that was expanded, rows of a position table, ``1 + weight``, a prompt behind two layers: with q =
f(parameters) the same for all records, the rule that reads q gives each record's gradient of q, and the derivative of
f, which is the same for every record too, pulls them back.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sordino.gradients.rules.recomputed import GradientsRule
from sordino.gradients.rules.rounding import Rounding
from sordino.gradients.rules.rule import LayerRule, Use

__all__ = ["Derived", "DerivedContext", "Lookup", "derived_rule"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Lookup:
    """Rows of a table, as a derived tensor: its last dimension holds the columns, the others are those of `ids`."""

    table: "Derived"
    ids: Tensor
    padding: int | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Derived:
    """A tensor computed from parameters.

    Args:
        tensor: its value; its graph ends at the leaves.
        leaves: what stands in for each parameter it depends on, by name.
        isometric: its entries are entries of one parameter, each at most once, so that norms of gradients are the same.
        repeats: the dimensions along which all its slices are equal because of an expansion, up to random draws.
        drawn: random draws may have made slices differ.
        lookup: how it came from a table, where it has rows of one.
        scope: the call of a module that all of it belongs to; None where that doesn't matter any more.
    """

    tensor: Tensor
    leaves: Mapping[str, Tensor]
    isometric: bool = False
    repeats: frozenset[int] = field(default_factory=frozenset)
    drawn: bool = False
    lookup: Lookup | None = None
    scope: object = None


@dataclass(frozen=True, eq=False, kw_only=True)
class DerivedContext:
    """How a use reads derived tensors.

    Args:
        rule: the rule that gives the gradients of `sources`.
        module: what it reads as the use's module.
        context: what it reads as the use's context.
        sources: the derived tensors, by the names that the rule knows them by.
        rows_of: the dimension of the source in which each record reads its own slice; the last kept tensor says which.
            None where every record reads all of it.
    """

    rule: LayerRule
    module: nn.Module
    context: object
    sources: Mapping[str, Derived]
    rows_of: int | None = None


class _DerivedRule(GradientsRule):
    """What has one parameter's entries goes to the kernels of the rule that reads it; anything else is pulled back."""

    def gradients(self, use: Use, names: Sequence[str]) -> dict[str, Float[Tensor, "B *shape"]]:
        """The gradients of everything derived from `names`, pulled back and added."""
        inner, context = _inner(use)
        totals = {
            name: torch.zeros((use.records, *use.parameters[name].shape), device=use.parameters[name].device)
            for name in names
        }
        for key, source in context.sources.items():
            wanted = [name for name in names if name in source.leaves]
            if wanted:
                gradient = context.rule.per_example(inner, key)
                if context.rows_of is not None:
                    gradient = _in_its_row(gradient, use.saved[-1], source.tensor, context.rows_of)
                for name, part in zip(wanted, _pulled(source, wanted, gradient, batched=True), strict=True):
                    totals[name] = totals[name] + part.reshape(totals[name].shape)
        return totals

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
            (pulled,) = _pulled(context.sources[key], [name], value, batched=False)
            sums[name] = pulled.reshape(use.parameters[name].shape)
        return sums


derived_rule = _DerivedRule()

# Keeps what the inner rule keeps apart from gradients of parameters.
_PREFIX = "of a derived tensor: "


def _inner(use: Use) -> tuple[Use, DerivedContext]:
    context = cast("DerivedContext", use.context)
    memo = {key.removeprefix(_PREFIX): value for key, value in use.memo.items() if key.startswith(_PREFIX)}
    values = {key: source.tensor.detach() for key, source in context.sources.items()}
    if context.rows_of is not None:
        values = {key: value.narrow(context.rows_of, 0, 1) for key, value in values.items()}
    parameters = {key: nn.Parameter(value, requires_grad=False) for key, value in values.items()}
    inner = replace(
        use,
        rule=context.rule,
        module=context.module,
        context=context.context,
        parameters=parameters,
        saved=use.saved if context.rows_of is None else use.saved[:-1],
        memo=memo,
        versions=(),
    )
    return inner, context


def _keys(use: Use, names: Iterable[str]) -> frozenset[str] | None:
    """The sources of `names`, when each is one parameter's entries and is read by a rule that sums them by itself."""
    context = cast("DerivedContext", use.context)
    owners = [name for source in context.sources.values() for name in source.leaves]
    plain = all(source.isometric and len(source.leaves) == 1 for source in context.sources.values())
    if not plain or len(set(owners)) < len(owners) or context.rows_of is not None:
        return None
    wanted = set(names)
    return frozenset(key for key, source in context.sources.items() if wanted.issuperset(source.leaves))


def _in_its_row(gradient: Tensor, rows: Tensor, like: Tensor, dim: int) -> Float[Tensor, "B *like"]:
    """Each record's gradient in its own slice of a tensor of zeros."""
    order = [dim, *(d for d in range(like.dim()) if d != dim)]
    whole = gradient.new_zeros(len(rows), *(like.shape[d] for d in order))
    whole[torch.arange(len(rows), device=rows.device), rows] = gradient.reshape(len(rows), *whole.shape[2:])
    return whole.movedim(1, dim + 1)


def _pulled(source: Derived, names: Sequence[str], gradient: Tensor, *, batched: bool) -> list[Tensor]:
    """The gradients of the leaves `names`, from one at the source or from one for each record."""
    leaves = [source.leaves[name] for name in names]
    if len(leaves) == 1 and leaves[0] is source.tensor:
        return [gradient]
    gradient = gradient.to(source.tensor.dtype)

    def pull(one: Tensor, *, batched: bool = False) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(
                source.tensor,
                leaves,
                one,
                retain_graph=True,
                is_grads_batched=batched,
                allow_unused=True,
                materialize_grads=True,
            )

    if not batched:
        return list(pull(gradient.reshape(source.tensor.shape)))
    rows = gradient.reshape(len(gradient), *source.tensor.shape)
    try:
        return list(pull(rows, batched=True))
    except RuntimeError:
        # A backward function without a batching rule.
        parts = [pull(row) for row in rows]
        return [torch.stack(found) for found in zip(*parts, strict=True)]
