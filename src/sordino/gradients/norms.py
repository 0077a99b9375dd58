"""Norms of uses and what rounding can do to them, group by group."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sordino.gradients.numerics import (
    ProductFormat,
    guard_holds,
    is_away,
    is_tracing_graph,
    joint_squared_norms,
    product_format,
    row_squared_norms,
)
from sordino.gradients.rules.base import (
    GramRounding,
    LayerCall,
    LayerRule,
    Rounding,
    alone_error,
    chunk_records,
    joint_rounding,
    sum_error,
)
from sordino.shapes import Float

# ----------------------------------------------------------------------------------------------------------------------
# Norms of parameters with several uses: tied weights, modules called twice.
#
# The gradient of a record is the sum over all uses, so its squared norm has cross terms. Clipping by the uses' own
# norms would let a record contribute up to the number of uses times the bound.
# ----------------------------------------------------------------------------------------------------------------------


# A squared norm this far below the sum of its parts has cancelled and is recomputed.
_CANCELLED = 0.05


def tied_squared_norms(uses: list[LayerCall], shares: list[tuple[str, ...]]) -> tuple[Float[Tensor, " B"], Rounding]:
    """Squared norm of each record's summed gradient over parameters that share the same uses.

    What is released is the sum of the uses' own weighted sums. The uses of one record may cancel, so the rounding is
    that of the lengths of all their terms.

    Args:
        uses: the uses, at least two.
        shares: for each parameter its name in each use.

    Returns:
        One value per record, in float64, and what rounding can do to it and to the released sum.
    """
    if all(len(set(names)) == 1 for names in shares):
        together = frozenset(names[0] for names in shares)
        merged = _merged(uses, together)
        if len(merged) == 1:
            total = merged[0].rule.squared_norms(merged[0], together)
            lengths = merged[0].rule.term_lengths(merged[0], together)
            length = (_sum_unit(uses) + _norm_unit(uses)) * lengths
            return total, Rounding(squares=_norm_rounding(merged[0], together), length=length)
    parts = [_of_one_parameter(uses, names) for names in shares]
    squares = torch.stack([rounding.squares for _, rounding in parts]).sum(0)
    length = torch.stack([rounding.length for _, rounding in parts]).square().sum(0).sqrt_()
    return torch.stack([norms for norms, _ in parts]).sum(0), Rounding(squares=squares, length=length)


def _of_one_parameter(uses: list[LayerCall], names: tuple[str, ...]) -> tuple[Float[Tensor, " B"], Rounding]:
    """By cross terms where the rules know them, otherwise by adding gradients."""
    merged = _merged(uses, frozenset(names)) if len(set(names)) == 1 else uses
    if len(merged) > 2:
        return _by_adding(uses, names)
    first, second = merged
    crossed = first.rule.inner_products(first, second)
    if crossed is None:
        crossed = second.rule.inner_products(second, first)
    if crossed is None:
        return _by_adding(uses, names)
    read = [(first, frozenset(names[:1])), (second, frozenset(names[-1:]))]
    norms = [use.rule.squared_norms(use, chosen).double() for use, chosen in read]
    parts = norms[0] + norms[1]
    total = parts + 2 * crossed
    # The terms of the inner product are themselves inner products over the columns of the shared parameter.
    one, other = (use.rule.term_lengths(use, chosen) for use, chosen in read)
    columns = uses[0].parameters[names[0]].shape[-1]
    inner = max((columns + 2 + each.parts) * each.addition + each.formed for each in _products(uses))
    squares = 2 * inner * one * other + sum(_norm_rounding(use, chosen) for use, chosen in read)
    length = _sum_unit(uses) * (one + other)
    sound = total > _CANCELLED * parts
    total += 4 * torch.finfo(torch.float32).eps * parts
    if is_away(total) and not is_tracing_graph():
        # Instead of adding gradients: what forming them apart may have cost each of the three terms.
        lacking = 2 * _norm_unit(uses) * (one + other).square()
        return total.clamp_(min=0), Rounding(squares=squares + torch.where(sound, 0, lacking), length=length)
    if not guard_holds(sound):
        index = (~sound).nonzero().flatten()
        total[index], _ = _by_adding([use.select(index) for use in uses], names)
        squares[index] = 0
        length[index] += _norm_unit(uses) * (one + other)[index]
    return total, Rounding(squares=squares, length=length)


def _sum_unit(uses: list[LayerCall]) -> float:
    """Rounding of a sum that is formed use by use and then added, relative to the lengths of all terms."""
    terms = max(use.records * use.rule.terms(use) for use in uses)
    return max(sum_error(product, terms, more=len(uses)) for product in _products(uses))


def _norm_unit(uses: list[LayerCall]) -> float:
    """The same for gradients that are formed apart, for their norms."""
    terms = sum(use.rule.terms(use) for use in uses)
    return max(alone_error(product, terms, more=len(uses)) for product in _products(uses))


def _norm_rounding(use: LayerCall, names: frozenset[str]) -> Float[Tensor, " B"]:
    """What the norm of a use that was measured for `names` may lack."""
    rounding = use.rule.rounding(use, names)
    if rounding is None:
        return torch.zeros(use.records, dtype=torch.float64, device=use.device)
    return joint_rounding([rounding]).squares


def _merged(uses: list[LayerCall], names: frozenset[str]) -> list[LayerCall]:
    """One use per rule where the rule can merge; the uses themselves where it can't."""
    by_rule: dict[int, list[LayerCall]] = {}
    for use in uses:
        by_rule.setdefault(id(use.rule), []).append(use)
    result: list[LayerCall] = []
    for group in by_rule.values():
        one = group[0] if len(group) == 1 else group[0].rule.merge(group, names)
        result += group if one is None else [one]
    return result


