"""Group-wise clipping while the backward pass runs (floor 1, gradients).

A group's factors depend on its own norms alone, so its clipped sum can be taken as soon as the backward pass has left
its last layer, and what was kept of its layers is freed before the layers below are reached.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor, nn

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
        self._group_of = {parameter: number for number, members in enumerate(groups) for parameter in members}
        self._parent = list(range(len(groups)))
        self._pending: Counter[int] = Counter()
        self._arrived: dict[int, list[Use]] = {}
        self._done: set[int] = set()

    def expect(self, use: Use) -> None:
        """A call was made, whose groups are done together; the same call made again by a backward pass is none more."""
        first, *others = {self._root(number) for number in self._numbers(use)}
        for other in others:
            self._parent[other] = first
            self._pending[first] += self._pending.pop(other, 0)
            self._arrived.setdefault(first, []).extend(self._arrived.pop(other, []))
        again = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
        self._pending[first] += not again

    def is_done(self, use: Use) -> bool:
        """Whether the sum of one of the use's groups was taken."""
        return any(number in self._done for number in self._numbers(use))

    def arrive(self, use: Use) -> list[Use]:
        """The uses of the groups that are complete with this one, if any."""
        root = self._root(self._numbers(use)[0])
        self._arrived.setdefault(root, []).append(use)
        self._pending[root] -= 1
        return self._take(root) if self._pending[root] == 0 else []

    def rest(self) -> list[list[Use]]:
        """What arrived of the groups that are not complete: some of their calls were not part of the loss."""
        return [self._take(root) for root in list(self._arrived)]

    def members(self, uses: Sequence[Use]) -> list[int]:
        """The groups that `uses` read, in order."""
        return sorted({number for use in uses for number in self._numbers(use)})

    def _take(self, root: int) -> list[Use]:
        uses = self._arrived.pop(root)
        self._done.update(number for use in uses for number in self._numbers(use))
        return uses

    def _numbers(self, use: Use) -> list[int]:
        return [self._group_of[parameter] for parameter in use.parameters.values()]

    def _root(self, number: int) -> int:
        while self._parent[number] != number:
            number = self._parent[number]
        return number
