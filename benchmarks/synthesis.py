"""Synthetic tables: errors on marginals, and accuracy of models trained on synthetic records and tested on real ones.

    [SORDINO_DATA=…] ./run bench synthesis [--sets adult,bike] [--epsilon 0.1 1 10] [--seeds 3] [--methods aim,mst]

Each row is kept in benchmarks/results/synthesis.json as soon as it is measured, so a benchmark that was cut off goes on
where it stopped; the section of docs/results.md is made from all rows (`./run bench accuracy --page` puts it there).

Errors are total variation distances between the real training table and a synthetic one of as many records, on the
public cells (20 equal parts of each number), averaged over all sets of one, two and three columns. "another sample" is
the distance of the real test table, which is another sample of the same population: a synthetic table need not be
nearer. Models are scikit-learn's HistGradientBoosting and logistic (linear) regression with default settings.

adult is embedded; the UCI regression sets lie in the folder uci/ of $SORDINO_DATA, whose bounds are taken from
themselves (they are public), and whose first fold is the test table.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge

from sordino.data import NumericColumn, Schema
from sordino.data.discretization import TableDomain, TableSource, table_columns
from sordino.data.readers import ADULT_SCHEMA, FILES
from sordino.data.tables import encode_table
from sordino.synthesis import TableSynthesizer

HERE = Path(__file__).parent
ROWS = HERE / "results" / "synthesis.json"
SECTION = HERE / "results" / "section-synthetic-tables.md"
DELTA = 1e-6
METHODS = ("independent", "mst", "aim")


@dataclass(frozen=True)
class Set:
    """A public table in two parts."""

    schema: Schema
    train: TableSource
    test: TableSource

    @classmethod
    def named(cls, name: str) -> "Set":
        if name == "adult":
            return cls(ADULT_SCHEMA, FILES / "adult-train.csv.xz", FILES / "adult-test.csv.xz")
        folder = Path(os.environ.get("SORDINO_DATA", "data")) / "uci"
        values = np.loadtxt(folder / f"{name}.data.csv.gz", delimiter=",")
        fold = np.loadtxt(folder / f"{name}.test_mask.csv.gz", delimiter=",")[:, 0] > 0
        names = [f"x{place}" for place in range(values.shape[1] - 1)] + ["y"]
        low, high = values.min(axis=0).tolist(), values.max(axis=0).tolist()
        columns = [
            NumericColumn(name=one, low=low[place], high=high[place])
            for place, one in enumerate(names[:-1])
            if low[place] < high[place]
        ]
        schema = Schema(columns=tuple(columns), target="y", labels=(), target_bounds=(low[-1], high[-1]))
        parts = [dict(zip(names, values[rows].T, strict=True)) for rows in (~fold, fold)]
        return cls(schema, parts[0], parts[1])

    def records(self, table: TableSource) -> tuple[np.ndarray, np.ndarray]:
        columns = [column.column for column in TableDomain.of_schema(self.schema).columns]
        found = encode_table(table_columns(table, columns), self.schema)
        return found.features, found.labels

    def scores(self, table: TableSource) -> dict[str, float]:
        """Accuracy, or R², on the real test records of models trained on `table`."""
        (features, targets), (test_x, test_y) = self.records(table), self.records(self.test)
        if self.schema.target_bounds is None:
            if len(np.unique(targets)) < 2:  # nothing to learn: the one label is predicted
                return dict.fromkeys(("boosting", "linear"), float(np.mean(test_y == targets[0])))
            models = (HistGradientBoostingClassifier(random_state=0), LogisticRegression(max_iter=2000))
        else:
            models = (HistGradientBoostingRegressor(random_state=0), Ridge())
        found = [model.fit(features, targets).score(test_x, test_y) for model in models]
        return dict(zip(("boosting", "linear"), found, strict=True))


def distances(domain: TableDomain, one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Mean total variation over sets of one, two and three columns."""
    found = {}
    for count in (1, 2, 3):
        values = []
        for clique in itertools.combinations(range(len(domain.sizes)), count):
            shape = [domain.sizes[column] for column in clique]
            shares = [
                np.bincount(
                    np.ravel_multi_index([codes[:, column] for column in clique], shape), minlength=math.prod(shape)
                )
                / max(len(codes), 1)
                for codes in (one, other)
            ]
            values.append(float(np.abs(shares[0] - shares[1]).sum() / 2))
        found[f"tv{count}"] = statistics.fmean(values)
    return found


