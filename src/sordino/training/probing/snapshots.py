"""What a module holds, compared around a forward pass and put back.

A forward pass that writes into the module stores values of records that are neither clipped nor covered by
noise.
"""

import copy
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy import random as numpy_random
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sordino.errors import CoupledRecords
from sordino.gradients.backward_strategies import tensor_fingerprint
from sordino.gradients.numerics import is_away, read_flags, storage_number
from sordino.training.generators import states_undisturbed
from sordino.training.probing.torch_modes import Args, Kwargs, Operator
from sordino.training.pytree import tensors_in

_REMEDY = (
    "what a module stores of records is released without noise. Turn the statistics off, call .eval() on that layer, "
    "or initialize it from public data before making the model private"
)
# Bytes of frozen weights and buffers that are kept however little is trained.
_ROOM = 1 << 24
_OF_TORCH = frozenset(vars(nn.Module()))


class _Held(NamedTuple):
    """A parameter or buffer: the object, its memory, how often torch changed it, its value or a fingerprint if kept.

    `location` is the memory's number, which it keeps as long as `memory` holds it, and where the tensor begins there.
    """

    tensor: Tensor
    memory: Tensor
    location: tuple[int, object]
    version: int
    value: Tensor | None
    fingerprint: Tensor | None

    def is_unchanged(self, now: Tensor | None) -> bool | Tensor:
        """Whether it is as it was; a single truth value on another device, where to look is to wait."""
        if now is None or now is not self.tensor or _location(now) != self.location:
            return False
        # Rewriting .data goes past the version, so that only the values can tell.
        if self.value is not None:
            return _same_bits(self.value, now.detach())
        if self.fingerprint is not None:
            same = _same_bits(self.fingerprint, tensor_fingerprint(now))
            return same & (now._version == self.version)
        return now._version == self.version


class ModuleSnapshot:
    """All parameters and buffers of a module at one moment.

    Args:
        module: whose they are.
        values: also look at the values: it finds what is written past torch's version count, and lets `refuse_changes`
            put things back. Costs the memory of the trained parameters once; of other large frozen weights only
            a fingerprint is kept.
    """

    def __init__(self, module: nn.Module, *, values: bool = True) -> None:
        self._module = module
        tensors = list(_tensors(module))
        # So much of what is not trained is kept too.
        trained = sum(tensor.nbytes for _, tensor in tensors if tensor.requires_grad) if values else 0
        self._room = max(trained, _ROOM)
        self._held = {name: self._hold(tensor, values=values) for name, tensor in tensors}

    def _hold(self, tensor: Tensor, *, values: bool) -> _Held:
        value = bits = None
        if values:
            is_kept = tensor.requires_grad or tensor.nbytes <= self._room
            bits = None if is_kept else readable_fingerprint(tensor)
            if bits is None:
                value = tensor.detach().clone()
                self._room -= 0 if tensor.requires_grad else tensor.nbytes
        return _Held(tensor, tensor.detach(), _location(tensor), tensor._version, value, bits)

    def refuse_changes(self) -> None:
        """Put back what changed since, and refuse it.

        Raises:
            CoupledRecords: names the parameters and buffers that changed.
        """
        names = self.restore()
        if names:
            raise CoupledRecords(
                f"parameters and buffers must not change in a training forward pass, got changes of "
                f"{', '.join(sorted(names))}: {_REMEDY}. Large frozen weights among them are not put back: load them "
                "again."
            )

    def restore(self) -> list[str]:
        """Put back what changed, and name it."""
        now = dict(_tensors(self._module))
        found = {name: held.is_unchanged(now.get(name)) for name, held in self._held.items()}
        waiting = {name: same for name, same in found.items() if isinstance(same, Tensor)}
        found |= zip(waiting, read_flags(list(waiting.values())), strict=True)
        changed = [name for name, same in found.items() if not same]
        changed += [name for name in now if name not in self._held]
        for name in changed:
            owner, _, attribute = name.rpartition(".")
            module = self._module.get_submodule(owner)
            if name not in self._held:
                delattr(module, attribute)
                continue
            held = self._held[name]
            if held.value is not None:
                held.memory.copy_(held.value)
                held.tensor.data = held.memory
            if now.get(name) is not held.tensor:
                setattr(module, attribute, held.tensor)
        return changed


