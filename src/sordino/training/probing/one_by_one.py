"""Experiments for gradients taken one record at a time.

There a record's forward and backward pass meet no other record. What is left to find out on synthetic records is
whether the module remembers something from one record to the next, and whether the loss is one number of this record.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
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
from sordino.gradients import GradientCapture, OneByOne
from sordino.gradients.module_hooks import PlainPython
from sordino.training.probing.probe import check_record_independence
from sordino.training.probing.probe_runner import (
    ProbeRunner,
    ProbeTask,
    attempt,
    backward_into_the_module,
    check_no_max_norm_embeddings,
    external_parameter_error,
    first_that_runs,
    graph_leaves,
    preserve_model_state,
)
from sordino.training.probing.snapshots import DisableRandomness, SeededGenerators, random_states
from sordino.training.probing.synthetic import AdversarialValue, SyntheticRecords
from sordino.training.probing.torch_modes import Args, Kwargs, Operator
from sordino.training.pytree import tensors_in

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


def check_draws(task: ProbeTask) -> None:
    """Refuse random numbers that are not secret, or that tie the records of a microbatch to each other.

    Guarantee: only the structure of the task's records is read.

    Raises:
        CoupledRecords: a generator of the model's own, a seed, or a number for all records of a microbatch.
    """
    with preserve_model_state(task.model):
        probe = _DrawsProbe(task)
        first = probe.drawn(_DRAWS_SEEDS[0])
        if first is None or not (first.used.any() or first.of_torch):
            return
        if first.of_own:
            raise CoupledRecords(
                "random numbers in model and loss must come from torch's global generators, got generator=…: from a "
                "seed that others know, a record's numbers follow from its place in the batch. Leave generator= out; "
                "the global generators have secret states while a batch is processed."
            )
        # torch's generators tell by themselves whether they were seeded.
        second = probe.drawn(_DRAWS_SEEDS[1]) if first.used.any() else None
        if first.was_seeded or first.ends_like(second):
            raise CoupledRecords(
                "random generators must not be seeded in model and loss, got a new seed: a record's numbers would "
                "follow from its place in the batch. Leave it out; seed before training."
            )
        # Each record has draws of its own where the model gets one at a time.
        if not task.options.is_split or probe.rows == 1:
            return
        fewer = probe.drawn(_DRAWS_SEEDS[0], rows=probe.rows - 1)
        if first.is_shared(fewer) or (first.ends_like(fewer) and probe.matters()):
            raise CoupledRecords(
                "random numbers in model and loss must be drawn for each record where batches are split into "
                "microbatches or over processes, got a draw that all rows share: which records share it depends on how "
                "many there are. Draw one row per record, switch the layer off (layerdrop=0), or use microbatch_size=1 "
                "or None in one process."
            )


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

    def __torch_dispatch__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.of_torch = True
            given = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.Generator)]
            self.of_own |= any(generator.initial_seed() != self._seed for generator in given)
            self.was_seeded |= torch.initial_seed() != self._seed
            first = next(iter(tensors_in(found)), None)
            self.sizes += [] if first is None else [first.numel()]
        return found

    def ends_like(self, other: "_Draws | None") -> bool:
        """Whether a generator of Python's or NumPy's was used, and ends where it ended in another pass."""
        return other is not None and bool((self.used & _equal(self.after, other.after)).any())

    def is_shared(self, fewer: "_Draws | None") -> bool:
        """Whether a draw is not as many times as large as one with fewer records as there are more records."""
        if fewer is not None and len(fewer.sizes) == len(self.sizes):
            pairs = zip(self.sizes, fewer.sizes, strict=True)
            return any(size * fewer.rows != other * self.rows for size, other in pairs)
        return any(size % self.rows for size in self.sizes)


class _DrawsProbe:
    """Draws of the first kind of synthetic records that the loop runs on."""

    def __init__(self, task: ProbeTask) -> None:
        self._task, options = task, task.options
        # What ties the records of a microbatch shows in how many numbers are drawn; a few records tell where from.
        few = options.num_records if options.is_split else min(_FEW, options.num_records)
        most = min([few, *(len(tensor) - 1 for tensor in tensors_in(options.public_batch) if tensor.dim())])
        is_captured = isinstance(task.recorder, GradientCapture)
        self.rows = next((rows for rows in _ROWS if rows <= most), 1) if is_captured else 1

    def drawn(self, seed: int, *, rows: int | None = None, other_seed: int | None = None) -> _Draws | None:
        """What is drawn; None where the loop runs on no synthetic records."""
        rows = self.rows if rows is None else rows
        chance = SeededGenerators(seed=seed, other_seed=other_seed)

        def observed(records: SyntheticRecords) -> _Draws:
            batch, recorder, draws = records.batch(range(rows)), self._task.recorder, _Draws(rows, seed)
            chance.start()
            before = random_states()[1:]
            try:
                with draws:
                    if isinstance(recorder, GradientCapture):
                        runner = ProbeRunner(self._task)
                        draws.norms = runner.observe(batch, torch.zeros(0, rows), chance=chance, large=True).norms
                    else:
                        with recorder.capturing(1), torch.enable_grad():
                            total = self._task.run(batch).sum()
                            backward_into_the_module(total, total.backward, records=rows)
            finally:
                recorder.discard()
            draws.after = random_states()[1:]
            draws.used = ~_equal(before, draws.after)
            return draws

        return first_that_runs(self._task.kinds(rows), observed)[1]

    def matters(self) -> bool:
        """Whether any record's gradient changes with Python's or NumPy's numbers: type checkers draw some too."""
        runs = [self.drawn(_DRAWS_SEEDS[0], other_seed=other_seed) for other_seed in range(_OTHERS)]
        norms = [draws.norms for draws in runs if draws is not None and draws.norms is not None]
        assert len(norms) == _OTHERS
        return not all(torch.allclose(norms[0], other, rtol=1e-4, equal_nan=True) for other in norms[1:])


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
_ADVERSARIAL = (
    *(AdversarialValue(floats=value) for value in (torch.nan, 1e4, -1e4)),
    *(AdversarialValue(integers=value) for value in (-1, -100, 2, "range")),
)
_SEEDS = (1, 2, 3)
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}
_HALF = 5e-2
# A batch goes through other kernels than a record.
_TOGETHER = {torch.float64: 1e-6, torch.float32: 1e-3}


