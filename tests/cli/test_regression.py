"""Numeric targets: declared in a schema, learned by every regressor, measured, compared, tuned, or refused by name."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from sordino.cli.app import app
from sordino.data import CategoricalColumn, NumericColumn, Schema, load_dataset
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.recipes.tabular import make_tabular_task
from sordino.report import compute_label_utility, compute_regression_utility, compute_utility

COLUMNS = [
    {"name": "size", "type": "numeric", "low": 0, "high": 10},
    {"name": "town", "type": "category", "categories": ["a", "b"]},
]
PRICE = {"name": "price", "type": "numeric", "low": 0, "high": 40}
SCHEMA = {"target": "price", "low": 0, "high": 40, "columns": COLUMNS}


def write(folder, name, rows, seed=0):
    rng = np.random.default_rng(seed)
    size, town = rng.uniform(0, 10, rows).round(2), rng.choice(["a", "b"], rows)
    price = (3 * size + 5 * (town == "b") + rng.normal(0, 1, rows)).round(2)
    lines = [f"{s},{t},{p}" for s, t, p in zip(size, town, price, strict=True)]
    (folder / name).write_text("size,town,price\n" + "\n".join(lines) + "\n")
    return folder / name


@pytest.fixture
def homes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "homes.csv", 4000)
    write(tmp_path, "test.csv", 300, seed=1)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def document(*arguments):
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("form", [SCHEMA, {"target": "price", "columns": [*COLUMNS, PRICE]}])
def test_a_schema_declares_a_number_beside_the_target_or_among_the_columns(form):
    schema = Schema.from_json(json.dumps(form))
    assert (schema.target_bounds, schema.labels, len(schema.columns)) == ((0, 40), (), 2)
    assert Schema.from_json(schema.to_json()) == schema


@pytest.mark.parametrize(
    ("form", "error", "words"),
    [
        ({"target": "price", "columns": COLUMNS}, MissingDeclaration, "'low' and 'high'"),
        ({**SCHEMA, "labels": ["x", "y"]}, InvalidArgument, "labels or bounds, got both"),
        ({"target": "price", "low": 1, "columns": COLUMNS}, MissingDeclaration, "'high' of the target"),
        ({**SCHEMA, "low": 40, "high": 0}, InvalidArgument, "low < high"),
        ({**SCHEMA, "low": "0"}, InvalidArgument, "must be a number"),
        # With labels, a target among the features stays an error.
        ({"target": "price", "labels": ["1", "2"], "columns": [*COLUMNS, PRICE]}, InvalidArgument, "not a feature"),
    ],
)
def test_half_a_declaration_is_refused(form, error, words):
    with pytest.raises(error, match=words):
        Schema.from_json(json.dumps(form))


def test_records_without_a_number_do_not_count_and_are_refused_in_a_public_test_file(tmp_path):
    schema = Schema(columns=(NumericColumn(name="x", low=0, high=1),), target="y", target_bounds=(0, 9))
    (tmp_path / "a.csv").write_text("x,y\n.1,5\n.2,\n.3,?\n.4,inf\n.5,1e9\n.6,unknown\n")
    found = load_dataset(tmp_path / "a.csv", schema=schema)
    assert found.train.labels.tolist() == [5, 1e9]
    task = make_tabular_task(found)
    assert (task.metric, task.facts.classes, task.facts.target_bounds) == ("rmse", None, (0, 9))
    (tmp_path / "test.csv").write_text("x,y\n.7,5\n.2,NA\n.3,high\n")
    with pytest.raises(InvalidArgument, match="must be a number, as the schema declares it, got 1 row with"):
        load_dataset(tmp_path / "a.csv", schema=schema, test=tmp_path / "test.csv")


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("dp-gd", "network")]


@pytest.mark.parametrize("model", [None, "objective", "output", "adassp", "sufficient-statistics", *SLOW])
def test_every_regressor_learns_a_declared_number(homes, model):
    chosen = [] if model is None else ["--model", model]
    out = ("--epsilon", "20", "--schema", "schema.json", "--test", "test.csv", "--out", "run")
    metrics = document("train", "homes.csv", *chosen, *out)["metrics"]
    assert set(metrics) == {"test_rmse", "test_mae", "test_r2", "trivial_rmse"}
    assert metrics["test_r2"] > 0.5
    assert metrics["test_r2"] == pytest.approx(1 - (metrics["test_rmse"] / metrics["trivial_rmse"]) ** 2)
    assert "R², share of the variance" in (homes / "run" / "report.html").read_text()


def test_errors_stand_in_the_terminal(homes):
    done = run("train", "homes.csv", "--schema", "schema.json", "--test", "test.csv", "--epsilon", "5", "--out", "run")
    words = " ".join(done.output.split())
    for part in ("R², share of the variance", "root mean squared error", "mean absolute error", "always the mean"):
        assert part in words


def test_a_number_is_compared_and_tuned(homes):
    files = ("homes.csv", "--schema", "schema.json", "--test", "test.csv", "--epsilon", "5")
    body = document("compare", *files, "--methods", "adassp,objective")
    assert body["measure"] == "rmse"
    assert {cell["method"] for cell in body["results"]} == {"adassp", "objective"}
    (homes / "space.json").write_text('{"max_iter": [2, 4]}')
    search = ("--model", "boosting", "--space", "space.json", "--runs", "2", "--score", "public")
    tuned = document("tune", *files, *search, "--out", "tuned")
    assert tuned["metrics"]["test_r2"] > 0
    assert set(tuned["settings"]) == {"max_iter"}


@pytest.mark.parametrize(
    "options",
    [
        ("--model", "mlp"),
        ("--model", "logistic"),
        ("--model", "svm"),
        ("--model", "naive-bayes"),
        ("--recipe", "adult-mlp"),
    ],
)
def test_a_classifier_refuses_a_number_by_name(homes, options):
    done = run("train", "homes.csv", "--schema", "schema.json", "--epsilon", "1", *options, "--out", "run")
    assert done.exit_code == 2
    assert "number" in done.output
    assert "adassp" in done.output
    assert not (homes / "run").exists()


@pytest.mark.parametrize(
    ("values", "fine"),
    [
        ([f"{k}.5" for k in range(20)], False),  # a measurement
        ([str(k) for k in range(40)], False),  # a count
        ([str(k) for k in range(10)], True),  # digits
        ([f"{k / 2}" for k in range(2, 11)], True),  # half stars
        ([f"name{k}" for k in range(60)], True),  # texts are classes, many or not
    ],
)
def test_a_sample_whose_target_would_become_dozens_of_classes_is_refused_with_the_remedy(homes, values, fine):
    lines = [f"{k % 7},{value}" for k, value in enumerate(values * 3)]
    (homes / "sample.csv").write_text("x,y\n" + "\n".join(lines) + "\n")
    (homes / "private.csv").write_text("x,y\n" + "\n".join(lines[1:] * 30) + "\n")
    options = {"public_schema_from": homes / "sample.csv", "target": "y"}
    if fine:
        assert len(load_dataset(homes / "private.csv", **options).labels) == len(values)
        return
    with pytest.raises(MissingDeclaration, match=r"number or as a label.*--target-bounds LOW HIGH"):
        load_dataset(homes / "private.csv", **options)
    # The remedy works.
    asked = ("--public-schema-from", "sample.csv", "--target", "y", "--target-bounds", "0", "40")
    done = run("train", "private.csv", *asked, "--epsilon", "1", "--out", "run")
    assert done.exit_code == 0, done.output


def test_target_bounds_stand_beside_a_sample_only(homes):
    with pytest.raises(InvalidArgument, match="with public_schema_from"):
        load_dataset("homes.csv", schema="schema.json", target_bounds=(0, 1))


def test_a_number_that_the_schema_declares_is_the_only_target(homes):
    with pytest.raises(InvalidArgument, match="'price', the number that the schema declares"):
        make_tabular_task(load_dataset("homes.csv", schema="schema.json"), target="size")


def test_the_schema_from_a_sample_keeps_categories_of_other_columns(homes):
    found = load_dataset("homes.csv", public_schema_from="test.csv", target="price", target_bounds=(0, 40))
    assert isinstance(found.schema.columns[1], CategoricalColumn)
    assert found.schema.target_bounds == (0, 40)


def test_figures_agree_with_scikit_learn():
    from sklearn import metrics

    rng = np.random.default_rng(3)
    truth, guess = rng.normal(size=200), rng.normal(size=200)
    found = compute_regression_utility(guess, truth, public=True)
    assert found["test_r2"].value == pytest.approx(metrics.r2_score(truth, guess))
    assert found["test_mae"].value == pytest.approx(metrics.mean_absolute_error(truth, guess))
    for classes in (2, 4):
        labels = rng.integers(0, classes, 300)
        # Few different values, so that there are ties.
        chances = rng.integers(1, 5, (300, classes)).astype(float)
        chances /= chances.sum(axis=1, keepdims=True)
        shown = compute_utility(chances, labels, public=True)
        scores = chances[:, 1] if classes == 2 else chances
        assert shown["test_auc"].value == pytest.approx(metrics.roc_auc_score(labels, scores, multi_class="ovr"))
        predicted = chances.argmax(axis=1)
        balanced = metrics.balanced_accuracy_score(labels, predicted)
        assert shown["test_balanced_accuracy"].value == pytest.approx(balanced)
        table = metrics.confusion_matrix(labels, predicted)
        mine = [[shown[f"confusion:{i}:{j}"].value for j in range(classes)] for i in range(classes)]
        assert table.tolist() == mine
        plain = compute_label_utility(predicted, labels, classes=classes, public=True)
        assert plain["test_accuracy"].value == shown["test_accuracy"].value


@pytest.mark.parametrize("compute", [compute_label_utility, compute_regression_utility])
def test_figures_of_private_records_are_refused(compute):
    more = {"classes": 2} if compute is compute_label_utility else {}
    with pytest.raises(InvalidArgument, match="release of its own"):
        compute([0, 1], [0, 1], public=False, **more)


def test_a_target_that_does_not_vary_has_no_share_of_variance():
    assert "test_r2" not in compute_regression_utility([1.0, 2.0], [3.0, 3.0], public=True)