def _location(tensor: Tensor) -> tuple[int, object]:
    return storage_number(tensor), tensor.storage_offset()


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Where the modules hold them: every training forward asks, and torch's own walks go over all modules twice."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        held = vars(part)
        for name, tensor in (*held["_parameters"].items(), *held["_buffers"].items()):
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def readable_fingerprint(tensor: Tensor) -> Tensor | None:
    """A few numbers that tell a tensor's bits; None for a kind of tensor whose bits can't be read in place."""
    try:
        return tensor_fingerprint(tensor)
    except (RuntimeError, KeyError):
        return None


def _same_bits(one: Tensor, other: Tensor) -> bool | Tensor:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if one.layout is not torch.strided or other.layout is not torch.strided:
        # Operations on whole sparse tensors are few.
        pairs = zip(_stored(one), _stored(other), strict=True) if one.layout is other.layout else ()
        return one.layout is other.layout and all(bool(_same_bits(a, b)) for a, b in pairs)
    if not is_away(one) and torch.equal(one, other):
        return True
    same = ((one == other) | ((one != one) & (other != other))).all()
    return same if is_away(one) else bool(same)


def _stored(sparse: Tensor) -> tuple[Tensor, ...]:
    """The tensors that a sparse one consists of."""
    if sparse.layout is torch.sparse_coo:
        return sparse._indices(), sparse._values()
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    return sparse.ccol_indices(), sparse.row_indices(), sparse.values()


@contextmanager
def preserve_attributes(module: nn.Module) -> Iterator[None]:
    """Python attributes of all submodules are after the block what they were before it.

    Tensors, lists, dicts and sets get back their contents too; what lies deeper is the user's own.
    """
    kept = [
        (vars(part), name, value, _contents(value)) for part in module.modules() for name, value in own_attributes(part)
    ]
    names = {id(vars(part)): set(vars(part)) for part in module.modules()}
    try:
        yield
    finally:
        for part in module.modules():
            attributes = vars(part)
            for name in [name for name in attributes if name not in names.get(id(attributes), attributes)]:
                del attributes[name]
        for attributes, name, value, contents in kept:
            _put_back(value, contents)
            attributes[name] = value


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """A block in which the model is in evaluation mode; afterwards each module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def own_attributes(module: nn.Module) -> list[tuple[str, object]]:
    """The attributes of one module, without those of its submodules, that are not torch's."""
    return [(name, value) for name, value in vars(module).items() if name not in _OF_TORCH]


def tensor_attributes(module: nn.Module) -> dict[tuple[int, int], Tensor]:
    """Tensors in plain attributes of all submodules, and in lists and dicts there, by whose they are and which."""
    found: dict[tuple[int, int], Tensor] = {}
    for part in module.modules():
        for tensor in tensors_in([value for _, value in own_attributes(part)]):
            found[id(part), id(tensor)] = tensor
    return found


def exports_by_hooks(module: nn.Module) -> bool:
    """Whether somebody else's forward hooks see what flows through the module."""
    hooks = (hook for part in module.modules() for hook in vars(part)["_forward_hooks"].values())
    return any(not type(hook).__module__.startswith("sordino.") for hook in hooks)


