"""The loss of a drop-in loop, put to the independence probe: followed on a tape, or given as a function."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from sordino.errors import CoupledRecords, InvalidArgument, NonPrivateStep, RecordCountMismatch, SordinoError
from sordino.gradients import GradientCapture, Recorder
from sordino.training.loss_tracing.trace import OperationTrace, map_values
from sordino.training.loss_tracing.traced_tensor import TracedTensor
from sordino.training.probing.one_by_one import NOT_CAPTURED, check_records
from sordino.training.probing.padding import Padding, check_padding
from sordino.training.probing.probe import ProbeSize, check_no_max_norm_embeddings, preserve_model_state
from sordino.training.probing.snapshots import SeededGenerators, generators_used, preserve_rng_state
from sordino.training.probing.synthetic import INTEGER_PATTERNS, AdversarialValue, SyntheticRecords
from sordino.training.probing.torch_modes import IndexBoundsCheck, PublicDivisor
from sordino.training.pytree import tensors_in, tree_leaves, tree_map

__all__ = [
    "Criterion",
    "OutputGradientCheck",
    "ProbeOptions",
    "check_arguments",
    "check_criterion",
    "check_traced_loss",
    "tensors_within",
    "try_forward",
]


# ----------------------------------------------------------------------------------------------------------------------
# The gradient that arrives at a module's output, compared with that of the declared criterion.
# ----------------------------------------------------------------------------------------------------------------------


Criterion = Callable[[Tensor, Tensor], Tensor]
"""A loss as a function of (output, target)."""

# Rounding between two ways to compute one loss; a coupling or another loss is far above it.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_HALF = 5e-2
# How deep objects (distributions) are searched for tensors.
_DEPTH = 3


class OutputGradientCheck:
    """Compares what arrives at one output.

    Args:
        criterion: the declared loss.
        output: what the module returned.
        target: the batch's last part.
    """

    def __init__(self, criterion: Criterion, output: object, target: Tensor) -> None:
        tensors = [tensor for tensor in tensors_within(output) if tensor.requires_grad]
        used: set[str] = set()
        leaves: list[Tensor] = []

        def leaf_of(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            leaves.append(tensor.detach().clone().requires_grad_())
            return leaves[-1]

        with preserve_rng_state(), generators_used(used), torch.enable_grad(), PublicDivisor():
            loss = criterion(_replaced(leaf_of, output, _DEPTH), target)  # pyright: ignore[reportArgumentType]
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves and loss.requires_grad else ()
        self._expected = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, gradients, strict=False)
        ]
        self._arrived: list[Tensor | None] = [None] * len(tensors)
        # A criterion that draws random numbers can't be repeated.
        self._is_comparable = not used and bool(self._expected)
        for place, tensor in enumerate(tensors):
            tensor.register_hook(lambda gradient, place=place: self._add(place, gradient))

    def _add(self, place: int, gradient: Tensor) -> None:
        before = self._arrived[place]
        self._arrived[place] = gradient.detach().clone() if before is None else before + gradient

    def restart(self) -> None:
        """The backward pass runs once more, and brings the same."""
        self._arrived = [None] * len(self._arrived)

    def check(self) -> None:
        """Compare, once the backward passes are over.

        Raises:
            NonPrivateStep: the gradients are not those of the criterion.
        """
        if not self._is_comparable or all(arrived is None for arrived in self._arrived):
            return
        difference = size = 0.0
        for expected, arrived in zip(self._expected, self._arrived, strict=True):
            # Where a record's own gradient is not finite it counts for nothing in any case.
            wanted = expected.double().nan_to_num(0.0, 0.0, 0.0)
            got = torch.zeros_like(wanted) if arrived is None else arrived.double().nan_to_num(0.0, 0.0, 0.0)
            difference += float((wanted - got).square().sum())
            size += float(wanted.square().sum())
        tolerance = max(_TOLERANCE.get(expected.dtype, _TOLERANCE_HALF) for expected in self._expected)
        if not difference**0.5 <= tolerance * size**0.5 + 1e-12:
            raise NonPrivateStep(
                "loss must be the declared criterion of (output, target), got other gradients at the module's output. "
                "Call the very function that was passed as criterion=, add nothing to it, and put no hooks on its "
                "input."
            )


def tensors_within(output: object, depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors of what a module returned, also inside objects such as distributions."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not callable(leaf):
            for value in vars(leaf).values():
                yield from tensors_within(value, depth - 1)


def _replaced(function: Callable[[Tensor], Tensor], output: object, depth: int) -> object:
    def replaced(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if not depth or not hasattr(leaf, "__dict__") or callable(leaf):
            return leaf
        made = copy.copy(leaf)
        for name, value in vars(leaf).items():
            vars(made)[name] = _replaced(function, value, depth - 1)
        return made

    return tree_map(replaced, output)


# ----------------------------------------------------------------------------------------------------------------------
# The loss of a drop-in loop, put to the independence probe: followed on a tape, or given as a function.
# ----------------------------------------------------------------------------------------------------------------------


_ALONE = (
    "Or, if the loss takes every record by itself, train one record at a time, with the loop as it is: "
    'PrivacyEngine(gradients="one-by-one"), in a trainer PrivacyArguments(gradients="one-by-one").'
)
# Repetitions of a check take a small batch at first, a large one later.
_SMALL_AGAIN = 16


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """How the probe is to look at a drop-in loop.

    Args:
        reduction: "mean" or "sum" over records, or "none" for one loss per record.
        may_be_empty: whether an empty batch may come.
        public_batch: records to use instead of synthetic ones, or None.
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
        """For a loss or module that was checked before and has come so many times."""
        return replace(self, size=replace(self.size, again=True, is_thorough=times > _SMALL_AGAIN))


