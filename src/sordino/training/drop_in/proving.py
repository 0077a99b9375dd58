"""What a session proves about a drop-in loop, and with which records (floor 3)."""

from sordino.gradients import OneByOne
from sordino.training.drop_in.session import Session
from sordino.training.loops.criterion import (
    Criterion,
    ProbeOptions,
    check_arguments,
    check_criterion,
    check_taped_loss,
    try_forward,
)
from sordino.training.probing.probe import ProbeSize
from sordino.training.records.loader import PrivateLoader

__all__ = ["set_probe"]


def set_probe(
    session: Session,
    loader: PrivateLoader,
    reduction: str,
    criterion: Criterion | None,
    public_batch: object,
    size: ProbeSize,
) -> None:
    """Have model and loss proved independent before the first record is used.

    Args:
        session: of the module.
        loader: gives the batches: what they look like, and how they are padded.
        reduction: "mean" or "sum" over records.
        criterion: the declared loss; without one the loop's own is followed.
        public_batch: records to use instead of made-up ones, or None.
        size: the most records that the module gets at once.
    """
    # The loop never meets an empty batch: the loader gives it made-up records in place of none.
    together = 1 if isinstance(session.capture, OneByOne) else min(4, size.records)
    structure = loader.empty_batch
    options = ProbeOptions(
        reduction=reduction,
        may_be_empty=False,
        public_batch=public_batch,
        together=together,
        padding=loader.padding,
        is_split=loader.is_split or session.processes > 1,
        size=size,
    )

    def options_for(times: int) -> ProbeOptions:
        return options.repeated(times) if times else options

    session.follow_padding(loader.padding)
    if criterion is None:
        session.verify_loss_with(
            lambda tape, loss, times: check_taped_loss(
                session.module, session.capture, tape, loss, structure, options_for(times)
            ),
            lambda tape, args, kwargs: try_forward(
                session.module, session.capture, tape, args, kwargs, structure, options
            ),
        )
    else:
        session.verify_module_with(
            lambda times: check_criterion(session.module, session.capture, criterion, structure, options_for(times)),
            criterion,
            lambda tape, given, times: check_arguments(
                session.module, session.capture, tape, given, criterion, structure, options_for(times)
            ),
        )
