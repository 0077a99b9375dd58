"""Experiments for gradients taken one record at a time (floor 3).

There a record's forward and backward pass meet no other record. What is left to find out on made-up records is whether
the module remembers something from one record to the next, and whether the loss is one number of this record.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
from sordino.training.probing.determinism import Chance, WithoutChance
from sordino.training.probing.draws import check_draws
from sordino.training.probing.observation import backward_into_the_module, foreign_leaves, learner_outside
from sordino.training.probing.probe import (
    ProbeSize,
    check_records_are_independent,
    refuse_renormalised_tables,
    without_traces,
)
from sordino.training.probing.synthetic import INTEGER_PATTERNS, Poison, SyntheticRecords
from sordino.training.structure import tensors_in

__all__ = ["NOT_CAPTURED", "check_one_by_one", "check_records", "is_not_captured"]

NOT_CAPTURED = (UncapturedParameter, RecordCountMismatch, UnsupportedModule)
"""Refusals of a capture that one record at a time may answer; what couples records is none of them."""


def is_not_captured(refusal: PrivacyError) -> bool:
    """Whether `refusal` is one of a capture: by name, or because the model failed while it was captured."""
    return isinstance(refusal, NOT_CAPTURED) or not isinstance(refusal.__cause__, SordinoError | None)


_ADVICE = (
    "Or train one record at a time, which takes every model that runs on one: "
    'Performance(gradients="one-by-one") in sordino.fit, PrivacyEngine(gradients="one-by-one") in a loop, '
    'PrivacyArguments(gradients="one-by-one") in a trainer.'
)
_RECORDS = 4
# The record whose gradient is compared before and after the others.
_WATCHED = 1
_POISONS = (
    *(Poison(floats=value) for value in (torch.nan, 1e4, -1e4)),
    *(Poison(integers=value) for value in (-1, -100, 2, "range")),
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

    Args and errors are those of `check_records_are_independent`, `check_one_by_one` and `check_draws`. With `advises`
    the refusal of a capture names one record at a time where made-up records show that this would work.
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
        check_records_are_independent(
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
        public_batch: public or invented records to use instead of made-up ones.
        as_in_a_batch: also require that a batch has the losses and the gradient of its records taken alone, so that
            nothing changes where the model was meant to see batches.

    Raises:
        CoupledRecords: the module stores something or remembers, or a batch is not its records taken alone.
        UnsupportedModule: model and loss don't run on one made-up record.
        LossShapeError: the loss is not one value of the record.
        UncapturedParameter: something outside the model would learn.
        InvalidArgument: no trained parameter takes part.
    """
    rows = next((tensor.size(0) for tensor in tensors_in(records) if tensor.dim()), 0)
    if any(tensor.dim() and tensor.size(0) == 0 for tensor in tensors_in(records)):
        rows = 0
    refuse_renormalised_tables(model)
    with without_traces(model):
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
        """The first kind of made-up records that the loop runs on, and what the watched one gives."""
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
        told = "got no finite loss and gradient on" if failure is None else f"got {type(failure).__name__} on"
        raise UnsupportedModule(
            f"model and loss must run on a batch of one made-up record, {told} random features with labels 0 "
            "and 1. A bare .squeeze() drops the records there: write .squeeze(1). Or pass public_batch=, five public "
            "or invented records that it runs on."
        ) from failure

    def _observe(self, batch: object, *, records: int = 1, chance: Chance | None = None) -> _Seen:
        (chance or Chance()).start()
        with self._recorder.recording(1), torch.enable_grad():
            loss = self._run(batch)
            self._check(loss, records)
            total = loss.sum()
            outside = [leaf for leaf in foreign_leaves(total) if leaf not in self._own]
            for leaf in outside:
                # What is still there for the next record is no tensor of one record.
                if isinstance(leaf, nn.Parameter) or any(leaf is other for other in self._outside):
                    raise learner_outside(leaf)
            self._outside = outside
            backward_into_the_module(total, total.backward, records=records)
        scale = float(records) if self._reduction == "mean" else 1.0
        gradients: dict[nn.Parameter, Tensor] = {}
        for found, _ in self._recorder.per_record_gradients():
            gradients = {parameter: gradient[0] * scale for parameter, gradient in found.items()}
        square = float(self._recorder.squared_bounds()) * scale**2
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
            self._meet(self._made_up.batch([others[-1]]), Chance(seed=seed))
        again = self._observe(self._made_up.batch([_WATCHED]))
        if not _same(self._first, again, _TOLERANCES):
            raise CoupledRecords(
                "model must forget a record when the next one comes, got another gradient for the same record after "
                "other records. Keep no hidden state or counter between forward passes."
            )

    def _meet(self, batch: object, chance: Chance | None = None) -> None:
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
                "made-up record. A loss that compares the records of a batch can't be taken one record at a time."
            )

    def is_its_records(self) -> None:
        """A batch's losses and gradient are those of its records, each taken alone."""
        places = list(range(_RECORDS))
        with WithoutChance():
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