def check_traced_loss(
    module: nn.Module, capture: Recorder, tape: OperationTrace, loss: int, structure: object, options: ProbeOptions
) -> None:
    """Probe the loss at place `loss` of the tape, or the losses of its records, with the module in between.

    Args:
        module: in the mode in which it will be trained.
        capture: its hooks, with no recording in use.
        tape: notes of the first batch.
        loss: the loss's place on the tape.
        structure: a batch with no rows.
        options: reduction, and which records to use.
    """
    if tape.is_by_record:
        options = replace(options, reduction="none")

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
    tape: OperationTrace,
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


def _with_outsiders(tape: OperationTrace, check: Callable[[], None]) -> None:
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
        "records, so that one record more or less changes what all others do. Put them into the dataset, draw them "
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
    tape: OperationTrace,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    structure: object,
    options: ProbeOptions,
) -> None:
    """Call the module on synthetic records in place of `args`, before it sees the first real ones.

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
    check_no_max_norm_embeddings(module)
    given = [tensor for tensor in tensors_in((args, dict(kwargs))) if isinstance(tensor, TracedTensor)]
    example = list(tensors_in(options.public_batch))
    poisons = (None, AdversarialValue(integers=-1), AdversarialValue(floats=torch.nan))
    sizes: list[list[torch.Size]] = []

    def call(made_up: SyntheticRecords, poison: AdversarialValue | None) -> None:
        SeededGenerators().start()
        inputs = list(tensors_in(made_up.batch(range(options.together), {} if poison is None else {0: poison})))
        values = tape.replay_all([tensor.slot for tensor in given], inputs, records=options.together)

        def value_of(leaf: object) -> object:
            return values[leaf.slot] if isinstance(leaf, TracedTensor) else leaf

        made = [values[tensor.slot] for tensor in given]
        sizes.append([tensor.shape[:1] for tensor in made if isinstance(tensor, Tensor)])
        arguments, named = map_values(value_of, args), map_values(value_of, dict(kwargs))
        assert isinstance(arguments, tuple)
        assert isinstance(named, dict)
        with IndexBoundsCheck():
            module(*arguments, **named)

    def capture_once(made_up: SyntheticRecords) -> None:
        try:
            with torch.enable_grad(), capture.capturing(options.together):
                call(made_up, None)
        except NOT_CAPTURED as refusal:
            raise type(refusal)(f"{refusal.args[0]} {_ALONE}") from refusal
        finally:
            capture.discard()

    with preserve_model_state(module):
        for pattern in INTEGER_PATTERNS:
            records = (structure, tape.outside_inputs())
            made_up = SyntheticRecords(records, rows=0, count=options.together, pattern=pattern, example=example)
            for poison in poisons:
                # What fails on synthetic records is reported with the loss, or doesn't take such values.
                try:
                    call(made_up, poison)
                    # Texts have no synthetic stand-ins: their number is that of the batch.
                    if poison is None and given and isinstance(capture, GradientCapture):
                        capture_once(made_up)
                except SordinoError:
                    raise
                except Exception:  # noqa: S112
                    continue
            _check_no_choice(sizes)
            sizes.clear()


def check_criterion(
    module: nn.Module, capture: Recorder, criterion: Criterion, structure: object, options: ProbeOptions
) -> None:
    """Probe ``criterion(module(*inputs), target)`` for batches (*inputs, target). See `check_traced_loss`."""

    def run(batch: object) -> Tensor:
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise InvalidArgument(
                "batch must be (inputs…, target) for criterion= to be called on it, got another structure. Leave "
                "criterion out; the loss is then followed from the first batch."
            )
        return _criterion_of(criterion, module(*batch[:-1]), batch[-1])

    _probe(module, capture, structure, run, options)


def _check_no_choice(sizes: list[list[torch.Size]]) -> None:
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
