"""Group-wise clipping while the backward pass runs (floor 1, gradients).

A group's factors depend on its own norms alone, so its clipped sum can be taken as soon as the backward pass has left
its last layer, and what was kept of its layers is freed before the layers below are reached.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from jaxtyping import Float
from torch import Tensor, nn

from sordino.gradients.clusters import Clusters
from sordino.gradients.measure import group_numbers
from sordino.gradients.rules.rule import Use

__all__ = ["Blocks", "GroupFactors"]

# (squared bounds [g, B], the numbers of these groups) ↦ one factor per group and record.
GroupFactors = Callable[[Float[Tensor, "g B"], Sequence[int]], Float[Tensor, "g B"]]


class Blocks:
    """Which groups of parameters wait for which uses, and the clipped sums of those that are done.

    Groups that one use reads together are done together. A use that comes after its group was done is refused by the
    recording: its norm would be missing.

    Args:
        groups: parameters that are clipped together, each in one group.
        factors: clips.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]], factors: GroupFactors) -> None:
        self.groups, self.factors = groups, factors
        self.sums: dict[nn.Parameter, Tensor] = {}
        # What surrounds the reading of norms and sums.
        self.reading: Callable[[], AbstractContextManager[None]] = nullcontext
        self._group_of = group_numbers(groups)
        self.clusters = Clusters(self._numbers)

    def members(self, uses: Sequence[Use]) -> list[int]:
        """The groups that `uses` read, in order."""
        return sorted({number for use in uses for number in self._numbers(use)})

    def _numbers(self, use: Use) -> list[int]:
        return [self._group_of[parameter] for parameter in use.parameters.values()]
