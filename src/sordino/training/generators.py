"""Secret states for the global random generators while private records are processed.

Dropout masks, augmentation and noise in a loss come from the global generators of torch, NumPy and Python. Under a
public seed they are a function of a record's index in the batch, so one record less changes the masks of all others.
`PrivateGenerators` sets those generators to states that only the run's key gives, and then puts the user's own states
back: these don't depend on how many numbers were drawn for private records. The argument that the sensitivity needs is
in ``docs/proofs/private-step.md``.
"""

import ctypes
import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy import random as numpy_random

from sordino.errors import NonPrivateStep
from sordino.randomness import KeyedRNG, RandomStream

# A Mersenne Twister has 624 words of 32 bits.
_WORDS = 624
# Words of secret bits for the seed and counter of an accelerator's generator, and for a generator of the user's own.
_DEVICE_WORDS, _OWN_WORDS = 4, 8

_OPEN: "list[PrivateGenerators | _Undisturbed]" = []


class PrivateGenerators:
    """The global generators, and those in `own`, in secret states from now to `close`.

    Several may be open at a time and close in any order: with the last one the user's states come back.

    Guarantee: after `close` every generator has the state that it had before, whatever was drawn meanwhile. A torch
    generator that was seeded meanwhile keeps what the user gave it.

    Args:
        stream: secret bits, used for nothing else.
        own: further generators: `torch.Generator`, NumPy's `Generator` and `RandomState`, `random.Random`.
    """

    def __init__(self, stream: RandomStream, own: Sequence[object] = ()) -> None:
        devices = _device_generators()
        bits = np.empty(3 * _WORDS + 2 + _DEVICE_WORDS * len(devices) + _OWN_WORDS * len(own), dtype=np.uint32)
        stream.fill(bits.data)
        seed, bits = bits[:2], bits[2:]
        # What puts each generator's state back; and the seeds by which torch's show that they were not seeded since.
        self.restores: dict[int, Callable[[], object]] = {}
        self._seeds: dict[int, tuple[torch.Generator, int]] = {}
        _OPEN.append(self)
        cpu = torch.default_generator
        self.restores[id(cpu)] = partial(cpu.set_state, cpu.get_state())
        cpu.set_state(_torch_state(bits[:_WORDS], seed))
        self.restores[id(_NUMPY)] = _numpy_replaced(bits[_WORDS : 2 * _WORDS])
        self.restores[id(_PYTHON)] = _python_replaced(bits[2 * _WORDS : 3 * _WORDS])
        bits = bits[3 * _WORDS :]
        for device in devices:
            self.restores[id(device)] = partial(device.set_state, device.get_state())
            key, counter = bits[:_DEVICE_WORDS].copy().view(np.uint64).tolist()
            device.manual_seed(key)
            # The counter starts anywhere: 60 more secret bits.
            device.set_offset(counter >> 4 << 2)
            bits = bits[_DEVICE_WORDS:]
        self._seeds = {id(generator): (generator, generator.initial_seed()) for generator in (cpu, *devices)}
        for generator in own:
            self.restores[id(generator)] = _own_replaced(generator, bits[:_OWN_WORDS])
            bits = bits[_OWN_WORDS:]

    @property
    def are_intact(self) -> bool:
        """Whether torch's generators still draw from the secret states."""
        return all(generator.initial_seed() == seed for generator, seed in self._seeds.values())

    def close(self) -> None:
        """Put the user's states back, once."""
        if self not in _OPEN:
            return
        index = _OPEN.index(self)
        del _OPEN[index]
        if index < len(_OPEN):
            # What was opened later gives back what there was before both.
            _OPEN[index].restores |= self.restores
            return
        for key, restore in self.restores.items():
            generator, seed = self._seeds.get(key, (None, 0))
            if generator is None or generator.initial_seed() == seed:
                restore()


