"""How every picture looks: colors, matplotlib's settings, and a figure with both that is written to a file.

Example:
    >>> sorted(COLORS)
    ['accent', 'alarm', 'hair', 'ink', 'mute', 'paper', 'soft', 'tint']
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.installation import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLORS", "METHOD_COLORS", "SERIF", "STYLE", "saved_figure"]


COLORS = {
    "accent": "#0b6e69",
    "alarm": "#a63a24",
    "hair": "#e4e2dc",
    "ink": "#1c1f23",
    "mute": "#b9bdc1",
    "paper": "#faf9f6",
    "soft": "#5b626b",
    "tint": "#e3eeec",
}
METHOD_COLORS = (
    COLORS["accent"],
    "#c08a2d",
    "#7a5ea8",
    COLORS["alarm"],
    "#4c7bb0",
    "#8a8f96",
    "#5f8a3a",
    "#3b9fa0",
    "#b0577f",
    "#2f4858",
    "#b6794f",
    "#98a33a",
)
SERIF = "DejaVu Serif"
STYLE: dict[str, object] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": COLORS["hair"],
    "axes.facecolor": COLORS["paper"],
    "axes.labelcolor": COLORS["soft"],
    "axes.titlecolor": COLORS["ink"],
    "xtick.color": COLORS["soft"],
    "ytick.color": COLORS["soft"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 7,
    "ytick.major.pad": 7,
    "figure.facecolor": COLORS["paper"],
    "savefig.facecolor": COLORS["paper"],
    "svg.hashsalt": "sordino",
}


@contextmanager
def saved_figure(path: Path, *, size: tuple[float, float], dpi: int = 110, **options: Any) -> "Iterator[Figure]":
    """A figure that is written to a PNG or SVG file at the end of the block.

    Args:
        path: the file.
        size: width and height in inches.
        dpi: pixels of an inch.
        **options: for matplotlib's `savefig`.
    """
    require("report", "matplotlib", user="a picture")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=size, dpi=dpi)
        FigureCanvasAgg(figure)
        yield figure
        stamp = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": "sordino"}
        figure.savefig(path, metadata=stamp, **options)
