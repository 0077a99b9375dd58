"""Parts of a report that somebody paid for: noisy losses, and evaluations on private records."""

import math
from typing import Annotated

from pydantic import Field

from sordino.report.parts import Calibration, Part, Real, Share
from sordino.runs import ReleasedLosses, smoothed

__all__ = ["NoisyLoss", "NoisyLosses", "PaidEvaluation", "PaidShare", "losses_shown"]

_MOST_POINTS = 60


class NoisyLoss(Part):
    """Mean of the noisy losses of some neighbouring steps.

    Args:
        steps: finished after the last of them.
        loss: noisy mean; may be negative.
        noise: its standard deviation.
    """

    steps: Annotated[int, Field(ge=1)]
    loss: Annotated[float, Field(allow_inf_nan=False)]
    noise: Real


class NoisyLosses(Part):
    """The loss curve that the plan bought.

    Args:
        bound: what each record's loss was cut to.
        share: of each step's budget.
        released: values released, one a step.
        points: at most 60 of them; more are means of neighbours.
    """

    bound: Real
    share: Share
    released: Annotated[int, Field(ge=0)]
    points: tuple[NoisyLoss, ...]

    @property
    def price(self) -> float:
        """By how much the noise on the gradient grew for it."""
        return 1 / math.sqrt(1 - self.share)


def losses_shown(losses: ReleasedLosses | None) -> NoisyLosses | None:
    """The curve as a report shows it, or None."""
    if losses is None:
        return None
    points = tuple(
        NoisyLoss(steps=point.step + 1, loss=point.loss, noise=point.stddev)
        for point in smoothed(losses.points, _MOST_POINTS)
    )
    return NoisyLosses(bound=losses.bound, share=losses.share, released=len(losses.points), points=points)


class PaidShare(Part):
    """A share of right answers among private records, from noisy counts.

    Args:
        column, value: whose share; ``all`` for all records.
        records: noisy number of records, and `records_noise` the standard deviation of its noise.
        accuracy: of them, and the 95 % interval for chance and noise together.
    """

    column: str
    value: str
    records: Annotated[int, Field(ge=0)]
    records_noise: Real
    accuracy: Share
    lower: Share
    upper: Share

    @property
    def is_known(self) -> bool:
        """Whether noise leaves anything to be said."""
        return (self.lower, self.upper) != (0.0, 1.0)

    @property
    def words(self) -> str:
        """The share in words."""
        return f"{100 * self.accuracy:.1f} %" if self.is_known else "not known"


class PaidEvaluation(Part):
    """One evaluation on private records.

    Args:
        records: what they are, as stated.
        epsilon, delta: what was paid for it.
        disjoint: declared: nobody's data are both here and in the training records.
        charged: whether a ledger was charged.
        noise: standard deviation of the noise on each count.
        shares: all records first; empty when it was paid for and gave no answer.
        calibration: from noisy counts, with the middle of each bin as its confidence.
        calibration_noise: about what ECE noise alone would make.
    """

    records: str
    epsilon: Real
    delta: Share
    disjoint: bool
    charged: bool
    noise: Real
    shares: tuple[PaidShare, ...]
    calibration: Calibration | None
    calibration_noise: Real | None
