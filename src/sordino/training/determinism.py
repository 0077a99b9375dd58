"""Two ways to take chance out of a forward pass (floor 3): repeat it exactly, or switch it off."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from numpy import random as numpy_random
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["WithoutChance", "random_state_kept", "same_chance"]

_FILLED = {"rand": 0.5, "rand_like": 0.5, "randn": 0.0, "randn_like": 0.0}


@contextmanager
def random_state_kept() -> Iterator[None]:
    """The random states of torch (every device in use), numpy and Python after the block are those before it."""
    python, numpy = random.getstate(), numpy_random.get_state()  # noqa: NPY002
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            numpy_random.set_state(numpy)  # noqa: NPY002


def same_chance() -> None:
    """Start all random states anew, so that two passes over batches of one shape meet the same chance."""
    torch.manual_seed(0)
    random.seed(0)
    numpy_random.seed(0)  # noqa: NPY002


class WithoutChance(TorchDispatchMode):
    """Inside, dropout keeps everything and added noise is constant. Permutations stay random on purpose.

    Batches of different size then give every record the same forward pass.
    """

    def __torch_dispatch__(
        self,
        func: "torch._ops.OpOverload",  # pyright: ignore[reportPrivateUsage]
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name == "bernoulli_" and isinstance(args[0], Tensor):
            return _fill(args[0], args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        if name == "bernoulli" and isinstance(args[0], Tensor):
            return args[0].clone()
        if name == "native_dropout" and isinstance(args[0], Tensor):
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name in {"uniform_", "normal_"} and isinstance(args[0], Tensor):
            low, high = [*args[1:3], *([0.0, 1.0][len(args) - 1 :])]
            return _fill(args[0], low if name == "normal_" else (_number(low) + _number(high)) / 2)
        if name in _FILLED:
            return func(*args, **kwargs).fill_(_FILLED[name])
        return func(*_without_dropout(func, args, kwargs), **kwargs)


def _without_dropout(
    func: "torch._ops.OpOverload",  # pyright: ignore[reportPrivateUsage]
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> tuple[object, ...]:
    """The arguments of a fused attention with its dropout probability at 0."""
    names = [argument.name for argument in func._schema.arguments]  # pyright: ignore[reportPrivateUsage]
    if "dropout_p" not in names:
        return args
    if "dropout_p" in kwargs:
        kwargs["dropout_p"] = 0.0
    place = names.index("dropout_p")
    return (*args[:place], 0.0, *args[place + 1 :]) if place < len(args) else args


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _fill(tensor: Tensor, value: object) -> Tensor:
    fill: Callable[..., Tensor] = tensor.copy_ if isinstance(value, Tensor) else tensor.fill_
    return fill(value)
