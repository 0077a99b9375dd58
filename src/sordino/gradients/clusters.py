"""Which uses must be read together, and whether all of them have arrived (floor 1, gradients).

A use is a call of a module. Uses that share a key (a group of parameters, or a parameter) form a cluster, which is
complete when the backward pass has left the last of its calls.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable

import torch

from sordino.gradients.rules.rule import Use

__all__ = ["Clusters"]


class Clusters:
    """Calls that were made and uses that arrived, cluster by cluster.

    Calls that a backward pass makes again (checkpointing) are none more. Those of reentrant checkpoints are only made
    there, and their number is not known ahead.

    Args:
        keys: what a use is read together by, at least one.
        held: keys whose clusters are not complete before the end; may grow between backward passes.
    """

    def __init__(self, keys: Callable[[Use], Iterable[Hashable]], held: Collection[Hashable] = ()) -> None:
        self._keys, self._held = keys, held
        self._parent: dict[Hashable, Hashable] = {}
        self._counted: set[Use] = set()
        self._expected: Counter[Hashable] = Counter()
        self.restart()

    def restart(self) -> None:
        """Another backward pass through the same calls."""
        self._came: Counter[Hashable] = Counter()
        self._arrived: dict[Hashable, list[Use]] = {}
        self._done: set[Hashable] = set()

    def expect(self, use: Use) -> None:
        """A call was made."""
        root = self._joined(use)
        if torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateUsage]
            self._counted.add(use)
            self._expected[root] += 1

    def is_done(self, use: Use) -> bool:
        """Whether one of the use's keys was in a cluster that was complete."""
        return any(key in self._done for key in self._keys(use))

    def arrive(self, use: Use, *, alone: bool = False) -> list[Use]:
        """The uses of the cluster that is complete with this one, if any.

        Args:
            use: what arrived.
            alone: whether a call that only the backward pass made is taken to be the last of its cluster.
        """
        root = self._joined(use)
        self._arrived.setdefault(root, []).append(use)
        if use in self._counted:
            self._came[root] += 1
        elif not alone:
            return []
        is_complete = self._came[root] == self._expected[root] and all(
            self._root(key) is not root for key in self._held
        )
        return self._take(root) if is_complete else []

    def rest(self) -> list[list[Use]]:
        """What arrived of the clusters that are not complete: some of their calls were not part of the loss."""
        return [self._take(root) for root in list(self._arrived)]

    def _take(self, root: Hashable) -> list[Use]:
        uses = self._arrived.pop(root)
        self._done.update(key for use in uses for key in self._keys(use))
        return uses

    def _joined(self, use: Use) -> Hashable:
        """The name of the use's cluster, after all its keys were joined."""
        first, *others = dict.fromkeys(self._root(key) for key in self._keys(use))
        for other in others:
            self._parent[other] = first
            for counter in (self._expected, self._came):
                counter[first] += counter.pop(other, 0)
            if other in self._arrived:
                self._arrived.setdefault(first, []).extend(self._arrived.pop(other))
        return first

    def _root(self, key: Hashable) -> Hashable:
        while (parent := self._parent.get(key)) is not None:
            key = parent
        return key
