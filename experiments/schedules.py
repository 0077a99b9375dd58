"""When does a dynamic schedule of noise pay? Theory and experiment over steps T and condition number κ.

Noisy gradient descent on quadratics that satisfy the theorem's conditions, at one zCDP budget, with uniform noise and
with the schedule that is best by theorem 3.2 of Hong, Wang, Zhou 2022. The map shows the share of the final excess loss
that the dynamic schedule saves: by the bound, and measured.

Run: python experiments/schedules.py [--out FOLDER]
"""

import argparse
import json
from pathlib import Path

import numpy as np

from sordino.plot_style import COLORS, METHOD_COLORS, SERIF, STYLE
from sordino.research import constant_noise_schedule, excess_risk_bound, noise_influence, optimal_noise_schedule

STEPS = (5, 10, 20, 40, 80, 160, 320)
CONDITIONS = (2.0, 5.0, 10.0, 20.0, 50.0)
DIMENSIONS, BUDGET, ALPHA = 20, 1.0, 1e-4


def schedules(steps: int, condition: float) -> dict[str, np.ndarray]:
    """Noise multipliers of both schedules, of the same budget Σ σ⁻²."""
    weights = noise_influence(steps, condition_number=condition)
    return {
        "uniform": np.array(constant_noise_schedule(steps, budget=BUDGET).values),
        "dynamic": np.array(optimal_noise_schedule(weights, budget=BUDGET).values),
    }


def bounds(steps: int, condition: float) -> dict[str, float]:
    """The theorem's bound on the final excess loss over the first, of both schedules."""
    return {
        name: excess_risk_bound(noise, condition_number=condition, alpha=ALPHA)
        for name, noise in schedules(steps, condition).items()
    }


def measured(steps: int, condition: float, *, runs: int, seed: int) -> dict[str, np.ndarray]:
    """Final excess loss over the first of each of `runs` descents, for both schedules.

    f(θ) = Σ h θ²/2 with curvatures h from 1/κ to 1 and f at the start 1, steps of 1/M = 1. The noise of a coordinate is
    s·σ_t with s² = 2αR(f₁ − f*)/D, which is what `noise_to_signal` says.
    """
    curvature = np.geomspace(1 / condition, 1.0, DIMENSIONS)
    scale = np.sqrt(2 * ALPHA * BUDGET / DIMENSIONS)
    found = {}
    for name, noise in schedules(steps, condition).items():
        draws = np.random.default_rng((seed, steps, int(condition)))
        theta = np.tile(np.sqrt(2 / (DIMENSIONS * curvature)), (runs, 1))
        for sigma in noise:
            theta = theta - (curvature * theta + scale * sigma * draws.normal(size=theta.shape))
        found[name] = (curvature * theta**2).sum(axis=1) / 2
    return found


def interval(values: dict[str, np.ndarray]) -> tuple[float, float]:
    """The share that the dynamic schedule saves, and half its 95 % interval (delta method, independent means)."""
    means = {name: float(losses.mean()) for name, losses in values.items()}
    errors = {name: float(losses.std(ddof=1) / np.sqrt(len(losses))) for name, losses in values.items()}
    ratio = means["dynamic"] / means["uniform"]
    return 1 - ratio, 1.96 * ratio * float(np.hypot(*(errors[name] / means[name] for name in means)))


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """Two maps with their numbers, and the loss over T for κ = 10 with error bars."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(17, 5.2), dpi=90, layout="constrained")
        axes = figure.subplots(1, 3)
        for place, (name, title) in enumerate((("theory", "Saved, by the bound"), ("saved", "Saved, measured"))):
            grid = np.array([[row[name] for row in rows if row["condition"] == c] for c in CONDITIONS])
            axes[place].imshow(grid, cmap="BrBG", vmin=-1, vmax=1, origin="lower", aspect="auto")
            for y, x in np.ndindex(grid.shape):
                color = COLORS["paper"] if grid[y, x] > 0.6 else COLORS["ink"]
                axes[place].text(x, y, f"{100 * grid[y, x]:.0f} %", ha="center", va="center", fontsize=10, color=color)
            axes[place].set_xticks(range(len(STEPS)), [str(steps) for steps in STEPS])
            axes[place].set_yticks(range(len(CONDITIONS)), [f"{condition:g}" for condition in CONDITIONS])
            axes[place].set_xlabel("steps T", loc="right")
            axes[place].set_ylabel("condition number κ")
            axes[place].set_title(title, loc="left", family=SERIF)
        for place, name in enumerate(("uniform", "dynamic")):
            mine = [row for row in rows if row["condition"] == 10]
            color = METHOD_COLORS[place]
            values, bars = [row[name] for row in mine], [row[f"{name} error"] for row in mine]
            axes[2].errorbar(
                STEPS, values, yerr=bars, marker="os"[place], capsize=3, linewidth=2, color=color, label=name
            )
            theory = [row[f"{name} bound"] for row in mine]
            axes[2].plot(STEPS, theory, linestyle=(0, (5, 3)), color=color, label=f"{name}, the bound")
        axes[2].set_xscale("log")
        axes[2].set_yscale("log")
        axes[2].set_xticks(STEPS, [str(steps) for steps in STEPS])
        axes[2].minorticks_off()
        axes[2].set_xlabel("steps T", loc="right")
        axes[2].set_title("Excess loss over the first, κ = 10", loc="left", family=SERIF)
        axes[2].legend(frameon=False)
        figure.savefig(path, metadata={"Software": "sordino"})


def main(arguments: list[str] | None = None) -> list[dict[str, float]]:
    """Measure, draw, and write the numbers beside the picture."""
    parser = argparse.ArgumentParser(description="Dynamic beside uniform noise over T and κ.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "schedules")
    parser.add_argument("--runs", type=int, default=400)
    chosen = parser.parse_args(arguments)
    rows: list[dict[str, float]] = []
    for condition in CONDITIONS:
        for steps in STEPS:
            told, found = bounds(steps, condition), measured(steps, condition, runs=chosen.runs, seed=0)
            saved, error = interval(found)
            row = {"condition": condition, "steps": steps, "saved": saved, "saved error": error}
            row["theory"] = 1 - told["dynamic"] / told["uniform"]
            for name, losses in found.items():
                row |= {name: float(losses.mean()), f"{name} bound": told[name]}
                row[f"{name} error"] = float(1.96 * losses.std(ddof=1) / np.sqrt(len(losses)))
            rows.append(row)
            print(
                f"κ = {condition:4g}, T = {steps:4}: uniform {row['uniform']:.5f}, dynamic {row['dynamic']:.5f}, "
                f"saved {saved:6.1%} ± {error:.1%}, by the bound {row['theory']:6.1%}"
            )
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "schedules.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    draw(rows, chosen.out / "schedules-map.png")
    return rows


if __name__ == "__main__":
    main()
