"""What noisy counts say: shares with intervals for chance and noise together, calibration, and what all of it cost.

    right − p·(right + wrong) has mean 0 and variance n p (1 − p) + σ² (p² + (1 − p)²)                          (1)

An interval holds every p for which (1) explains what was seen; without noise it is Wilson's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sordino import accounting
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import Event, Gaussian, Nothing, SelfComposed, compose
from sordino.report.bought import PaidEvaluation, PaidShare
from sordino.report.parts import Bin, Calibration
from sordino.runs import Evaluation, NoisyTable

__all__ = ["paid_evaluation", "share_interval", "together"]

_NORMAL = 1.959963984540054
# The 95 % interval of a Laplace variable, in its standard deviations: ln 20 / √2.
_LAPLACE = math.log(20) / math.sqrt(2)


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Noisy numbers of right and wrong ones, each with noise of variance `variance`."""

    right: float
    wrong: float
    variance: float


def share_interval(right: float, wrong: float, *, stddev: float, width: float = _NORMAL) -> tuple[float, float]:
    """The 95 % interval of a share of right answers, for chance and noise together, by (1).

    Args:
        right: noisy count of right ones.
        wrong: noisy count of wrong ones.
        stddev: standard deviation of the noise on each, ≥ 0.
        width: of the interval in standard deviations; more than 1.96 for noise with heavier tails.

    Returns:
        Lower and upper end in [0, 1]; (0, 1) where the counts say nothing.

    Example:
        >>> low, high = share_interval(80, 20, stddev=0.0)
        >>> round(low, 4), round(high, 4)
        (0.7112, 0.8666)
    """
    total = right + wrong
    # The number of records in (1) is only known with noise: more of them are more variance.
    records = max(total, 0.0) + width * math.sqrt(2) * stddev
    square, noise = width**2, (width * stddev) ** 2
    # (right − p·total)² ≤ width² (records p (1 − p) + σ² (1 − 2p + 2p²)), as a p² + b p + c ≤ 0.
    a = total**2 + square * records - 2 * noise
    b = -2 * right * total - square * records + 2 * noise
    c = right**2 - noise
    inside = b * b - 4 * a * c
    if total <= 0 or a <= 0 or inside < 0:
        return 0.0, 1.0
    root = math.sqrt(inside)
    low, high = (-b - root) / (2 * a), (-b + root) / (2 * a)
    return (0.0, 1.0) if low > 1 or high < 0 else (max(0.0, low), min(1.0, high))


def together(
    evaluations: Sequence[Evaluation],
    trained: Event,
    *,
    claimed: float,
    delta: float,
    relation: NeighboringRelation,
) -> float | None:
    """ε at `delta` of training and all evaluations; None where no accountant composes them.

    `trained` are the events of training and `claimed` its ε. Where the claim is more than the events come to (a budget
    that was spent step by step), pure ε of evaluations are added to the claim.

    Those on records that are declared disjoint from the training records are composed among themselves: nobody pays for
    both, so the larger of the two sums holds for everybody.
    """
    ours = [one.event for one in evaluations if not one.disjoint]
    others = [one.event for one in evaluations if one.disjoint]
    try:
        apart = accounting.epsilon(compose(others), delta, relation=relation).upper
        alone = accounting.epsilon(trained, delta, relation=relation).upper
        if claimed <= alone * (1 + 1e-9):
            return max(apart, accounting.epsilon(compose([trained, *ours]), delta, relation=relation).upper)
        return max(apart, claimed + accounting.epsilon(compose(ours), 0.0, relation=relation).upper)
    except (AccountingError, UnsupportedEvent):
        return None


def paid_evaluation(evaluation: Evaluation) -> PaidEvaluation:
    """What a report says of one evaluation."""
    width = _NORMAL if _is_gaussian(evaluation.event) else _LAPLACE
    return PaidEvaluation(
        records=evaluation.records,
        epsilon=evaluation.epsilon,
        delta=evaluation.delta,
        disjoint=evaluation.disjoint,
        charged=evaluation.charge is not None,
        noise=evaluation.stddev,
        shares=() if evaluation.tables is None else tuple(_shares(evaluation, evaluation.tables, width)),
        calibration=_calibration(evaluation),
        calibration_noise=_calibration_noise(evaluation),
    )


