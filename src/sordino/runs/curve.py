"""The noisy losses that a run bought (floor 2): values that were released step by step, and the noise on each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = ["LossPoint", "ReleasedLosses", "losses_body", "losses_of", "smoothed"]

_FIELDS = {"schema", "bound", "share", "points"}


@dataclass(frozen=True, kw_only=True)
class LossPoint:
    """One released value of a loss curve.

    Args:
        step: number of the step, from 0.
        loss: noisy sum of the bounded losses of the step's batch over the expected batch size; may be negative.
        stddev: standard deviation of the noise on `loss`, known beforehand.
    """

    step: int
    loss: float
    stddev: float


@dataclass(frozen=True, kw_only=True)
class ReleasedLosses:
    """What a run folder holds of a loss curve.

    Args:
        bound: what each record's loss was cut to, from 0.
        share: of the step's budget that went to the losses, in (0, 1).
        points: in the order of steps.
    """

    bound: float
    share: float
    points: tuple[LossPoint, ...]


def smoothed(points: Sequence[LossPoint], most: int) -> tuple[LossPoint, ...]:
    """At most `most` means of neighbouring points: noise is independent from step to step, so a mean has less of it.

    Example:
        >>> points = [LossPoint(step=k, loss=float(k), stddev=2.0) for k in range(8)]
        >>> [(point.step, point.loss, point.stddev) for point in smoothed(points, 2)]
        [(3, 1.5, 1.0), (7, 5.5, 1.0)]
    """
    checks.integer(1, most=most)
    size = max(1, -(-len(points) // most))
    found = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        spread = math.sqrt(math.fsum(point.stddev**2 for point in part)) / len(part)
        mean = math.fsum(point.loss for point in part) / len(part)
        found.append(LossPoint(step=part[-1].step, loss=mean, stddev=spread))
    return tuple(found)


def losses_body(losses: ReleasedLosses) -> dict[str, object]:
    """The curve in plain JSON types. Losses are texts of one length, so that the size of the file tells nothing."""
    points = [[point.step, f"{point.loss:+.16e}", point.stddev] for point in losses.points]
    return {"schema": 1, "bound": losses.bound, "share": losses.share, "points": points}


def losses_of(body: Mapping[str, object]) -> ReleasedLosses:
    """The curve that `losses_body` described.

    Raises:
        InvalidArgument: it is another body.
    """
    points = body.get("points")
    try:
        if set(body) != _FIELDS or body["schema"] != 1 or not isinstance(points, list):
            raise ValueError
        found = tuple(
            LossPoint(step=checks.integer(0, step=step), loss=_finite(float(str(loss))), stddev=_finite(stddev))
            for step, loss, stddev in points
        )
        return ReleasedLosses(bound=_finite(body["bound"]), share=_finite(body["share"]), points=found)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(
            f"loss_curve.json must hold {', '.join(sorted(_FIELDS))}, schema 1, got another body. "
            "The run folder was changed."
        ) from error


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return float(value)
