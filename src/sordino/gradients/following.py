"""Which modules are followed through their forward, and what happens at their borders (floor 1, gradients)."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sordino.gradients.bare import MARK, BareTap, FollowedCall
from sordino.gradients.flow import Mark, Marks
from sordino.gradients.graph import ordinary_uses
from sordino.gradients.hooks import CallBefore, ModuleHook, in_checkpoint, in_compiled
from sordino.gradients.purity import held_attributes
from sordino.gradients.recording import Recording
from sordino.gradients.records import layout_of
from sordino.gradients.rules.derived import Derived
from sordino.gradients.sites import Site

__all__ = ["Following", "Knowledge"]

_Args = tuple[object, ...]
_Kwargs = Mapping[str, object]
_Result = TypeVar("_Result")


@dataclass(eq=False, kw_only=True)
class Knowledge:
    """What belongs to one recording.

    Args:
        marks: what is known of its tensors.
        stand_ins: what stands in for parameters, with a name for messages.
    """

    marks: Marks
    stand_ins: dict[Tensor, str] = field(default_factory=dict)


class Following:
    """The open tap of a capture, what is known of tensors, and which modules turned out to be opaque.

    The whole model is followed as long as something is computed without records in one module and read in another:
    rows of a table of positions, prompts, learned queries. Whether that happens is looked at in recordings 1, 2, 4,
    8, …; otherwise only modules that read parameters of their own are followed.

    Args:
        model: the captured model.
        names: the managed parameters.
        refuse: called with a parameter's name when an ordinary gradient reaches what stands in for it.
    """

    def __init__(self, model: nn.Module, names: Mapping[nn.Parameter, str], refuse: Callable[[str], None]) -> None:
        self._model, self._names, self._refuse = model, names, refuse
        self._parameters = {id(parameter): parameter for parameter in model.parameters()}
        self._owners = {name: parameter for parameter, name in names.items()}
        self._tap: BareTap | None = None
        self.knowledge = Knowledge(marks=Marks(0))
        # With the recording in which it was found out: there it is tried again, as a checkpointed block must be.
        self._opaque: dict[nn.Module, Marks] = {}
        self._seen: set[nn.Module] = set()
        self._recordings = 0
        self._is_needed = False
        # Modules that were called with a row, or rows, for no record in particular.
        self._without_records: set[nn.Module] = set()
        # Inputs of the model, by number, that once had another first dimension than the records'.
        self._other_inputs: set[int] = set()
        self._verified: set[object] = set()
        self._constants = [v for held in held_attributes(model).values() for v in tree_flatten(held)[0]]
        self.own_hooks: set[int] = set()

    @property
    def marks(self) -> Marks:
        """What is known of tensors."""
        return self.knowledge.marks

    @property
    def stand_ins(self) -> dict[Tensor, str]:
        """What stands in for parameters in this recording, with a name for messages."""
        return self.knowledge.stand_ins

    def begin(self, records: int) -> None:
        """A new recording: nothing is known of any tensor."""
        self.knowledge = Knowledge(marks=Marks(records))
        self._recordings += 1

    def pause(self, change: int) -> None:
        """A module that is captured at its border begins (1) or ends (-1)."""
        self.marks.paused += change

    def quietly(self, work: Callable[..., _Result], *arguments: object) -> _Result:
        """The capture's own work, which is no part of the model."""
        marks = self.marks
        marks.paused += 1
        try:
            return work(*arguments)
        finally:
            marks.paused -= 1

    # --- what is followed ----------------------------------------------------------------------------------------

    def may_follow(self, site: Site) -> bool:
        """Whether `site` is followed; otherwise it is run again as a whole, with its other hooks."""
        if self.is_opaque(site) or isinstance(site.module, torch.jit.ScriptModule):
            return False
        hooks = vars(site.module)
        both = [*hooks["_forward_pre_hooks"].items(), *hooks["_forward_hooks"].items()]
        return all(number in self.own_hooks or isinstance(hook, ModuleHook) for number, hook in both)

    def is_opaque(self, site: Site) -> bool:
        """Whether `site` was found to be opaque in an earlier recording."""
        return self._opaque.get(site.module, self.marks) is not self.marks

    @property
    def is_discarding(self) -> bool:
        """Whether the call in progress will be made once more."""
        return self._tap is not None and self._tap.is_discarding

    def watches(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        """Whether the whole model is followed in this recording.

        A model that is called without tensors (on texts) makes those of the records by itself.
        """
        count = self._recordings
        if in_compiled() or not any(isinstance(leaf, Tensor) for leaf in tree_flatten((args, dict(kwargs)))[0]):
            return False
        return self._is_needed or count & (count - 1) == 0

    def need(self) -> None:
        """Follow the whole model from the next recording on."""
        self._is_needed = True

    def open(self, site: Site, recording: Recording, anchor: Tensor, before: CallBefore) -> FollowedCall:
        """Begin to follow a call."""
        whole = site.module is self._model
        inputs = [leaf for leaf in tree_flatten((before.args, dict(before.kwargs)))[0] if isinstance(leaf, Tensor)]
        if self._tap is None:
            self._mark_constants()
            tap = BareTap(
                parameters=self._parameters,
                names=self._names,
                owners=self._owners,
                recording=recording,
                anchor=anchor,
                marks=self.marks,
                stand_ins=self.stand_ins,
                refuse=self._refuse,
                verified=self._verified,
            )
        else:
            tap = self._tap
        for number, leaf in enumerate(inputs):
            if whole:
                self._mark_input(number, leaf)
            else:
                if leaf.dim() and leaf.shape[0] != 1 and tap.calls and self.marks.record_free(leaf):
                    # Seen from this module alone, its rows could be taken for records.
                    self.need()
                if tap.derived(leaf) is None:
                    self.marks.set_input(leaf)
        around = tap.calls[-1] if tap.calls else None
        checkpointed = recording.is_rehearsed or in_checkpoint()
        call = FollowedCall(site=site, outermost=self._tap is None, checkpointed=checkpointed, around=around)
        tap.calls.append(call)
        if self._tap is None:
            self._tap = tap
            tap.__enter__()
        return call

    def _mark_input(self, number: int, leaf: Tensor) -> None:
        records = self.marks.records
        if leaf.dim() and leaf.shape[0] != records:
            self._other_inputs.add(number)
        if number not in self._other_inputs or (leaf.dim() and leaf.shape[0] != records):
            self.marks.set_input(leaf)

    def _mark_constants(self) -> None:
        """Buffers, parameters that are frozen now, and what attributes held when the capture began."""
        for tensor in (*self._model.buffers(), *self._constants):
            if isinstance(tensor, Tensor) and not tensor.requires_grad:
                self.marks.set(tensor, Mark.CONSTANT)
        for parameter in self._model.parameters():
            if not parameter.requires_grad:
                self.marks.set(parameter, Mark.CONSTANT)

    # --- where a call ends ---------------------------------------------------------------------------------------

    def leave(self, call: FollowedCall) -> None:
        """The call has ended; called for every call that was opened."""
        tap = self._tap
        if tap is None or call not in tap.calls:
            return
        while tap.calls.pop() is not call:
            pass
        tap.ended = call
        if call.outermost:
            tap.__exit__(None, None, None)
            self._tap, call.tap = None, tap
        else:
            call.tap = tap

    def finish(self, call: FollowedCall, before: CallBefore, output: object) -> object | None:
        """The output of a call that was followed to its end; None when it has to be made again as a whole.

        Raises:
            UnsupportedModule: the call changed a buffer.
        """
        tap, module = call.tap, call.site.module
        assert tap is not None
        if tap.is_discarding:
            return output
        passed = output
        inside = bool(tap.calls) and call.checkpointed == tap.calls[-1].checkpointed
        if not call.is_opaque:
            if inside:
                self._is_needed = self._is_needed or any(
                    tap.derived(leaf) is not None for leaf in tree_flatten(output)[0]
                )
            else:
                passed = tree_map(lambda leaf: self._at_the_border(tap, call, leaf), output)
        if not call.is_opaque and module not in self._seen:
            self._look_for_others(tap, call, passed)
            self._seen.add(module)
            if tap.is_discarding:
                return output
        call.is_opaque = call.is_opaque or module in self._opaque
        if module is self._model:
            self._is_needed = self._is_needed or tap.crossed
        if call.is_opaque:
            self._opaque.setdefault(module, self.marks)
            tap.forget(call)
            return None
        before.fingerprint.check_buffers(module, call.site.label)
        return passed

    def _at_the_border(self, tap: BareTap, call: FollowedCall, leaf: object) -> object:
        """What was derived gets one copy per record, where it leaves what is followed."""
        derived = tap.derived(leaf)
        if call.is_opaque or derived is None:
            return leaf
        copy = tap.per_record_argument(cast("Tensor", leaf), 0)
        if copy is None and (call.site.module is not self._model or derived.tensor.dim()):
            # A number that the model returns stays as it is: a loss that reads it sends it an ordinary gradient.
            call.is_opaque = True
        return leaf if copy is None else copy

    def _look_for_others(self, tap: BareTap, call: FollowedCall, output: object) -> None:
        """Whether a use was not seen (a function of one's own, a compiled extension): looked at once per module."""
        names: dict[Tensor, str] = {**{p: n for p, n in self._names.items() if p.requires_grad}, **self.stand_ins}
        tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
        reached = {name for t in tensors if tap.derived(t) is None for name in ordinary_uses(t, names)}
        for name in reached:
            scope = tap.scope_of(self._owners[name], call)
            if scope is not None:
                scope.is_opaque = True

    # --- modules inside a followed one -----------------------------------------------------------------------------

    def enter(self, site: Site, args: _Args, kwargs: _Kwargs) -> tuple[bool, tuple[_Args, _Kwargs] | None]:
        """What becomes of a call inside a followed one.

        Returns:
            Whether it has nothing to do with records, so that what it computes is derived; and its arguments, where
            what was derived got one copy per record.
        """
        tap = self._tap
        if tap is None or tap.is_discarding:
            return False, None
        if site.rule is None and not site.tapped and self.may_follow(site):
            return False, None
        leaves = tree_flatten((args, dict(kwargs)))[0]
        layout = layout_of(site.module, site.label, self.marks.records)
        dims = [site.dim if site.rule else layout.input_dim(place) for place in layout.places(args, dict(kwargs))]
        checkpointed = tap.is_in_other_checkpoint()
        derived = [isinstance(leaf, Tensor) and tap.derived(leaf) is not None for leaf in leaves]
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not tensors or not (any(derived) or site.rule is not None):
            return False, None
        whole = site.rule is None and not site.tapped
        known = site.module in self._without_records
        chosen: list[int] = []
        for i in tensors:
            if derived[i]:
                repeated = tap.is_repeated(cast("Tensor", leaves[i]), dims[i] or 0)
                if whole or checkpointed or (repeated and not known):
                    chosen.append(i)
        alone = all(
            derived[i] or self._has_no_records(cast("Tensor", leaves[i]), dims[i] or 0, known=known) for i in tensors
        )
        if alone and not chosen:
            if checkpointed:
                # Made again in the backward pass, where nobody follows: one row is expanded as outside.
                return False, None
            self._remember(site, tap)
            return True, None
        chosen = chosen if alone else [i for i in tensors if derived[i] and dims[i] is not None]
        changed = list(leaves)
        for i in chosen:
            copy = tap.per_record_argument(cast("Tensor", leaves[i]), dims[i] or 0)
            if copy is None:
                tap.give_up(cast("Derived", tap.derived(leaves[i])).scope)
                return False, None
            changed[i] = copy
        if not chosen:
            return False, None
        return False, cast("tuple[_Args, _Kwargs]", tree_unflatten(changed, tree_flatten((args, dict(kwargs)))[1]))

    def _has_no_records(self, tensor: Tensor, dim: int, *, known: bool) -> bool:
        """Whether an input of a captured module is the same for every record.

        One of which nothing is known has records where its size says so, unless the module was called without before.
        """
        if not self.marks.record_free(tensor):
            return False
        sized = tensor.dim() > dim and tensor.shape[dim] == self.marks.records
        return self.marks.constant(tensor) or known or not sized

    def _remember(self, site: Site, tap: BareTap) -> None:
        if self.marks.records > 1:
            self._without_records.add(site.module)
        if tap.calls and tap.calls[0].site.module is self._model:
            self._is_needed = True

    def mark_output(self, site: Site, output: object) -> None:
        """Inside a followed module: what a captured one returns has the records first."""
        if self._tap is None:
            return
        recurrent = isinstance(site.module, nn.RNNBase)
        if site.dim or (site.tapped and not getattr(site.module, "batch_first", False)):
            return
        for leaf in tree_flatten(output)[0][: 1 if recurrent else None]:
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == self.marks.records:
                self.marks.set(leaf, Mark.RECORDS_FIRST)


def is_kept_elsewhere(call: FollowedCall) -> bool:
    """Whether what a call computed the first time, and was thrown away, is still held by somebody."""

    def alive() -> bool:
        edges = (torch.autograd.graph.get_gradient_edge(leaf).node for leaf in call.leaves)
        return any(MARK in cast("dict[str, bool]", node.metadata) for node in edges)

    if alive():
        gc.collect()
    return alive()
