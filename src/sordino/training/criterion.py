"""The loss of a drop-in loop, put to the independence probe (floor 3): followed on a tape, or given as a function."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from sordino.errors import InvalidArgument, SordinoError
from sordino.gradients import GradientCapture
from sordino.training.probe import check_records_are_independent
from sordino.training.structure import tensors_in
from sordino.training.tape import Tape

__all__ = ["Criterion", "ProbeOptions", "check_criterion", "check_taped_loss", "may_be_empty"]

Criterion = Callable[[Tensor, Tensor], Tensor]
"""A loss as a function of (output, target)."""

# A run of a million steps meets an event of this probability once in a billion runs.
_NEVER = 1e-15


def may_be_empty(expected_batch_size: float) -> bool:
    """Whether a Poisson batch of this expected size can be empty in practice: (1 − q)ᴺ ≤ exp(−q N)."""
    return math.exp(-expected_batch_size) > _NEVER


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """How the probe is to look at a drop-in loop.

    Args:
        reduction: "mean" or "sum" over records.
        may_be_empty: whether an empty batch may come.
        public_batch: records to use instead of made-up ones, or None.
    """

    reduction: str
    may_be_empty: bool
    public_batch: object


def check_taped_loss(
    module: nn.Module, capture: GradientCapture, tape: Tape, loss: int, structure: object, options: ProbeOptions
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
    try:
        check()
    except SordinoError as refusal:
        # What came from outside the batch with a row a record may be a constant whose size fits by chance.
        if not tape.outside_inputs() or refusal.__cause__ is None:
            raise
        tape.outside_is_constant = True
        check()


def check_criterion(
    module: nn.Module, capture: GradientCapture, criterion: Criterion, structure: object, options: ProbeOptions
) -> None:
    """Probe ``criterion(module(*inputs), target)`` for batches (*inputs, target). See `check_taped_loss`."""

    def run(batch: object) -> Tensor:
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise InvalidArgument(
                "batch must be (inputs…, target) for criterion= to be called on it, got another structure. Leave "
                "criterion out; the loss is then followed from the first batch."
            )
        return criterion(module(*batch[:-1]), batch[-1])

    _probe(module, capture, structure, run, options)


def _probe(
    module: nn.Module, capture: GradientCapture, records: object, run: Callable[[object], Tensor], options: ProbeOptions
) -> None:
    check_records_are_independent(
        module,
        capture,
        records,
        run,
        reduction=options.reduction,
        may_be_empty=options.may_be_empty,
        public_batch=options.public_batch,
    )


def _first_with_rows(structure: object) -> int:
    return next(place for place, tensor in enumerate(tensors_in(structure)) if tensor.dim() and tensor.size(0) == 0)
