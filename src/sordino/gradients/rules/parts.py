"""Uses that consist of several linear maps, and parameters whose gradient is read directly (floor 1, gradients).

The projections of an attention call and the cells of a recurrent layer are linear maps with weights that may be rows
of one parameter. Rows of different parts don't overlap, so their squared norms add up.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from sordino.gradients.numerics import compute_dtype, row_squared_norms
from sordino.gradients.rules.linear import GHOST_LENGTHS, GHOST_ROUNDING, LinearRule, SharedBias, positions_of
from sordino.gradients.rules.rounding import Rounding, additions, unit
from sordino.gradients.rules.rule import LayerRule, Use, weigh

__all__ = ["DirectRule", "Part", "PartsRule", "direct_rule", "parts_rule"]

Rows = tuple[int, int] | None

_LINEAR = LinearRule()


@dataclass(frozen=True, kw_only=True)
class Part:
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


class PartsRule(LayerRule):
    """Several linear maps in one call: each part goes to the linear rule's kernels.

    The use keeps one input per part in ``saved``, one gradient per part in ``grads`` and the parts in ``context``.
    """

    def squared_norms(self, use: Use, names: Iterable[str]) -> Float[Tensor, " B"]:
        """Each record's squared norm over `names`: the sum over parts, or of the added gradients where rows repeat."""
        repeated = _repeated(_parts(use)) & set(names)
        total = torch.zeros(use.records, dtype=torch.float64, device=_device(use))
        for name in sorted(repeated):
            total += row_squared_norms(self.per_example(use, name))
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

    def per_example(self, use: Use, name: str) -> Float[Tensor, "B *shape"]:
        """The gradients of all parts that read `name`, each in its rows."""
        total = use.parameters[name].new_zeros((use.records, *use.parameters[name].shape), dtype=torch.float32)
        for i, part in enumerate(_parts(use)):
            one = _linear_use(use, i, {name})
            for role in () if one is None else one.parameters:
                assert one is not None
                gradient = _LINEAR.per_example(one, role)
                total = _added(total, gradient, part.roles()[role][1], dim=1)
        return total

    def weighted_sums(
        self, use: Use, names: Iterable[str], weights: Float[Tensor, " B"]
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

    def rounding(self, use: Use, names: Iterable[str]) -> Rounding | None:
        """The linear rule's for each part; where rows repeat, that of all the terms in them."""
        repeated = _repeated(_parts(use)) & set(names)
        squares, apart = (torch.zeros(use.records, dtype=torch.float64, device=use.device) for _ in range(2))
        for one in _read_uses(use, set(names) - repeated):
            part = _LINEAR.rounding(one, frozenset(one.parameters))
            if part is not None:
                squares += part.squares
                apart += part.length.square()
        if repeated:
            rounds = additions(use.records * self.terms(use)) + additions(self.terms(use)) + len(use.grads)
            apart += (rounds * unit(torch.float32) * self.term_lengths(use, repeated)).square()
        return Rounding(squares=squares, length=apart.sqrt_())

    def term_lengths(self, use: Use, names: Iterable[str]) -> Float[Tensor, " B"]:
        """The parts' together, as if all of them were added up."""
        total = torch.zeros(use.records, dtype=torch.float64, device=use.device)
        for one in _read_uses(use, set(names)):
            total += _LINEAR.term_lengths(one, frozenset(one.parameters))
        return total

    def terms(self, use: Use) -> int:
        """The positions of all parts."""
        return sum(_LINEAR.terms(replace(use, saved=(saved,))) for saved in use.saved)

    def merge(self, uses: list[Use], names: frozenset[str]) -> Use | None:  # noqa: ARG002
        """Several calls of the same module are one call on all their positions."""
        parts = _parts(uses[0])
        if any(use.context != parts for use in uses) or any(grad is None for use in uses for grad in use.grads):
            return None
        pairs = [
            [positions_of(replace(use, saved=(use.saved[i],), grads=(use.grads[i],))) for use in uses]
            for i in range(len(parts))
        ]
        saved = tuple(torch.cat([x for x, _ in calls], dim=1) for calls in pairs)
        grads = tuple(torch.cat([g for _, g in calls], dim=1) for calls in pairs)
        return replace(uses[0], saved=saved, grads=grads, memo={}, versions=())


class DirectRule(LayerRule):
    """Parameters that were expanded to one copy per record: the gradient of the copy is the record's gradient.

    ``context`` names the parameter behind each output.
    """

    def per_example(self, use: Use, name: str) -> Float[Tensor, "B *shape"]:
        """The gradients of all copies of `name`, added."""
        shape = (use.records, *use.parameters[name].shape)
        own = [g for g, owner in zip(use.grads, cast("tuple[str, ...]", use.context), strict=True) if owner == name]
        total = torch.zeros(shape, dtype=torch.float32, device=_device(use))
        for grad in own:
            if grad is not None:
                total = total + grad.to(compute_dtype(grad)).reshape(shape)
        return total

    def squared_norms(self, use: Use, names: Iterable[str]) -> Float[Tensor, " B"]:
        """Each record's squared norm over `names`."""
        parts = [row_squared_norms(self.per_example(use, name)) for name in sorted(names)]
        return torch.stack(parts).sum(0)

    def weighted_sums(
        self, use: Use, names: Iterable[str], weights: Float[Tensor, " B"]
    ) -> dict[str, Float[Tensor, "*shape"]]:
        """From the gradients themselves."""
        return {name: weigh(self.per_example(use, name), weights) for name in names}


parts_rule = PartsRule()
direct_rule = DirectRule()


def _parts(use: Use) -> tuple[Part, ...]:
    return cast("tuple[Part, ...]", use.context)


def _device(use: Use) -> torch.device:
    return next(iter(use.parameters.values())).device


def _added(whole: Tensor, value: Tensor, rows: Rows, *, dim: int) -> Tensor:
    """`whole` with `value` added in its rows; `whole` may be overwritten."""
    if rows is None:
        return whole + value
    whole = whole.to(torch.promote_types(whole.dtype, value.dtype))
    whole.narrow(dim, rows[0], rows[1] - rows[0]).add_(value)
    return whole


def _repeated(parts: tuple[Part, ...]) -> set[str]:
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


def _linear_use(use: Use, i: int, names: set[str]) -> Use | None:
    """Part `i` as a use of the linear rule; None where no gradient reached it."""
    part, grad = _parts(use)[i], use.grads[i]
    if grad is None:
        return None
    parameters = {role: use.parameters[name] for role, (name, _) in part.roles().items() if name in names}
    memo = {role: use.memo[key] for role in parameters if (key := f"{i}.{role}") in use.memo}
    return replace(
        use, parameters=parameters, saved=(use.saved[i],), grads=(grad,), context=None, memo=memo, versions=()
    )


def _read_uses(use: Use, names: set[str]) -> list[Use]:
    """The uses of the linear rule that the norms of `names` were read from, with all that was kept of them."""
    uses: list[Use] = []
    i = 0
    while i < len(_parts(use)) and use.records:
        joined = _joined_use(use, i, names)
        one = _linear_use(use, i, names) if joined is None else joined
        if one is not None and one.parameters:
            kept = {key: use.memo[f"{i}.{key}"] for key in (GHOST_ROUNDING, GHOST_LENGTHS) if f"{i}.{key}" in use.memo}
            uses.append(replace(one, memo=one.memo | kept))
        i += 1 if joined is None else 2
    return uses


def _joined_use(use: Use, i: int, names: set[str]) -> Use | None:
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
    width, place = first.shape[-1] + second.shape[-1], first.storage_offset()
    neighbours = (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.stride() == second.stride()
        and first.stride(-1) == 1
        and min(first.stride()[:-1]) >= width
        and second.storage_offset() == place + first.shape[-1]
    )
    if not neighbours:
        return torch.cat([first, second], dim=-1)
    return first.as_strided((*first.shape[:-1], width), first.stride(), place)


def _separated(use: Use, i: int, sums: dict[str, Tensor]) -> dict[str, Tensor]:
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