def _contents(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if type(value) in {list, dict, set} else None


def _put_back(value: object, contents: object) -> None:
    if isinstance(value, Tensor) and isinstance(contents, Tensor):
        if not _same_bits(value.detach(), contents):
            value.data = contents
    elif isinstance(value, list) and isinstance(contents, list):
        value[:] = contents
    elif isinstance(value, dict | set) and isinstance(contents, dict | set):
        value.clear()
        value.update(contents)


# ----------------------------------------------------------------------------------------------------------------------
# Ways to hold chance in a forward pass: repeat it, drive it to an extreme, or switch it off.
# ----------------------------------------------------------------------------------------------------------------------


GENERATORS = ("torch", "python", "numpy")
"""The generators that the probe can drive. One of the user's own (``numpy.random.default_rng``) is out of reach."""

# The word of a Mersenne Twister's state whose output has all bits set; the word 0 gives the output 0.
_ALL_BITS = 0x12DD9BB3
# This many first draws are extreme, the others as the seed has them: loops that reject a draw come to an end.
_FORCED_WORDS = 64
# Where torch's serialized Mersenne Twister has its counters and its 64-bit words.
_TORCH_LEFT, _TORCH_NEXT, _TORCH_WORDS, _WORDS = slice(8, 12), slice(16, 24), 24, 624


@contextmanager
def preserve_rng_state() -> Iterator[None]:
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
class SeededGenerators:
    """One course of all random numbers.

    Args:
        seed: of every generator.
        forced: one of `GENERATORS`, whose first draws are then as small as they can be, or as large.
        high: as large as they can be.
        other_seed: of Python's and NumPy's generators, if it is another one.
    """

    seed: int = 0
    forced: str | None = None
    high: bool = False
    other_seed: int | None = None

    def start(self) -> None:
        """Start all generators again, so that two passes over batches of one shape meet the same chance."""
        _seed_torch(self.seed)
        other_seed = self.seed if self.other_seed is None else self.other_seed
        random.seed(other_seed)
        numpy_random.seed(other_seed)  # noqa: NPY002
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


def _seed_torch(seed: int) -> None:
    """``torch.manual_seed`` without the record of the call that torch keeps where there is no accelerator."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


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


class DisableRandomness(TorchDispatchMode):
    """Inside, dropout keeps everything, and numbers and choices are constant. Permutations stay random on purpose.

    Batches of different size then give every record the same forward pass.

    Attributes:
        is_used: whether torch was asked for a random number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_used = False

    def __torch_dispatch__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        self.is_used |= torch.Tag.nondeterministic_seeded in func.tags
        if name not in _DRAWN or name == "randperm":
            return func(*_without_dropout(func, args, kwargs), **kwargs)
        arguments = _by_name(func, args, kwargs)
        if name in _LIKELIEST:
            return _LIKELIEST[name](arguments)
        drawn = func(*args, **kwargs)
        assert isinstance(drawn, Tensor)
        device = drawn.device
        middle = _DRAWN[name](arguments, drawn, lambda shape: torch.full(tuple(shape), 0.5, device=device))
        return drawn.copy_(middle)


@cache
def _dropout_argument(func: Operator) -> int | None:
    """Which argument of a fused attention is its dropout probability."""
    names = [argument.name for argument in func._schema.arguments]  # pyright: ignore[reportPrivateUsage]
    return names.index("dropout_p") if "dropout_p" in names else None


def _without_dropout(func: Operator, args: Args, kwargs: dict[str, object]) -> Args:
    """The arguments of a fused attention with its dropout probability at 0; others as they are."""
    index = _dropout_argument(func)
    if index is None:
        return args
    if "dropout_p" in kwargs:
        kwargs["dropout_p"] = 0.0
    return (*args[:index], 0.0, *args[index + 1 :]) if index < len(args) else args


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


# --- the same chance at the same position -----------------------------------------------------------------------------

# An odd number without a pattern: the golden ratio's bits, as a signed word; and its part after the point.
_SCRAMBLE = 0x9E37_79B9_7F4A_7C15 - (1 << 64)
_TURN = 0.618_033_988_749_895
_UNIFORM_BITS = 53
_LIBRARIES = (
    "<",
    *(
        f"{Path(file).parent}/"
        # jaxtyping wraps functions where the shapes of their arguments are checked.
        for file in (torch.__file__, getattr(sys.modules.get("jaxtyping"), "__file__", None), Path(__file__).parents[1])
        if file is not None
    ),
)

_Uniform = Callable[[Sequence[int]], Tensor]
_Arguments = Mapping[str, object]


class ChanceByPosition(TorchDispatchMode):
    """Inside, a random number follows from the call that draws it and from its position among those drawn there.

    It does not follow from how many are drawn: batches padded to different lengths have the same chance at the
    positions that both have, and the longer one has further chance beyond. What a batch of the one length makes of that
    has then the distribution that a batch of the other length has, if it is the same.

    Calls are matched by the code that makes them and by how often it did so before; the numbers of one call by their
    indices. Dimensions whose size changes with the length are counted from the side that is not padded.

    Args:
        seed: another chance for every one; those of one position are spread evenly over the seeds 0, 1, 2, ….
        within: the code under which calls are distinguished.
        in_front: whether positions are counted from the last one.
        is_folded: whether a dimension whose size is a multiple of a padded length holds records, or heads, times
            positions.
    """

    def __init__(self, *, seed: int, within: CodeType, in_front: bool, is_folded: bool) -> None:
        super().__init__()
        self.seed = seed
        self._within, self._in_front, self._is_folded = within, in_front, is_folded
        self._lengths: Sequence[tuple[int, int]] = ()
        self._sites: dict[tuple[object, ...], int] = {}
        self._calls: Counter[int] = Counter()
        # The shapes of the first pass, by call.
        self._shapes: dict[tuple[int, int], tuple[int, ...]] = {}
        self._is_first = True

    def start(self, lengths: Sequence[tuple[int, int]] = ()) -> None:
        """Start a pass; in the first there are no `lengths`, in others those of the first pass and of this one."""
        self._is_first, self._lengths = not lengths, lengths
        self._calls.clear()

    def __torch_dispatch__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name not in _DRAWN and torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*_without_dropout(func, args, kwargs), **kwargs)
        call = self._call()
        if name not in _DRAWN:
            torch.manual_seed(hash((self.seed, *call)) % (1 << 63))
            return func(*_without_dropout(func, args, kwargs), **kwargs)
        arguments = _by_name(func, args, kwargs)
        if name == "native_dropout":
            return _dropped(arguments, lambda shape: self._uniform(call, shape, arguments["input"]))
        given = func(*args, **kwargs)
        assert isinstance(given, Tensor)
        values = _DRAWN[name](arguments, given, lambda shape: self._uniform(call, shape, given))
        return given.copy_(values)

    def _call(self) -> tuple[int, int]:
        """The call's site, by the order in which sites came first, and how often it was there before."""
        where: list[object] = []
        frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
        while frame is not None and frame.f_code is not self._within:
            owner = frame.f_locals.get("self")
            # What stands between, in torch and here, is not always the same.
            if isinstance(owner, nn.Module) or not frame.f_code.co_filename.startswith(_LIBRARIES):
                where.append((frame.f_code, frame.f_lineno, id(owner) if isinstance(owner, nn.Module) else None))
            frame = frame.f_back
        site = self._sites.setdefault(tuple(where), len(self._sites))
        self._calls[site] += 1
        return site, self._calls[site]

    def _uniform(self, call: tuple[int, int], shape: Sequence[int], like: object) -> Tensor:
        """Numbers in (0, 1), float64, one for each entry of `shape`."""
        device = like.device if isinstance(like, Tensor) else None
        known = tuple(shape) if self._is_first else self._shapes.get(call, tuple(shape))
        if self._is_first:
            self._shapes[call] = tuple(shape)
        code = torch.tensor(call[0] * 1_000_003 + call[1], device=device)
        for dim, size in enumerate(shape):
            index = torch.arange(size, device=device)
            if len(known) == len(shape) and known[dim] != size:
                index = self._aligned(index, known[dim], size)
            code = _scrambled(code[..., None] + _SCRAMBLE * (index + 1))
        mantissa = _scrambled(code) & ((1 << _UNIFORM_BITS) - 1)
        return ((mantissa.double() + 0.5) / (1 << _UNIFORM_BITS) + self.seed * _TURN) % 1.0

    def _aligned(self, index: Tensor, first: int, now: int) -> Tensor:
        """Where positions of a dimension that had the size `first` were then; positions that are new come behind."""
        for before, after in self._lengths if self._is_folded else ():
            if first % before == now % after == 0 and first // before == now // after:
                position = index % after - (after - before if self._in_front else 0)
                is_known = (position >= 0) & (position < before)
                return torch.where(is_known, index // after * before + position, first + index)
        position = index - (now - first if self._in_front else 0)
        return torch.where(position >= 0, position, first + index)


def _scrambled(words: Tensor) -> Tensor:
    for shift in (30, 27, 31):
        words = (words ^ (words >> shift)) * _SCRAMBLE
    return words


def _by_name(func: Operator, args: Args, kwargs: Mapping[str, object]) -> _Arguments:
    declared = func._schema.arguments  # pyright: ignore[reportPrivateUsage]
    found = {one.name: one.default_value for one in declared if one.has_default_value()}
    return {**found, **{one.name: value for one, value in zip(declared, args, strict=False)}, **kwargs}


def _dropped(arguments: _Arguments, uniform: _Uniform) -> tuple[Tensor, Tensor]:
    given, p = arguments["input"], _number(arguments["p"])
    assert isinstance(given, Tensor)
    if arguments["train"] is False:
        return given.clone(), torch.ones_like(given, dtype=torch.bool)
    kept = uniform(given.shape) >= p
    return given * kept.to(given.dtype) / max(1.0 - p, 1e-30), kept


def _normal(arguments: _Arguments, given: Tensor, uniform: _Uniform) -> Tensor:
    found = torch.special.ndtri(uniform(given.shape))
    return found * arguments.get("std", 1.0) + arguments.get("mean", 0.0)


def _between(arguments: _Arguments, given: Tensor, uniform: _Uniform) -> Tensor:
    low, high = _number(arguments.get("from", 0.0)), _number(arguments.get("to", 1.0))
    return low + (high - low) * uniform(given.shape)


def _integers(arguments: _Arguments, given: Tensor, uniform: _Uniform) -> Tensor:
    low, high = _limits(arguments, given)
    return low + (uniform(given.shape) * (high - low)).floor()


def _limits(arguments: _Arguments, given: Tensor) -> tuple[int, int]:
    """The smallest random integer, and one more than the largest."""
    low, high = arguments.get("low", arguments.get("from")), arguments.get("high", arguments.get("to"))
    largest = 1 << 24 if given.dtype.is_floating_point else torch.iinfo(given.dtype).max
    return int(_number(low)), largest if high is None else int(_number(high))


def _coins(arguments: _Arguments, given: Tensor, uniform: _Uniform) -> Tensor:
    return uniform(given.shape) < arguments.get("p", arguments["self"])  # pyright: ignore[reportOperatorIssue]


def _chosen(arguments: _Arguments, given: Tensor, uniform: _Uniform) -> Tensor:
    weights = arguments["self"]
    assert isinstance(weights, Tensor)
    weights = weights.double()
    if given.size(-1) == 1 or arguments["replacement"]:
        limits = weights.cumsum(-1)
        found = torch.searchsorted(limits, uniform(given.shape) * limits[..., -1:], right=True)
        return found.clamp(max=weights.size(-1) - 1)
    return (-uniform(weights.shape).log() / weights).topk(given.size(-1), largest=False).indices


_DRAWN: dict[str, Callable[[_Arguments, Tensor, _Uniform], Tensor]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform", "uniform_"), _between),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_", "normal_functional"), _normal),
    **dict.fromkeys(("randint", "randint_like", "random", "random_"), _integers),
    **dict.fromkeys(("bernoulli", "bernoulli_"), _coins),
    "native_dropout": lambda _arguments, given, _uniform: given,
    "multinomial": _chosen,
    "randperm": lambda _, given, uniform: uniform(given.shape).argsort(),
    "exponential_": lambda said, given, uniform: -torch.log1p(-uniform(given.shape)) / _number(said["lambd"]),
    "log_normal_": lambda said, given, uniform: _normal(said, given, uniform).exp(),
    "geometric_": lambda said, given, uniform: (
        (torch.log1p(-uniform(given.shape)) / np.log1p(-_number(said["p"]))).ceil().clamp(min=1)
    ),
    "cauchy_": lambda said, given, uniform: (
        _number(said["median"]) + _number(said["sigma"]) * torch.tan(torch.pi * (uniform(given.shape) - 0.5))
    ),
}


def _most_chosen(arguments: _Arguments) -> Tensor:
    """What is chosen most often; with replacement again and again."""
    weights, count = arguments["self"], arguments["num_samples"]
    assert isinstance(weights, Tensor)
    assert isinstance(count, int)
    if arguments["replacement"]:
        return weights.argmax(-1, keepdim=True).expand(*weights.shape[:-1], count).clone()
    return weights.topk(count).indices


def _expected_coins(arguments: _Arguments) -> Tensor:
    """The probabilities."""
    p = arguments.get("p", arguments["self"])
    coins = cast("Tensor", arguments["self"]).clone()
    return coins.copy_(p) if isinstance(p, Tensor) else coins.fill_(_number(p))


# In place of the middle of what may be drawn.
_LIKELIEST: dict[str, Callable[[_Arguments], object]] = {
    "bernoulli": _expected_coins,
    "bernoulli_": lambda arguments: cast("Tensor", arguments["self"]).copy_(_expected_coins(arguments)),
    "native_dropout": lambda arguments: (
        cast("Tensor", arguments["input"]).clone(),
        torch.ones_like(cast("Tensor", arguments["input"]), dtype=torch.bool),
    ),
    "multinomial": _most_chosen,
}
