"""Tensors that note every torch function applied to them on their trace."""

import copy
import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor

from sordino.errors import NonPrivateStep
from sordino.training.probing.torch_modes import Args, Function, Kwargs
from sordino.training.pytree import tensors_in

if TYPE_CHECKING:
    from sordino.training.loss_tracing.trace import OperationTrace

# What torch does in another way, or not at all, for subclasses.
_OF_PLAIN_TENSORS = frozenset({"__format__", "__repr__", "__reduce_ex__"})


_untraced: "WeakSet[object]" = WeakSet()


def leave_untraced(owner: object) -> None:
    """Have torch.compile start behind the place where traced tensors become plain ones, until `trace_again`."""
    from torch._dynamo import config  # loaded by every optimizer; slow where nothing is trained

    _untraced.add(owner)
    config.nontraceable_tensor_subclasses.add(TracedTensor)


def trace_again(owner: object) -> None:
    """Give torch.compile's setting back, unless another `owner` needs it."""
    from torch._dynamo import config

    _untraced.discard(owner)
    if not _untraced:
        config.nontraceable_tensor_subclasses.discard(TracedTensor)


class TracedTensor(Tensor):
    """A tensor of a private batch, or made from one.

    Attributes:
        operation_trace: that of the batch.
        slot: the tensor's number on it.
        keeps_values: whether its values depend on more than shapes.
        has_data_dependent_size: whether its shape depends on values.
    """

    operation_trace: "OperationTrace"
    slot: int
    keeps_values: bool
    sized_by_values: bool

    @classmethod
    def __torch_function__(cls, func: Function, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _OF_PLAIN_TENSORS:
            return func(*(without_trace(arg) if isinstance(arg, Tensor) else arg for arg in args), **kwargs)
        if name == "__deepcopy__":
            return _copied(args)
        tensors = list(tensors_in((args, kwargs)))
        traces = [tensor.operation_trace for tensor in tensors if isinstance(tensor, TracedTensor)]
        # Results of an earlier batch's tensors still belong to that batch.
        trace = next((trace for trace in traces if trace.is_open), traces[0] if traces else None)
        if trace is None:
            with not_noting():
                return func(*args, **kwargs)
        if trace.is_open and (func is Tensor.backward or func is torch.autograd.backward):
            return _backward(trace, func, args, kwargs)
        if trace.is_open and name == "register_hook":
            raise NonPrivateStep(
                "gradients must reach the module as the loss makes them, got register_hook on a tensor of the loop: a "
                "hook may mix the gradients of records. Clipping by record makes clipping here needless."
            )
        return trace.call(func, args, kwargs, tensors)


def _backward(trace: "OperationTrace", function: Function, args: Args, kwargs: Mapping[str, object]) -> object:
    """A backward pass; one from weighted losses, or from a tensor off the trace, is run as not followed."""
    given = args[0] if args else kwargs.get("tensors")
    losses = list(tensors_in(given))
    weights = [*args[1:2], kwargs.get("gradient"), kwargs.get("grad_tensors")]

    def run(again: bool) -> object:
        given, named = _retaining(args, kwargs) if again else (args, kwargs)
        with not_noting():
            return function(*given, **named)

    own = [loss for loss in losses if isinstance(loss, TracedTensor) and loss.operation_trace is trace]
    if len(own) != len(losses):
        return run(False)
    return trace.backward(own, run, is_weighted=any(True for _ in tensors_in(weights)))


def _retaining(args: Args, kwargs: Mapping[str, object]) -> tuple[Args, dict[str, object]]:
    """The arguments of a backward pass whose graph is kept for another."""
    if len(args) > 2:
        return (*args[:2], True, *args[3:]), dict(kwargs)
    return args, {**kwargs, "retain_graph": True}


def _copied(args: Args) -> object:
    """A deep copy: as torch makes it, noted as a clone."""
    (traced, memo) = args
    assert isinstance(traced, TracedTensor)
    with not_noting():
        made = copy.deepcopy(without_trace(traced), memo)  # pyright: ignore[reportArgumentType]
    return traced.operation_trace.note(Tensor.clone, (traced,), {}, made)


def not_noting() -> AbstractContextManager[None]:
    """Inside, traced tensors behave as ordinary ones."""
    return torch._C.DisableTorchFunctionSubclass()  # pyright: ignore[reportPrivateUsage]


def without_trace(tensor: Tensor) -> Tensor:
    """The same tensor without notes; autograd sees no difference."""
    if not isinstance(tensor, TracedTensor):
        return tensor
    with not_noting():
        return tensor.as_subclass(Tensor)


# ----------------------------------------------------------------------------------------------------------------------
# Numbers read from a traced tensor: ordinary floats and ints that remember where they come from.
#
# ``x - x.mean().item()`` couples the records of a batch as ``x - x.mean()`` does. The number that ``item()`` gives
# notes the arithmetic done with it on the same trace, and is computed again in a replay.
# ----------------------------------------------------------------------------------------------------------------------


class _Tainted:
    """Arithmetic of numbers that came from a trace.

    Attributes:
        source: the trace.
        slot: number on it, None when it was closed by then.
        counts: whether it is a number of records, or made of such numbers and constants only.
    """

    source: "OperationTrace"
    slot: int | None
    counts: bool

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object]]:
        value = untainted(self)
        return type(value), (value,)

    def __deepcopy__(self, memo: object) -> object:
        return untainted(self)

    def __bool__(self) -> bool:
        self.source.decide(counts=self.counts)
        return bool(untainted(self))


