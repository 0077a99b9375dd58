"""Uses that consist of several linear maps, and parameters whose gradient is read directly.

The projections of an attention call and the cells of a recurrent layer are linear maps with weights that may be rows
of one parameter. Rows of different parts don't overlap, so their squared norms add up.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from sordino.gradients.numerics import compute_dtype, row_squared_norms, storage_number
from sordino.gradients.rules.base import (
    CHUNK_ENTRIES,
    GramRounding,
    LayerCall,
    LayerRule,
    Rounding,
    alone_error,
    chunk_records,
    joint_rounding,
    sum_error,
    weighted_sum,
)
from sordino.gradients.rules.linear import GHOST_MEMO, LinearRule, SharedBias, num_positions
from sordino.shapes import Float

Rows = tuple[int, int] | None

_LINEAR = LinearRule()


@dataclass(frozen=True, kw_only=True)
class LinearMap:
    """One linear map ``x W[rows]^T + b[rows]`` of a use; its input and output gradient are at the part's position.

    Args:
        weight: name of W, or None where it isn't captured.
        bias: name of b, or None.
        rows: first and last row (exclusive) of W; None for all.
        bias_rows: the same of b.
        joined: its output gradient is that of the part before it: both are one map of the concatenated inputs.
    """

    weight: str | None
    bias: str | None
    rows: Rows = None
    bias_rows: Rows = None
    joined: bool = False

    def roles(self) -> dict[str, tuple[str, Rows]]:
        """Name and rows of the captured ones of "weight" and "bias"."""
        both = {"weight": (self.weight, self.rows), "bias": (self.bias, self.bias_rows)}
        return {role: (name, rows) for role, (name, rows) in both.items() if name is not None}


class LinearMapsRule(LayerRule):
    """Several linear maps in one call: each part goes to the linear rule's kernels.

    The use keeps one input per part in ``saved``, one gradient per part in ``grads`` and the parts in ``context``.
    """

    def squared_norms(self, use: LayerCall, names: Iterable[str]) -> Float[Tensor, " B"]:
        """Each record's squared norm over `names`: the sum over parts, or of the added gradients where rows repeat."""
        repeated = _repeated(_parts(use)) & set(names)
        total = torch.zeros(use.records, dtype=torch.float64, device=_device(use))
        for name in sorted(repeated):
            total += row_squared_norms(self.per_record_gradient(use, name))
        wanted = set(names) - repeated
        i = 0
        while i < len(_parts(use)) and use.records:
            joined = _joined_use(use, i, wanted)
            one = _linear_use(use, i, wanted) if joined is None else joined
            if one is not None and one.parameters:
                total += _LINEAR.squared_norms(one, frozenset(one.parameters))
                use.memo.update({f"{i}.{role}": tensor for role, tensor in one.memo.items()})
            i += 1 if joined is None else 2
        return total

    def per_record_gradient(self, use: LayerCall, name: str) -> Float[Tensor, "B *shape"]:
        """The gradients of all parts that read `name`, each in its rows."""
        total = use.parameters[name].new_zeros((use.records, *use.parameters[name].shape), dtype=torch.float32)
        for i, part in enumerate(_parts(use)):
            one = _linear_use(use, i, {name})
            for role in () if one is None else one.parameters:
                assert one is not None
                gradient = _LINEAR.per_record_gradient(one, role)
                total = _added(total, gradient, part.roles()[role][1], dim=1)
        return total

    def weighted_sums(
        self, use: LayerCall, names: Iterable[str], weights: Float[Tensor, " B"]
    ) -> dict[str, Float[Tensor, "*shape"]]:
        """One matrix product per part, placed into its rows."""
        sums: dict[str, Tensor] = {}
        parts = _parts(use)
        i = 0
        while i < len(parts):
            part, joined = parts[i], _joined_use(use, i, set(names))
            if joined is not None:
                sums.update(_separated(use, i, _LINEAR.weighted_sums(joined, joined.parameters, weights)))
                i += 2
                continue
            one = _linear_use(use, i, set(names))
            i += 1
            if one is None or not one.parameters:
                continue
            for role, value in _LINEAR.weighted_sums(one, one.parameters, weights).items():
                name, rows = part.roles()[role]
                if rows is None and name not in sums:
                    sums[name] = value
                else:
                    whole = sums[name] if name in sums else value.new_zeros(use.parameters[name].shape)
                    sums[name] = _added(whole, value, rows, dim=0)
        return sums

    def rounding(self, use: LayerCall, names: Iterable[str]) -> Rounding | None:
        """The linear rule's for each part; where rows repeat, that of all the terms in them."""
        repeated = _repeated(_parts(use)) & set(names)
        parts = [_LINEAR.rounding(one, frozenset(one.parameters)) for one in _read_uses(use, set(names) - repeated)]
        parts = [part for part in parts if part is not None]
        if repeated:
            terms, error = self.terms(use), 0.0
            for one in _read_uses(use, repeated):
                product = one.product
                both = sum_error(product, use.records * terms, more=len(use.grads)) + alone_error(product, terms)
                error = max(error, both)
            lengths = error * self.term_lengths(use, repeated)
            parts.append(Rounding(squares=torch.zeros_like(lengths), length=lengths))
        return joint_rounding(parts) if parts else None

    def term_lengths(self, use: LayerCall, names: Iterable[str]) -> Float[Tensor, " B"]:
        """The parts' together, as if all of them were added up."""
        total = torch.zeros(use.records, dtype=torch.float64, device=use.device)
        for one in _read_uses(use, set(names)):
            total += _LINEAR.term_lengths(one, frozenset(one.parameters))
        return total

    def terms(self, use: LayerCall) -> int:
        """The positions of all parts."""
        return sum(_LINEAR.terms(replace(use, saved=(saved,))) for saved in use.saved)

    def merge(self, uses: list[LayerCall], names: frozenset[str]) -> LayerCall | None:  # noqa: ARG002
        """Several calls of the same module are one call on all their positions."""
        parts = _parts(uses[0])
        if any(use.context != parts for use in uses) or any(grad is None for use in uses for grad in use.grads):
            return None
        pairs = [
            [num_positions(replace(use, saved=(use.saved[i],), grads=(use.grads[i],))) for use in uses]
            for i in range(len(parts))
        ]
        saved = tuple(torch.cat([x for x, _ in calls], dim=1) for calls in pairs)
        grads = tuple(torch.cat([g for _, g in calls], dim=1) for calls in pairs)
        return replace(uses[0], saved=saved, grads=grads, memo={}, versions=())


