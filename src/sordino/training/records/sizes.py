"""Numbers of batches and of records in them, from public numbers only (floor 3)."""

import math
from collections.abc import Sized

from sordino.training.plan import Plan

__all__ = ["batch_bound", "largest_batch", "parts_of", "steps_per_epoch", "substitutes"]

# So many steps of a schedule are looked at, and so many standard deviations of a batch's size: more come in one of
# thirty thousand batches.
_LOOKED_AT, _DEVIATIONS = 256, 4.0
# A batch is larger than `batch_bound` with at most this probability.
_SELDOM = 1e-6


def steps_per_epoch(data_loader: Sized, sample_rate: float | None) -> int:
    """Logical batches an epoch, from public numbers only when a rate was declared.

    Fewer records than one batch are one batch, also where the loader would drop it.
    """
    return max(1, len(data_loader) if sample_rate is None else round(1 / sample_rate))


def substitutes(expected_batch_size: float, microbatch_size: int | None) -> int:
    """How many made-up records stand for an empty batch: an ordinary number, so that loops run as they always do."""
    most = max(2, round(expected_batch_size))
    return most if microbatch_size is None else min(most, max(1, microbatch_size))


def largest_batch(plan: Plan, microbatch_size: int | None, *, records_each: int = 1, processes: int = 1) -> int:
    """The most records that the model is given at once, but for one batch in thirty thousand: a public number.

    Args:
        plan: of the steps.
        microbatch_size: most records in one forward and backward, or None.
        records_each: records of a privacy unit in one forward.
        processes: that share a batch.

    Example:
        >>> plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, steps=5, expected_batch_size=64.0,
        ...             delta=1e-5)
        >>> largest_batch(plan, None), largest_batch(plan, 16)
        (96, 16)
    """
    steps = range(0, plan.steps, max(1, plan.steps // _LOOKED_AT)) if plan.is_scheduled else range(1)
    expected = max(plan.at(step).expected_batch_size for step in (*steps, max(0, plan.steps - 1)))
    spread = _DEVIATIONS * math.sqrt(expected) if plan.poisson_sampling else 0.0
    most = max(1, math.ceil((expected + spread) * records_each / processes))
    return most if microbatch_size is None else min(most, microbatch_size)


def batch_bound(mean: float, most: int | None = None) -> int:
    """How many records a batch drawn by chance has at most, all but once in a million batches.

    Bernstein's bound for a sum of independent draws, P[b ≥ μ + s] ≤ exp(−s² / 2(μ + s/3)).

    Args:
        mean: expected number of records μ ≥ 0, public.
        most: what no batch can exceed, public; None for nothing.

    Returns:
        An integer ≥ 1.
    """
    log = -math.log(_SELDOM)
    bound = math.ceil(mean + log / 3 + math.sqrt(log * log / 9 + 2 * mean * log))
    return max(1, bound if most is None else min(bound, most))


def parts_of(largest: int, microbatch_size: int) -> int:
    """Parts of every logical batch: as many whatever was drawn, so that a loop that counts them learns nothing.

    A larger batch than `largest` still comes in as many parts, each with a record more.
    """
    return math.ceil(largest / microbatch_size)
