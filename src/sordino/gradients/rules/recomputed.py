"""Rules that form gradients record by record, twice where they can't be kept (floor 1, gradients)."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from sordino.gradients.numerics import row_squared_norms
from sordino.gradients.rules.cost import CHUNK_ENTRIES, chunk_records
from sordino.gradients.rules.rule import LayerRule, Use, weigh

__all__ = ["GradientsRule"]


class GradientsRule(LayerRule):
    """Base of rules that know the gradients of all wanted parameters at once; a subclass needs `gradients`.

    Gradients are kept between norms and sums where they are small enough. Otherwise they are formed twice, and the
    second ones are shrunk to the norms of the first.
    """

    def gradients(self, use: Use, names: Sequence[str]) -> dict[str, Float[Tensor, "B *shape"]]:
        """The gradient of each record, of which there is at least one, for the parameters `names`."""
        raise NotImplementedError

    def squared_norms(self, use: Use, names: Iterable[str]) -> Float[Tensor, " B"]:
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

    def per_example(self, use: Use, name: str) -> Float[Tensor, "B *shape"]:
        """The gradient of each record for parameter `name`."""
        if use.records == 0:
            return use.parameters[name].new_zeros((0, *use.parameters[name].shape))
        return self.gradients(use, [name])[name]

    def weighted_sums(
        self, use: Use, names: Iterable[str], weights: Float[Tensor, " B"]
    ) -> dict[str, Float[Tensor, "*shape"]]:
        """From the kept gradients where there are any, otherwise from gradients that are formed once more."""
        wanted = sorted(names)
        sums = {name: weigh(use.memo[name], weights) for name in wanted if name in use.memo}
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
                sums[name] = sums[name] + weigh(gradients[name], chosen * kept)
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


def _chunks(use: Use, entries: int) -> Iterable[Use]:
    step = chunk_records(use.records, entries)
    if 0 < use.records <= step:
        yield use
        return
    for start in range(0, use.records, step):
        yield use.select(torch.arange(start, min(start + step, use.records), device=use.device))
