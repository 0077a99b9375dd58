"""Batches padded to their longest record: allowed where the padded length changes no record's gradient.

How far a batch is padded depends on its longest record. That reaches no other record when the model and the loss give
every record the same gradient whatever the length: attention masks, masked means, sums over valid positions. It is
checked on synthetic records, padded less and more: without chance, and with the same chance at the same positions, for
a sum or a mean of random numbers over positions follows the padded length too.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sordino.errors import CoupledRecords
from sordino.gradients import GradientCapture
from sordino.training.probing.probe_runner import ProbeResult, ProbeRunner, ProbeTask, attempt, preserve_model_state
from sordino.training.probing.snapshots import ChanceByPosition, DisableRandomness, SeededGenerators
from sordino.training.probing.synthetic import AdversarialValue, SyntheticRecords
from sordino.training.pytree import map_tensors, tensors_in

_Lengths = tuple[tuple[int, ...], ...]

_RECORDS = 4
# So often chance is tried: every number has values from all over its range.
_COURSES = 5
# Another length goes through other kernels: rounding, far below what one position of padding does to a mean.
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}
_ROUNDING_HALF = 5e-2
# One position more, and much more. A position table may end before.
_Grown = Callable[[int, int, int], int]
"""The number of a padded tensor, that of one of its padded dimensions, and its size ↦ a larger size."""
_LONGER: tuple[_Grown, ...] = (lambda _, __, n: n + 1, lambda _, __, n: 2 * n + 16)


@dataclass(frozen=True, kw_only=True)
class PaddedTensor:
    """How one tensor of a batch is padded.

    Args:
        dims: the dimensions that follow the longest record, ≥ 1.
        fill: the value of padded entries.
        in_front: whether padding comes before a record's own entries.
    """

    dims: tuple[int, ...]
    fill: float
    in_front: bool

    def padded(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The tensor with its padded dimensions grown to those of `shape`."""
        grown = tensor.new_full(tuple(shape), self.fill)
        own = [slice(None)] * tensor.dim()
        for dim in self.dims:
            size, whole = tensor.shape[dim], shape[dim]
            own[dim] = slice(whole - size, whole) if self.in_front else slice(0, size)
        grown[tuple(own)] = tensor
        return grown

    def shortened(self, tensor: Tensor, record: int, by: int) -> None:
        """Fill the last (or first) `by` positions of a record with padding, in place; one position is left."""
        for dim in self.dims:
            size = tensor.shape[dim]
            by = max(min(by, size - 1), 0)
            where = [slice(record, record + 1), *[slice(None)] * (tensor.dim() - 1)]
            where[dim] = slice(0, by) if self.in_front else slice(size - by, None)
            tensor[tuple(where)] = self.fill


@dataclass(kw_only=True)
class Padding:
    """The padding of a loader's batches, and whether their length may vary.

    Args:
        tensors: the padded tensors, by their index among the batch's tensors.

    Attributes:
        may_vary: whether model and loss were checked to be independent of the padded length; None before a check.
        varies: whether a batch of another length has been read.
        untried: lengths of batches that were read, of each padded tensor, which the next check tries.
    """

    tensors: Mapping[int, PaddedTensor]
    may_vary: bool | None = field(default=None, init=False)
    varies: bool = field(default=False, init=False)
    untried: "list[_Lengths]" = field(default_factory=list[tuple[tuple[int, ...], ...]], init=False)
    _met: "set[_Lengths]" = field(default_factory=set[tuple[tuple[int, ...], ...]], init=False)

    def meet(self, batch: object) -> None:
        """A batch of another length than the first was read: models may treat long batches in another way.

        Raises:
            CoupledRecords: the length matters.
        """
        if self.may_vary is False:
            raise padding_refusal()
        self.varies = True
        lengths = tuple(tuple(tensor.shape[dim] for dim in known.dims) for known, tensor in self.padded(batch))
        if lengths not in self._met:
            self._met.add(lengths)
            self.untried.append(lengths)

    def padded(self, batch: object) -> "list[tuple[PaddedTensor, Tensor]]":
        """The padded tensors of a batch, each with how it is padded."""
        return [
            (self.tensors[index], tensor) for index, tensor in enumerate(tensors_in(batch)) if index in self.tensors
        ]


