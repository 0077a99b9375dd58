"""Experiments for gradients taken one record at a time.

There a record's forward and backward pass meet no other record. What is left to find out on synthetic records is
whether the module remembers something from one record to the next, and whether the loss is one number of this record.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy import random as numpy_random
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sordino.errors import (
    CoupledRecords,
    InvalidArgument,
    LossShapeError,
    PrivacyError,
    RecordCountMismatch,
    SordinoError,
    UncapturedParameter,
    UnsupportedModule,
)
from sordino.gradients import GradientCapture, OneByOne, Recorder
from sordino.training.probing.probe import (
    ProbeRunner,
    ProbeSize,
    backward_into_the_module,
    check_no_max_norm_embeddings,
    check_record_independence,
    external_parameter_error,
    graph_leaves,
    preserve_model_state,
)
from sordino.training.probing.snapshots import DisableRandomness, SeededGenerators, random_states
from sordino.training.probing.synthetic import INTEGER_PATTERNS, AdversarialValue, SyntheticRecords
from sordino.training.pytree import tensors_in

__all__ = ["NOT_CAPTURED", "check_draws", "check_one_by_one", "check_records", "is_not_captured"]


# ----------------------------------------------------------------------------------------------------------------------
# Which random numbers a forward and backward pass draws, on synthetic records.
#
# Numbers of private records come from the global generators, which are in secret states while a batch is processed
# (`sordino.training.generators`). Numbers from elsewhere are not secret. Where a logical batch is split, a number that
# all records of a microbatch share ties them to each other, and one record less ties others.
# ----------------------------------------------------------------------------------------------------------------------


# The most rows that training's batches and the public records allow, of these.
_ROWS = (11, 7, 5, 3, 2)
_FEW = 3
# Seeds that no model uses by itself.
_DRAWS_SEEDS = (736_878_701, 736_878_702)
# A layer that is dropped half of the time is met both ways all but once in 4096 times.
_OTHERS = 13


def check_draws(
    model: nn.Module,
    recorder: Recorder,
    records: object,
    run: Callable[[object], Tensor],
    *,
    reduction: str = "none",
    public_batch: object = None,
    is_split: bool = False,
    size: ProbeSize | None = None,
) -> None:
    """Refuse random numbers that are not secret, or that tie the records of a microbatch to each other.

    Guarantee: only the structure of `records` is read.

    Args:
        model: in the mode in which it will be trained.
        recorder: of the model's gradients, with no recording in use.
        records: a batch, or a batch with no rows; or a tuple whose first part is one.
        run: batch ↦ loss, as for `check_record_independence`.
        reduction: "none", "mean" or "sum".
        public_batch: records to use instead of synthetic ones.
        is_split: whether a logical batch may come in several microbatches of more than one record, or in several
            processes.
        size: how many records at once.

    Raises:
        CoupledRecords: a generator of the model's own, a seed, or a number for all records of a microbatch.
    """
    with preserve_model_state(model):
        example = list(tensors_in(public_batch))
        look = _Look(recorder, run, reduction, records, example, size or ProbeSize(), is_split=is_split)
        first = look.drawn(_DRAWS_SEEDS[0])
        if first is None or not (first.used.any() or first.of_torch):
            return
        if first.of_own:
            raise CoupledRecords(
                "random numbers in model and loss must come from torch's global generators, got generator=…: from a "
                "seed that others know, a record's numbers follow from its place in the batch. Leave generator= out; "
                "the global generators have secret states while a batch is processed."
            )
        # torch's generators tell by themselves whether they were seeded.
        second = look.drawn(_DRAWS_SEEDS[1]) if first.used.any() else None
        same = second is not None and (first.used & _equal(first.after, second.after)).any()
        if first.was_seeded or same:
            raise CoupledRecords(
                "random generators must not be seeded in model and loss, got a new seed: a record's numbers would "
                "follow from its place in the batch. Leave it out; seed before training."
            )
        # Each record has draws of its own where the model gets one at a time.
        if not is_split or look.rows == 1:
            return
        fewer = look.drawn(_DRAWS_SEEDS[0], rows=look.rows - 1)
        may_share = fewer is not None and (first.used & _equal(first.after, fewer.after)).any()
        if first.is_shared(fewer) or (may_share and look.matters()):
            raise CoupledRecords(
                "random numbers in model and loss must be drawn for each record where batches are split into "
                "microbatches or over processes, got a draw that all rows share: which records share it depends on how "
                "many there are. Draw one row per record, switch the layer off (layerdrop=0), or use microbatch_size=1 "
                "or None in one process."
            )


@dataclass(frozen=True, kw_only=True)
class _OtherDraws(SeededGenerators):
    """torch's generators start with `seed`, those of Python and NumPy with `other`."""

    other: int

    def start(self) -> None:
        """Start all generators again."""
        super().start()
        random.seed(self.other)
        numpy_random.seed(self.other)  # noqa: NPY002