class StoredGradientRule(LayerRule):
    """Parameters that were expanded to one copy per record: the gradient of the copy is the record's gradient.

    ``context`` names the parameter behind each output.
    """

    def per_record_gradient(self, use: LayerCall, name: str) -> Float[Tensor, "B *shape"]:
        """The gradients of all copies of `name`, added."""
        shape = (use.records, *use.parameters[name].shape)
        own = [g for g, owner in zip(use.grads, cast("tuple[str, ...]", use.context), strict=True) if owner == name]
        total = torch.zeros(shape, dtype=torch.float32, device=_device(use))
        for grad in own:
            if grad is not None:
                total = total + grad.to(compute_dtype(grad)).reshape(shape)
        return total

    def squared_norms(self, use: LayerCall, names: Iterable[str]) -> Float[Tensor, " B"]:
        """Each record's squared norm over `names`."""
        parts = [row_squared_norms(self.per_record_gradient(use, name)) for name in sorted(names)]
        return torch.stack(parts).sum(0)

    def weighted_sums(
        self, use: LayerCall, names: Iterable[str], weights: Float[Tensor, " B"]
    ) -> dict[str, Float[Tensor, "*shape"]]:
        """From the gradients themselves."""
        return {name: weighted_sum(self.per_record_gradient(use, name), weights) for name in names}


parts_rule = LinearMapsRule()
direct_rule = StoredGradientRule()


def _parts(use: LayerCall) -> tuple[LinearMap, ...]:
    return cast("tuple[LinearMap, ...]", use.context)


def _device(use: LayerCall) -> torch.device:
    return next(iter(use.parameters.values())).device


def _added(whole: Tensor, value: Tensor, rows: Rows, *, dim: int) -> Tensor:
    """`whole` with `value` added in its rows; `whole` may be overwritten."""
    if rows is None:
        return whole + value
    whole = whole.to(torch.promote_types(whole.dtype, value.dtype))
    whole.narrow(dim, rows[0], rows[1] - rows[0]).add_(value)
    return whole


def _repeated(parts: tuple[LinearMap, ...]) -> set[str]:
    """Names that are read twice in overlapping rows."""
    seen: dict[str, list[Rows]] = {}
    for part in parts:
        for name, rows in part.roles().values():
            seen.setdefault(name, []).append(rows)
    return {name for name, rows in seen.items() if not _disjoint(rows)}


def _disjoint(rows: list[Rows]) -> bool:
    if len(rows) < 2:
        return True
    spans = sorted(span for span in rows if span is not None)
    apart = all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    return len(spans) == len(rows) and apart


def _linear_use(use: LayerCall, i: int, names: set[str]) -> LayerCall | None:
    """Part `i` as a use of the linear rule; None where no gradient reached it."""
    part, grad = _parts(use)[i], use.grads[i]
    if grad is None:
        return None
    parameters = {role: use.parameters[name] for role, (name, _) in part.roles().items() if name in names}
    memo = {role: use.memo[key] for role in parameters if (key := f"{i}.{role}") in use.memo}
    return replace(
        use, parameters=parameters, saved=(use.saved[i],), grads=(grad,), context=None, memo=memo, versions=()
    )


