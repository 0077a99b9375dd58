"""`compare` and `train` with estimators: public data on a grid, private data on one budget, folders that verify."""

import json
import random

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from sordino import accounting
from sordino.cli import app
from sordino.commands.pictures import plot_comparison
from sordino.data import load_dataset
from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument
from sordino.estimators.base import dry_run_events
from sordino.events import NoOp, compose
from sordino.ledger import Ledger
from sordino.recipes.tabular import (
    TABULAR_METHODS,
    Comparison,
    MethodResult,
    compare_private,
    compare_public,
    get_method,
    make_tabular_task,
    non_private_scores,
    supported_methods,
)
from sordino.report import build_report
from sordino.runs import RunFolder

SCHEMA = {
    "target": "income",
    "labels": ["low", "high"],
    "columns": [
        {"name": "age", "type": "numeric", "low": 0, "high": 100},
        {"name": "job", "type": "category", "categories": ["clerk", "nurse"]},
    ],
}
QUICK = ("adassp", "sufficient-statistics", "naive-bayes")


def write_people(path, records, *, seed):
    generator = random.Random(seed)
    lines = ["age,job,income"]
    for _ in range(records):
        age, job = generator.randint(18, 90), generator.choice(["clerk", "nurse"])
        lines.append(f"{age},{job},{'high' if age + 20 * (job == 'nurse') > 60 else 'low'}")
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def people(tmp_path, monkeypatch):
    """A working directory with a private file, a public one, and the schema of both."""
    monkeypatch.chdir(tmp_path)
    write_people(tmp_path / "people.csv", 400, seed=1)
    write_people(tmp_path / "public.csv", 200, seed=2)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1"})


def document(*arguments):
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


PRIVATE = ("compare", "people.csv", "--schema", "schema.json", "--test", "public.csv", "--methods", ",".join(QUICK))


def test_public_records_are_compared_at_every_epsilon_beside_models_without_privacy(people):
    body = document(*PRIVATE, "--data-is-public", "--epsilon", "0.5", "4", "50", "--repeats", "2")
    found = {(cell["method"], cell["epsilon"]): cell["scores"] for cell in body["results"]}
    assert set(found) == {(name, budget) for name in QUICK for budget in (0.5, 4.0, 50.0)}
    assert all(len(scores) == 2 and all(0 <= score <= 1 for score in scores) for scores in found.values())
    assert min(found["sufficient-statistics", 50.0]) > body["non_private"]["nothing"]
    assert body["non_private"]["linear"] > 0.9
    assert (people / "compare-people.png").stat().st_size > 10_000


def test_private_records_share_one_budget_and_the_bill_is_the_composition(people):
    body = document(*PRIVATE, "--epsilon", "2")
    assert not body["public"]
    assert body["non_private"] == {}
    assert 0.9 * 2 < body["total"]["epsilon"] <= 2
    parts = [cell["epsilon"] for cell in body["results"]]
    assert len(set(parts)) == 1
    assert 2 / 3 * 0.999 < parts[0] < 2
    text = call(*PRIVATE, "--epsilon", "2").stdout
    assert "PRIVATE records. 3 methods SHARE ε = 2" in " ".join(text.split())
    assert "NOT private" not in text