class TaintedFloat(_Tainted, float):
    """A float that came from a trace."""

    __hash__ = float.__hash__


class TaintedInt(_Tainted, int):
    """An int that came from a trace."""

    __hash__ = int.__hash__


def tainted(value: object, source: "OperationTrace", slot: int | None, *, counts: bool = False) -> object:
    """`value` with its origin; anything but a float or an int is returned as it is."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        return value
    number = TaintedFloat(value) if isinstance(value, float) else TaintedInt(value)
    number.source, number.slot, number.counts = source, slot, counts
    return number


def untainted(value: object) -> object:
    """The bare number; anything else is returned as it is."""
    if isinstance(value, TaintedFloat):
        return float.__pos__(value)
    return int.__pos__(value) if isinstance(value, TaintedInt) else value


def _arithmetic(name: str, function: Callable[..., object], *, reflected: bool) -> Callable[..., object]:
    def compute(self: _Tainted, *others: object) -> object:
        args = (*others, self) if reflected else (self, *others)
        if any(not isinstance(other, float | int | None) for other in others):
            return NotImplemented
        result = function(*map(untainted, args))
        counts = all(arg.counts for arg in args if isinstance(arg, _Tainted))
        return self.source.note_number(function, args, result, counts=counts)

    compute.__name__ = name
    return compute


def _comparison(name: str, function: Callable[..., object]) -> Callable[..., object]:
    def compare(self: _Tainted, other: object) -> object:
        if not isinstance(other, float | int):
            return NotImplemented
        self.source.decide(counts=self.counts)
        return function(untainted(self), untainted(other))

    compare.__name__ = name
    return compare


def _conversion(name: str, function: Callable[..., object]) -> Callable[..., object]:
    def convert(self: _Tainted) -> object:
        result = function(untainted(self))
        if not self.counts and isinstance(result, float | int):
            self.source.read(result)
        return result

    convert.__name__ = name
    return convert


_BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
}
_UNARY = {"neg": operator.neg, "pos": operator.pos, "abs": abs, "round": round}
_COMPARED = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}

for _kind in (TaintedFloat, TaintedInt):
    for _name, _function in {**_BINARY, **_UNARY}.items():
        setattr(_kind, f"__{_name}__", _arithmetic(_name, _function, reflected=False))
    for _name, _function in _BINARY.items():
        setattr(_kind, f"__r{_name}__", _arithmetic(f"r{_name}", _function, reflected=True))
    for _name, _function in _COMPARED.items():
        setattr(_kind, f"__{_name}__", _comparison(_name, _function))
    for _name, _function in {"int": int, "float": float}.items():
        setattr(_kind, f"__{_name}__", _conversion(_name, _function))