def reference(name: str) -> dict[str, object]:
    """What needs no privacy: another sample of the population, and models trained on the real records."""
    found = Set.named(name)
    domain = TableDomain.of_schema(found.schema)
    train, test = domain.codes(found.train), domain.codes(found.test)
    return {"set": name, "method": "another sample", "epsilon": None, "seed": 0} | {
        **distances(domain, train, test),
        **found.scores(found.train),
        "records": len(train),
        "columns": len(domain.sizes),
    }


def measure(name: str, method: str, epsilon: float, seed: int) -> dict[str, object]:
    found = Set.named(name)
    domain = TableDomain.of_schema(found.schema)
    train = domain.codes(found.train)
    started = time.process_time()
    fitted = TableSynthesizer(schema=found.schema, epsilon=epsilon, delta=DELTA, method=method).fit(found.train)
    seconds = time.process_time() - started
    table = fitted.sample(len(train))
    return {"set": name, "method": method, "epsilon": epsilon, "seed": seed} | {
        **distances(domain, train, domain.codes(table)),
        **found.scores(table),
        "seconds": seconds,
        "measured": len(fitted.measured_),
    }


def section(rows: list[dict[str, object]]) -> str:
    """The section of docs/results.md."""
    lines = [
        "## Synthetic tables",
        "",
        textwrap.fill(
            "[`sordino synthesize`](synthetic-tables.md) at δ = 1e-6, default settings. Errors are mean total "
            "variation distances to the real training table over all sets of one, two and three columns, on the "
            "public cells. *Another sample* is the real test table. Models are trained on synthetic records and "
            "tested on real ones: accuracy for adult, R² for the regression sets (negative: worse than the mean); "
            "in its first row they are trained on the real records. Means over seeds; seconds are CPU time of one "
            "fit, on a machine that did other work.",
            100,
            break_on_hyphens=False,
        ),
    ]
    for name in dict.fromkeys(str(row["set"]) for row in rows):
        own = [row for row in rows if row["set"] == name]
        lines += ["", f"### {name}, synthetic", ""]
        lines += [
            "| method | ε | 1 column | 2 columns | 3 columns | boosting | linear | seeds | CPU seconds |",
            "|" + "---|" * 9,
        ]
        groups: dict[tuple[object, object], list[dict[str, object]]] = {}
        for row in sorted(own, key=lambda row: (_place(row["method"]), float(str(row["epsilon"] or 0)))):
            groups.setdefault((row["method"], row["epsilon"]), []).append(row)
        for (method, epsilon), found in groups.items():
            figures = [statistics.fmean(float(str(row[key])) for row in found) for key in ("tv1", "tv2", "tv3")]
            scores = [statistics.fmean(float(str(row[key])) for row in found) for key in ("boosting", "linear")]
            seconds = "–" if epsilon is None else f"{statistics.fmean(float(str(row['seconds'])) for row in found):.0f}"
            lines.append(
                f"| {method} | {'–' if epsilon is None else f'{epsilon:g}'} | "
                + " | ".join(f"{value:.4f}" for value in figures)
                + " | "
                + " | ".join(f"{value:.3f}" for value in scores)
                + f" | {len(found)} | {seconds} |"
            )
    sets = ",".join(dict.fromkeys(str(row["set"]) for row in rows))
    lines += ["", f"Made by `./run bench synthesis --sets {sets}`, with the seeds of the tables."]
    return "\n".join(lines) + "\n"


def _place(method: object) -> int:
    return ("another sample", *METHODS).index(str(method))


def _key(row: Mapping[str, object]) -> tuple[object, ...]:
    return row["set"], row["method"], row["epsilon"], row["seed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default="adult")
    parser.add_argument("--epsilon", nargs="+", type=float, default=[0.1, 1.0, 10.0])
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--page", action="store_true", help="only make the section from the rows that are there")
    options = parser.parse_args()
    rows: list[dict[str, object]] = json.loads(ROWS.read_text()) if ROWS.is_file() else []
    names = [] if options.page else options.sets.split(",")
    asked = [(name, "another sample", None, 0) for name in names]
    asked += [
        (name, method, epsilon, seed)
        for name in names
        for epsilon in options.epsilon
        for method in options.methods.split(",")
        for seed in range(options.seeds)
    ]
    for key in asked:
        if key in {_key(row) for row in rows}:
            continue
        name, method, epsilon, seed = key
        row = reference(name) if epsilon is None else measure(name, method, epsilon, seed)
        Console().print(row)
        rows.append(row)
        ROWS.write_text(json.dumps(rows, indent=1) + "\n")
    SECTION.write_text(section(rows))


if __name__ == "__main__":
    main()
