"""Four tables at three ε beside IBM's diffprivlib: accuracy, or R², on the same public test records.

    SORDINO_DATA=… ./run bench beside-diffprivlib [--seeds 3]

diffprivlib runs in an environment of its own, which the first call makes in sordino's cache folder by pip, with the
versions below. Both libraries get the same rows, scaled to [−1, 1] by public bounds, and the same declared bounds;
everything else is each library's default. The rows go to benchmarks/results/beside-diffprivlib.json, the section of
docs/results.md is made from them, and the page with it.

adult is embedded; the UCI regression sets lie in the folder uci/ of $SORDINO_DATA. Their bounds are taken from
themselves (they are public), and their first fold is the test table.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import numpy as np
from rich.console import Console

from sordino.data import load_dataset
from sordino.installation import cache_folder
from sordino.recipes.tabular import PublicFacts, fit_to, get_method, make_tabular_task
from sordino.recipes.tabular import TabularTask as Table

HERE = Path(__file__).parent
ROWS = HERE / "results" / "beside-diffprivlib.json"
SECTION = HERE / "results" / "section-beside-diffprivlib.md"
SETS = ("adult", "bike", "elevators", "protein")
EPSILONS = (0.1, 1.0, 3.0)
DELTA = 1e-5
OURS = {
    "adult": ("objective", "naive-bayes", "boosting", "forest"),
    "": ("sufficient-statistics", "adassp", "boosting"),
}
THEIRS = {"adult": ("LogisticRegression", "GaussianNB", "RandomForestClassifier"), "": ("LinearRegression",)}
PINS = ("diffprivlib==0.6.6", "scikit-learn==1.5.2", "numpy==2.0.2", "scipy==1.14.1", "setuptools<81")

# Runs in the other environment: reads rows and bounds, fits, and prints one JSON line a fit.
WORKER = """
import json, sys, time, warnings
import numpy as np
warnings.simplefilter("ignore")
from diffprivlib import models
table = np.load(sys.argv[1])
for name in sys.argv[3].split(","):
    for epsilon in map(float, sys.argv[4].split(",")):
        for seed in range(int(sys.argv[2])):
            if name == "LogisticRegression":
                model = models.LogisticRegression(epsilon=epsilon, data_norm=float(table["norm"]), random_state=seed)
            elif name == "GaussianNB":
                model = models.GaussianNB(epsilon=epsilon, bounds=(-1, 1), random_state=seed)
            elif name == "RandomForestClassifier":
                model = models.RandomForestClassifier(
                    epsilon=epsilon, bounds=(-1, 1), classes=(0, 1), random_state=seed
                )
            else:
                bounds = tuple(float(end) for end in table["target_bounds"])
                model = models.LinearRegression(epsilon=epsilon, bounds_X=(-1, 1), bounds_y=bounds, random_state=seed)
            begun = time.process_time()
            model.fit(table["train"], table["targets"])
            seconds = time.process_time() - begun
            print(json.dumps([name, epsilon, model.score(table["test"], table["answers"]), seconds]), flush=True)
"""


def other_python() -> str:
    """The interpreter of diffprivlib's environment, made if it is not there."""
    folder = cache_folder() / "beside-diffprivlib"
    python = folder / "bin" / "python"
    if not (folder / "complete").is_file():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PINS], check=True)
        (folder / "complete").touch()
    return str(python)


def uci(name: str) -> Table:
    """A public regression table, scaled by its own bounds."""
    folder = Path(os.environ["SORDINO_DATA"]) / "uci"
    table = np.loadtxt(folder / f"{name}.data.csv.gz", delimiter=",")
    tested = np.loadtxt(folder / f"{name}.test_mask.csv.gz", delimiter=",")[:, 0] > 0
    low, high = table.min(axis=0), table.max(axis=0)
    rows = 2 * (table - low) / np.where(high > low, high - low, 1) - 1
    features, targets = rows[:, :-1], table[:, -1]
    facts = PublicFacts(
        columns=features.shape[1],
        dataset_size=int((~tested).sum()),
        data_norm=features.shape[1] ** 0.5,
        one_hot=(),
        target=name,
        classes=None,
        target_bounds=(float(low[-1]), float(high[-1])),
    )
    return Table(
        name=name,
        public=True,
        facts=facts,
        train=(features[~tested], targets[~tested]),
        test=(features[tested], targets[tested]),
    )


def score(predicted: np.ndarray, targets: np.ndarray, *, labels: bool) -> float:
    """Accuracy, or R²."""
    if labels:
        return float(np.mean(predicted == targets))
    return 1 - float(np.square(predicted - targets).sum() / np.square(targets - targets.mean()).sum())


