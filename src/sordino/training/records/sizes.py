"""Numbers of batches and of records in them, from public numbers only (floor 3)."""

from collections.abc import Sized

__all__ = ["steps_per_epoch", "substitutes"]


def steps_per_epoch(data_loader: Sized, sample_rate: float | None) -> int:
    """Logical batches an epoch, from public numbers only when a rate was declared.

    Fewer records than one batch are one batch, also where the loader would drop it.
    """
    return max(1, len(data_loader) if sample_rate is None else round(1 / sample_rate))


def substitutes(expected_batch_size: float, microbatch_size: int | None) -> int:
    """How many made-up records stand for an empty batch: an ordinary number, so that loops run as they always do."""
    most = max(2, round(expected_batch_size))
    return most if microbatch_size is None else min(most, max(1, microbatch_size))