class _Draws(TorchDispatchMode):
    """Notes where the random numbers of a block come from.

    Args:
        rows: number of records.
        seed: of torch's generators.
    """

    def __init__(self, rows: int, seed: int) -> None:
        super().__init__()
        self.rows, self._seed = rows, seed
        self.of_torch = self.of_own = self.was_seeded = False
        self.sizes: list[int] = []
        self.used = np.zeros(2, dtype=bool)
        self.after: list[np.ndarray] = []
        self.norms: Tensor | None = None

    def __torch_dispatch__(
        self,
        func: "torch._ops.OpOverload",  # pyright: ignore[reportPrivateUsage]
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.of_torch = True
            given = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.Generator)]
            self.of_own |= any(generator.initial_seed() != self._seed for generator in given)
            self.was_seeded |= torch.initial_seed() != self._seed
            first = next(iter(tensors_in(found)), None)
            self.sizes += [] if first is None else [first.numel()]
        return found

    def is_shared(self, fewer: "_Draws | None") -> bool:
        """Whether a draw is not as many times as large as one with fewer records as there are more records."""
        if fewer is not None and len(fewer.sizes) == len(self.sizes):
            pairs = zip(self.sizes, fewer.sizes, strict=True)
            return any(size * fewer.rows != other * self.rows for size, other in pairs)
        return any(size % self.rows for size in self.sizes)


class _Look:
    def __init__(
        self,
        recorder: Recorder,
        run: Callable[[object], Tensor],
        reduction: str,
        structure: object,
        example: Sequence[Tensor],
        size: ProbeSize,
        *,
        is_split: bool,
    ) -> None:
        self._recorder, self._run, self._reduction = recorder, run, reduction
        self._structure, self._example = structure, example
        self._two_passes = size.two_passes
        # What ties the records of a microbatch shows in how many numbers are drawn; a few records tell where from.
        few = size.records if is_split else min(_FEW, size.records)
        most = min([few, *(len(tensor) - 1 for tensor in example if tensor.dim())])
        self.rows = next((rows for rows in _ROWS if rows <= most), 1) if isinstance(recorder, GradientCapture) else 1
        self._given = next((tensor.size(0) for tensor in tensors_in(structure) if tensor.dim()), 0)

    def drawn(self, seed: int, *, rows: int | None = None, other: int | None = None) -> _Draws | None:
        """What the first kind of synthetic records that the loop runs on draws; None where it runs on none."""
        rows = self.rows if rows is None else rows
        for pattern in INTEGER_PATTERNS:
            records = SyntheticRecords(
                self._structure, rows=self._given, count=rows, pattern=pattern, example=self._example
            )
            draws = _Draws(rows, seed)
            try:
                chance = SeededGenerators(seed=seed) if other is None else _OtherDraws(seed=seed, other=other)
                self._observe(records.batch(range(rows)), rows, draws, chance)
            except SordinoError:
                raise
            except Exception:
                self._recorder.discard()
                continue
            return draws
        return None

    def matters(self) -> bool:
        """Whether any record's gradient changes with Python's or NumPy's numbers: type checkers draw some too."""
        norms = [self._norms(other) for other in range(_OTHERS)]
        return not all(torch.allclose(norms[0], other, rtol=1e-4, equal_nan=True) for other in norms[1:])

    def _norms(self, other: int) -> Tensor:
        draws = self.drawn(_DRAWS_SEEDS[0], other=other)
        assert draws is not None
        assert draws.norms is not None
        return draws.norms

    def _observe(self, batch: object, rows: int, draws: _Draws, chance: SeededGenerators) -> None:
        chance.start()
        before = random_states()[1:]
        with draws:
            if isinstance(self._recorder, GradientCapture):
                observer = ProbeRunner(self._recorder, self._run, self._reduction, two_passes=self._two_passes)
                draws.norms = observer.observe(batch, torch.zeros(0, rows), chance=chance, large=True).norms
            else:
                with self._recorder.capturing(1), torch.enable_grad():
                    total = self._run(batch).sum()
                    backward_into_the_module(total, total.backward, records=rows)
                self._recorder.discard()
        draws.after = random_states()[1:]
        draws.used = ~_equal(before, draws.after)


