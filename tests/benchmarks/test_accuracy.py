"""The bench of accuracy on synthetic records: rows, resuming, the held-out part, and what the page makes of rows."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from patterned import made_up
from sordino.recipes.models import logistic
from sordino.recipes.network_recipes import LOGISTIC_SGD
from sordino.recipes.stages import network_recipe
from sordino.recipes.training_config import NetworkSpec

ROOT = Path(__file__).parents[2]
QUICK = NetworkSpec(build=logistic, batch_size=None, steps=5, max_grad_norm=1.0, learning_rate=4.0, momentum=0.0)


@pytest.fixture
def bench(tmp_path):
    found = runpy.run_path(str(ROOT / "benchmarks" / "accuracy.py"))
    # What the functions see are these names.
    found["run"].__globals__["RESULTS"] = tmp_path
    return found


def quick():
    return replace(LOGISTIC_SGD, prepare=lambda task: network_recipe(task, QUICK))


def test_a_row_holds_what_the_page_needs_and_can_be_repeated(bench):
    rows = [bench["measured"](quick(), made_up(), "mnist", epsilon=4.0, setting=None, seed=seed) for seed in (0, 0, 1)]
    assert rows[0]["accuracy"] == rows[1]["accuracy"]
    assert rows[0]["ece"] == rows[1]["ece"]
    assert 0.98 * 4 < rows[0]["epsilon_spent"] <= 4.0 < rows[0]["epsilon_rdp"]
    assert rows[0]["accuracy"] > 0.5
    assert bench["key"](rows[2]) == ("logistic-sgd", "mnist", 4.0, None, 1)


def test_rows_that_are_there_are_not_run_again(bench, monkeypatch):
    inside = bench["run"].__globals__
    asked = []

    def measured(pipeline, dataset, name, *, epsilon, setting, seed):
        asked.append((epsilon, seed))
        return {
            **dict.fromkeys(bench["KEY"]),
            "recipe": pipeline.name,
            "data": name,
            "epsilon": epsilon,
            "seed": seed,
            "accuracy": 0.5,
            "epsilon_spent": epsilon,
            "seconds": 0.1,
        }

    monkeypatch.setitem(inside, "measured", measured)
    monkeypatch.setitem(inside, "data", type("Data", (), {"load_dataset": staticmethod(lambda *_, **__: made_up())}))
    bench["run"]("adult-mlp", ["adult"], [2.0, 1.0], [], 2)
    bench["run"]("adult-mlp", ["adult"], [1.0, 3.0], [], 2)
    assert asked == [(2.0, 0), (2.0, 1), (1.0, 0), (1.0, 1), (3.0, 0), (3.0, 1)]
    assert [(row["epsilon"], row["seed"]) for row in bench["kept"]("adult-mlp")] == sorted(asked)


def test_the_held_out_part_is_a_sixth_of_the_training_records_and_shares_none_with_the_rest(bench):
    whole = made_up(n=600)
    parts = bench["held_out"](whole)
    assert (len(parts.train), len(parts.test)) == (500, 100)
    flat = np.concatenate([parts.train.features, parts.test.features]).reshape(600, -1)
    assert len(np.unique(flat, axis=0)) == 600
    assert {row.tobytes() for row in flat} == {row.tobytes() for row in whole.train.features.reshape(600, -1)}


def test_a_published_figure_stands_only_beside_its_own_epsilon(bench):
    kind = {"mnist": {"3": [98.7, "someone"], "0.5": [90, "others"]}}
    assert bench["figure"](kind, "mnist", 3.0) == "98.7 (someone)"
    assert bench["figure"](kind, "mnist", 0.5) == "90 (others)"
    assert bench["figure"](kind, "mnist", 2.9) == "–"
    assert bench["figure"](kind, "cifar10", 3.0) == "–"


def test_the_table_shows_mean_and_spread_over_seeds(bench):
    row = {"recipe": "adult-mlp", "data": "adult", "epsilon": 1.0, "setting": None, "epsilon_spent": 0.9999}
    row |= {"epsilon_rdp": 1.2345, "ece": 0.01, "seconds": 2.0}
    rows = [row | {"seed": seed, "accuracy": value} for seed, value in enumerate((0.80, 0.82, 0.84))]
    published = json.loads((ROOT / "benchmarks" / "published.json").read_text())
    line = bench["table"](rows, published, uses=False).splitlines()[-1]
    assert "**82.00** ± 2.00 (3 seeds)" in line
    assert "| 1 |" in line
    assert "| 1.23 |" in line
    alone = bench["table"](rows[:1], published, uses=False).splitlines()[-1]
    assert "**80.00** (1 seed)" in alone


def test_features_that_a_process_makes_once_are_in_the_seconds_of_a_first_run_only(bench):
    row = {"recipe": "minilm", "data": "imdb", "setting": None, "epsilon_spent": 0.9, "epsilon_rdp": 1.1, "ece": 0.01}
    row |= {"accuracy": 0.8}
    seconds = {1.0: (219.0, 7.0, 8.0), 2.0: (8.0, 208.0, 9.0), 8.0: (20.0, 20.0, 20.0)}
    rows = [row | {"epsilon": e, "seed": k, "seconds": s} for e, found in seconds.items() for k, s in enumerate(found)]
    published = json.loads((ROOT / "benchmarks" / "published.json").read_text())
    shown = [line.split("|")[-3:-1] for line in bench["table"](rows, published, uses=True).splitlines()[2:]]
    # 211.5 and 199.5 seconds of features: 205.5 in the mean.
    assert [[int(cell) for cell in pair] for pair in shown] == [[213, 8], [214, 8], [226, 20]]
