"""The user's loop, followed from batch to step: which losses were checked, what the module stored, whether a
gradient came from anywhere else.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.overrides import _get_current_function_mode_stack as _function_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack as _dispatch_modes,  # pyright: ignore[reportPrivateUsage]
)

from sordino.errors import CoupledRecords, NonPrivateStep
from sordino.gradients import Recorder
from sordino.gradients.numerics import storage_number
from sordino.training.generators import closure_values, instance_values
from sordino.training.loss_tracing.carried import FIRST_BATCHES, CrossBatchState, compares_values
from sordino.training.loss_tracing.criterion import Criterion, LoopProbe, OutputGradientCheck, tensors_within
from sordino.training.loss_tracing.trace import OperationTrace, untraceable_loss_error
from sordino.training.loss_tracing.traced_tensor import TaintedFloat, TaintedInt, TracedTensor, not_noting, untainted
from sordino.training.probing.probe_runner import external_parameter_error, graph_bypassing_outputs, graph_leaves
from sordino.training.probing.snapshots import ModuleSnapshot, exports_by_hooks, own_attributes, tensor_attributes
from sordino.training.probing.torch_modes import Args, PublicDivisor
from sordino.training.pytree import tensors_in, tree_leaves

# ----------------------------------------------------------------------------------------------------------------------
# Losses that were checked, by their form, and when one has to be checked again.
#
# A form leaves out the values of constants. ``loss + beta * penalty`` is checked with the beta of its first batch;
# where that was 0, nothing was seen of the penalty.
# ----------------------------------------------------------------------------------------------------------------------


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(getattr(torch_module, f"_global{name}") for name in _HOOKS)
# Objects of these packages in a module's attributes are the loop's, not the model's.
_OF_LOOPS = frozenset(
    {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "sordino", "logging"}
)
# How deep objects in attributes are looked into, and how many values of each.
_DEPTH, _FORMS_MOST = 4, 64
_FIRST_AGAIN, _FACTOR = 16, 4


def is_recheck_due(times: int) -> bool:
    """Whether what came this many times is checked again: at 16, 64, 256, …"""
    while times > _FIRST_AGAIN and times % _FACTOR == 0:
        times //= _FACTOR
    return times == _FIRST_AGAIN


def order_of_magnitude(number: float) -> Hashable:
    """Sign and power of two of a number; zero is by itself."""
    if isinstance(number, int) and number:
        return math.copysign(1.0, number), number.bit_length()  # It may be too large for a float.
    if number == 0 or not math.isfinite(number):
        return str(abs(number))
    return math.copysign(1.0, number), math.frexp(number)[1]


NumberMark = Callable[[float], Hashable]
"""What counts of a number in the marks of a module."""


@dataclass(frozen=True, kw_only=True)
class ModuleMarks:
    """What a module does besides its parameters and buffers, roughly.

    Args:
        modes: which parts are in training.
        rest: kinds of its parts, frozen parameters, hooks, replaced methods, plain attributes and what they hold.
    """

    modes: tuple[bool, ...]
    rest: tuple[Hashable, ...]


class _Itself:
    """An object that is known by its identity, and kept, so that no other takes its place."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def module_state_key(module: nn.Module, number: NumberMark = order_of_magnitude) -> ModuleMarks:
    """The marks of a module at this moment; two states that do different things have different ones, as far as known.

    Tensors count not at all: those of a batch are known by their notes.

    Args:
        module: the root module.
        number: what counts of a number.
    """
    marks: list[Hashable] = [parameter.requires_grad for parameter in module.parameters()]
    # A mode of torch that the loop has entered sees every call inside the module.
    marks += [_Itself(mode) for mode in (*_function_modes(), *_dispatch_modes()) if _is_users(mode)]
    seen: set[int] = set()
    for hooks in _GLOBAL_HOOKS:
        _add_hooks(hooks, marks, seen, number)
    modes: list[bool] = []
    for part in module.modules():
        kind, attributes = type(part), vars(part)
        modes.append(part.training)
        marks.append(kind)
        _add(getattr(kind, "forward", None), marks, seen, _DEPTH, number)
        for name in _HOOKS:
            if attributes.get(name):
                _add_hooks(attributes[name], marks, seen, number)
        for name, value in own_attributes(part):
            marks.append(name)
            _add(value, marks, seen, _DEPTH, number)
    return ModuleMarks(modes=tuple(modes), rest=tuple(marks))


