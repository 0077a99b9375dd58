"""Norms while the backward pass runs, sums afterwards (floor 1, gradients).

A layer is measured as soon as the backward pass has left it. Where its rule keeps gradients per record, what the layer
saw is freed before those below are reached, instead of after the pass.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch._C._autograd import (
    _get_current_graph_task_keep_graph,  # pyright: ignore[reportPrivateUsage]
)

from sordino.gradients.measure import Measured, group_numbers
from sordino.gradients.rules.parts import direct_rule
from sordino.gradients.rules.rule import Use

__all__ = ["Early"]


class Early:
    """What was measured of a chunk before all of it had arrived.

    A use is measured alone when its parameters were called once and its graph is not run again. Where another use of a
    parameter turns up all the same, the first is taken back: the norm of their sum has cross terms.

    Args:
        groups: parameters that will be measured together, each in one group.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        # What surrounds the reading of norms.
        self.reading: Callable[[], AbstractContextManager[None]] = nullcontext
        self._group_of = group_numbers(groups)
        self._called: Counter[nn.Parameter] = Counter()
        self._arrived: set[nn.Parameter] = set()
        self._parts: dict[Use, tuple[list[int], Measured]] = {}

    def expect(self, use: Use) -> None:
        """A call was made; those that a backward pass makes again (checkpointing) are none more."""
        if torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateUsage]
            self._called.update(use.parameters.values())

    def arrive(self, use: Use) -> None:
        """Measure a use that arrived for the first time, if nothing else can be added to it."""
        parameters = set(use.parameters.values())
        is_first = self._arrived.isdisjoint(parameters)
        self._arrived |= parameters
        if not is_first:
            for other in [other for other in self._parts if not parameters.isdisjoint(other.parameters.values())]:
                self.take_back(other)
            return
        is_only = use.saved and all(self._called[parameter] <= 1 for parameter in parameters)
        if not is_only or not use.records or _get_current_graph_task_keep_graph():
            return
        numbers = sorted({self._group_of.get(parameter, 0) for parameter in parameters})
        places = {parameter: numbers.index(self._group_of.get(parameter, 0)) for parameter in parameters}
        part = Measured.nothing(len(numbers), use.records, use.device)
        with self.reading(), torch.no_grad():
            part.add([use], places)
        self._parts[use] = numbers, part

    def take_back(self, use: Use) -> None:
        """Forget what was measured of `use`; gradients per record that were kept for it stay, as what is read."""
        if self._parts.pop(use, None) is None:
            return
        if not use.grads:
            names = tuple(use.parameters)
            use.rule, use.context, use.grads = direct_rule, names, tuple(use.memo[name] for name in names)
        use.memo = {}

    def take_all_back(self) -> None:
        """`take_back` of everything."""
        for use in list(self._parts):
            self.take_back(use)

    def add_to(self, measured: Measured, uses: Sequence[Use], group_of: Mapping[nn.Parameter, int]) -> list[Use]:
        """Add what was measured in these groups to `measured`; the uses that are left."""
        for use in [use for use in self._parts if not self._is_grouped(use, group_of)]:
            self.take_back(use)
        for numbers, part in self._parts.values():
            measured.squares[numbers] += part.squares
            measured.lacking[numbers] += part.lacking
            measured.apart[numbers] += part.apart
        return [use for use in uses if use not in self._parts]

    def _is_grouped(self, use: Use, group_of: Mapping[nn.Parameter, int]) -> bool:
        return all(group_of.get(each, 0) == self._group_of.get(each, 0) for each in use.parameters.values())
