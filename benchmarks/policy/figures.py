"""The figures of `./run bench policies`."""

from pathlib import Path


def figures(found: dict[str, dict[str, object]], folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    tasks = found["dynamic"]
    figure, axes = plt.subplots(2, len(tasks), figsize=(13, 6.4), layout="constrained")
    for column, (name, body) in enumerate(tasks.items()):
        rows, (above, below) = body["rows"], axes[:, column]  # type: ignore[index]
        for number, (way, row) in enumerate(rows.items()):
            above.plot(row.get("noise", []), color=f"C{number}", label=way, lw=1.4)
        above.set_title(name, fontsize=10)
        above.set_xlabel("step")
        places = range(len(rows))
        change, error = ([row[part] for row in rows.values()] for part in ("change_percent", "change_sd"))
        for place in places:
            below.errorbar(change[place], place, xerr=error[place], fmt="o", color=f"C{place}", capsize=3)
        below.set_yticks(list(places), list(rows) if column == 0 else [""] * len(rows), fontsize=9)
        below.invert_yaxis()
        below.axvline(0, color="black", lw=0.8)
        below.set_xlabel("final loss beside uniform noise, %")
    axes[0][0].set_ylabel("noise multiplier")
    axes[0][0].legend(fontsize=7)
    figure.savefig(folder / "policies-schedules.png", dpi=110)
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    parts = {
        "clipping, ε = 1": found["clippings"],
        "optimizers, ε = 0.5": found["optimizers"],
        "norms by projections": found["projections"]["training"],
    }
    for axis, (title, rows) in zip(axes, parts.items(), strict=True):
        axis.barh(list(rows), [row["loss"] for row in rows.values()], xerr=[row["loss_sd"] for row in rows.values()])  # type: ignore[index]
        axis.invert_yaxis()
        axis.set_title(f"{title}: network on digits 3 and 5", fontsize=9)
        axis.set_xlabel("final training loss")
    figure.savefig(folder / "policies-methods.png", dpi=110)