def _is_users(mode: object) -> bool:
    """Whether a mode is neither torch's nor ours."""
    return type(mode).__module__.partition(".")[0] not in {"torch", "sordino"}


def _add_hooks(hooks: Mapping[object, object], marks: list[Hashable], seen: set[int], number: NumberMark) -> None:
    for hook in hooks.values():
        if not str(getattr(hook, "__module__", "")).startswith("sordino."):
            _add(hook, marks, seen, _DEPTH, number)


_NAMED = (bool, str, bytes, Enum, torch.dtype, torch.device, type)
_PLAIN_KINDS = frozenset({bool, str, type(None)})


def _add(value: object, marks: list[Hashable], seen: set[int], depth: int, number: NumberMark) -> None:
    """Append what is known of a value, and of what it holds."""
    if type(value) in _PLAIN_KINDS or isinstance(value, _NAMED):
        marks.append(value)
    elif isinstance(value, FunctionType):
        marks.append(_Itself(value))
        _add_all([*closure_values(value), *(value.__defaults__ or ())], id(value), marks, seen, depth, number)
    elif isinstance(value, (int, float)):
        marks.append(number(untainted(value)))  # pyright: ignore[reportArgumentType]
    elif isinstance(value, (Tensor, nn.Module, ModuleType)):
        marks.append(type(value))
    elif isinstance(value, (list, tuple, set, frozenset, dict)):
        marks += (type(value), number(len(value)))
        held = itertools.chain(value, value.values()) if isinstance(value, dict) else value
        _add_all(held, id(value), marks, seen, depth, number)
    elif isinstance(value, np.ndarray):
        marks.append(value.tobytes() if value.size <= _FORMS_MOST and value.dtype != object else value.shape)
    elif isinstance(value, MethodType):
        marks.append(_Itself(value.__func__))
        _add(value.__self__, marks, seen, depth, number)
    elif isinstance(value, functools.partial):
        marks.append(_Itself(value))
        _add_all([value.func, *value.args, *value.keywords.values()], id(value), marks, seen, depth, number)
    else:
        marks.append(type(value))
        if callable(value):
            marks.append(_Itself(value))
        if type(value).__module__.partition(".")[0] not in _OF_LOOPS:
            _add_all(instance_values(value), id(value), marks, seen, depth, number)


def _add_all(
    values: Iterable[object], owner: int, marks: list[Hashable], seen: set[int], depth: int, number: NumberMark
) -> None:
    if depth and owner not in seen:
        seen.add(owner)
        for value in itertools.islice(values, _FORMS_MOST):
            _add(value, marks, seen, depth - 1, number)


