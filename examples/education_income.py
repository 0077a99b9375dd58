"""Does education pay, and what may be told of it? Four private models of income, and an attack on an exact one.

Income above 50 000 dollars is predicted on UCI Adult (embedded in the package) from years of education alone, then from
everything. The first view is a predictor's: accuracy. The second is an economist's: what a year of education adds, and
what the noise does to that number. The last part is why the noise is there: anyone who knows all other records
can infer from an exact release whether one more person was in it.

Run: python examples/education_income.py
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from sklearn import linear_model

from sordino import data
from sordino.estimators import HistGradientBoostingClassifier, LinearRegression, LogisticRegression

DELTA = 1e-5
POPULATION = 30_000  # a public guess of how many records there are


@dataclass(frozen=True)
class View:
    """Some columns of the table, with what is public about them."""

    name: str
    columns: list[int]
    data_norm: float
    one_hot: list[list[int]]


def views(adult: data.DatasetSplits) -> tuple[View, View]:
    """Years of education alone, and every column but the categories of education, which say the years again."""
    assert adult.schema is not None
    start, years, columns, groups = 0, 0, [], []
    for column in adult.schema.columns:
        if column.name == "education-num":
            years = start
        if column.name != "education":
            if column.width > 1:
                groups.append(list(range(len(columns), len(columns) + column.width)))
            columns += range(start, start + column.width)
        start += column.width
    # Numbers are at most 1 and of a category one column is 1: 12 columns of the file are left.
    everything = View("everything", columns, (len(adult.schema.columns) - 1) ** 0.5, groups)
    return View("education alone", [years], 1.0, []), everything


def models(
    view: View, epsilon: float
) -> dict[str, LogisticRegression | LinearRegression | HistGradientBoostingClassifier]:
    """Four ways to private income; numbers are in [-1, 1], so norms and bounds are public."""
    budget = {"epsilon": epsilon, "delta": DELTA}
    linear = budget | {"data_norm": view.data_norm, "classes": (0, 1)}
    return {
        "noise in the objective": LogisticRegression(**linear),
        "noisy gradient descent": LogisticRegression(method="dp-gd", dataset_size=POPULATION, **linear),
        "noisy least squares": LinearRegression(data_norm=view.data_norm, target_bounds=(0.0, 1.0), **budget),
        "boosted curves": HistGradientBoostingClassifier(
            bounds=(-1.0, 1.0), classes=(0, 1), one_hot=view.one_hot or None, **budget
        ),
    }


def accuracies(adult: data.DatasetSplits, view: View, epsilons: list[float]) -> dict[str, list[float]]:
    """Accuracy on the public test records of each way at each ε; the last row is not private."""
    assert adult.test is not None
    x, y = adult.train.features[:, view.columns], adult.train.labels
    tested, truth = adult.test.features[:, view.columns], adult.test.labels
    found: dict[str, list[float]] = {}
    for epsilon in epsilons:
        for name, model in models(view, epsilon).items():
            guessed = model.fit(x, y).predict(tested)
            if isinstance(model, LinearRegression):
                guessed = guessed > 0.5
            found.setdefault(name, []).append(float(np.mean(guessed == truth)))
            assert model.guarantee_.epsilon <= epsilon
    exact = linear_model.LogisticRegression(max_iter=1000).fit(x, y)
    return {**found, "logistic, NOT private": [float(exact.score(tested, truth))] * len(epsilons)}


def slopes(
    adult: data.DatasetSplits, view: View, epsilons: list[float], repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """Percentage points that a year of education adds to the share of high incomes: mean and deviation of fits.

    In reality a dataset is released once: the deviation is the error bar that the noise alone adds. It can be computed
    without the data, so it may be published with the number. What it does not show is a bias: methods that fight noise
    with shrinkage pull the slope towards zero, and more so the more columns share the budget.
    """
    x, y = adult.train.features[:, view.columns], adult.train.labels
    place = view.columns.index(views(adult)[0].columns[0])
    a_year = 2 / 15  # 1 to 16 years are [-1, 1]
    exact = linear_model.LinearRegression().fit(x, y).coef_[place] * 100 * a_year
    found = {"exact, NOT private": [(float(exact), 0.0)] * len(epsilons)}
    for method in ("adassp", "sufficient-statistics"):
        rows = []
        for epsilon in epsilons:
            told = [
                LinearRegression(
                    epsilon=epsilon,
                    delta=DELTA,
                    data_norm=view.data_norm,
                    target_bounds=(0.0, 1.0),
                    method=method,
                )
                .fit(x, y)
                .coef_[place]
                * 100
                * a_year
                for _ in range(repeats)
            ]
            rows.append((float(np.mean(told)), float(np.std(told))))
        found[method] = rows
    return found


Release = Callable[[np.ndarray, np.ndarray], np.ndarray]


def exact_line(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Slope and intercept of least squares, to the last digit."""
    return np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)[0]


