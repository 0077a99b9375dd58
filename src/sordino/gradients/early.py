"""Norms while the backward pass runs, sums afterwards (floor 1, gradients).

A layer is measured as soon as the backward pass has left it. Where its rule keeps gradients per record, what the layer
saw is freed before those below are reached, instead of after the pass.

Between norm and sum lies the rest of the pass, and code of the user's. So a layer is measured early only if its sum
follows from what was kept, and it is measured again where that has changed.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch._C._autograd import (
    _get_current_graph_task_keep_graph,  # pyright: ignore[reportPrivateUsage]
)

from sordino.gradients.measure import Measured, group_numbers
from sordino.gradients.rules.convolution import ConvolutionRule
from sordino.gradients.rules.linear import LinearRule
from sordino.gradients.rules.parts import PartsRule, direct_rule
from sordino.gradients.rules.rule import LayerRule, Use
from sordino.gradients.rules.transposed import TransposedLinearRule

__all__ = ["Early"]

# Rules whose norms and sums depend on the kept tensors and on the module's settings, never on parameters.
_PURE: tuple[type[LayerRule], ...] = (LinearRule, TransposedLinearRule, PartsRule, ConvolutionRule)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What was measured of one use.

    Args:
        groups: the numbers of its groups.
        measured: in these groups.
        state: what its sum depends on, as it was.
    """

    groups: list[int]
    measured: Measured
    state: object


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
        self._parts: dict[Use, _Part] = {}

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
        is_only = all(self._called[parameter] <= 1 for parameter in parameters)
        if not is_only or not use.records or not _may_wait(use) or _get_current_graph_task_keep_graph():
            return
        groups = sorted({self._group_of.get(parameter, 0) for parameter in parameters})
        places = {parameter: groups.index(self._group_of.get(parameter, 0)) for parameter in parameters}
        measured = Measured.nothing(len(groups), use.records, use.device)
        with self.reading(), torch.no_grad():
            measured.add([use], places)
        self._parts[use] = _Part(groups=groups, measured=measured, state=_state(use))

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
        """Add what was measured in these groups, and holds, to `measured`; the uses that are left."""
        for use, part in list(self._parts.items()):
            grouped = all(group_of.get(each, 0) == self._group_of.get(each, 0) for each in use.parameters.values())
            if not grouped or part.state != _state(use):
                self.take_back(use)
        for part in self._parts.values():
            measured.squares[part.groups] += part.measured.squares
            measured.lacking[part.groups] += part.measured.lacking
            measured.apart[part.groups] += part.measured.apart
        return [use for use in uses if use not in self._parts]


def _may_wait(use: Use) -> bool:
    """Whether the sum follows from what is kept: by a known rule, or as every gradient per record is kept."""
    keeps_gradients = type(use.rule).squared_norms is LayerRule.squared_norms
    return bool(use.saved) and (keeps_gradients or type(use.rule) in _PURE)


def _state(use: Use) -> object:
    """Versions of what is kept, and the module's settings."""
    tensors = (*use.grads, *use.memo.values())
    settings = {key: value for key, value in vars(use.module).items() if isinstance(value, int | float | str | tuple)}
    return [None if tensor is None else tensor._version for tensor in tensors], settings if use.grads else None