def check_records(task: ProbeTask, *, as_in_a_batch: bool = False, advises: bool = True) -> None:
    """Refuse a model and loss in which one record changes another record's loss or gradient, as it is recorded.

    Errors are those of `check_record_independence`, `check_one_by_one` and `check_draws`.

    Args:
        task: what is checked.
        as_in_a_batch: see `check_one_by_one`.
        advises: the refusal of a capture names one record at a time where synthetic records show that this would work.
    """
    with PlainPython():
        try:
            if isinstance(task.recorder, OneByOne):
                check_one_by_one(task, as_in_a_batch=as_in_a_batch)
            else:
                _check_captured(task, advises=advises)
        except CoupledRecords:
            # Numbers that are not the same in two runs look like a coupling: say where they come from.
            check_draws(task)
            raise
        check_draws(task)


def _check_captured(task: ProbeTask, *, advises: bool) -> None:
    try:
        check_record_independence(task)
    except PrivacyError as refusal:
        if not advises or not is_not_captured(refusal) or not _would_go_alone(task):
            raise
        raise type(refusal)(f"{refusal.args[0]} {_ADVICE}") from refusal.__cause__


def _would_go_alone(task: ProbeTask) -> bool:
    """Whether one record at a time works for a model that can't be captured, and changes nothing but the speed."""
    assert isinstance(task.recorder, GradientCapture)
    try:
        with task.recorder.ordinary():
            single = OneByOne(task.model, task.recorder.names, is_trial=True)
            try:
                check_one_by_one(replace(task, recorder=single), as_in_a_batch=True)
            finally:
                single.detach()
    except Exception:
        return False
    return True