def _equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([np.array_equal(a, b) for a, b in zip(one, other, strict=True)])


# ----------------------------------------------------------------------------------------------------------------------
# Experiments for gradients taken one record at a time.
# ----------------------------------------------------------------------------------------------------------------------


NOT_CAPTURED = (UncapturedParameter, RecordCountMismatch, UnsupportedModule)
"""Refusals of a capture that one record at a time may answer; what couples records is none of them."""


def is_not_captured(refusal: PrivacyError) -> bool:
    """Whether `refusal` is one of a capture: by name, or because the model failed while it was captured."""
    return isinstance(refusal, NOT_CAPTURED) or not isinstance(refusal.__cause__, SordinoError | None)


_ADVICE = (
    "Or train one record at a time, which takes every model that runs on one: "
    'PerformanceOptions(gradients="one-by-one") in sordino.fit, PrivacyEngine(gradients="one-by-one") in a loop, '
    'PrivacyArguments(gradients="one-by-one") in a trainer.'
)
_RECORDS = 4
# The record whose gradient is compared before and after the others.
_WATCHED = 1
_POISONS = (
    *(AdversarialValue(floats=value) for value in (torch.nan, 1e4, -1e4)),
    *(AdversarialValue(integers=value) for value in (-1, -100, 2, "range")),
)
_SEEDS = (1, 2, 3)
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}
_HALF = 5e-2
# A batch goes through other kernels than a record.
_TOGETHER = {torch.float64: 1e-6, torch.float32: 1e-3}


def check_records(
    model: nn.Module,
    recorder: Recorder,
    records: object,
    run: Callable[[object], Tensor],
    *,
    reduction: str = "none",
    may_be_empty: bool = False,
    public_batch: object = None,
    values_released: bool = False,
    as_in_a_batch: bool = False,
    is_split: bool = False,
    advises: bool = True,
    size: ProbeSize | None = None,
) -> None:
    """Refuse a model and loss in which one record changes another record's loss or gradient, as it is recorded.

    Args and errors are those of `check_record_independence`, `check_one_by_one` and `check_draws`. With `advises`
    the refusal of a capture names one record at a time where synthetic records show that this would work.
    """

    def look_at_draws() -> None:
        check_draws(
            model,
            recorder,
            records,
            run,
            reduction=reduction,
            public_batch=public_batch,
            is_split=is_split,
            size=size,
        )

    try:
        _check_gradients(
            model,
            recorder,
            records,
            run,
            reduction=reduction,
            may_be_empty=may_be_empty,
            public_batch=public_batch,
            values_released=values_released,
            as_in_a_batch=as_in_a_batch,
            advises=advises,
            size=size,
        )
    except CoupledRecords:
        # Numbers that are not the same in two runs look like a coupling: say where they come from.
        look_at_draws()
        raise
    look_at_draws()


def _check_gradients(
    model: nn.Module,
    recorder: Recorder,
    records: object,
    run: Callable[[object], Tensor],
    *,
    reduction: str,
    may_be_empty: bool,
    public_batch: object,
    values_released: bool,
    as_in_a_batch: bool,
    advises: bool,
    size: ProbeSize | None,
) -> None:
    if isinstance(recorder, OneByOne):
        check_one_by_one(
            model,
            recorder,
            records,
            run,
            reduction=reduction,
            public_batch=public_batch,
            as_in_a_batch=as_in_a_batch,
        )
        return
    assert isinstance(recorder, GradientCapture)
    try:
        check_record_independence(
            model,
            recorder,
            records,
            run,
            reduction=reduction,
            may_be_empty=may_be_empty,
            public_batch=public_batch,
            values_released=values_released,
            size=size,
        )
    except PrivacyError as refusal:
        if (
            not advises
            or not is_not_captured(refusal)
            or not _would_go_alone(model, recorder, records, run, reduction, public_batch)
        ):
            raise
        raise type(refusal)(f"{refusal.args[0]} {_ADVICE}") from refusal.__cause__


def _would_go_alone(
    model: nn.Module,
    recorder: GradientCapture,
    records: object,
    run: Callable[[object], Tensor],
    reduction: str,
    public_batch: object,
) -> bool:
    """Whether one record at a time works for a model that can't be captured, and changes nothing but the speed."""
    try:
        with recorder.ordinary():
            single = OneByOne(model, recorder.names, is_trial=True)
            try:
                check_one_by_one(
                    model,
                    single,
                    records,
                    run,
                    reduction=reduction,
                    public_batch=public_batch,
                    as_in_a_batch=True,
                )
            finally:
                single.detach()
    except Exception:
        return False
    return True


