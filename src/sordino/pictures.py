"""How every picture looks: colours, and matplotlib's settings (floor 0, no matplotlib).

Example:
    >>> sorted(COLOURS)
    ['accent', 'alarm', 'hair', 'ink', 'mute', 'paper', 'soft', 'tint']
"""

__all__ = ["COLOURS", "METHOD_COLOURS", "SERIF", "STYLE"]

COLOURS = {
    "accent": "#0b6e69",
    "alarm": "#a63a24",
    "hair": "#e4e2dc",
    "ink": "#1c1f23",
    "mute": "#b9bdc1",
    "paper": "#faf9f6",
    "soft": "#5b626b",
    "tint": "#e3eeec",
}
METHOD_COLOURS = (
    COLOURS["accent"],
    "#c08a2d",
    "#7a5ea8",
    COLOURS["alarm"],
    "#4c7bb0",
    "#8a8f96",
    "#5f8a3a",
    "#3b9fa0",
    "#b0577f",
    "#2f4858",
)
SERIF = "DejaVu Serif"
STYLE: dict[str, object] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": COLOURS["hair"],
    "axes.facecolor": COLOURS["paper"],
    "axes.labelcolor": COLOURS["soft"],
    "axes.titlecolor": COLOURS["ink"],
    "xtick.color": COLOURS["soft"],
    "ytick.color": COLOURS["soft"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 7,
    "ytick.major.pad": 7,
    "figure.facecolor": COLOURS["paper"],
    "savefig.facecolor": COLOURS["paper"],
    "svg.hashsalt": "sordino",
}