def _device(uses: list[LayerCall]) -> torch.device:
    return uses[0].device


def _products(uses: list[LayerCall]) -> set[ProductFormat]:
    """How what was kept of the uses is multiplied."""
    return {
        product_format(saved, grad)
        for use in uses
        for saved in _floating(use)
        for grad in use.grads
        if grad is not None
    }


def _floating(use: LayerCall) -> list[Tensor]:
    """What was kept with values; the gradient at the output where there is nothing else."""
    kept = [tensor for tensor in use.saved if tensor.is_floating_point()]
    return kept or [grad for grad in use.grads if grad is not None]


def _by_adding(uses: list[LayerCall], names: tuple[str, ...]) -> tuple[Float[Tensor, " B"], Rounding]:
    """Form the summed gradient of a few records at a time."""
    records = uses[0].records
    step = chunk_records(records, uses[0].parameters[names[0]].numel())
    device = _device(uses)
    lengths = torch.stack([use.rule.term_lengths(use, [name]) for use, name in zip(uses, names, strict=True)]).sum(0)
    rounding = Rounding(squares=torch.zeros_like(lengths), length=(_sum_unit(uses) + _norm_unit(uses)) * lengths)
    parts = []
    for start in range(0, records, step):
        index = torch.arange(start, min(start + step, records), device=device)
        chosen = [(use.select(index), name) for use, name in zip(uses, names, strict=True)]
        # What a rule has kept is what its sum will weigh.
        gradients = [
            use.memo[name] if name in use.memo else use.rule.per_record_gradient(use, name) for use, name in chosen
        ]
        parts.append(row_squared_norms(torch.stack(gradients).sum(0)))
    total = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=device)
    return total, rounding


# ----------------------------------------------------------------------------------------------------------------------
# Norms of uses and what rounding can do to them, group by group.
# ----------------------------------------------------------------------------------------------------------------------


# Called with a use and the parameters that were measured with it alone.
Note = Callable[[LayerCall, frozenset[str]], None]