def ours(table: Table, seeds: int) -> list[dict[str, object]]:
    """Fits of this library."""
    found, labels = [], table.facts.classes is not None
    assert table.test is not None
    for name in OURS.get(table.name, OURS[""]):
        for epsilon in EPSILONS:
            for _ in range(seeds):
                begun = time.process_time()
                made = get_method(name).estimator(table.facts, epsilon=epsilon, delta=DELTA)
                fitted = fit_to(made, table)
                seconds = time.process_time() - begun
                value = score(np.asarray(fitted.predict(table.test[0])), np.asarray(table.test[1]), labels=labels)
                found.append({"set": table.name, "library": "sordino", "model": name, "epsilon": epsilon})
                found[-1] |= {"score": value, "seconds": seconds}
    return found


def theirs(table: Table, seeds: int, python: str) -> list[dict[str, object]]:
    """Fits of diffprivlib."""
    assert table.test is not None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.npz"
        arrays = dict(zip(("train", "targets", "test", "answers"), (*table.train, *table.test), strict=True))
        np.savez(file, norm=table.facts.data_norm, target_bounds=table.facts.target_bounds or (0, 1), **arrays)
        names = ",".join(THEIRS.get(table.name, THEIRS[""]))
        done = subprocess.run(
            [python, "-c", WORKER, file, str(seeds), names, ",".join(map(str, EPSILONS))],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": ""},
        )
    return [
        {"set": table.name, "library": "diffprivlib", "model": model, "epsilon": epsilon, "score": value, "seconds": s}
        for model, epsilon, value, s in map(json.loads, done.stdout.splitlines())
    ]


def section(rows: list[dict[str, object]]) -> str:
    """The section of the page."""
    seeds = len([row for row in rows if row["library"] == "diffprivlib" and row["set"] == "adult"]) // (
        len(EPSILONS) * len(THEIRS["adult"])
    )
    lines = [
        "## Beside diffprivlib",
        "",
        f"Means over {seeds} fits each, ± their standard deviation, on the same rows with the same declared bounds and",
        "each library's defaults: accuracy in % for adult, R² for the others. diffprivlib 0.6.6 is ε-private",
        f"(δ = 0); ours have δ = {DELTA:g}, naive Bayes δ = 0. An R² below 0 is worse than always saying the mean:",
        "diffprivlib's linear regression minimizes a quadratic whose noisy matrix may be far from positive definite.",
        "Made by `./run bench beside-diffprivlib`.",
        "",
        f"| set | library | model | {' | '.join(f'ε = {epsilon:g}' for epsilon in EPSILONS)} | CPU seconds |",
        f"|---|---|---|{'---|' * len(EPSILONS)}---|",
    ]
    for name in SETS:
        for library in ("sordino", "diffprivlib"):
            own = [row for row in rows if row["set"] == name and row["library"] == library]
            for model in dict.fromkeys(str(row["model"]) for row in own):
                cells = []
                for epsilon in EPSILONS:
                    values = [
                        float(str(row["score"])) for row in own if row["model"] == model and row["epsilon"] == epsilon
                    ]
                    cells.append(_cell(values, percent=name == "adult"))
                spent = statistics.mean(float(str(row["seconds"])) for row in own if row["model"] == model)
                shown = f"`{model}`" if library == "sordino" else model
                lines.append(f"| {name} | {library} | {shown} | {' | '.join(cells)} | {spent:.2g} |")
    return "\n".join(lines) + "\n"


def _cell(values: list[float], *, percent: bool) -> str:
    mean, spread = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    if percent:
        return f"{100 * mean:.1f} ± {100 * spread:.1f}"
    return f"{mean:.2f} ± {spread:.2f}" if max(values) > -1 else "all below −1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--page", action="store_true", help="only make the section from the rows that are there")
    options = parser.parse_args()
    if options.page:
        SECTION.write_text(section(json.loads(ROWS.read_text())))
        subprocess.run([sys.executable, HERE / "accuracy.py", "--page"], check=True)
        return
    python, rows = other_python(), []
    for name in SETS:
        table = make_tabular_task(load_dataset(name)) if name == "adult" else uci(name)
        rows += ours(table, options.seeds) + theirs(table, options.seeds, python)
        Console(stderr=True).print(f"{name}: {len(rows)} fits")
    ROWS.write_text(json.dumps(rows, indent=1) + "\n")
    SECTION.write_text(section(rows))
    subprocess.run([sys.executable, HERE / "accuracy.py", "--page"], check=True)


if __name__ == "__main__":
    main()