def _read_uses(use: LayerCall, names: set[str]) -> list[LayerCall]:
    """The uses of the linear rule that the norms of `names` were read from, with all that was kept of them."""
    uses: list[LayerCall] = []
    i = 0
    while i < len(_parts(use)) and use.records:
        joined = _joined_use(use, i, names)
        one = _linear_use(use, i, names) if joined is None else joined
        if one is not None and one.parameters:
            kept = {key: use.memo[f"{i}.{key}"] for key in GHOST_MEMO if f"{i}.{key}" in use.memo}
            uses.append(replace(one, memo=one.memo | kept))
        i += 1 if joined is None else 2
    return uses


def _joined_use(use: LayerCall, i: int, names: set[str]) -> LayerCall | None:
    """Parts `i` and `i` + 1 as one use with the inputs side by side, when they share all of their gradient.

    Two biases with one gradient are one bias that counts twice.
    """
    parts = _parts(use)
    if i + 1 >= len(parts) or not parts[i + 1].joined or use.grads[i] is None:
        return None
    owned = [name for part in parts[i : i + 2] for name, _ in part.roles().values()]
    whole = all(
        part.weight is not None and rows is None for part in parts[i : i + 2] for _, rows in part.roles().values()
    )
    if not whole or len(set(owned)) < len(owned) or not names.issuperset(owned) or len(owned) == 3:
        return None
    memo = {role: use.memo[key] for role in ("weight", "bias") if (key := f"{i}.{role}") in use.memo}
    parameters = {"weight": use.parameters[owned[0]]}
    if len(owned) == 4:
        parameters["bias"] = use.parameters[owned[1]]
    return replace(
        use,
        parameters=parameters,
        saved=(_side_by_side(*use.saved[i : i + 2]),),
        grads=(use.grads[i],),
        context=SharedBias(count=2),
        memo=memo,
        versions=(),
    )


def _side_by_side(first: Tensor, second: Tensor) -> Tensor:
    """Both along the last dimension; without a copy where they lie next to each other in memory."""
    width, offset = first.shape[-1] + second.shape[-1], first.storage_offset()
    neighbors = (
        storage_number(first) == storage_number(second)
        and first.stride() == second.stride()
        and first.stride(-1) == 1
        and min(first.stride()[:-1]) >= width
        and second.storage_offset() == offset + first.shape[-1]
    )
    if not neighbors:
        return torch.cat([first, second], dim=-1)
    return first.as_strided((*first.shape[:-1], width), first.stride(), offset)