def test_private_records_are_never_compared_on_a_grid_or_without_public_test_records(people):
    grid = call(*PRIVATE, "--epsilon", "1,2")
    assert grid.exit_code == 2
    assert "epsilon must be one number on private records" in grid.stderr
    untested = call("compare", "people.csv", "--schema", "schema.json", "--epsilon", "1")
    assert untested.exit_code == 2
    assert "test must be declared" in untested.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epsilon", "many"], "epsilon must be numbers"),
        (["--epsilon", "0"], "epsilon must be"),
        (["--epsilon", "1", "--methods", "thicket"], "methods must be one of"),
        (["--epsilon", "1", "--methods", "svm,svm"], "each once"),
        (["--epsilon", "1", "--plot", "a.pdf"], "must end in .png or .svg"),
        (["--epsilon", "1", "--target", "job"], "target must be 'income' or one of the numeric columns age"),
        (["--epsilon", "1", "--repeats", "0"], "repeats must be"),
    ],
)
def test_wrong_use_of_compare_is_one_line_with_exit_code_two(people, arguments, words):
    result = call(*PRIVATE, *arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert not (people / "compare-people.png").exists()


def test_a_share_is_what_the_accountant_composes_to_the_budget(people):
    rows = make_tabular_task(load_dataset("people.csv", schema="schema.json", test="public.csv"))
    chosen = [get_method(name) for name in QUICK]
    found = compare_private(rows, chosen, epsilon=1.0, delta=1e-5)
    events = [event for cell in found.cells for event in cell.events]
    assert accounting.epsilon(compose(events), 1e-5).upper == pytest.approx(found.total.epsilon)
    assert found.total.epsilon <= 1.0
    with pytest.raises(InvalidArgument, match="table must be public for a grid"):
        compare_public(rows, chosen, epsilons=[1.0], delta=1e-5)
    with pytest.raises(InvalidArgument, match="table must be public to be trained on without privacy"):
        non_private_scores(rows)


def test_a_comparison_of_private_records_is_charged_to_the_account_at_once(people):
    account = Ledger(people / "privacy.db").declare("people", epsilon=3.0, delta=1e-4)
    paid = ("--ledger", "privacy.db", "--dataset-name", "people")
    body = document(*PRIVATE, "--epsilon", "2", *paid)
    (entry,) = [entry for entry in account.history() if entry.kind == "charge"]
    assert entry.note == "compare"
    assert accounting.epsilon(entry.event, body["total"]["delta"]).upper == pytest.approx(body["total"]["epsilon"])
    again = call(*PRIVATE, "--epsilon", "2.9", *paid)
    assert again.exit_code == 3, again.output
    assert call(*PRIVATE, "--data-is-public", "--epsilon", "2", *paid).exit_code == 2


def test_tables_state_facts_from_the_schema_alone():
    adult = load_dataset("adult")
    rows = make_tabular_task(adult)
    assert rows.facts.columns == 104
    assert rows.facts.dataset_size == 30162
    assert sum(map(len, rows.facts.one_hot)) + 5 == 104
    longest = max(float((row**2).sum()) ** 0.5 for row in rows.train[0][:2000])
    assert longest <= rows.facts.data_norm
    hours = make_tabular_task(adult, target="hours-per-week")
    assert hours.facts.target_bounds == (1, 99)
    assert hours.facts.columns == 105
    assert hours.train[1].min() >= 1
    assert hours.train[1].max() <= 99
    for group in hours.facts.one_hot:
        assert set(hours.train[0][:500][:, list(group)].sum(axis=1)) <= {0.0, 1.0}
    with pytest.raises(InvalidArgument, match="target must be"):
        make_tabular_task(adult, target="sex")


def test_every_method_can_be_priced_for_every_table_it_suits():
    adult = load_dataset("adult")
    for target in (None, "age"):
        facts = make_tabular_task(adult, target=target).facts
        assert len(supported_methods(facts)) >= 6
        for method in supported_methods(facts):
            if method.name in {"dp-gd", "dp-sgd", "network"}:
                continue  # a rehearsal of theirs takes steps; the contract tests have them
            events, _ = dry_run_events(method.estimator(facts, epsilon=1.0, delta=1e-5), facts.columns)
            assert 0.9 < accounting.epsilon(compose(list(events)), 1e-5).upper <= 1 + 1e-9
    with pytest.raises(InvalidArgument, match="model must suit the table"):
        TABULAR_METHODS["svm"].estimator(make_tabular_task(adult, target="age").facts, epsilon=1.0, delta=1e-5)


@pytest.mark.parametrize(
    "method", ["objective", "adassp", "boosting", "dp-gd", pytest.param("network", marks=pytest.mark.slow)]
)
def test_training_by_an_estimator_leaves_a_folder_that_holds_together(people, method):
    body = document(
        "train", "people.csv", "--schema", "schema.json", "--epsilon", "2", "--model", method, "--out", "run"
    )
    run = RunFolder.open("run")
    assert 0.98 * 2 < body["epsilon"] <= 2
    assert body["description"] == run.guarantee.describe()
    assert json.loads((people / "run" / "metrics.json").read_text()) == {}
    assert accounting.epsilon(run.event(), run.guarantee.delta).upper == pytest.approx(body["epsilon"])
    assert sum(tensor.numel() for tensor in run.load_model().values()) > 2
    assert ("size of the dataset is treated as public" in body["description"]) == (method in {"dp-gd", "network"})
    assert (people / "run" / "report.html").stat().st_size > 0
    report = build_report(run)
    assert {item.title for item in report.privacy_hazards if item.status == "not stated"} - {
        "δ is below 1 / number of records"
    } == {"No audit or attack contradicts the claim", "Other uses of the same records are counted"}
    assert report.missing == ()
    checked = call("verify", "run")
    assert checked.exit_code == 0, checked.output


def test_a_numeric_target_is_measured_by_its_error_and_public_data_have_a_twin(people):
    body = document(
        *("train", "people.csv", "--schema", "schema.json", "--test", "public.csv", "--data-is-public"),
        *("--target", "age", "--epsilon", "20", "--model", "adassp", "--out", "run"),
    )
    metrics = body["metrics"]
    assert set(metrics) == {"test_rmse", "test_mae", "test_r2", "baseline_test_rmse", "trivial_rmse"}
    assert metrics["baseline_test_rmse"] < metrics["test_rmse"] < 1.5 * metrics["trivial_rmse"]


def test_a_refused_estimator_leaves_no_folder_and_settings_by_hand_are_for_modules(people):
    start = ("train", "people.csv", "--schema", "schema.json", "--epsilon", "1", "--out", "run")
    for arguments, words in (
        (["--model", "objective", "--steps", "3"], "steps must be left out"),
        (["--model", "objective", "--checkpoint-every", "3"], "checkpoints must be left out"),
        (["--model", "svm", "--target", "age"], "model must suit the table"),
        (["--model", "objective", "--delta", "0.5"], "delta must be below"),
        (["--model", "thicket"], "model must be one of logistic"),
    ):
        result = call(*start, *arguments)
        assert result.exit_code == 2, result.output
        assert words in result.stderr
        assert not (people / "run").exists()


def test_the_charge_is_written_before_a_record_is_read(people, monkeypatch):
    def failing(estimator, rows):
        raise KeyboardInterrupt

    monkeypatch.setattr("sordino.recipes.tabular.fit_to", failing)
    result = call(
        "train", "people.csv", "--schema", "schema.json", "--epsilon", "1", "--model", "adassp", "--out", "run"
    )
    assert result.exit_code == 130
    assert accounting.epsilon(RunFolder.open("run").event(), 1e-5).upper > 0.9


@pytest.mark.parametrize("budgets", [(0.1, 1.0, 8.0), (1.0,)])
@pytest.mark.parametrize("measure", ["accuracy", "rmse"])
def test_pictures_are_drawn_for_one_and_for_many_epsilons(tmp_path, budgets, measure):
    cells = [
        MethodResult(
            method=name,
            epsilon=budget,
            scores=(0.5 + place / 50, 0.6),
            events=(NoOp(),),
            neighboring_relation="add_or_remove_one",
        )
        for place, name in enumerate(TABULAR_METHODS)
        for budget in budgets
    ]
    total = Guarantee(epsilon=1.0, delta=1e-5, accountant="contour", sampler="none")
    others = {"linear": 0.7, "trees": 0.8, "nothing": 0.5} if len(budgets) > 1 else {}
    for name in ("a.png", "a.svg"):
        found = Comparison(measure=measure, cells=tuple(cells), total=total)
        plot_comparison(found, others, title="people: income", delta=1e-5, path=tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    with Image.open(tmp_path / "a.png") as image:
        picture = np.asarray(image.convert("RGB")).astype(int)
    # No name of a method is cut: the sheet's edges are blank.
    for edge in (picture[:, :12], picture[:, -12:], picture[:12], picture[-12:]):
        assert abs(edge - picture[0, 0]).max() == 0