@dataclass(eq=False, kw_only=True)
class CheckedLossForm:
    """What is known of a loss of one form.

    Args:
        late: constants behind a call by which values left the trace; they must stay.
        numbers: all constants in the batch before.
        records: number of records in the batch before.
        shapes: those of tensors from outside that were taken as constants though they may have a row a record.

    Attributes:
        times: how many times it came.
        has_grown: whether a constant was of a new size in the batch that came last.
    """

    late: tuple[float, ...]
    numbers: tuple[float, ...]
    records: int
    shapes: Hashable = None
    _magnitudes: list[set[Hashable]] = field(init=False)
    _in_step: list[int] = field(init=False)
    times: int = field(init=False, default=1)
    has_grown: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._magnitudes = [{order_of_magnitude(number)} for number in self.numbers]
        self._in_step = [0] * len(self.numbers)

    def meet(self, late: tuple[float, ...], numbers: tuple[float, ...], records: int) -> bool:
        """Whether a loss of this form has to be checked again in the batch at hand.

        Raises:
            CoupledRecords: its constants follow the records.
        """
        if late != self.late:
            raise CoupledRecords(
                "loss must keep its constants from batch to batch when values of the batch were read into numpy or "
                "lists before it, got another one: it may have been computed from records. Stay with tensors up to the "
                "loss, and compute metrics after it."
            )
        self.times += 1
        self.has_grown = False
        if len(numbers) != len(self.numbers):
            self.numbers, self._magnitudes = numbers, [set() for _ in numbers]
            self._in_step = [0] * len(numbers)
        elif records != self.records:
            self._refuse_counts(numbers, records)
        for number, known in zip(numbers, self._magnitudes, strict=True):
            size = order_of_magnitude(number)
            self.has_grown = self.has_grown or size not in known
            known.add(size)
        self.numbers, self.records = numbers, records
        return self.has_grown or is_recheck_due(self.times)

    def fits(self, shapes: Hashable) -> bool:
        """Whether what was checked as a constant may be one in the batch at hand: it has the same shape."""
        return self.shapes is None or self.shapes == shapes

    def _refuse_counts(self, numbers: Sequence[float], records: int) -> None:
        """A constant that changes as the number of records does was made from it (``len(batch)``)."""
        for index, (old, new) in enumerate(zip(self.numbers, numbers, strict=True)):
            exact = (old, new) in {(self.records, records), (1 / self.records, 1 / records)}
            one, other = old * records, new * self.records
            inverse = math.isclose(old * self.records, new * records, rel_tol=1e-9)
            follows = old != new and (exact or inverse or math.isclose(one, other, rel_tol=1e-9))
            self._in_step[index] = self._in_step[index] + 1 if follows else 0
            if follows and (exact or self._in_step[index] > 1):
                raise CoupledRecords(
                    "loss must not use the number of records as a Python number, got a constant that follows it: one "
                    "record more would change what all others do. Take .mean() over records with "
                    "loss_reduction='mean', or divide by x.size(0), which is understood; len(x) is not."
                )


# ----------------------------------------------------------------------------------------------------------------------
# The user's loop, followed from batch to step: which losses were checked, what the module stored, whether a gradient
# came from anywhere else.
# ----------------------------------------------------------------------------------------------------------------------


# So many states of the module are remembered.
_MOST = 1024


