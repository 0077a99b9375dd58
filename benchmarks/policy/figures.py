"""The figures of `./run bench policies`, in the style of the others."""

from pathlib import Path

from sordino.plot_style import COLORS, METHOD_COLORS, SERIF, STYLE


def figures(found: dict[str, dict[str, object]], folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    with mpl.rc_context(STYLE):
        folder.mkdir(parents=True, exist_ok=True)
        _schedules(found["dynamic"], folder / "policies-schedules.png")
        parts = {
            "clipping, ε = 1": found["clippings"],
            "optimizers, ε = 0.5": found["optimizers"],
            "norms by projections": found["projections"]["training"],
        }
        _methods(parts, folder / "policies-methods.png")


def _schedules(tasks: dict[str, dict], path: Path) -> None:
    """Noise over the steps, and what each schedule changes of the final loss, task by task."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(tasks), figsize=(15, 8), layout="constrained")
    for column, (name, body) in enumerate(tasks.items()):
        rows, (above, below) = body["rows"], axes[:, column]
        for place, (way, row) in enumerate(rows.items()):
            # Learned noise is the same with and without a learned rate: dashes let both be seen.
            style = (0, (4, 4)) if way == "learned noise and rate" else "-"
            color = METHOD_COLORS[place]
            above.plot(row.get("noise", []), color=color, linestyle=style, linewidth=2, label=way)
            change, error = row["change_percent"], row["change_sd"]
            below.errorbar(change, place, xerr=error, fmt="o", color=color, capsize=3)
        above.set_title(name, loc="left", family=SERIF)
        above.set_xlabel("step", loc="right")
        below.set_yticks(range(len(rows)), list(rows) if column == 0 else [""] * len(rows))
        below.invert_yaxis()
        below.axvline(0, color=COLORS["ink"], linewidth=0.8)
        below.set_xlabel("change of the final loss from uniform noise, %", loc="right")
    axes[0][0].set_ylabel("noise multiplier")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(rows), frameon=False)
    figure.savefig(path, dpi=100, metadata={"Software": "sordino"})
    plt.close(figure)


def _methods(parts: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """Final training loss of each method, with one standard deviation."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(parts), figsize=(15, 4.6), layout="constrained")
    for axis, (title, rows) in zip(axes, parts.items(), strict=True):
        losses, bars = ([row[name] for row in rows.values()] for name in ("loss", "loss_sd"))
        axis.barh(list(rows), losses, xerr=bars, color=METHOD_COLORS[0], ecolor=COLORS["ink"], capsize=3)
        axis.invert_yaxis()
        axis.set_title(title, loc="left", family=SERIF)
        axis.set_xlabel("final training loss, network on digits 3 and 5", loc="right")
    figure.savefig(path, dpi=100, metadata={"Software": "sordino"})
    plt.close(figure)
