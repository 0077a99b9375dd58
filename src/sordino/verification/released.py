"""Items about what was released beside the model: the loss curve (floor 6)."""

from sordino.errors import SordinoError
from sordino.events import Event, Gaussian, PoissonSampled
from sordino.runs import Line, RunFolder
from sordino.verification.files import Chain
from sordino.verification.items import Item, failed, not_checked, passed
from sordino.verification.planned import planned_loss_stddev

__all__ = ["check_loss_curve"]

_SAME = 1e-9


def check_loss_curve(run: RunFolder, chain: Chain | None) -> Item | None:
    """Whether the losses that were released are those that the plan bought, with its noise; None without any."""
    try:
        return _check_loss_curve(run, chain)
    except (SordinoError, UnicodeDecodeError, KeyError, ValueError) as error:
        return failed("loss curve", f"it can't be held against the plan: {error}")


def _check_loss_curve(run: RunFolder, chain: Chain | None) -> Item | None:
    planned, curve = run.plan.get("loss_curve"), run.loss_curve
    if curve is None:
        return None if planned is None else not_checked("loss curve", "none is written: the run did not finish")
    if planned != {"bound": curve.bound, "share": curve.share}:
        return failed("loss curve", "its bound or share is not the plan's, or the plan bought none")
    if chain is None:
        return not_checked("loss curve", "the chain is broken")
    charged: dict[int, Line] = {line.step: line for line in chain.lines}
    steps = [point.step for point in curve.points]
    if steps != sorted(set(steps)) or not charged.keys() >= set(steps):
        return failed("loss curve", "it holds a step twice, or one that was not charged")
    chosen = run.meta.get("budget") is not None
    for point in curve.points:
        asked = _asked(charged[point.step].event) if chosen else None
        stddev = planned_loss_stddev(run.plan, point.step, asked=asked)
        if abs(point.stddev - stddev) > _SAME * stddev:
            return failed("loss curve", f"step {point.step} states another noise than the plan's")
    return passed("loss curve", f"{len(steps)} values, with the noise that the plan gives them")


def _asked(event: Event) -> tuple[float, float] | None:
    """(noise multiplier, sample rate) that a step under a budget asked for; None where its event does not say."""
    inner, rate = (event.event, event.sample_rate) if isinstance(event, PoissonSampled) else (event, 1.0)
    return (inner.noise_multiplier, rate) if isinstance(inner, Gaussian) else None