@dataclass(eq=False, kw_only=True)
class NormMeasurement:
    """Squares and squared lengths, which add over parameters; the two are apart until the end.

    Args:
        squares: squared norms of each group and record.
        norm_error: how much more the true ones can be; None as long as nothing was rounded.
        sum_error: squared distance, at most, between what was measured and what a sum at weight 1 adds; None likewise.
    """

    squares: Float[Tensor, "G B"]
    norm_error: Float[Tensor, "G B"] | None = None
    sum_error: Float[Tensor, "G B"] | None = None

    @staticmethod
    def nothing(groups: int, records: int, device: torch.device) -> "NormMeasurement":
        """Before the first use."""
        return NormMeasurement(squares=torch.zeros(groups, records, dtype=torch.float64, device=device))

    def add(self, uses: Sequence[LayerCall], group_of: Mapping[nn.Parameter, int], note: Note | None = None) -> None:
        """Take in uses whose parameters are used by no others.

        Args:
            uses: at least one record each.
            group_of: the number of each parameter's group, 0 by default.
            note: called with each use that is the only one of some parameters.
        """
        gathered = _gathered(uses, group_of)
        # By group; what all layers give is added up in one operation.
        squares: dict[int, list[Tensor]] = defaultdict(list)
        kept: dict[int, list[Tensor]] = defaultdict(list)
        roundings: dict[int, list[Rounding | GramRounding]] = defaultdict(list)
        waiting: dict[int, int] = defaultdict(int)
        for _, members, _ in gathered:
            waiting[id(members[0])] += len(members) == 1
        for group, members, shares in gathered:
            if len(members) == 1:
                names = frozenset([names[0] for names in shares])
                part = _measured(members[0], names)
                rounding = members[0].rule.rounding(members[0], names)
                if note is not None:
                    note(members[0], names)
                waiting[id(members[0])] -= 1
                if not waiting[id(members[0])]:
                    members[0].release()
            else:
                part, rounding = tied_squared_norms(members, shares)
            if isinstance(part, Tensor):
                squares[group].append(part)
            else:
                kept[group] += part
            if rounding is not None:
                roundings[group].append(rounding)
        for group, gradients in kept.items():
            squares[group].append(joint_squared_norms(gradients))
        for group, parts in squares.items():
            self.squares[group].add_(_total(parts))
        for group, parts in roundings.items():
            rounding = joint_rounding(parts)
            self.add_errors(group, rounding.squares, rounding.length.square())
            # A sum that cancels may be below zero; what it lacks is in its rounding.
            self.squares[group].clamp_(min=0)

    def add_errors(self, group: int, norm_error: Float[Tensor, " B"], sum_error: Float[Tensor, " B"]) -> None:
        """Take in what was rounded in a group."""
        if self.norm_error is None or self.sum_error is None:
            self.norm_error, self.sum_error = torch.zeros_like(self.squares), torch.zeros_like(self.squares)
        self.norm_error[group].add_(norm_error)
        self.sum_error[group].add_(sum_error)

    def squared_norm_bounds(self) -> Float[Tensor, "G B"]:
        """Square of a bound on the norm of what each record adds to a sum at weight 1."""
        if self.norm_error is None or self.sum_error is None:
            return self.squares
        # (√(n² + lacking) + apart)², multiplied out so that it is n² where there is nothing to add.
        measured = self.squares + self.norm_error
        return measured + 2 * (measured * self.sum_error).sqrt_() + self.sum_error


def _measured(use: LayerCall, names: frozenset[str]) -> Float[Tensor, " B"] | list[Float[Tensor, "B ..."]]:
    """Squared norms, or the gradients that were kept; a rule of the user's may know its norms in its own way."""
    rule = use.rule
    if type(rule).squared_norms is LayerRule.squared_norms:
        return rule.measure(use, names)
    return rule.squared_norms(use, names)


def _total(parts: list[Float[Tensor, " B"]]) -> Float[Tensor, " B"]:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def group_numbers(groups: Sequence[Sequence[nn.Parameter]]) -> dict[nn.Parameter, int]:
    """The number of each parameter's group."""
    return {parameter: number for number, members in enumerate(groups) for parameter in members}


def _gathered(
    uses: Sequence[LayerCall], group_of: Mapping[nn.Parameter, int]
) -> list[tuple[int, list[LayerCall], list[tuple[str, ...]]]]:
    """Parameters of one group that share exactly the same uses: (group, the uses, per parameter its name in each use).

    Squared norms add over parameters, but not over the uses of one parameter.
    """
    # By number: a tensor's hash is a call of its own.
    shares: dict[int, list[tuple[int, str]]] = {}
    groups: dict[int, int] = {}
    for position, use in enumerate(uses):
        for name, parameter in use.parameters.items():
            present = shares.get(id(parameter))
            if present is None:
                shares[id(parameter)] = [(position, name)]
                groups[id(parameter)] = group_of.get(parameter, 0) if group_of else 0
            else:
                present.append((position, name))
    found: dict[tuple[int, tuple[int, ...]], list[tuple[str, ...]]] = defaultdict(list)
    for number, occurrences in shares.items():
        positions = tuple([position for position, _ in occurrences])
        found[groups[number], positions].append(tuple([name for _, name in occurrences]))
    return [(group, [uses[position] for position in key], names) for (group, key), names in found.items()]
