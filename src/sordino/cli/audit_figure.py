"""The picture of `sordino audit`: the canaries' scores, and what was shown beside what is claimed."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sordino.cli.figures import COLOURS, METHOD_COLOURS, STYLE
from sordino.definitions import round_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sordino.audit import AuditResult

__all__ = ["draw_audit"]

_ACCENT, _OTHER = METHOD_COLOURS[0], METHOD_COLOURS[1]
_BAD = METHOD_COLOURS[3]


def draw_audit(result: "AuditResult", path: Path) -> None:
    """Draw an audit to a PNG or SVG file."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(13, 6.2), dpi=110)
        FigureCanvasAgg(figure)
        left, right = figure.subplots(
            1,
            2,
            gridspec_kw={
                "left": 0.05,
                "right": 0.96,
                "bottom": 0.13,
                "top": 0.7,
                "wspace": 0.16,
                "width_ratios": [3, 2],
            },
        )
        ink, soft = COLOURS["ink"], COLOURS["soft"]
        claimed = round_up(result.claimed.epsilon)
        verdict = "nothing speaks against it" if result.passed else "the claim is REJECTED"
        figure.text(
            0.05, 0.88, f"ε ≥ {result.bound.epsilon:.2f} was shown", fontsize=26, color=ink, family="DejaVu Serif"
        )
        figure.text(
            0.05, 0.81, f"ε = {claimed} is claimed at δ = {result.bound.delta:g}: {verdict}", fontsize=14, color=soft
        )
        _scores(left, result)
        _scale(right, result)
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else {"Software": "sordino"})


def _scores(axes: "Axes", result: "AuditResult") -> None:
    """Histograms of the canaries that were in and out, and where the attacker guessed."""
    scores, present = result.scores, result.present
    low, high = np.quantile(scores, [0.002, 0.998])
    bins = np.linspace(low, high, 41).tolist()
    axes.hist(scores[~present], bins=bins, color=_OTHER, alpha=0.55, label="canaries that were out")
    axes.hist(scores[present], bins=bins, color=_ACCENT, alpha=0.55, label="canaries that were in")
    half = result.bound.guesses // 2
    order = np.sort(scores)
    for edge, words, side in ((order[half - 1], "guessed out", "right"), (order[-half], "guessed in", "left")):
        axes.axvline(edge, color=COLOURS["soft"], linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            words,
            (edge, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-6 if side == "right" else 6, -4),
            textcoords="offset points",
            ha=side,
            va="top",
            color=COLOURS["soft"],
            fontsize=10,
        )
    axes.set_yticks([])
    axes.set_xlabel(f"score, {result.attacker}")
    correct, guesses = result.bound.correct, result.bound.guesses
    axes.set_title(f"{correct} of {guesses} guesses were right", loc="left", fontsize=12, pad=28)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.01, 0.995), ncols=2, fontsize=10, handlelength=1.2)


def _scale(axes: "Axes", result: "AuditResult") -> None:
    """Shown, claimed, and the most that could have been shown."""
    rows = [
        ("most that could\nbe shown", result.bound.ceiling, COLOURS["hair"]),
        ("claimed", result.claimed.epsilon, COLOURS["soft"]),
        ("shown", result.bound.epsilon, _ACCENT if result.passed else _BAD),
    ]
    for place, (_, value, colour) in enumerate(rows):
        axes.barh(place, value, height=0.42, color=colour)
        axes.annotate(
            f"{value:.2f}",
            (value, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=COLOURS["ink"],
            fontsize=12,
        )
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_xlim(0, 1.18 * max(value for _, value, _ in rows))
    axes.set_xlabel("ε")
    confidence = f"{100 * result.bound.confidence:g} % confidence"
    axes.set_title(f"{confidence} · {result.bound.family or 'any curve'}", loc="left", fontsize=12, pad=28)