@contextmanager
def private_generators(stream: RandomStream, own: Sequence[object] = ()) -> Iterator[None]:
    """Run a block with the generators in secret states; see `PrivateGenerators`.

    Raises:
        NonPrivateStep: the block gave torch's generators another seed or state.
    """
    generators = PrivateGenerators(stream, own)
    try:
        yield
        check_not_seeded()
    finally:
        generators.close()


class _Undisturbed:
    """Keeps what puts the user's states back until a block is over."""

    are_intact = True

    def __init__(self) -> None:
        self.restores: dict[int, Callable[[], object]] = {}


@contextmanager
def states_undisturbed() -> Iterator[None]:
    """Run a block in which an abandoned loop that is collected puts no states back: they come back after the block."""
    kept = _Undisturbed()
    _OPEN.append(kept)
    try:
        yield
    finally:
        _OPEN.remove(kept)
        outer = next((other for other in reversed(_OPEN) if isinstance(other, _Undisturbed)), None)
        if outer is not None:
            outer.restores |= kept.restores
        else:
            for restore in kept.restores.values():
                restore()


class BatchGenerators:
    """The global generators in secret states while a batch that a loop was given is under way.

    Args:
        rng: the run's key.
        rank: this process's number.
    """

    def __init__(self, rng: KeyedRNG, *, rank: int = 0) -> None:
        self._randomness, self._rank = rng, rank
        self._open: PrivateGenerators | None = None

    @property
    def are_open(self) -> bool:
        """Whether a batch is under way."""
        return self._open is not None

    def stream(self, step: int, microbatch: int = 0, *, again: bool = False) -> RandomStream:
        """The secret bits of one microbatch of one process, or those for when it is taken up again."""
        purpose = "generators again" if again else "generators"
        return self._randomness.stream(purpose, step=step, tensor=microbatch, rank=self._rank)

    def open(self, step: int, microbatch: int = 0, *, again: bool = False) -> None:
        """A batch begins, and the one before is over."""
        self.close()
        self._open = PrivateGenerators(self.stream(step, microbatch, again=again))

    def close(self) -> None:
        """The batch is over: put the user's states back."""
        if self._open is not None:
            self._open.close()
            self._open = None


def check_not_seeded() -> None:
    """Refuse random numbers of private records that don't come from secret states.

    Raises:
        NonPrivateStep: torch's generators got another seed or state since they were put into secret states.
    """
    if _OPEN and not _OPEN[-1].are_intact:
        raise NonPrivateStep(
            "torch's generators must keep their states while a private batch is processed, got another seed or state: "
            "random numbers would follow from a record's place in the batch. Seed before the loop; within a batch "
            "random numbers come from the run's secret key."
        )


# --- torch -----------------------------------------------------------------------------------------------------------


# torch's serialized Mersenne Twister, just seeded: 8 bytes of seed, 16 that say where it stands, words of 64 bits, and
# cached normal numbers, of which there are none.
_SEEDED = torch.Generator().manual_seed(0).get_state()
_SEEDED_SEED = _SEEDED.numpy()[:8].view(np.uint32)
_SEEDED_WORDS = _SEEDED.numpy()[24 : 24 + 8 * _WORDS].view(np.uint64)


def _torch_state(words: np.ndarray, seed: np.ndarray) -> torch.Tensor:
    """A state with these words, valid until the next call."""
    _SEEDED_SEED[:], _SEEDED_WORDS[:] = seed, words
    return _SEEDED


def _device_generators() -> list[torch.Generator]:
    """The generators of all accelerators in use."""
    return [
        generator
        for accelerator in (torch.cuda, torch.xpu)
        if accelerator.is_initialized()
        for generator in accelerator.default_generators
    ]


# --- NumPy and Python ------------------------------------------------------------------------------------------------
# Through their own functions, reading and setting these states takes longer than a small step: the words are copied
# where they lie in memory, which is compared with what those functions say when this module is imported.

_NUMPY: Any = getattr(numpy_random.rand, "__self__")  # noqa: B009
_PYTHON: Any = getattr(random.getrandbits, "__self__")  # noqa: B009
_MEMORY: Any = ctypes.c_uint32 * (_WORDS + 1)
_NO_NORMAL = {"has_gauss": 0, "gauss": 0.0}


