"""What a loss must be (floor 3): one value per record that depends on a trained parameter."""

from torch import Tensor

from sordino.errors import InvalidArgument, LossShapeError

__all__ = ["per_record_losses"]


def per_record_losses(losses: object, *, records: int) -> Tensor:
    """`losses` of `records` records, shape (records,); neither number is told in a refusal.

    Raises:
        LossShapeError: it is not one value per record.
        InvalidArgument: no trained parameter takes part.
    """
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        got = f"{losses.dim()} dimensions" if isinstance(losses, Tensor) else type(losses).__name__
        raise LossShapeError(
            f"loss must be a tensor of shape (records,), one value per record, got {got}. "
            'Use reduction="none" and average over everything but the records.'
        )
    if len(losses) != records:
        raise LossShapeError(
            "loss must have one value per record, got another number of values. "
            "Average over everything but the first dimension."
        )
    if not losses.requires_grad:
        raise InvalidArgument("loss must depend on a trained parameter, got one that doesn't. Unfreeze something.")
    return losses
