"""Private search of settings on Adult: random stopping over 20 settings at a total ε of 1, against each setting alone.

    python benchmarks/tuning.py [--seeds 5] [--target-epsilon 1.0]

Every fixed setting is fitted with the whole budget, so "best" is what someone would reach who knew it in advance.
"""

import argparse
import json
import time

import numpy as np

from sordino.data import load_dataset
from sordino.estimators import LogisticRegression
from sordino.recipes import make_tabular_task
from sordino.tuning import PrivateRandomSearch

RATES, NORMS = (1.0, 4.0, 16.0, 64.0, 256.0), (0.05, 0.15, 0.25, 0.5)
DELTA = 1e-5


def model(facts, **changes):
    given = {"data_norm": facts.data_norm, "classes": (0, 1), "dataset_size": facts.dataset_size}
    return LogisticRegression(method="dp-gd", **given, **changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--target-epsilon", type=float, default=1.0)
    parser.add_argument("--mean", type=float, default=20.0)
    given = parser.parse_args()
    rows = make_tabular_task(load_dataset("adult"))
    (X, y), test = rows.train, rows.test
    assert test is not None
    fixed = {}
    for rate in RATES:
        for norm in NORMS:
            alone = model(rows.facts, learning_rate=rate, max_grad_norm=norm, epsilon=given.target_epsilon, delta=DELTA)
            fixed[f"learning rate {rate:g}, clipping {norm:g}"] = alone.fit(X, y).score(*test)
    found, chosen, seconds = [], [], []
    for _ in range(given.seeds):
        start = time.perf_counter()
        search = PrivateRandomSearch(
            model(rows.facts),
            {"learning_rate": list(RATES), "max_grad_norm": list(NORMS)},
            epsilon=given.target_epsilon,
            delta=DELTA,
            mean=given.mean,
        ).fit(X, y)
        seconds.append(time.perf_counter() - start)
        found.append(search.score(*test))
        chosen.append(search.best_params_)
    best = max(fixed, key=lambda name: fixed[name])
    document = {
        "fixed": fixed,
        "best_fixed": {best: fixed[best]},
        "median_fixed": float(np.median(list(fixed.values()))),
        "search": found,
        "mean_search": float(np.mean(found)),
        "chosen": chosen,
        "guarantee": search.guarantee_.describe(),
        "seconds": seconds,
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
