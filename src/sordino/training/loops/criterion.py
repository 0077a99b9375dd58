"""The loss of a drop-in loop, put to the independence probe (floor 3): followed on a tape, or given as a function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from sordino.errors import CoupledRecords, InvalidArgument, RecordCountMismatch, SordinoError
from sordino.gradients import GradientCapture, Recorder
from sordino.training.loops.arrival import Criterion
from sordino.training.loops.calls import map_values
from sordino.training.loops.tape import Tape
from sordino.training.loops.taped import TapedTensor
from sordino.training.probing.alone import NOT_CAPTURED, check_records
from sordino.training.probing.determinism import Chance
from sordino.training.probing.indices import IndicesChecked
from sordino.training.probing.padding import Padding, check_padding
from sordino.training.probing.probe import ProbeSize, refuse_renormalised_tables, without_traces
from sordino.training.probing.synthetic import INTEGER_PATTERNS, Poison, SyntheticRecords
from sordino.training.structure import tensors_in

__all__ = ["Criterion", "ProbeOptions", "check_arguments", "check_criterion", "check_taped_loss", "try_forward"]

_ALONE = (
    "Or, if the loss takes every record by itself, train one record at a time, with the loop as it is: "
    'PrivacyEngine(gradients="one-by-one"), in a trainer PrivacyArguments(gradients="one-by-one").'
)
# Repetitions of a proof take a small batch at first, a large one later.
_SMALL_AGAIN = 16


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """How the probe is to look at a drop-in loop.

    Args:
        reduction: "mean" or "sum" over records.
        may_be_empty: whether an empty batch may come.
        public_batch: records to use instead of made-up ones, or None.
        together: how many records the loop's batches are tried with.
        padding: how batches follow their longest record, or None.
        is_split: whether a logical batch may come in several microbatches of more than one record, or in several
            processes.
        size: the most records that training gives to the module at once, and how the probe goes about them.
    """

    reduction: str
    may_be_empty: bool
    public_batch: object
    together: int = 4
    padding: Padding | None = None
    is_split: bool = False
    size: ProbeSize = field(default_factory=ProbeSize)

    def repeated(self, times: int) -> "ProbeOptions":
        """For a loss or module that was proved before and has come so many times."""
        return replace(self, size=replace(self.size, again=True, is_thorough=times > _SMALL_AGAIN))


def check_taped_loss(
    module: nn.Module, capture: Recorder, tape: Tape, loss: int, structure: object, options: ProbeOptions
) -> None:
    """Probe the loss at place `loss` of the tape, with the module in between.

    Args:
        module: in the mode in which it will be trained.
        capture: its hooks, with no recording in use.
        tape: notes of the first batch.
        loss: the loss's place on the tape.
        structure: a batch with no rows.
        options: reduction, and which records to use.
    """

    def check() -> None:
        records = (structure, tape.outside_inputs())
        _probe(module, capture, records, run, options)

    def run(batch: object) -> Tensor:
        inputs = list(tensors_in(batch))
        return tape.replay(loss, inputs, records=inputs[place].size(0))

    place = _first_with_rows(structure)
    _with_outsiders(tape, check)


def check_arguments(
    module: nn.Module,
    capture: Recorder,
    tape: Tape,
    arguments: int,
    criterion: Criterion,
    structure: object,
    options: ProbeOptions,
) -> None:
    """Probe the declared criterion of what the module gives on the arguments that the loop made of its batch.

    Args:
        module: in the mode in which it will be trained.
        capture: its hooks, with no recording in use.
        tape: notes of the batch.
        arguments: where the module's arguments are on the tape.
        criterion: the declared loss.
        structure: a batch with no rows.
        options: reduction, and which records to use.
    """

    def check() -> None:
        _probe(module, capture, (structure, tape.outside_inputs()), run, options)

    def run(batch: object) -> Tensor:
        inputs = list(tensors_in(batch))
        made = tape.replay_all([arguments], inputs, records=inputs[place].size(0))[arguments]
        args, kwargs = cast("tuple[tuple[object, ...], dict[str, object]]", made)
        own = cast("tuple[Sequence[object], object]", batch)[0]
        return _criterion_of(criterion, module(*args, **kwargs), cast("Tensor", own[-1]))

    place = _first_with_rows(structure)
    _with_outsiders(tape, check)


def _with_outsiders(tape: Tape, check: Callable[[], None]) -> None:
    """Check a loss with tensors from outside: as rows of records where they may be that, then read in other ways."""
    *others, last = tape.outside_readings()
    for reading in (*others, last):
        tape.outside = reading
        try:
            check()
            return
        except SordinoError as refusal:
            # What came from outside the batch with a row a record may be a constant whose size fits by chance.
            failed = refusal.__cause__ is not None
            if failed and reading != last:
                continue
            if reading == "rows" and tape.has_bound_rows and (failed or isinstance(refusal, RecordCountMismatch)):
                raise _of_rows() from refusal
            raise


def _of_rows() -> CoupledRecords:
    return CoupledRecords(
        "rows of records must be made of the batch, got a tensor from elsewhere with one row per record whose rows "
        "differ (weights, labels, noise, public records): they follow from the place in the batch, or from other "
        "records, so that one record more or less changes what all others do. Put them into the data set, draw them "
        "with torch's generator in the loop (torch.rand_like(x)), or make all rows the same."
    )


def _criterion_of(criterion: Criterion, output: object, target: Tensor) -> Tensor:
    try:
        return criterion(output, target)  # pyright: ignore[reportArgumentType]
    except (TypeError, AttributeError) as failure:
        if isinstance(output, Tensor):
            raise
        raise InvalidArgument(
            f"criterion must be a function of what the module returns, got a failure on {type(output).__name__}. Let "
            "it take its part of that (lambda out, target: loss(out.logits, target)), or leave criterion= out: the "
            "loss of the loop is then followed."
        ) from failure


def try_forward(
    module: nn.Module,
    capture: Recorder,
    tape: Tape,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    structure: object,
    options: ProbeOptions,
) -> None:
    """Call the module on made-up records in place of `args`, before it sees the first real ones.

    Whether records are independent is seen later, with the loss; but what a module would store must not be real.

    Args:
        module: in the mode in which it will be trained, without a recording.
        capture: its hooks: what they can't read is refused here, before a real record.
        tape: notes of the first batch so far.
        args: taped arguments of the module.
        kwargs: arguments by name.
        structure: a batch with no rows.
        options: which records to use.

    Raises:
        CoupledRecords: the module changes its parameters or buffers.
        UnsupportedModule: an embedding rewrites the rows that are looked up.
        RecordCountMismatch: some records decide how many are given to the module, or a layer gets other rows.
        UncapturedParameter: a parameter is used where no layer rule captures it.
    """
    refuse_renormalised_tables(module)
    given = [tensor for tensor in tensors_in((args, dict(kwargs))) if isinstance(tensor, TapedTensor)]
    example = list(tensors_in(options.public_batch))
    poisons = (None, Poison(integers=-1), Poison(floats=torch.nan))
    sizes: list[list[torch.Size]] = []

    def call(made_up: SyntheticRecords, poison: Poison | None) -> None:
        Chance().start()
        inputs = list(tensors_in(made_up.batch(range(options.together), {} if poison is None else {0: poison})))
        values = tape.replay_all([tensor.slot for tensor in given], inputs, records=options.together)

        def value_of(leaf: object) -> object:
            return values[leaf.slot] if isinstance(leaf, TapedTensor) else leaf

        made = [values[tensor.slot] for tensor in given]
        sizes.append([tensor.shape[:1] for tensor in made if isinstance(tensor, Tensor)])
        arguments, named = map_values(value_of, args), map_values(value_of, dict(kwargs))
        assert isinstance(arguments, tuple)
        assert isinstance(named, dict)
        with IndicesChecked():
            module(*arguments, **named)

    def capture_once(made_up: SyntheticRecords) -> None:
        try:
            with torch.enable_grad(), capture.recording(options.together):
                call(made_up, None)
        except NOT_CAPTURED as refusal:
            raise type(refusal)(f"{refusal.args[0]} {_ALONE}") from refusal
        finally:
            capture.discard()

    with without_traces(module):
        for pattern in INTEGER_PATTERNS:
            records = (structure, tape.outside_inputs())
            made_up = SyntheticRecords(records, rows=0, count=options.together, pattern=pattern, example=example)
            for poison in poisons:
                # What fails on made-up records is told with the loss, or doesn't take such values.
                try:
                    call(made_up, poison)
                    # Texts have no made-up stand-ins: their number is that of the batch.
                    if poison is None and given and isinstance(capture, GradientCapture):
                        capture_once(made_up)
                except SordinoError:
                    raise
                except Exception:  # noqa: S112
                    continue
            _refuse_choice(sizes)
            sizes.clear()


def check_criterion(
    module: nn.Module, capture: Recorder, criterion: Criterion, structure: object, options: ProbeOptions
) -> None:
    """Probe ``criterion(module(*inputs), target)`` for batches (*inputs, target). See `check_taped_loss`."""

    def run(batch: object) -> Tensor:
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise InvalidArgument(
                "batch must be (inputs…, target) for criterion= to be called on it, got another structure. Leave "
                "criterion out; the loss is then followed from the first batch."
            )
        return _criterion_of(criterion, module(*batch[:-1]), batch[-1])

    _probe(module, capture, structure, run, options)


def _refuse_choice(sizes: list[list[torch.Size]]) -> None:
    """Refuse inputs whose number of rows changed with the values of one record."""
    if any(size != sizes[0] for size in sizes[1:]):
        raise RecordCountMismatch(
            "module must be called on all records of the batch, got a part of them that their values decide. Give the "
            "module the whole batch, and weight the losses of the records that don't count with 0."
        )


def _probe(
    module: nn.Module, capture: Recorder, records: object, run: Callable[[object], Tensor], options: ProbeOptions
) -> None:
    check_records(
        module,
        capture,
        records,
        run,
        reduction=options.reduction,
        may_be_empty=options.may_be_empty,
        public_batch=options.public_batch,
        is_split=options.is_split,
        size=options.size,
    )
    check_padding(
        options.padding,
        module,
        capture,
        records,
        run,
        reduction=options.reduction,
        public_batch=options.public_batch,
        size=options.size,
    )


def _first_with_rows(structure: object) -> int:
    return next(place for place, tensor in enumerate(tensors_in(structure)) if tensor.dim() and tensor.size(0) == 0)