def private_line(epsilon: float) -> Release:
    """Slope and intercept with noise."""

    def release(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        model = LinearRegression(
            epsilon=epsilon, delta=DELTA, data_norm=1.0, target_bounds=(0.0, 1.0), method="sufficient-statistics"
        ).fit(x[:, None], y)
        return np.array([model.coef_[0], model.intercept_])

    return release


def attacked(x: np.ndarray, y: np.ndarray, release: Release, targets: int) -> float:
    """Share of right guesses whether a person was in the data, by one who knows all other records.

    The attacker computes what would be released with the person and without, and takes what is nearer. Half of the
    people are in.
    """
    right = 0
    for person in range(targets):
        others_x, others_y = np.delete(x, person), np.delete(y, person)
        with_person, without = exact_line(x, y), exact_line(others_x, others_y)
        inside = person % 2 == 0
        seen = release(x, y) if inside else release(others_x, others_y)
        guess = np.linalg.norm(seen - with_person) < np.linalg.norm(seen - without)
        right += bool(guess) == inside
    return right / targets


def show(title: str, columns: list[float], rows: dict[str, list[str]]) -> None:
    """Print one table."""
    print(f"\n{title}\n{'':26}" + "".join(f"{f'ε = {value:g}':>18}" for value in columns))
    for name, cells in rows.items():
        print(f"{name:26}" + "".join(f"{cell:>18}" for cell in cells))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Print all three parts; return what a test wants to know."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.1, 1.0, 8.0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--targets", type=int, default=200)
    chosen = parser.parse_args(arguments)
    adult = data.load_dataset("adult")

    best = {}
    for view in views(adult):
        found = accuracies(adult, view, chosen.epsilons)
        show(f"Accuracy from {view.name}", chosen.epsilons, {k: [f"{v:.1%}" for v in row] for k, row in found.items()})
        best[view.name] = max(max(row) for name, row in found.items() if "NOT" not in name)

    for view in views(adult):
        told = slopes(adult, view, chosen.epsilons, chosen.repeats)
        cells = {k: [f"{mean:.2f} ± {spread:.2f}" for mean, spread in row] for k, row in told.items()}
        show(f"Points a year of education adds to the share above 50k, from {view.name}", chosen.epsilons, cells)

    x = adult.train.features[:, views(adult)[0].columns[0]].astype(np.float64)
    y = adult.train.labels.astype(np.float64)
    x, y = x[:2000], y[:2000]  # a town: what is attacked is the release, not the size
    exact = attacked(x, y, exact_line, chosen.targets)
    noisy = attacked(x, y, private_line(1.0), chosen.targets)
    bound = np.e / (1 + np.e)
    print("\nWas this person in the data? Right guesses of one who knows everyone else's record:")
    print(f"  from the exact line {exact:.0%}, from the private line with ε = 1 {noisy:.0%}")
    print(f"  nobody, by any means, is right more often than {bound:.1%} of the time at ε = 1 (and δ beside it)")
    model = LogisticRegression(epsilon=1.0, delta=DELTA, data_norm=13**0.5, classes=(0, 1))
    print(f"\n{model.fit(adult.train.features, adult.train.labels).guarantee_.describe()}")
    return {"education": best["education alone"], "everything": best["everything"], "exact": exact, "private": noisy}


if __name__ == "__main__":
    main()
