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


def shared_squared_norms(uses: list[Use], shares: list[tuple[str, ...]]) -> Float[Tensor, " B"]:
    """Squared norm of each record's summed gradient over parameters that share the same uses.

    Args:
        uses: the uses, at least two.
        shares: for each parameter its name in each use.

    Returns:
        One value per record, in float64.
    """
    total = torch.zeros(uses[0].records, dtype=torch.float64, device=uses[0].saved[0].device)
    together = [names[0] for names in shares if len(set(names)) == 1]
    merged = _merged(uses, together)
    for names in shares:
        if names[0] in together and merged is not None:
            continue
        total += _by_adding(uses, names)
    if merged is not None:
        total += merged.rule.squared_norms(merged, frozenset(together))
    return total


def _merged(uses: list[Use], together: list[str]) -> Use | None:
    if not together or any(use.rule is not uses[0].rule for use in uses):
        return None
    return uses[0].rule.merge(uses, together[0])


def _by_adding(uses: list[Use], names: tuple[str, ...]) -> Float[Tensor, " B"]:
    """Form the summed gradient of a few records at a time."""
    records = uses[0].records
    step = chunk_records(records, uses[0].parameters[names[0]].numel())
    device = uses[0].saved[0].device
    parts = []
    for start in range(0, records, step):
        index = torch.arange(start, min(start + step, records), device=device)
        gradients = [use.rule.per_example(use.select(index), name) for use, name in zip(uses, names, strict=True)]
        parts.append(row_squared_norms(torch.stack(gradients).sum(0)))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=device)
