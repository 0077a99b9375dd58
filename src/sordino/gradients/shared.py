"""Norms of parameters with several uses: tied weights, modules called twice (floor 1, gradients).

The gradient of a record is the sum over all uses, so its squared norm has cross terms. Clipping by the uses' own
norms would let a record contribute up to the number of uses times the bound.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from sordino.gradients.numerics import row_squared_norms
from sordino.gradients.rules.cost import chunk_records
from sordino.gradients.rules.rule import Use

__all__ = ["shared_squared_norms"]


# A squared norm this far below the sum of its parts has cancelled and is recomputed.
_CANCELLED = 0.05


def shared_squared_norms(uses: list[Use], shares: list[tuple[str, ...]]) -> Float[Tensor, " B"]:
    """Squared norm of each record's summed gradient over parameters that share the same uses.

    Args:
        uses: the uses, at least two.
        shares: for each parameter its name in each use.

    Returns:
        One value per record, in float64.
    """
    if all(len(set(names)) == 1 for names in shares):
        together = frozenset(names[0] for names in shares)
        merged = _merged(uses, together)
        if len(merged) == 1:
            return merged[0].rule.squared_norms(merged[0], together)
    total = torch.zeros(uses[0].records, dtype=torch.float64, device=_device(uses))
    for names in shares:
        total += _of_one_parameter(uses, names)
    return total


def _of_one_parameter(uses: list[Use], names: tuple[str, ...]) -> Float[Tensor, " B"]:
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
    parts = sum(use.rule.squared_norms(use, frozenset([names[0]])).double() for use in merged)
    assert isinstance(parts, Tensor)
    total = parts + 2 * crossed
    sound = total > _CANCELLED * parts
    if not bool(sound.all()):
        index = (~sound).nonzero().flatten()
        total[index] = _by_adding([use.select(index) for use in uses], names)
    return total + 4 * torch.finfo(torch.float32).eps * parts


def _merged(uses: list[Use], names: frozenset[str]) -> list[Use]:
    """One use per rule where the rule can merge; the uses themselves where it can't."""
    by_rule: dict[int, list[Use]] = {}
    for use in uses:
        by_rule.setdefault(id(use.rule), []).append(use)
    result: list[Use] = []
    for group in by_rule.values():
        one = group[0] if len(group) == 1 else group[0].rule.merge(group, names)
        result += group if one is None else [one]
    return result


def _device(uses: list[Use]) -> torch.device:
    return next(iter(uses[0].parameters.values())).device


def _by_adding(uses: list[Use], names: tuple[str, ...]) -> Float[Tensor, " B"]:
    """Form the summed gradient of a few records at a time."""
    records = uses[0].records
    step = chunk_records(records, uses[0].parameters[names[0]].numel())
    device = _device(uses)
    parts = []
    for start in range(0, records, step):
        index = torch.arange(start, min(start + step, records), device=device)
        gradients = [use.rule.per_example(use.select(index), name) for use, name in zip(uses, names, strict=True)]
        parts.append(row_squared_norms(torch.stack(gradients).sum(0)))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=device)
