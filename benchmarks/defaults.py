"""Defaults of the estimators on 12 public sets: half of them chose the constants, the other half shows them.

    SORDINO_DATA=… ./run bench defaults [--seeds 5] [--sets wine,pol]

A fifth of each set is held out; columns and target are scaled to [−1, 1] by their range, which stands for declared
bounds; at most 10 000 records. For classes the target is cut at its median. δ = 1e-6. Figures are means over fits:

  regression       mean squared error over the variance of the target
  classification   accuracy in %
"""

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from sordino.estimators import (
    GaussianNB,
    HistGradientBoostingClassifier,
    LinearRegression,
    LogisticRegression,
    RandomForestClassifier,
)

CHOSEN = ("airfoil", "bike", "concrete", "elevators", "energy", "housing")
SHOWN = ("kin40k", "parkinsons", "pol", "protein", "skillcraft", "wine")
EPSILONS = (0.1, 0.3, 1.0, 3.0, 8.0)
DELTA = 1e-6

TREES = {"boosting": HistGradientBoostingClassifier, "forest": RandomForestClassifier}

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def load(folder: Path, name: str) -> Split:
    """Training records and targets in [−1, 1], then those held out."""
    table = np.loadtxt(folder / f"{name}.data.csv.gz", delimiter=",")
    table = np.random.default_rng(0).permutation(table)[:10_000]
    low, high = table.min(axis=0), table.max(axis=0)
    table = np.where(high > low, 2 * (table - low) / np.where(high > low, high - low, 1.0) - 1, 0.0)
    held = len(table) // 5
    return table[held:, :-1], table[held:, -1], table[:held, :-1], table[:held, -1]


def regression(method: str) -> Callable[[Split, float], float]:
    """Relative squared error of a method."""

    def measure(split: Split, epsilon: float) -> float:
        X, y, held_X, held_y = split
        model = LinearRegression(
            method=method, epsilon=epsilon, delta=DELTA, data_norm=X.shape[1] ** 0.5, target_bounds=(-1.0, 1.0)
        )
        found = np.clip(model.fit(X, y).predict(held_X), -1.0, 1.0)
        return float(np.mean((found - held_y) ** 2) / np.var(held_y))

    return measure


def classification(kind: str) -> Callable[[Split, float], float]:
    """Accuracy of an estimator with its defaults; "λ = 1 + 1/ε" is objective perturbation with a fixed part."""

    def measure(split: Split, epsilon: float) -> float:
        X, y, held_X, held_y = split
        middle = np.median(y)
        given = {"epsilon": epsilon, "delta": DELTA, "classes": (False, True)}
        if kind in {"Bayes, no floor", "Bayes"}:
            smoothing = {} if kind == "Bayes" else {"var_smoothing": 0.0}
            model = GaussianNB(bounds=(-1.0, 1.0), **given, **smoothing)
        elif kind in TREES:
            model = TREES[kind](bounds=(-1.0, 1.0), **given)
        else:
            fixed = None if kind == "default" else 1 + 1.01 / epsilon
            model = LogisticRegression(data_norm=X.shape[1] ** 0.5, regularization=fixed, **given)
        return 100 * float(model.fit(X, y > middle).score(held_X, held_y > middle))

    return measure


COLUMNS: dict[str, Callable[[Split, float], float]] = {
    "adassp": regression("adassp"),
    "sufficient-statistics": regression("sufficient-statistics"),
    "logistic, λ = 1 + 1/ε": classification("fixed"),
    "logistic, default λ": classification("default"),
    "naive Bayes, no floor": classification("Bayes, no floor"),
    "naive Bayes": classification("Bayes"),
    "boosting": classification("boosting"),
    "forest": classification("forest"),
}


def rows(folder: Path, names: list[str], seeds: int) -> Iterator[str]:
    """A line of the table for each set and ε."""
    for name in names:
        split = load(folder, name)
        for epsilon in EPSILONS:
            cells = []
            for title, measure in COLUMNS.items():
                found = np.mean([measure(split, epsilon) for _ in range(seeds)])
                cells.append(f"{found:.3f}" if title in {"adassp", "sufficient-statistics"} else f"{found:.1f}")
            half = "chosen on" if name in CHOSEN else "shown"
            yield f"| {name} | {half} | {epsilon:g} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sets", default=",".join((*CHOSEN, *SHOWN)))
    options = parser.parse_args()
    folder = Path(os.environ.get("SORDINO_DATA", "data")) / "uci"
    if not folder.is_dir():
        raise SystemExit(f"{folder} must be a folder with the UCI sets. Point SORDINO_DATA at its parent.")
    print("| set | half | ε | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (3 + len(COLUMNS)))
    for line in rows(folder, options.sets.split(","), options.seeds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