def check_one_by_one(
    model: nn.Module,
    recorder: OneByOne,
    records: object,
    run: Callable[[object], Tensor],
    *,
    reduction: str = "none",
    public_batch: object = None,
    as_in_a_batch: bool = False,
) -> None:
    """Refuse a model that remembers records, and a loss that is not one number of one record.

    Guarantee: only the structure of `records` is read. Random states, parameters, buffers, gradients, flags and Python
    attributes are as before.

    Args:
        model: in the mode in which it will be trained.
        recorder: hooks on the model's parameters, with no recording in use.
        records: a batch, or a batch with no rows; records first.
        run: batch ↦ loss; with `reduction` "none" one value per record, else a scalar.
        reduction: how `run` reduces over records.
        public_batch: public or invented records to use instead of synthetic ones.
        as_in_a_batch: also require that a batch has the losses and the gradient of its records taken alone, so that
            nothing changes where the model was meant to see batches.

    Raises:
        CoupledRecords: the module stores something or remembers, or a batch is not its records taken alone.
        UnsupportedModule: model and loss don't run on one synthetic record.
        LossShapeError: the loss is not one value of the record.
        UncapturedParameter: something outside the model would learn.
        InvalidArgument: no trained parameter takes part.
    """
    rows = next((tensor.size(0) for tensor in tensors_in(records) if tensor.dim()), 0)
    if any(tensor.dim() and tensor.size(0) == 0 for tensor in tensors_in(records)):
        rows = 0
    check_no_max_norm_embeddings(model)
    with preserve_model_state(model):
        look = _Alone(model, recorder, run, reduction, records, rows, list(tensors_in(public_batch)))
        look.remembers_nothing()
        look.learns()
        if as_in_a_batch:
            look.is_its_records()


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What one run gave: the losses, and the gradient by parameter."""

    losses: Tensor
    gradients: Mapping[nn.Parameter, Tensor]
    square: float

    @property
    def finite(self) -> bool:
        return bool(self.losses.isfinite().all()) and self.square < torch.inf


class _Alone:
    def __init__(
        self,
        model: nn.Module,
        recorder: OneByOne,
        run: Callable[[object], Tensor],
        reduction: str,
        records: object,
        rows: int,
        example: Sequence[Tensor],
    ) -> None:
        self._recorder, self._run, self._reduction = recorder, run, reduction
        self._own = set(model.parameters())
        self._outside: list[Tensor] = []
        self._structure, self._rows, self._example = records, rows, example
        self._made_up, self._first = self._workable()

    def _workable(self) -> tuple[SyntheticRecords, _Seen]:
        """The first kind of synthetic records that the loop runs on, and what the watched one gives."""
        failure: Exception | None = None
        for pattern in INTEGER_PATTERNS:
            made_up = SyntheticRecords(
                self._structure, rows=self._rows, count=_RECORDS, pattern=pattern, example=self._example
            )
            try:
                seen = [self._observe(made_up.batch([place])) for place in (0, _WATCHED)]
            except SordinoError:
                raise
            except Exception as error:
                failure = error
                continue
            if all(one.finite for one in seen):
                return made_up, seen[1]
        failed = "got no finite loss and gradient on" if failure is None else f"got {type(failure).__name__} on"
        raise UnsupportedModule(
            f"model and loss must run on a batch of one synthetic record, {failed} random features with labels 0 "
            "and 1. A bare .squeeze() drops the records there: write .squeeze(1). Or pass public_batch=, five public "
            "or invented records that it runs on."
        ) from failure

    def _observe(self, batch: object, *, records: int = 1, chance: SeededGenerators | None = None) -> _Seen:
        (chance or SeededGenerators()).start()
        with self._recorder.capturing(1), torch.enable_grad():
            loss = self._run(batch)
            self._check(loss, records)
            total = loss.sum()
            outside = [leaf for leaf in graph_leaves(total) if leaf not in self._own]
            for leaf in outside:
                # What is still there for the next record is no tensor of one record.
                if isinstance(leaf, nn.Parameter) or any(leaf is other for other in self._outside):
                    raise external_parameter_error(leaf)
            self._outside = outside
            backward_into_the_module(total, total.backward, records=records)
        scale = float(records) if self._reduction == "mean" else 1.0
        gradients: dict[nn.Parameter, Tensor] = {}
        for found, _ in self._recorder.per_record_gradients():
            gradients = {parameter: gradient[0] * scale for parameter, gradient in found.items()}
        square = float(self._recorder.squared_norm_bounds()) * scale**2
        self._recorder.discard()
        return _Seen(losses=loss.detach(), gradients=gradients, square=square)

    def _check(self, loss: object, records: int) -> None:
        wanted = (records,) if self._reduction == "none" else ()
        if not isinstance(loss, Tensor) or (loss.shape != wanted and not (wanted == () and loss.numel() == 1)):
            raise LossShapeError(
                "loss must have shape (B,), one value per record, got another. Use reduction='none' and average over "
                "everything but the records, for example .flatten(1).mean(1)."
            )
        if not loss.requires_grad:
            raise InvalidArgument("loss must depend on a trained parameter, got one that doesn't. Unfreeze something.")

    def remembers_nothing(self) -> None:
        """A record has the same loss and gradient before and after others, whatever these hold."""
        others = [place for place in range(_RECORDS + 1) if place != _WATCHED]
        for place in others:
            self._meet(self._made_up.batch([place]))
        for poison in _POISONS:
            self._meet(self._made_up.batch([0], {0: poison}))
        for seed in _SEEDS:
            self._meet(self._made_up.batch([others[-1]]), SeededGenerators(seed=seed))
        again = self._observe(self._made_up.batch([_WATCHED]))
        if not _same(self._first, again, _TOLERANCES):
            raise CoupledRecords(
                "model must forget a record when the next one comes, got another gradient for the same record after "
                "other records. Keep no hidden state or counter between forward passes."
            )

    def _meet(self, batch: object, chance: SeededGenerators | None = None) -> None:
        try:
            self._observe(batch, chance=chance)
        except SordinoError:
            raise
        except Exception:
            self._recorder.discard()  # Code that refuses such a value can't be asked in this way.

    def learns(self) -> None:
        """Something is learned from a record: losses that compare the records of a batch vanish for one alone."""
        seen = [self._observe(self._made_up.batch([place])) for place in range(_RECORDS)]
        if all(one.square == 0 and torch.equal(one.losses, seen[0].losses) for one in seen):
            raise CoupledRecords(
                "loss must say something about a record by itself, got the same loss and a gradient of zero for every "
                "synthetic record. A loss that compares the records of a batch can't be taken one record at a time."
            )

    def is_its_records(self) -> None:
        """A batch's losses and gradient are those of its records, each taken alone."""
        places = list(range(_RECORDS))
        with DisableRandomness():
            whole = self._observe(self._made_up.batch(places), records=_RECORDS)
            parts = [self._observe(self._made_up.batch([place])) for place in places]
        losses = torch.stack([part.losses.flatten()[0] for part in parts])
        losses = losses if self._reduction == "none" else (losses.mean() if self._reduction == "mean" else losses.sum())
        total: dict[nn.Parameter, Tensor] = {}
        for part in parts:
            for parameter, gradient in part.gradients.items():
                total[parameter] = total[parameter] + gradient if parameter in total else gradient.clone()
        alone = _Seen(losses=losses, gradients=total, square=sum(part.square for part in parts))
        if not _same(whole, alone, _TOGETHER):
            raise CoupledRecords(
                "records must be independent of each other in model and loss, got a coupling: a batch has other losses "
                "or gradients than its records have alone. Look for batch statistics, sums over dimension 0 and losses "
                "that compare records; see LayerNorm, GroupNorm."
            )


def _same(one: _Seen, other: _Seen, tolerances: Mapping[torch.dtype, float]) -> bool:
    """Whether losses and gradients agree, relative to the norms."""
    dtype = next((gradient.dtype for gradient in one.gradients.values()), torch.float32)
    tolerance = tolerances.get(dtype, _HALF)
    square = 0.0
    for parameter in dict.fromkeys([*one.gradients, *other.gradients]):
        zero = torch.zeros_like(parameter)
        difference = one.gradients.get(parameter, zero).double() - other.gradients.get(parameter, zero).double()
        square += float(torch.linalg.vector_norm(difference)) ** 2
    scale = max(one.square, other.square)
    close = square <= tolerance**2 * scale or (square == 0.0 and scale == 0.0)
    return close and torch.allclose(one.losses.flatten(), other.losses.flatten(), rtol=tolerance, atol=1e-6)
