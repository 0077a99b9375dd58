"""Which modules are followed through their forward, and what happens at their borders (floor 1, gradients)."""

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from sordino.gradients.bare import BareTap
from sordino.gradients.flow import Mark, Marks
from sordino.gradients.graph import ordinary_uses
from sordino.gradients.hooks import CallBefore, ModuleHook
from sordino.gradients.recording import Recording
from sordino.gradients.sites import Site

__all__ = ["Following", "Knowledge"]

_Args = tuple[object, ...]
_Kwargs = Mapping[str, object]
_Result = TypeVar("_Result")
# What is known of the tensors of one recording, and what stands in for parameters in it.
Knowledge = tuple[Marks, dict[Tensor, str]]


class Following:
    """The open taps of a capture, what is known of tensors, and which modules turned out to be opaque.

    Args:
        model: the captured model.
        refuse: called with a parameter's name when an ordinary gradient reaches what stands in for it.
    """

    def __init__(self, model: nn.Module, refuse: Callable[[str], None]) -> None:
        self._model, self._refuse = model, refuse
        self._open: list[BareTap] = []
        self._marks = Marks(0)
        # With the recording in which it was found out: there it is tried again, as a checkpointed block must be.
        self._opaque: dict[nn.Module, Marks] = {}
        self._seen: set[nn.Module] = set()
        self.own_hooks: set[int] = set()
        self.stand_ins: dict[Tensor, str] = {}

    def begin(self, records: int) -> None:
        """A new recording: nothing is known of any tensor."""
        self._marks = Marks(records)
        self.stand_ins = {}

    @property
    def knowledge(self) -> Knowledge:
        """What belongs to the present recording."""
        return self._marks, self.stand_ins

    @knowledge.setter
    def knowledge(self, known: Knowledge) -> None:
        self._marks, self.stand_ins = known

    def pause(self, change: int) -> None:
        """A module that is captured at its border begins (1) or ends (-1)."""
        self._marks.paused += change

    def quietly(self, work: Callable[..., _Result], *arguments: object) -> _Result:
        """The capture's own work, which is no part of the model."""
        marks = self._marks
        marks.paused += 1
        try:
            return work(*arguments)
        finally:
            marks.paused -= 1

    def may_follow(self, site: Site) -> bool:
        """Whether `site` is followed; otherwise it is run again as a whole, with its other hooks."""
        found = self._opaque.get(site.module, self._marks)
        if found is not self._marks or isinstance(site.module, torch.jit.ScriptModule):
            return False
        hooks = vars(site.module)
        both = [*hooks["_forward_pre_hooks"].items(), *hooks["_forward_hooks"].items()]
        return all(number in self.own_hooks or isinstance(hook, ModuleHook) for number, hook in both)

    def open(
        self,
        site: Site,
        captured: Mapping[str, nn.Parameter],
        recording: Recording,
        anchor: Tensor,
        before: CallBefore,
    ) -> BareTap:
        """Begin to follow a call."""
        if not self._open:
            self._mark_constants()
        for leaf in tree_flatten((before.args, dict(before.kwargs)))[0]:
            if isinstance(leaf, Tensor):
                self._marks.set_input(leaf)
        chosen = {id(value) for value in captured.values()}
        tap = BareTap(
            module=site.module,
            label=site.label,
            parameters=captured,
            recording=recording,
            anchor=anchor,
            detached=[value for _, value in site.parameters() if value.requires_grad and id(value) not in chosen],
            marks=self._marks,
            refuse=self._refuse,
        )
        names = {id(value): name for name, value in captured.items()}
        self.stand_ins.update({leaf: f"{site.label}: {names[id(p)]}" for p, leaf in tap.stand_ins.items()})
        self._open.append(tap)
        tap.__enter__()
        return tap

    def _mark_constants(self) -> None:
        """Buffers, and parameters that are frozen now."""
        for buffer in self._model.buffers():
            self._marks.set(buffer, Mark.CONSTANT)
        for parameter in self._model.parameters():
            if not parameter.requires_grad:
                self._marks.set(parameter, Mark.CONSTANT)

    def close(self, tap: BareTap) -> None:
        """The call has ended."""
        if tap in self._open:
            self._open.remove(tap)

    def finish(self, tap: BareTap, site: Site, before: CallBefore, output: object) -> object | None:
        """The output of a call that was followed to its end; None when it has to be run again as a whole.

        Raises:
            UnsupportedModule: the call changed a buffer.
        """
        passed = tree_map(lambda leaf: self._returned(tap, leaf), output)
        if not tap.opaque and site.module not in self._seen:
            tap.opaque = self._reaches_parameters(tap, passed)
            self._seen.add(site.module)
        tap.opaque = tap.opaque or site.module in self._opaque
        if tap.opaque:
            self._opaque.setdefault(site.module, self._marks)
            for leaf in tap.stand_ins.values():
                self.stand_ins.pop(leaf, None)
            return None
        before.fingerprint.check_buffers(site.module, site.label)
        return passed

    @staticmethod
    def _returned(tap: BareTap, leaf: object) -> object:
        """A parameter that is returned as it is gets one copy per record."""
        if tap.opaque or tap.derived(leaf) is None:
            return leaf
        copy = tap.per_record_argument(cast("Tensor", leaf))
        return leaf if copy is None else copy

    @staticmethod
    def _reaches_parameters(tap: BareTap, output: object) -> bool:
        """Whether a use was not seen (a function of one's own, a compiled extension): looked at once per module."""
        names: dict[Tensor, str] = dict.fromkeys([*tap.stand_ins, *tap.stand_ins.values()], "")
        tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
        return any(ordinary_uses(tensor, names) for tensor in tensors)

    def hand_over(self, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs] | None:
        """Arguments of a module inside a followed one: what was derived from parameters gets one copy per record."""
        for tap in self._open:
            leaves = tree_flatten((args, dict(kwargs)))[0]
            if not tap.opaque and any(tap.derived(leaf) is not None for leaf in leaves):
                args, kwargs = cast(
                    "tuple[_Args, _Kwargs]",
                    tree_map(lambda leaf, tap=tap: self._returned(tap, leaf), (args, dict(kwargs))),
                )
                return args, kwargs
        return None

    def mark_output(self, site: Site, output: object) -> None:
        """Inside a followed module: what a captured one returns has the records first."""
        if not self._open:
            return
        recurrent = isinstance(site.module, nn.RNNBase)
        if site.dim or (site.tapped and not getattr(site.module, "batch_first", False)):
            return
        for leaf in tree_flatten(output)[0][: 1 if recurrent else None]:
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == self._marks.records:
                self._marks.set(leaf, Mark.RECORDS_FIRST)