def padding_refusal() -> CoupledRecords:
    """What is raised for batches of different lengths where the length matters."""
    return CoupledRecords(
        "collate_fn must not pad to the longest record of the batch unless padding changes no record's loss or "
        "gradient, got a batch of another length for a model and loss in which it does. Give the model a mask "
        "(attention_mask) and divide within each record by its own valid positions, or pad and cut each record to a "
        "public length (padding='max_length', truncation=True). Or train one record at a time, each at its own length: "
        'gradients="one-by-one".'
    )


def check_padding(padding: Padding | None, task: ProbeTask) -> None:
    """Decide whether batches may be padded to their longest record, by synthetic records padded less and more.

    Guarantee: only the structure of the task's records is read.

    Args:
        padding: of the loader's batches, or None; `may_vary` is set.
        task: what is checked; a record taken alone is not padded for others.

    Raises:
        CoupledRecords: the length matters, and a batch of another length was read already.
    """
    if padding is None or padding.may_vary is False:
        return
    if not isinstance(task.recorder, GradientCapture):
        padding.may_vary, padding.untried = True, []
        return
    thorough = padding.may_vary is None or not task.options.again
    probe = _PaddingProbe(padding, task)
    grown, padding.untried = [*_LONGER, *map(_to, padding.untried)], []
    with preserve_model_state(task.model):
        padding.may_vary = probe.is_independent_of_length(grown, thorough=thorough)
    if padding.varies and not padding.may_vary:
        raise padding_refusal()


def _to(lengths: _Lengths) -> "_Grown":
    """Every padded tensor as long as in a batch that was read, or as it is where that is longer."""
    return lambda number, dim, size: max(size, lengths[number][dim])