def _is_gaussian(event: Event) -> bool:
    inner = event.event if isinstance(event, SelfComposed) else event
    return isinstance(inner, Gaussian | Nothing)


def _shares(evaluation: Evaluation, tables: Sequence[NoisyTable], width: float) -> list[PaidShare]:
    """All records first, then every value of classes and columns."""
    variance = evaluation.stddev**2
    found = [_share("all", "all", _of_all(tables, variance), width)]
    for table in tables:
        if table.name in ("all", "confidence"):
            continue
        for value, right, wrong in zip(table.values, table.right, table.wrong, strict=True):
            counts = _Counts(right=right, wrong=wrong, variance=variance)
            found.append(_share(table.name, value, counts, width))
    return found


def _of_all(tables: Sequence[NoisyTable], variance: float) -> _Counts:
    """Every table counts the same records, so their sums are averaged, each by the inverse of its noise."""
    weights = [1 / len(table.values) for table in tables]
    total = math.fsum(weights)
    right = math.fsum(weight * sum(table.right) for weight, table in zip(weights, tables, strict=True)) / total
    wrong = math.fsum(weight * sum(table.wrong) for weight, table in zip(weights, tables, strict=True)) / total
    return _Counts(right=right, wrong=wrong, variance=variance / total)


def _share(column: str, value: str, counts: _Counts, width: float) -> PaidShare:
    total = counts.right + counts.wrong
    low, high = share_interval(counts.right, counts.wrong, stddev=math.sqrt(counts.variance), width=width)
    share = counts.right / total if total > 0 else 0.5
    return PaidShare(
        column=column,
        value=value,
        records=max(0, round(total)),
        records_noise=math.sqrt(2 * counts.variance),
        accuracy=min(max(share, low), high),
        lower=low,
        upper=high,
    )


def _middles(table: NoisyTable) -> list[float]:
    """The middle of each part of confidence, which stands for all confidences in it."""
    return [sum(map(float, value.split(" to "))) / 2 for value in table.values]


def _calibration(evaluation: Evaluation) -> Calibration | None:
    """ECE with the middles of the bins in place of mean confidences; None where the counts say nothing."""
    table = evaluation.table("confidence")
    if table is None or evaluation.tables is None:
        return None
    counts = _of_all(evaluation.tables, 1.0)
    total = counts.right + counts.wrong
    if total <= 0:
        return None
    gaps, bins = [], []
    for middle, right, wrong in zip(_middles(table), table.right, table.wrong, strict=True):
        gaps.append(abs(right - middle * (right + wrong)))
        # Bins in which noise hides whether there is anybody are not drawn.
        if right + wrong > 3 * math.sqrt(2) * evaluation.stddev:
            share = min(1.0, max(0.0, right / (right + wrong)))
            bins.append(Bin(records=round(right + wrong), confidence=middle, accuracy=share))
    largest = max((abs(part.accuracy - part.confidence) for part in bins), default=0.0)
    return Calibration(
        expected_error=min(1.0, math.fsum(gaps) / total), maximum_error=min(1.0, largest), bins=tuple(bins)
    )


def _calibration_noise(evaluation: Evaluation) -> float | None:
    """What ECE would be, about, from noise alone: the mean of |noise| over all bins."""
    table = evaluation.table("confidence")
    if table is None or evaluation.tables is None:
        return None
    counts = _of_all(evaluation.tables, 1.0)
    total = max(1.0, counts.right + counts.wrong)
    spreads = [evaluation.stddev * math.hypot(1 - middle, middle) for middle in _middles(table)]
    return min(1.0, math.sqrt(2 / math.pi) * math.fsum(spreads) / total)