class _NoBits:
    """Stands for a bit generator while NumPy's cached normal number is read or written alone."""

    @property
    def state(self) -> dict[str, object]:
        return {"bit_generator": "none"}

    @state.setter
    def state(self, state: object) -> None:
        pass


_NO_BITS = _NoBits()


def _numpy_memory(bits: Any) -> np.ndarray:
    """The words of a Mersenne Twister of NumPy's, then its position."""
    return np.frombuffer(_MEMORY.from_address(bits.ctypes.state_address), dtype=np.uint32)


def _normal(new: Mapping[str, object] | None = None) -> Mapping[str, object]:
    """NumPy's cached normal number, the second one of a pair; `new` takes its place."""
    bits = _NUMPY._bit_generator
    _NUMPY._bit_generator = _NO_BITS
    try:
        old = _NUMPY.get_state(legacy=False)
        if new is not None:
            _NUMPY.set_state({**new, "bit_generator": "none", "state": None})
    finally:
        _NUMPY._bit_generator = bits
    return old


def _numpy_replaced(words: np.ndarray) -> Callable[[], object]:
    """Put `words` in place of NumPy's state, and return what puts that state back."""
    bits = _NUMPY._bit_generator
    if not _NUMPY_IS_KNOWN or type(bits) is not numpy_random.MT19937:
        return _own_replaced(_NUMPY, words[:_OWN_WORDS])
    memory = _numpy_memory(bits)
    before, normal = memory.copy(), _normal(_NO_NORMAL)
    memory[:_WORDS], memory[_WORDS] = words, _WORDS

    def restore() -> None:
        memory[:] = before
        if _NUMPY._bit_generator is bits:
            _normal(normal)

    return restore


def _python_replaced(words: np.ndarray) -> Callable[[], object]:
    """Put `words` in place of Python's state, and return what puts that state back."""
    memory = _PYTHON_MEMORY
    if memory is None:
        return _own_replaced(_PYTHON, words[:_OWN_WORDS])
    before, normal = memory.copy(), _PYTHON.gauss_next
    memory[0], memory[1:], _PYTHON.gauss_next = _WORDS, words, None

    def restore() -> None:
        memory[:], _PYTHON.gauss_next = before, normal

    return restore


def _is_numpy_known() -> bool:
    try:
        bits = _NUMPY._bit_generator
        state, normal = _NUMPY.get_state(legacy=False), _normal()
        memory = _numpy_memory(bits).tolist()
    except (AttributeError, TypeError, ValueError):
        return False
    found = {"key": memory[:_WORDS], "pos": memory[_WORDS]}
    return (
        type(bits) is numpy_random.MT19937
        and found == {"key": state["state"]["key"].tolist(), "pos": state["state"]["pos"]}
        and all(normal[name] == state[name] for name in _NO_NORMAL)
    )


def _python_memory() -> np.ndarray | None:
    """The position of Python's Mersenne Twister, then its words; None where they don't lie where they are expected."""
    # The object must be large enough to be read at all.
    size = getattr(type(_PYTHON).__base__, "__basicsize__", 0)
    if size < object.__basicsize__ + ctypes.sizeof(_MEMORY) or not hasattr(_PYTHON, "gauss_next"):
        return None
    memory = np.frombuffer(_MEMORY.from_address(id(_PYTHON) + object.__basicsize__), dtype=np.uint32)
    version, words, _ = _PYTHON.getstate()
    return memory if version == 3 and (*memory[1:].tolist(), int(memory[0])) == words else None


_NUMPY_IS_KNOWN, _PYTHON_MEMORY = _is_numpy_known(), _python_memory()


# --- generators of the user's own ------------------------------------------------------------------------------------


