"""Linear regression on UCI sets: mean squared error over 10 folds, ours beside the published AdaSSP.

    SORDINO_DATA=… ./run bench adassp [--repeats 5] [--sets airfoil,bike] [--json FILE]

Protocol of Wang 2018, "Revisiting differentially private linear regression": features standardized without privacy,
rows scaled to norm 1, targets divided by the largest |y|, 10 fixed folds, δ = 1e-6, no intercept. "paper" are the
author's results, "its noise" a rerun with that noise, (ε/3, δ/3) a release, "ours" `LinearRegression(method="adassp")`.

The folder uci/ of $SORDINO_DATA holds NAME.data.csv.gz (last column the target) and NAME.test_mask.csv.gz (column k is
1 for the records of test fold k).
"""

import argparse
import json
import math
import os
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from sordino.estimators import LinearRegression
from sordino.estimators.linear_statistics import AdaptiveStatistics
from sordino.mechanisms import GaussianBudget

EPSILONS = (0.1, 1.0, 10.0)
DELTA = 1e-6

# name: trivial, without privacy, AdaSSP at ε = 0.1, 1, 10 (Wang 2018, supplementary results)
PUBLISHED = {
    "bike": (0.1073, 0.0279, 0.0472, 0.0287, 0.0279),
    "elevators": (0.0367, 0.0086, 0.0261, 0.0132, 0.0087),
    "protein": (0.1671, 0.1189, 0.1259, 0.1199, 0.1189),
    "pol": (0.3448, 0.1349, 0.2236, 0.1398, 0.1351),
    "parkinsons": (0.1697, 0.1278, 0.1543, 0.1330, 0.1282),
    "skillcraft": (0.0439, 0.0203, 0.0381, 0.0243, 0.0205),
    "wine": (0.0566, 0.0202, 0.0627, 0.0326, 0.0205),
    "airfoil": (0.1033, 0.0533, 0.0912, 0.0588, 0.0534),
    "concrete": (0.1274, 0.0445, 0.1320, 0.0637, 0.0453),
    "energy": (0.2352, 0.0232, 0.1477, 0.0429, 0.0255),
    "housing": (0.1120, 0.0394, 0.0985, 0.0680, 0.0438),
    "kin40k": (0.0634, 0.0632, 0.0639, 0.0632, 0.0632),
}


def load(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of norm 1, targets in [−1, 1], and which records each fold tests."""
    table = np.loadtxt(folder / f"{name}.data.csv.gz", delimiter=",")
    masks = np.loadtxt(folder / f"{name}.test_mask.csv.gz", delimiter=",") > 0
    features, targets = table[:, :-1], table[:, -1]
    spread = features.std(axis=0)
    features = (features - features.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(lengths > 0, lengths, 1.0), targets / np.abs(targets).max(), masks


def as_published(rows: np.ndarray, targets: np.ndarray, epsilon: float) -> np.ndarray:
    """Weights with the noise of the paper: √log(6/δ)/(ε/3) on each of three releases."""
    each = math.sqrt(math.log(6 / DELTA)) / (epsilon / 3)
    whole = GaussianBudget(noise_multiplier=each / math.sqrt(3))
    return AdaptiveStatistics(budget=whole, dimension=rows.shape[1]).weights(rows, targets, regularization=None)


def calibrated(rows: np.ndarray, targets: np.ndarray, epsilon: float) -> np.ndarray:
    """Weights of the estimator."""
    model = LinearRegression(
        method="adassp", epsilon=epsilon, delta=DELTA, data_norm=1.0, target_bounds=(-1.0, 1.0), fit_intercept=False
    )
    return model.fit(rows, targets).coef_


def measure(folder: Path, name: str, repeats: int) -> dict[str, list[float]]:
    """Mean squared test errors: [trivial, non-private], and [mean, standard error of the mean] a budget and method."""
    rows, targets, masks = load(folder, name)
    found: dict[str, list[float]] = {}
    trivial, plain = [], []
    errors: dict[tuple[str, float], list[float]] = {}
    for fold in masks.T:
        train_x, train_y, test_x, test_y = rows[~fold], targets[~fold], rows[fold], targets[fold]
        trivial.append(float((test_y**2).mean()))
        # Some sets have columns that nearly depend on one another: a trace of ridge keeps the solution finite.
        gram = train_x.T @ train_x + 1e-3 * np.eye(train_x.shape[1])
        weights = np.linalg.solve(gram, train_x.T @ train_y)
        plain.append(float(((test_x @ weights - test_y) ** 2).mean()))
        for method, solve in (("paper's noise", as_published), ("ours", calibrated)):
            for epsilon in EPSILONS:
                for _ in range(repeats):
                    weights = solve(train_x, train_y, epsilon)
                    error = float(((test_x @ weights - test_y) ** 2).mean())
                    errors.setdefault((method, epsilon), []).append(error)
    found["trivial, non-private"] = [float(np.mean(trivial)), float(np.mean(plain))]
    for (method, epsilon), values in errors.items():
        by_fold = np.array(values)
        found[f"{method} ε={epsilon:g}"] = [float(by_fold.mean()), float(by_fold.std() / math.sqrt(len(by_fold)))]
        # What one run of ten folds scatters, for the comparison with a published single run.
        found[f"{method} ε={epsilon:g}"].append(float(by_fold.std() / math.sqrt(10)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sets", default=",".join(PUBLISHED))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(os.environ.get("SORDINO_DATA", "data")) / "uci"
    if not folder.is_dir():
        raise SystemExit(f"{folder} must be a folder with the UCI sets. Point SORDINO_DATA at its parent.")
    table = Table("set", "trivial", "non-private", *(f"ε={e:g} paper / its noise / ours" for e in EPSILONS))
    results = {}
    for name in options.sets.split(","):
        results[name] = found = measure(folder, name, options.repeats)
        trivial, plain = found["trivial, non-private"]
        cells = [
            f"{PUBLISHED[name][2 + place]:.4f} / {found[f'paper{chr(39)}s noise ε={e:g}'][0]:.4f} / "
            f"{found[f'ours ε={e:g}'][0]:.4f}"
            for place, e in enumerate(EPSILONS)
        ]
        table.add_row(name, f"{trivial:.4f}", f"{plain:.4f}", *cells)
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
