"""The attacks' ROC curves on logarithmic axes, under the ceiling of the claim (floor 4)."""

from pathlib import Path
from typing import TYPE_CHECKING

from sordino.audit.attacks.membership import NO_PROOF, MembershipReport
from sordino.pictures import COLOURS, SERIF, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_roc"]

_OTHERS = ("#5f7f9e", "#b08948", "#8d6a9f", "#7d8a4a", "#b0665c", "#4f9090")


def draw_roc(report: MembershipReport, path: Path, *, title: str = "") -> None:
    """Draw the strongest attack with its band, the others behind it, and the ceiling, to a PNG of 1000 × 800 pixels.

    Guarantee: none: the curves are statistics of the members. The picture says so unless the records are public.

    Args:
        report: from `membership_report`.
        path: where the PNG goes.
        title: what was attacked.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lowest = 0.5 / report.strongest.roc.non_members
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(10, 8), dpi=100)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.1, 0.13, 0.86, 0.7))
        _curves(axes, report, lowest)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(lowest, 1)
        axes.set_ylim(min(lowest, 0.5 / report.strongest.roc.members), 1.15)
        axes.set_xlabel("share of non-members wrongly accused", color=COLOURS["soft"], loc="right")
        axes.set_title("share of members found", loc="left", color=COLOURS["soft"], fontsize=11)
        axes.grid(color=COLOURS["hair"], which="major")
        axes.set_axisbelow(True)
        axes.legend(loc="lower right", frameon=False, labelcolor=COLOURS["ink"], fontsize=10.5)
        figure.text(0.06, 0.93, title or "Membership attacks", fontsize=20, color=COLOURS["ink"], family=SERIF)
        figure.text(0.06, 0.885, _words(report), fontsize=11, color=COLOURS["soft"])
        figure.text(0.06, 0.03, NO_PROOF, fontsize=10, color=COLOURS["soft"])
        if not report.public:
            figure.text(0.96, 0.03, "Private: keep beside the data.", fontsize=10, color=COLOURS["alarm"], ha="right")
        figure.savefig(path, metadata={"Software": "sordino"})


def _words(report: MembershipReport) -> str:
    roc = report.strongest.roc
    claim = f"claimed ε = {report.claim.epsilon:.3g}" if report.claim is not None else "no guarantee claimed"
    return f"{roc.members:,} members, {roc.non_members:,} others, {report.references} reference models · {claim}"


def _curves(axes: "Axes", report: MembershipReport, lowest: float) -> None:
    rates = [rate for rate, _ in report.ceiling.curve if rate >= lowest]
    most = [value for rate, value in report.ceiling.curve if rate >= lowest]
    axes.fill_between(rates, most, 1.15, color=COLOURS["hair"], alpha=0.55, linewidth=0)
    axes.plot(rates, most, color=COLOURS["alarm"], linewidth=2, label=f"ceiling, from {report.ceiling.source}")
    for number, attack in enumerate(report.attacks):
        points = [point for point in attack.roc.curve if point[0] > 0]
        x, y = [point[0] for point in points], [point[1] for point in points]
        # A logarithmic axis has no zero: a curve that found nobody yet starts where it finds somebody.
        first = next((k for k, value in enumerate(y) if value > 0), len(y))
        label = f"{attack.name}   AUC {attack.roc.auc:.3f}"
        if number == 0:
            low, high = [max(point[2], 1e-9) for point in points], [point[3] for point in points]
            axes.fill_between(x, low, high, color=COLOURS["tint"], alpha=0.8, linewidth=0)
            axes.plot(x[first:], y[first:], color=COLOURS["accent"], linewidth=2.8, label=label, zorder=3)
        else:
            axes.plot(x[first:], y[first:], color=_OTHERS[(number - 1) % len(_OTHERS)], linewidth=1.3, label=label)
    axes.plot(
        [lowest, 1], [lowest, 1], color=COLOURS["soft"], linewidth=1, linestyle=(0, (2, 3)), label="blind guessing"
    )