class _PaddingProbe:
    """Compares synthetic records of different lengths with the same ones in longer batches."""

    def __init__(self, padding: Padding, task: ProbeTask) -> None:
        self._padding, self._task = padding, task
        self._runner = ProbeRunner(task)
        self._is_random = False
        self._count = max(1, min(_RECORDS, task.options.num_records))
        self._weights = torch.linspace(0.5, 1.0, self._count)[None]

    def is_independent_of_length(self, grown: "Sequence[_Grown]", *, thorough: bool) -> bool:
        """Whether some synthetic records have the same losses and gradients whatever the length."""
        sides = dict.fromkeys(padded.in_front for padded in self._padding.tensors.values())
        # How positions are counted where random numbers are drawn for them.
        ways = [(in_front, is_folded) for is_folded in (True, False) for in_front in sides]
        for synthetic in self._task.kinds(self._count):
            for in_front, is_folded in ways:
                courses = [_course(seed, in_front=in_front, is_folded=is_folded) for seed in range(_COURSES)]
                found = self._is_same(synthetic, courses, grown, thorough=thorough)
                if found is None:
                    break
                # Without random numbers there is one way to count them.
                if found or not self._is_random:
                    return found
            else:
                return False
        return False

    def _is_same(
        self,
        synthetic: SyntheticRecords,
        courses: Sequence[ChanceByPosition],
        grown: "Sequence[_Grown]",
        *,
        thorough: bool,
    ) -> bool | None:
        """Whether lengths make no difference, without chance and with; None where these records don't run."""
        still, course = DisableRandomness(), courses[0]
        with still:
            found = self._tried(synthetic, None, grown, course)
            values = list(self._adversarial(synthetic, thorough=thorough)) if found else []
            found = found and all(self._tried(synthetic, value, grown, course) is not False for value in values)
        self._is_random = still.is_used or bool(self._runner.generators)
        if not found or not self._is_random:
            return found
        seen = [self._tried(synthetic, None, grown, chance) for chance in courses]
        if True not in seen or False in seen:
            return False
        return all(self._tried(synthetic, value, grown, course) is not False for value in values)

    def _adversarial(self, synthetic: SyntheticRecords, *, thorough: bool) -> Iterator[AdversarialValue]:
        """Ids that all differ, and those that the code compares with."""
        kinds = ["range", *(list(self._runner.singled.integers) if thorough else ())]
        has_example = any(True for _ in tensors_in(self._task.options.public_batch))
        for index in synthetic.tensors_of(floating=False) if not has_example else ():
            if index in self._padding.tensors:
                yield from (AdversarialValue(integers=kind, tensor=index) for kind in kinds)

    def _tried(
        self,
        synthetic: SyntheticRecords,
        value: AdversarialValue | None,
        grown: "Sequence[_Grown]",
        chance: ChanceByPosition,
    ) -> bool | None:
        """None where model and loss don't run on these records."""
        values = {} if value is None else dict.fromkeys(range(self._count), value)
        batch = synthetic.batch(range(self._count), values)
        for known, tensor in self._padding.padded(batch):
            # Every record ends so many positions before the batch does; of several, one is not padded at all.
            for record in range(self._count):
                known.shortened(tensor, record, record if self._count > 1 else 1)
        shown = self._observed(batch, chance, [])
        if shown is None or not shown.finite or not shown.scale(0):
            return None
        tried: list[ProbeResult] = []
        for length in grown:
            longer = _grown(self._padding, batch, length)
            other = self._observed(longer, chance, self._lengths(batch, longer))
            tried += [] if other is None else [other]
        tolerance = _ROUNDING.get(self._runner.dtype, _ROUNDING_HALF)
        if self._runner.precision != "single":
            tolerance = self._runner.other_shape()
        return bool(tried) and all(_same(shown, other, tolerance) for other in tried)

    def _observed(
        self, batch: object, chance: ChanceByPosition, lengths: Sequence[tuple[int, int]]
    ) -> ProbeResult | None:
        """None where the code does not run on such a batch."""
        chance.start(lengths)
        with chance:
            seeded = SeededGenerators(seed=chance.seed)
            return attempt(lambda: self._runner.observe(batch, self._weights, chance=seeded, large=True))

    def _lengths(self, one: object, other: object) -> list[tuple[int, int]]:
        """The padded lengths of two batches, in pairs."""
        pairs = zip(self._padding.padded(one), self._padding.padded(other), strict=True)
        return [(short.shape[dim], long.shape[dim]) for (known, short), (_, long) in pairs for dim in known.dims]


def _course(seed: int, *, in_front: bool, is_folded: bool) -> ChanceByPosition:
    within = inspect.unwrap(ProbeRunner.observe).__code__
    return ChanceByPosition(seed=seed, within=within, in_front=in_front, is_folded=is_folded)


def _same(one: ProbeResult, other: ProbeResult, tolerance: float) -> bool:
    if not float(torch.linalg.vector_norm(one.sketches[0] - other.sketches[0])) <= tolerance * one.scale(0):
        return False
    if one.losses is None or other.losses is None:
        return True
    return torch.allclose(one.losses, other.losses, rtol=tolerance, atol=tolerance * float(one.losses.abs().max()))


def _grown(padding: Padding, batch: object, length: _Grown) -> object:
    indices, numbers = itertools.count(), itertools.count()

    def grown(tensor: Tensor) -> Tensor:
        known = padding.tensors.get(next(indices))
        if known is None:
            return tensor
        number = next(numbers)
        shape = [
            length(number, known.dims.index(dim), size) if dim in known.dims else size
            for dim, size in enumerate(tensor.shape)
        ]
        return known.padded(tensor, shape)

    return map_tensors(grown, batch)
