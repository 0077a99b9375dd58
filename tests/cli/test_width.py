"""Tables fit 80 columns with long names: nothing is cut to an ellipsis, no line is longer."""

import dataclasses
import json
import re

import pytest
from typer.testing import CliRunner

from sordino.cli import app
from sordino.events import Gaussian
from sordino.ledger import Ledger

LONG = "hospital-discharges-2023-of-all-wards"
WIDTH = 80


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A ledger and two runs with long names."""
    folder = tmp_path_factory.mktemp("width")
    rows = [f"{20 + row % 60},{('clerk', 'nurse')[row % 2]},{('low', 'high')[row % 2]}" for row in range(80)]
    (folder / f"{LONG}.csv").write_text("\n".join(["age,profession_as_it_is_declared,income", *rows]) + "\n")
    schema = {
        "target": "income",
        "labels": ["low", "high"],
        "columns": [
            {"name": "age", "type": "numeric", "low": 0, "high": 100},
            {"name": "profession_as_it_is_declared", "type": "category", "categories": ["clerk", "nurse"]},
        ],
    }
    (folder / "s.json").write_text(json.dumps(schema))
    here = pytest.MonkeyPatch()
    here.chdir(folder)
    ledger = Ledger(folder / "l.db")
    account = ledger.declare(LONG, epsilon=3.0, delta=1e-5, note="the yearly budget of the board of the hospital")
    account.charge(Gaussian(noise_multiplier=20.0), note="a note that explains at some length what was bought by it")
    account.reserve(Gaussian(noise_multiplier=30.0), note="for later", run="a-run-with-a-long-name-2026-11-29-1")
    for model in ("naive-bayes", "sufficient-statistics"):
        made = CliRunner().invoke(
            app,
            ["train", f"{LONG}.csv", "--schema", "s.json", "--epsilon", "1", "--model", model,
             "--out", f"runs/{LONG}-{model}"],
        )  # fmt: skip
        assert made.exit_code == 0, made.stderr
    yield folder
    here.undo()


@pytest.mark.parametrize(
    "line",
    [
        "runs list",
        f"runs show runs/{LONG}-naive-bayes",
        f"runs compare runs/{LONG}-naive-bayes runs/{LONG}-sufficient-statistics",
        f"verify runs/{LONG}-naive-bayes",
        f"report runs/{LONG}-naive-bayes",
        f"schema check {LONG}.csv --schema s.json",
        f"describe {LONG}.csv --schema s.json --epsilon 5 --run d",
        "ledger show l.db",
        f"ledger show l.db {LONG}",
        f"ledger history l.db {LONG}",
        "data list",
        "data show adult",
        "recipes",
        "account --sample-rate 0.01 --noise-multiplier 4 --steps 100 --delta 1e-5",
        "plan --epsilon 3 --delta 1e-5 --dataset-size 60000 --batch-sizes 1024,4096 --epochs 1,2,3,4,5,6",
    ],
)
def test_a_page_fits_80_columns(place, line):
    result = CliRunner().invoke(app, line.split(), env={"COLUMNS": str(WIDTH), "NO_COLOR": "1"})
    assert result.exit_code == 0, result.stderr
    longest = max(result.stdout.splitlines(), key=len)
    assert len(longest.rstrip()) <= WIDTH, longest
    cut = [
        one for one in result.stdout.splitlines() if re.search(r"(?<![0-9a-f]{6})…", one)
    ]  # a digest is cut on purpose
    assert not cut, cut


def test_a_comparison_of_all_methods_fits_80_columns():
    from sordino.cli.console import Output
    from sordino.cli.training import _table
    from sordino.commands import MethodComparison
    from sordino.recipes.tabular import TABULAR_METHODS, Comparison, MethodResult, get_method

    methods = [get_method(name) for name in TABULAR_METHODS]
    cells = [
        MethodResult(method=method.name, epsilon=epsilon, scores=(0.1234,), events=(), neighboring_relation=None)
        for method in methods
        for epsilon in (0.1, 0.5, 1.0, 8.0)
    ]
    fields = {field.name: None for field in dataclasses.fields(Comparison)}
    found = Comparison(**{**fields, "measure": "accuracy", "cells": tuple(cells)})
    fields = {field.name: None for field in dataclasses.fields(MethodComparison)}
    others = {"linear": 0.5, "trees": 0.6, "nothing": 0.4}
    done = MethodComparison(**{**fields, "found": found, "non_private": others, "methods": methods})
    out = Output(as_json=False)
    out.console.width = WIDTH
    with out.console.capture() as page:
        out.console.print(_table(done))
    assert "…" not in page.get()
    assert max(map(len, page.get().splitlines())) <= WIDTH
