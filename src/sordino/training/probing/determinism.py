"""Ways to hold chance in a forward pass (floor 3): repeat it, drive it to an extreme, or switch it off."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy import random as numpy_random
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sordino.training.generators import states_undisturbed

__all__ = ["Chance", "GENERATORS", "WithoutChance", "generators_used", "random_state_kept", "random_states"]

GENERATORS = ("torch", "python", "numpy")
"""The generators that the probe can drive. One of the user's own (``numpy.random.default_rng``) is out of reach."""

_FILLED = {"rand": 0.5, "rand_like": 0.5, "randn": 0.0, "randn_like": 0.0}
# The word of a Mersenne Twister's state whose output has all bits set; the word 0 gives the output 0.
_ALL_BITS = 0x12DD9BB3
# This many first draws are extreme, the others as the seed has them: loops that reject a draw come to an end.
_FORCED_WORDS = 64
# Where torch's serialised Mersenne Twister has its counters and its 64-bit words.
_TORCH_LEFT, _TORCH_NEXT, _TORCH_WORDS, _WORDS = slice(8, 12), slice(16, 24), 24, 624


@contextmanager
def random_state_kept() -> Iterator[None]:
    """The random states of torch (every device in use), numpy and Python after the block are those before it."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    # An abandoned loop's states would otherwise come back in the midst of it.
    with states_undisturbed(), _states_kept(devices):
        yield


@contextmanager
def _states_kept(devices: list[int]) -> Iterator[None]:
    python, numpy = random.getstate(), numpy_random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            numpy_random.set_state(numpy)  # noqa: NPY002


@dataclass(frozen=True, kw_only=True)
class Chance:
    """One course of all random numbers.

    Args:
        seed: of every generator.
        forced: one of `GENERATORS`, whose first draws are then as small as they can be, or as large.
        high: as large as they can be.
    """

    seed: int = 0
    forced: str | None = None
    high: bool = False

    def start(self) -> None:
        """Start all generators anew, so that two passes over batches of one shape meet the same chance."""
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        numpy_random.seed(self.seed)  # noqa: NPY002
        word = _ALL_BITS if self.high else 0
        if self.forced == "python":
            version, words, gauss = random.getstate()
            random.setstate((version, (*[word] * _FORCED_WORDS, *words[_FORCED_WORDS:-1], 0), gauss))
        elif self.forced == "numpy":
            state = numpy_random.get_state(legacy=False)  # noqa: NPY002
            assert isinstance(state, dict)
            state["state"]["key"][:_FORCED_WORDS], state["state"]["pos"] = word, 0
            numpy_random.set_state(state)  # noqa: NPY002
        elif self.forced == "torch":
            _force_torch(word)


def _force_torch(word: int) -> None:
    state = torch.get_rng_state()
    as_bytes = state.numpy()
    as_bytes[_TORCH_LEFT] = np.array([_WORDS], dtype=np.int32).view(np.uint8)
    as_bytes[_TORCH_NEXT] = np.array([0], dtype=np.uint64).view(np.uint8)
    forced = np.full(_FORCED_WORDS, word, dtype=np.uint64).view(np.uint8)
    as_bytes[_TORCH_WORDS : _TORCH_WORDS + len(forced)] = forced
    torch.set_rng_state(state)


@contextmanager
def generators_used(used: set[str]) -> Iterator[None]:
    """Add to `used` the generators that the block draws from."""
    before = random_states()
    yield
    after = random_states()
    used.update(name for name, old, new in zip(GENERATORS, before, after, strict=True) if not np.array_equal(old, new))


def random_states() -> list[np.ndarray]:
    """The states of `GENERATORS`, in that order."""
    parts = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        parts += torch.cuda.get_rng_state_all()
    _, words, _ = random.getstate()
    state = numpy_random.get_state(legacy=False)  # noqa: NPY002
    assert isinstance(state, dict)
    return [
        torch.cat(parts).numpy(),
        np.asarray(words),
        np.append(state["state"]["key"], (state["state"]["pos"], state["has_gauss"])),
    ]


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