def _own_replaced(generator: Any, words: np.ndarray) -> Callable[[], object]:
    """Seed `generator` with 256 secret bits, and return what puts its state back."""
    secret = words.tobytes()
    number = int.from_bytes(secret, "little")
    if isinstance(generator, torch.Generator):
        restore = partial(generator.set_state, generator.get_state())
        if generator.device.type == "cpu":
            more = np.frombuffer(hashlib.shake_256(secret).digest(4 * _WORDS + 8), dtype=np.uint32)
            generator.set_state(_torch_state(more[2:], more[:2]))
        else:
            generator.manual_seed(number % 2**64)
        return restore
    if isinstance(generator, random.Random):
        restore = partial(generator.setstate, generator.getstate())
        generator.seed(number)
        return restore
    if isinstance(generator, numpy_random.RandomState):
        state = generator.get_state(legacy=False)
        bits = getattr(generator, "_bit_generator")  # noqa: B009
        generator.set_state({**_NO_NORMAL, **_state_from(bits, number)})
        return partial(generator.set_state, state)
    bits = generator if isinstance(generator, numpy_random.BitGenerator) else generator.bit_generator
    before = bits.state
    bits.state = _state_from(bits, number)
    return partial(setattr, bits, "state", before)


def _state_from(bits: Any, number: int) -> dict[str, Any]:
    return type(bits)(numpy_random.SeedSequence(number)).state


_GENERATORS = (
    torch.Generator,
    random.Random,
    numpy_random.Generator,
    numpy_random.RandomState,
    numpy_random.BitGenerator,
)
_SKIPPED = (str, bytes, int, float, complex, bool, type(None), np.ndarray, torch.Tensor, torch.dtype, ModuleType)
# Whose classes and functions keep no generator for a dataset to draw from, but lead to everything else.
_LIBRARIES = frozenset({"builtins", "collections", "functools", "typing", "abc", "torch", "numpy", "sordino"})
_MAX_OBJECTS, _MAX_ELEMENTS = 20_000, 1_000


def owned_generators(*roots: object) -> list[object]:
    """The generators that datasets and functions keep for themselves, each once.

    They are looked for in attributes, containers, class attributes, closures, default arguments and the global names
    that functions use, among the first 20,000 objects and the first 1,000 elements of a container.

    Args:
        *roots: where to look.
    """
    shared = {id(torch.default_generator), id(_NUMPY), id(_PYTHON), *map(id, _device_generators())}
    found: list[object] = []
    seen: dict[int, object] = {}
    pending = deque(roots)
    while pending and len(seen) < _MAX_OBJECTS:
        value = pending.popleft()
        if isinstance(value, _SKIPPED) or id(value) in seen:
            continue
        seen[id(value)] = value
        if not isinstance(value, _GENERATORS):
            pending.extend(_parts(value))
        elif id(value) not in shared and not isinstance(value, random.SystemRandom):
            found.append(value)
    return found


def _parts(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(islice(value.values(), _MAX_ELEMENTS))
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(islice(value, _MAX_ELEMENTS))
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, FunctionType):
        return [] if _is_library(value) else _parts_of_function(value)
    if isinstance(value, type):
        return [part for kind in value.__mro__ if not _is_library(kind) for part in vars(kind).values()]
    return [type(value), *instance_values(value)]


def instance_values(value: object) -> list[object]:
    """What an object holds in its slots and attributes."""
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for some in slots for name in ((some,) if isinstance(some, str) else some)]
    held = [getattr(value, name, None) for name in names if name not in {"__dict__", "__weakref__"}]
    return [*held, *getattr(value, "__dict__", {}).values()]


def closure_values(function: FunctionType) -> list[object]:
    """What a function holds of the scope that it was made in."""
    held = []
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:
            continue  # Not bound yet.
    return held


def _is_library(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in _LIBRARIES


def _parts_of_function(function: FunctionType) -> list[object]:
    names, codes = set[str](), [function.__code__]
    for code in codes:
        names.update(code.co_names)
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [
        *closure_values(function),
        *defaults,
        *(function.__globals__[name] for name in names if name in function.__globals__),
    ]