def check_one_by_one(task: ProbeTask, *, as_in_a_batch: bool = False) -> None:
    """Refuse a model that remembers records, and a loss that is not one number of one record.

    Guarantee: only the structure of the task's records is read. Random states, parameters, buffers, gradients, flags
    and Python attributes are as before.

    Args:
        task: with a recorder that takes one record at a time.
        as_in_a_batch: also require that a batch has the losses and the gradient of its records taken alone, so that
            nothing changes where the model was meant to see batches.

    Raises:
        CoupledRecords: the module stores something or remembers, or a batch is not its records taken alone.
        UnsupportedModule: model and loss don't run on one synthetic record.
        LossShapeError: the loss is not one value of the record.
        UncapturedParameter: something outside the model would learn.
        InvalidArgument: no trained parameter takes part.
    """
    check_no_max_norm_embeddings(task.model)
    with preserve_model_state(task.model):
        probe = _Alone(task)
        probe.remembers_nothing()
        probe.learns()
        if as_in_a_batch:
            probe.is_its_records()


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
    """The experiments, one record at a time."""

    def __init__(self, task: ProbeTask) -> None:
        assert isinstance(task.recorder, OneByOne)
        self._task, self._recorder, self._reduction = task, task.recorder, task.options.reduction
        self._own = set(task.model.parameters())
        self._outside: list[Tensor] = []

        def watched(records: SyntheticRecords) -> _Seen | None:
            seen = [self._observe(records.batch([index])) for index in (0, _WATCHED)]
            return seen[1] if all(one.finite for one in seen) else None

        records, first, failure = first_that_runs(task.kinds(_RECORDS), watched)
        if records is None or first is None:
            failed = "got no finite loss and gradient on" if failure is None else f"got {type(failure).__name__} on"
            raise UnsupportedModule(
                f"model and loss must run on a batch of one synthetic record, {failed} random features with labels 0 "
                "and 1. A bare .squeeze() drops the records there: write .squeeze(1). Or pass public_batch=, five "
                "public or invented records that it runs on."
            ) from failure
        self._records, self._first = records, first

    def _observe(self, batch: object, *, records: int = 1, chance: SeededGenerators | None = None) -> _Seen:
        (chance or SeededGenerators()).start()
        with self._recorder.capturing(1), torch.enable_grad():
            loss = self._task.run(batch)
            self._check(loss, records)
            total = loss.sum()
            outside = [leaf for leaf in graph_leaves(total) if leaf not in self._own]
            for leaf in outside:
                # What is still there for the next record is no tensor of one record.
                if isinstance(leaf, nn.Parameter) or any(leaf is other for other in self._outside):
                    raise external_parameter_error(leaf)
            self._outside = outside
            backward_into_the_module(total, total.backward, records=records)
        scale = self._task.scale(records)
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
        others = [index for index in range(_RECORDS + 1) if index != _WATCHED]
        met = [(self._records.batch([index]), 0) for index in others]
        met += [(self._records.batch([0], {0: value}), 0) for value in _ADVERSARIAL]
        met += [(self._records.batch([others[-1]]), seed) for seed in _SEEDS]
        for batch, seed in met:
            chance = SeededGenerators(seed=seed)
            # Code that refuses such a value can't be asked in this way.
            if attempt(lambda batch=batch, chance=chance: self._observe(batch, chance=chance)) is None:
                self._recorder.discard()
        again = self._observe(self._records.batch([_WATCHED]))
        if not _same(self._first, again, _TOLERANCES):
            raise CoupledRecords(
                "model must forget a record when the next one comes, got another gradient for the same record after "
                "other records. Keep no hidden state or counter between forward passes."
            )

    def learns(self) -> None:
        """Something is learned from a record: losses that compare the records of a batch vanish for one alone."""
        seen = [self._observe(self._records.batch([index])) for index in range(_RECORDS)]
        if all(one.square == 0 and torch.equal(one.losses, seen[0].losses) for one in seen):
            raise CoupledRecords(
                "loss must say something about a record by itself, got the same loss and a gradient of zero for every "
                "synthetic record. A loss that compares the records of a batch can't be taken one record at a time."
            )

    def is_its_records(self) -> None:
        """A batch's losses and gradient are those of its records, each taken alone."""
        with DisableRandomness():
            whole = self._observe(self._records.batch(range(_RECORDS)), records=_RECORDS)
            parts = [self._observe(self._records.batch([index])) for index in range(_RECORDS)]
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
