"""Tensors that note every torch function applied to them on their tape (floor 3)."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from sordino.errors import UnprivateStep
from sordino.training.probing.losses import with_public_divisor
from sordino.training.structure import tensors_in

__all__ = ["TapedTensor", "leave_untraced", "not_noting", "plain", "scaler_refusal"]

# How far up the stack a gradient scaler's own frame is from the multiplication it makes.
_SCALER_DEPTH = 8
# What torch does in another way, or not at all, for subclasses.
_OF_PLAIN_TENSORS = frozenset({"__format__", "__repr__", "__reduce_ex__"})


def leave_untraced() -> None:
    """Have torch.compile start behind the place where taped tensors become plain ones."""
    from torch._dynamo import config  # loaded by every optimizer; slow where nothing is trained

    config.nontraceable_tensor_subclasses.add(TapedTensor)


class Notes(Protocol):
    """What a taped tensor needs of its tape."""

    is_open: bool
    records: int

    def begin(self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """A call begins; `note` follows."""
        ...

    def note(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], result: object
    ) -> object:
        """Note a call and return its result as taped tensors."""
        ...

    def backward(
        self, losses: Sequence["TapedTensor"], run: Callable[[bool], object], *, is_weighted: bool = False
    ) -> object:
        """Run a backward pass after a look at the losses; `run` is called with whether its graph must be kept."""
        ...


class TapedTensor(Tensor):
    """A tensor of a private batch, or made from one.

    Attributes:
        tape: the batch's tape.
        slot: the tensor's place on it.
        keeps_values: whether its values depend on more than shapes.
        sized_by_values: whether its shape depends on values.
    """

    tape: Notes
    slot: int
    keeps_values: bool
    sized_by_values: bool

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _OF_PLAIN_TENSORS:
            return func(*(plain(arg) if isinstance(arg, Tensor) else arg for arg in args), **kwargs)
        if name == "__deepcopy__":
            return _copied(args)
        tapes = [tensor.tape for tensor in tensors_in((args, dict(kwargs))) if isinstance(tensor, TapedTensor)]
        # Results of an earlier batch's tensors still belong to that batch.
        tape = next((tape for tape in tapes if tape.is_open), tapes[0] if tapes else None)
        if tape is None:
            with not_noting():
                return func(*args, **kwargs)
        if tape.is_open and func in {Tensor.backward, torch.autograd.backward}:
            return _backward(tape, func, args, kwargs)
        if name in {"mul", "__mul__"}:
            _refuse_scaler()
        if tape.is_open and name == "register_hook":
            raise UnprivateStep(
                "gradients must reach the module as the loss makes them, got register_hook on a tensor of the loop: a "
                "hook may mix the gradients of records. Clipping by record makes clipping here needless."
            )
        with not_noting():
            if tape.is_open:
                tape.begin(func, args, kwargs)
            result = with_public_divisor(func, args, kwargs)
        return tape.note(func, args, kwargs, result)


def _backward(
    tape: Notes, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    """A backward pass; one from weighted losses, or from a tensor off the tape, is run as not followed."""
    given = args[0] if args else kwargs.get("tensors")
    losses = list(tensors_in(given))
    weights = [*args[1:2], kwargs.get("gradient"), kwargs.get("grad_tensors")]

    def run(again: bool) -> object:
        given, named = _retaining(args, kwargs) if again else (args, kwargs)
        with not_noting():
            return function(*given, **named)

    own = [loss for loss in losses if isinstance(loss, TapedTensor) and loss.tape is tape]
    if len(own) != len(losses):
        return run(False)
    return tape.backward(own, run, is_weighted=any(True for _ in tensors_in(weights)))


def _retaining(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments of a backward pass whose graph is kept for another."""
    if len(args) > 2:
        return (*args[:2], True, *args[3:]), dict(kwargs)
    return args, {**kwargs, "retain_graph": True}


def _copied(args: tuple[object, ...]) -> object:
    """A deep copy: as torch makes it, noted as a clone."""
    (taped, memo) = args
    assert isinstance(taped, TapedTensor)
    with not_noting():
        made = copy.deepcopy(plain(taped), memo)  # pyright: ignore[reportArgumentType]
    return taped.tape.note(Tensor.clone, (taped,), {}, made)


def not_noting() -> AbstractContextManager[None]:
    """Inside, taped tensors behave as ordinary ones."""
    return torch._C.DisableTorchFunctionSubclass()  # pyright: ignore[reportPrivateUsage]


def plain(tensor: Tensor) -> Tensor:
    """The same tensor without notes; autograd sees no difference."""
    if not isinstance(tensor, TapedTensor):
        return tensor
    with not_noting():
        return tensor.as_subclass(Tensor)


def scaler_refusal() -> UnprivateStep:
    """What is raised when a dynamic loss scaler takes part."""
    return UnprivateStep(
        "loss must not be scaled by a GradScaler: it skips steps when a record's gradient overflows, which tells about "
        "the record. Use torch.autocast with bfloat16, without a scaler."
    )


def _refuse_scaler() -> None:
    frame = inspect.currentframe()
    for _ in range(_SCALER_DEPTH):
        if frame is None:
            return
        if isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
            raise scaler_refusal()
        frame = frame.f_back