def _separated(use: LayerCall, i: int, sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sums of a joined use, by name."""
    parts, result = _parts(use), {}
    start = 0
    for part in parts[i : i + 2]:
        roles = part.roles()
        name = roles["weight"][0]
        width = use.parameters[name].shape[1]
        result[name] = sums["weight"][:, start : start + width].contiguous()
        start += width
        if "bias" in roles:
            result[roles["bias"][0]] = sums["bias"]
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Rules that form gradients record by record, twice where they can't be kept.
# ----------------------------------------------------------------------------------------------------------------------


class GradientsRule(LayerRule):
    """Base of rules that know the gradients of all wanted parameters at once; a subclass needs `gradients`.

    Gradients are kept between norms and sums where they are small enough. Otherwise they are formed twice, and the
    second ones are shrunk to the norms of the first.
    """

    def gradients(self, use: LayerCall, names: Sequence[str]) -> dict[str, Float[Tensor, "B *shape"]]:
        """The gradient of each record, of which there is at least one, for the parameters `names`."""
        raise NotImplementedError

    def squared_norms(self, use: LayerCall, names: Iterable[str]) -> Float[Tensor, " B"]:
        """Each record's squared norm over `names`; gradients are kept for the sum when they are small enough."""
        wanted = sorted(names)
        entries = sum(use.parameters[name].numel() for name in wanted)
        keep = use.records * entries <= 4 * CHUNK_ENTRIES
        parts: list[Tensor] = []
        kept: list[dict[str, Tensor]] = []
        for chunk in _chunks(use, entries):
            gradients = self.gradients(chunk, wanted)
            parts.append(torch.stack([row_squared_norms(gradients[name]) for name in wanted]))
            if keep:
                kept.append(gradients)
        if not parts:
            return torch.zeros(0, dtype=torch.float64, device=use.device)
        squares = torch.cat(parts, dim=1)
        if keep:
            use.memo.update({name: torch.cat([gradients[name] for gradients in kept]) for name in wanted})
        else:
            use.memo.update({_MEASURED + name: row for name, row in zip(wanted, squares, strict=True)})
        return squares.sum(0)

    def per_record_gradient(self, use: LayerCall, name: str) -> Float[Tensor, "B *shape"]:
        """The gradient of each record for parameter `name`."""
        if use.records == 0:
            return use.parameters[name].new_zeros((0, *use.parameters[name].shape))
        return self.gradients(use, [name])[name]

    def weighted_sums(
        self, use: LayerCall, names: Iterable[str], weights: Float[Tensor, " B"]
    ) -> dict[str, Float[Tensor, "*shape"]]:
        """From the kept gradients where there are any, otherwise from gradients that are formed once more."""
        wanted = sorted(names)
        sums = {name: weighted_sum(use.memo[name], weights) for name in wanted if name in use.memo}
        missing = [name for name in wanted if name not in sums]
        if not missing:
            return sums
        sums.update({name: torch.zeros_like(use.parameters[name], dtype=torch.float32) for name in missing})
        start = 0
        for chunk in _chunks(use, sum(use.parameters[name].numel() for name in missing)):
            gradients = self.gradients(chunk, missing)
            chosen = weights[start : start + chunk.records]
            for name in missing:
                # Parameters may have been measured apart, for other groups: each keeps its own norm.
                squares = chunk.memo.get(_MEASURED + name)
                kept = 1.0 if squares is None else _no_longer_than_measured(gradients[name], squares)
                sums[name] = sums[name] + weighted_sum(gradients[name], chosen * kept)
            start += chunk.records
        return sums


# Before a parameter's name in a use's memo, for the squared norms of gradients that were not kept. A dot can't begin
# the name of a parameter.
_MEASURED = "."


def _no_longer_than_measured(gradient: Float[Tensor, "B *shape"], squares: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Factors that shrink gradients to the norms that were measured; rows that became non-finite are set to zero.

    Running a module again in another batch may round in another way, and a record whose terms cancel makes that as
    large as it likes.
    """
    again = row_squared_norms(gradient)
    gradient[~again.isfinite()] = 0
    return torch.where(again > squares, (squares / again).sqrt(), torch.ones_like(again)).nan_to_num(nan=0.0)


def _chunks(use: LayerCall, entries: int) -> Iterable[LayerCall]:
    step = chunk_records(use.records, entries)
    if 0 < use.records <= step:
        yield use
        return
    for start in range(0, use.records, step):
        yield use.select(torch.arange(start, min(start + step, use.records), device=use.device))


# ----------------------------------------------------------------------------------------------------------------------
# Uses of tensors that were computed from parameters alone.
#
# A class token that was expanded, rows of a position table, ``1 + weight``, a prompt behind two layers: with q =
# f(parameters) the same for all records, the rule that reads q gives each record's gradient of q, and the derivative of
# f, which is the same for every record too, pulls them back.
# ----------------------------------------------------------------------------------------------------------------------


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

    def gradients(self, use: LayerCall, names: Sequence[str]) -> dict[str, Float[Tensor, "B *shape"]]:
        """The gradients of everything derived from `names`, pulled back and added."""
        inner, context = _inner(use)
        totals = {
            name: torch.zeros((use.records, *use.parameters[name].shape), device=use.parameters[name].device)
            for name in names
        }
        for key, source in context.sources.items():
            wanted = [name for name in names if name in source.leaves]
            if wanted:
                gradient = context.rule.per_record_gradient(inner, key)
                if context.rows_of is not None:
                    gradient = _in_its_row(gradient, use.saved[-1], source.tensor, context.rows_of)
                for name, part in zip(wanted, _pulled(source, wanted, gradient, batched=True), strict=True):
                    totals[name] = totals[name] + part.reshape(totals[name].shape)
        return totals

    def squared_norms(self, use: LayerCall, names: Iterable[str]) -> Float[Tensor, " B"]:
        """By the rule itself where every source has one parameter's entries; otherwise from the gradients."""
        chosen = _keys(use, names)
        if chosen is None:
            return super().squared_norms(use, names)
        inner, context = _inner(use)
        total = context.rule.squared_norms(inner, chosen)
        use.memo.update({_PREFIX + key: value for key, value in inner.memo.items()})
        return total

    def rounding(self, use: LayerCall, names: Iterable[str]) -> Rounding | GramRounding | None:
        """The rule's own; none where kept gradients are weighed."""
        chosen = _keys(use, names)
        inner, context = _inner(use)
        return None if chosen is None else context.rule.rounding(inner, chosen)

    def weighted_sums(
        self, use: LayerCall, names: Iterable[str], weights: Float[Tensor, " B"]
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


def _inner(use: LayerCall) -> tuple[LayerCall, DerivedContext]:
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


def _keys(use: LayerCall, names: Iterable[str]) -> frozenset[str] | None:
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