class _NotRead(TorchFunctionMode):
    """Inside, no function of torch may be given what lies in the memory of one of `tensors`, or a number of a batch."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._numbers = set(map(storage_number, tensors))

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Args = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            is_read = any(map(self._is_private, tree_leaves((args, dict(kwargs or {})))))
        if is_read:
            raise CoupledRecords(
                "module must read no attribute that the loop set to values of a batch, got one: what is kept from "
                "records to later steps is without noise. Use a public constant, or compute it on public records."
            )
        return func(*args, **(kwargs or {}))

    def _is_private(self, value: object) -> bool:
        if isinstance(value, Tensor):
            return value.layout is torch.strided and storage_number(value) in self._numbers
        return isinstance(value, (TaintedFloat, TaintedInt))


class ForwardMonitor:
    """A training forward of the root module: mean losses have a public divisor, and nothing is stored.

    Args:
        module: the root.
        values: whether to compare values, or only what torch's own counts tell.
        is_private: whether mean losses are of private records.
        written: attributes with values of a batch, which may not be read.
    """

    def __init__(
        self, module: nn.Module, *, values: bool, is_private: bool = True, written: Sequence[object] = ()
    ) -> None:
        self._state = ModuleSnapshot(module, values=values)
        self._stack = ExitStack()
        if is_private:
            self._stack.enter_context(PublicDivisor())
        if written:
            self._stack.enter_context(_NotRead([one for one in written if isinstance(one, Tensor)]))

    def close(self) -> None:
        """End the watch without looking: the forward pass failed."""
        self._stack.close()

    def end(self) -> None:
        """End the watch.

        Raises:
            CoupledRecords: the module stored something; its values are put back where they were kept.
        """
        self._stack.close()
        self._state.refuse_changes()


_Holder = dict[Any, Any] | list[Any]
"""Attributes of a module, or a list or dictionary in them."""


class _UntrainedForward:
    """Calls a module as it was called in the loop, in the mode it had and without taking part in a recording."""

    def __init__(self, module: nn.Module, capture: Recorder) -> None:
        self._module, self._capture = module, capture
        self._modes = [(part, part.training) for part in module.modules()]

    def __call__(self, *args: object, **kwargs: object) -> object:
        modes, recording = [(part, part.training) for part in self._module.modules()], self._capture.suspend()
        try:
            for part, mode in self._modes:
                part.training = mode
            return self._module(*args, **kwargs)
        finally:
            for part, mode in modes:
                part.training = mode
            self._capture.resume(recording)


class LossTracer:
    """Follows a loop with the private batches of one module.

    Guarantee: without a declared criterion, every gradient that reached the module's outputs in a batch came from
    losses of a form that was checked, made of that batch alone. With one, the first batches' gradients are compared
    with the criterion's own.

    Args:
        module: the root module.
        run_check: runs a check on synthetic records, while the module is in a state for it.

    Attributes:
        probe: checks module and loss on synthetic records; set before the first batch.
        passes: runs both backward passes of a loss that takes two; None for one.
        is_one_by_one: whether gradients are taken from the parameters, whatever sends them there.
        carried: what the loop carries from batch to batch.
    """

    probe: LoopProbe

    def __init__(self, module: nn.Module, run_check: Callable[[Callable[[], None]], None]) -> None:
        self._run_check = run_check
        self._has_tried = False
        self.passes: Callable[[Callable[[bool], object]], object] | None = None
        self.is_one_by_one = False
        self.trace: OperationTrace | None = None
        self._module = module
        self._rows = self._batches = self._untrained = 0
        self.carried = CrossBatchState(module)
        # Forms of losses that were checked, and states of the module in which something was.
        self._known: dict[Hashable, CheckedLossForm] = {}
        # With a criterion, where the arguments of the module's calls are on the trace.
        self._given: list[int] = []
        # Whether the loop drew random numbers for the batch: state of torch's generator, looked at around forwards.
        self._has_drawn = False
        self._chance: Hashable = None
        self._states: dict[ModuleMarks, int] = {}
        self._checked: set[int] = set()
        # By state: the one in which the module's own forwards left it in the first batch.
        self._left: dict[int, Hashable] = {}
        self._is_new = True
        # The module's state before the first training forward of the batch, and after the last one.
        self._before: ModuleMarks | None = None
        self._after: Hashable = None
        self._state = 0
        self._is_checked = False
        self._target: Tensor | None = None
        self._gradient_checks: list[OutputGradientCheck] = []
        self._attributes: frozenset[tuple[int, int]] = frozenset()
        # Tensors that forwards of the batch made and kept in attributes, or in lists and dictionaries there, by what
        # holds them; and the same of a batch that is over, with what takes their place.
        self._kept: list[tuple[_Holder, Tensor]] = []
        self._marked: list[tuple[_Holder, Tensor, Tensor]] = []
        self._outputs: set[torch.autograd.graph.Node] = set()

    @property
    def _criterion(self) -> Criterion | None:
        """The declared criterion; without one losses are followed."""
        return self.probe.criterion

    # --- batches -------------------------------------------------------------------------------------------------

    def begin(self, batch: object, rows: int, on_backward: Callable[[OperationTrace, int], None]) -> object:
        """The batch as its loop gets it."""
        self.end()
        self._batches += 1
        self._rows, self._is_checked = rows, False
        if self._criterion is not None and self._batches <= FIRST_BATCHES and isinstance(batch, tuple | list):
            last = batch[-1]
            self._target = last.clone() if isinstance(last, Tensor) else None
        self.trace = OperationTrace(records=rows, on_backward=on_backward, carried=self.carried)
        self.trace.may_leave = self.carried.is_left()
        self.trace.passes = None if self.passes is None else self._run_passes
        return self.trace.inputs(batch, padded=() if self.probe.padding is None else self.probe.padding.tensors)

    def _run_passes(self, run: Callable[[bool], object]) -> object:
        """Both backward passes; the gradients at the outputs count once."""

        def one(again: bool) -> object:
            for check in self._gradient_checks:
                check.restart()
            return run(again)

        assert self.passes is not None
        return self.passes(one)

    def end(self) -> None:
        """The batch is over. Until the module is called again, what it kept carries the batch's notes."""
        self._gradient_checks, self._target, self._outputs, self._before = [], None, set(), None
        self._given, self._has_drawn = [], False
        if self.trace is not None:
            for holder, tensor in self._kept:
                marked = self.trace.wrap(tensor)
                if _exchange(holder, tensor, marked):
                    self._marked.append((holder, tensor, marked))
            self.trace.close()
            self.trace = None
        self._kept = []

    def try_forward(self, args: Args, kwargs: Mapping[str, object]) -> None:
        """Before the first training forward: try the module on synthetic records in place of the arguments."""
        trace = self.trace
        if self._criterion is None and trace is not None and not self._has_tried:
            self._run_check(lambda: self.probe.try_forward(trace, args, kwargs))
            self._has_tried = True

    def check_state(self) -> None:
        """Before a training forward: check module and criterion in a state (modes, hooks, attributes) that is new.

        Without a criterion losses are checked in every state of the module.

        Raises:
            NonPrivateStep: the module was in another state in an earlier forward of the batch, or is now.
        """
        before, marks = self._before, module_state_key(self._module)
        if before is None and len(self._states) > _MOST:
            self._states.clear()
            self._checked.clear()
            self._left.clear()
            self._known.clear()
        if before is not None and marks.modes == before.modes and marks.rest in {before.rest, self._after}:
            return
        if before is not None:
            raise _another_state()
        self._state = self._states.setdefault(marks, len(self._states))
        self._before, self._after = marks, self._left.get(self._state, marks.rest)
        self._is_new = self._state not in self._left
        is_known = self._state in self._checked
        is_due = not is_known or is_recheck_due(self._batches) or self._has_new_length
        if self._criterion is not None and is_due:
            self._run_check(lambda: self.probe.check_criterion(self._batches if is_known else 0))
            self._checked.add(self._state)

    def _note_state(self) -> None:
        """A forward pass of the module is over. What it changed in the module by itself, it may."""
        if self._before is not None and (self._is_new or self._state not in self._checked):
            self._after = self._left[self._state] = module_state_key(self._module).rest

    def _require_state(self) -> None:
        """Before a check: the module does what it did in the forward passes of the batch."""
        before, marks = self._before, module_state_key(self._module)
        if before is None:
            raise NonPrivateStep(
                "loss must come from model(batch), a call of the module that was made private, got one without it: its "
                "layers or methods (model.encode(batch)) were called past its forward, where nothing is clipped. Let "
                "forward do what the loop needs, for example by an argument: forward(batch, part='encode')."
            )
        if marks.modes != before.modes or marks.rest not in {before.rest, self._after}:
            raise _another_state()

    @property
    def _has_new_length(self) -> bool:
        """Whether a batch came that is padded to a length at which nothing was tried."""
        return self.probe.padding is not None and bool(self.probe.padding.untried)

    # --- forward -------------------------------------------------------------------------------------------------

    def watch(self, args: Args, kwargs: Mapping[str, object]) -> ForwardMonitor:
        """Watch the training forward that begins."""
        if self._criterion is not None and self.trace is not None:
            self._given.append(self.trace.note_arguments(args, kwargs))
        self._has_drawn = self._has_drawn or self._chance != _chance()
        attributes = tensor_attributes(self._module)
        self._attributes = frozenset(attributes)
        # A tensor that was set to zero since holds nothing of them.
        written: list[object] = [
            one for one in attributes.values() if self.carried.was_written(one) and bool((one != 0).any())
        ]
        numbers = (value for part in self._module.modules() for _, value in own_attributes(part))
        written += [value for value in numbers if isinstance(value, (TaintedFloat, TaintedInt))]
        with not_noting():
            leaves = [
                leaf for given in tensors_in((args, kwargs)) if given.requires_grad for leaf in graph_leaves(given)
            ]
        own = set(self._module.parameters()) if leaves else set()
        for leaf in leaves:
            if isinstance(leaf, nn.Parameter) and leaf not in own:
                raise external_parameter_error(leaf)
        return ForwardMonitor(self._module, values=compares_values(self._batches - 1), written=written)

    def outputs(
        self, args: Args, kwargs: Mapping[str, object], output: object, compare: bool
    ) -> tuple[object, list[Tensor]]:
        """The module's output as its loop gets it, and the tensors at which gradients arrive.

        Args:
            args: the module's arguments.
            kwargs: arguments by name.
            output: what the module returned.
            compare: whether there are records whose gradients count.
        """
        self._note_state()
        self.mark_chance()
        if self._criterion is not None and self._target is not None and compare:
            self._gradient_checks.append(OutputGradientCheck(self._criterion, output, self._target))
        if self.trace is not None:
            made = [tensor for key, tensor in tensor_attributes(self._module).items() if key not in self._attributes]
            if made or exports_by_hooks(self._module):
                self.trace.leave(made)
            if made:
                self._kept += self._made_attributes()
        if any(isinstance(tensor, TracedTensor) for tensor in tensors_in(output)):
            raise CoupledRecords(
                "module must get tensors of the batch as arguments only, got an output made with one that the loop "
                "left in an attribute: what it does to other records can't be tried out. Pass it to the forward."
            )
        if self._criterion is not None:
            self._outputs.update(t.grad_fn for t in tensors_within(output) if t.grad_fn is not None)
        tracked = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        noted = output if self.trace is None else self.trace.note(self._module, args, kwargs, output)
        return noted, tracked

    def _made_attributes(self) -> Iterator[tuple["_Holder", Tensor]]:
        for part in self._module.modules():
            for _, value in own_attributes(part):
                for holder, tensor in _held_in(vars(part), value):
                    if (id(part), id(tensor)) not in self._attributes:
                        yield holder, tensor

    def restore_attributes(self) -> None:
        """Before the module is called again: put back what it kept itself."""
        for holder, tensor, marked in self._marked:
            _exchange(holder, marked, tensor)
        self._marked = []

    def begin_untrained(self) -> None:
        """A forward begins that is not trained: what it draws, the loop does not draw."""
        if self.trace is not None:
            self._draws()

    def watch_untrained(self) -> ForwardMonitor:
        """Watch a forward in training mode that is not trained: it may store nothing either."""
        self._untrained += 1
        return ForwardMonitor(self._module, values=compares_values(self._untrained - 1), is_private=False)

    def trace_untrained_forward(
        self, args: Args, kwargs: Mapping[str, object], output: object, capture: Recorder
    ) -> object:
        """The output of a forward that is not trained: what it makes of the batch is still of the batch."""
        self._note_state()
        trace = next(
            (tensor.operation_trace for tensor in tensors_in((args, dict(kwargs))) if isinstance(tensor, TracedTensor)),
            None,
        )
        if trace is None:
            return output
        return trace.note(_UntrainedForward(self._module, capture), args, kwargs, output)

    # --- backward and step ---------------------------------------------------------------------------------------

    def check_before_backward(self, trace: OperationTrace, loss: int) -> None:
        """Before a backward pass: a loss of a new form is checked, one of a known form must have its constants."""
        if self._criterion is not None:
            self._refuse_past_output(trace)
        elif not trace.is_weighted:  # Those are not followed: what arrives at the module's outputs is refused.
            self._check_value(trace, loss, self.probe.check_traced_loss)
            trace.keep_constants()
            self._is_checked = True

    def _check_value(
        self, trace: OperationTrace, value: int, check: Callable[[OperationTrace, int, int], None]
    ) -> None:
        """Check a loss, or arguments of the module, unless its form is known."""
        found = trace.look(value, by_chance=self._draws)
        form = (self._state, found.form, found.rows, trace.is_by_record)
        known = self._known.get(form)
        meets = known is not None and known.meet(found.late, found.numbers, self._rows)
        again = known is None or meets or not known.fits(trace.outside_shapes())
        if again or self._has_new_length:
            # Forgotten meanwhile: what is refused stays unknown.
            self._known.pop(form, None)
            self._require_state()
            trace.outside = "rows"
            times = 0 if known is None or known.has_grown else known.times
            self._run_check(lambda: check(trace, value, times))
            self._known[form] = known or CheckedLossForm(late=found.late, numbers=found.numbers, records=self._rows)
            self._known[form].shapes = trace.outside_shapes() if trace.outside == "constants" else None
            self._checked.add(self._state)

    def mark_chance(self) -> None:
        """What random numbers are drawn from here on, the loop draws."""
        self._chance = _chance()

    def _draws(self) -> bool:
        """Whether random numbers were drawn for this batch, outside the module's forward passes."""
        self._has_drawn = self._has_drawn or self._chance != _chance()
        return self._has_drawn

    def _refuse_past_output(self, trace: OperationTrace) -> None:
        """With a criterion: refuse a loss that reaches the module past its outputs, or teaches something else."""
        if trace.loss is None:
            return
        found = graph_bypassing_outputs(trace.loss, self._outputs)
        if found.captured:
            raise untraceable_loss_error()
        own = set(self._module.parameters())
        for leaf in found.leaves:
            if leaf in own and self.is_one_by_one:
                raise untraceable_loss_error()
            if leaf not in own and not (leaf.dim() and leaf.size(0) == self._rows):
                raise external_parameter_error(leaf)

    @property
    def is_passing(self) -> bool:
        """Whether a backward pass runs from losses of the batch that were looked at."""
        trace = self.trace
        return trace is not None and (trace.is_passing or (self._criterion is not None and trace.is_weighted))

    def check_gradient(self) -> None:
        """A gradient has reached the module's outputs.

        Raises:
            NonPrivateStep: it does not come from a loss that was checked.
        """
        if self._criterion is None and (self.trace is None or not self.trace.is_passing):
            raise untraceable_loss_error()

    def check_step(self) -> None:
        """Before the step.

        Raises:
            NonPrivateStep: no loss of this batch was seen, or the gradients are not those of the criterion.
        """
        if self._criterion is None and not self._is_checked:
            raise untraceable_loss_error()
        for check in self._gradient_checks:
            check.check()
        if self._criterion is not None and self.trace is not None:
            for given in self._given:
                self._check_value(self.trace, given, self.probe.check_arguments)
            self.trace.keep_constants()


def _held_in(holder: "_Holder", value: object) -> Iterator[tuple["_Holder", Tensor]]:
    """The tensors of an attribute's value, also in lists and dictionaries, each with what holds it."""
    if isinstance(value, Tensor):
        yield holder, value
    elif isinstance(value, list | dict):
        for held in value.values() if isinstance(value, dict) else value:
            yield from _held_in(value, held)


def _exchange(holder: "_Holder", old: Tensor, new: Tensor) -> bool:
    """Put `new` wherever `holder` has `old`; whether it has it."""
    items = holder.items() if isinstance(holder, dict) else enumerate(holder)
    keys = [key for key, held in items if held is old]
    for key in keys:
        holder[key] = new
    return bool(keys)


def _chance() -> Hashable:
    """The state of torch's generators, without waiting for a device."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    return tuple([generator.get_state().numpy().tobytes() for generator in generators])


def _another_state() -> NonPrivateStep:
    return NonPrivateStep(
        "module must be in one state from its first forward on a batch to loss.backward(), got another one (a hook, a "
        "replaced forward, an attribute, a mode of the module or of torch): what it did can't be tried out again. "
        "Change it between a step and the next batch, and pass what differs between two forwards as an argument."
    )
