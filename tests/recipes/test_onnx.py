"""ONNX files predict as the models that they were made of, asked by onnxruntime on the same rows."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import sordino
from sordino.cli.app import app
from sordino.data import CategoricalColumn, DatasetSplits, NumericColumn, Records, Schema
from sordino.errors import DataUnavailable, InvalidArgument
from sordino.recipes import MODELS, get_recipe, onnx_export
from sordino.recipes.onnx_export import export_onnx, onnx_difference
from sordino.recipes.saved_model import describe_estimator, describe_module
from sordino.recipes.tabular import TABULAR_METHODS, make_tabular_task
from sordino.recipes.training_config import NETWORKS
from sordino.runs import RunFolder

COLUMNS = (
    NumericColumn(name="age", low=0, high=100),
    CategoricalColumn(name="job", categories=("a", "b", "c")),
    NumericColumn(name="hours", low=0, high=80),
)
SCHEMAS = {
    "two": Schema(columns=COLUMNS, target="ill", labels=("no", "yes")),
    "three": Schema(columns=COLUMNS, target="ill", labels=("0", "1", "2")),
    "number": Schema(columns=COLUMNS, target="cost", target_bounds=(10.0, 50.0)),
}


@pytest.fixture
def onnxruntime():
    pytest.importorskip("onnx", reason="sordino[onnx] is not installed")
    return pytest.importorskip("onnxruntime", reason="sordino[onnx] is not installed")


def records(schema, count, seed=0):
    """Rows as they are encoded, unlisted categories and the ends of intervals among them."""
    rng = np.random.default_rng(seed)
    features = np.zeros((count, 5), dtype=np.float32)
    features[:, 0] = rng.choice(np.linspace(-1, 1, 257), count)
    features[:, 4] = rng.uniform(-1, 1, count)
    job = rng.integers(0, 4, count)
    features[np.flatnonzero(job < 3), 1 + job[job < 3]] = 1.0
    mean = features[:, 0] + 0.3 * features[:, 1]
    if schema.target_bounds:
        return Records(features, (30 + 15 * mean).astype(np.float64))
    return Records(features, np.clip(((mean + 1) * len(schema.labels) / 2).astype(np.int64), 0, len(schema.labels) - 1))


def splits(schema, train, labels=None):
    return DatasetSplits(
        name="made",
        train=train,
        test=None,
        labels=schema.labels if labels is None else labels,
        public=False,
        source="",
        license="",
        schema=schema,
    )


def saved(folder, state, description):
    run = RunFolder.create(folder, plan="{}")
    run.save_model(state)
    run.close()
    run.write_model_description(description)
    return folder


def fits(method, kind):
    return method.regressor if kind == "number" else method.classifier or (kind == "two" and method.regressor)


CASES = [
    pytest.param(name, kind, marks=[pytest.mark.slow] if name in {"dp-gd", "dp-sgd"} else [])
    for kind in SCHEMAS
    for name, method in TABULAR_METHODS.items()
    if fits(method, kind)
]


@pytest.mark.parametrize(("method", "kind"), CASES)
def test_an_estimator_is_the_same_in_onnxruntime(tmp_path, onnxruntime, method, kind):
    dataset = splits(SCHEMAS[kind], records(SCHEMAS[kind], 400))
    changes = {"epochs": 1.0} if method == "network" else {}
    fitted = TABULAR_METHODS[method].fit(make_tabular_task(dataset), epsilon=20.0, delta=1e-5, **changes)
    state = {name: torch.from_numpy(np.array(value)) for name, value in fitted.estimator.learned_arrays().items()}
    model = sordino.load_model(saved(tmp_path / "run", state, describe_estimator(dataset, fitted)))
    outputs = export_onnx(model, tmp_path / "model.onnx")
    new = records(SCHEMAS[kind], 300, seed=1)
    assert onnx_difference(model, tmp_path / "model.onnx", new) < (1e-5 if method == "network" else 1e-9)
    # Asked by itself, without this package's own comparison.
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    found = dict(zip(outputs, session.run(None, {"features": new.features}), strict=True))
    wanted = model.predict(new)
    if kind == "number":
        assert np.allclose(found["prediction"], wanted, rtol=1e-5)
        return
    assert (found["label"] == wanted).mean() > 0.99
    if "probabilities" in found:
        assert np.allclose(found["probabilities"], model.predict_proba(new), atol=1e-5)
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["labels"]) == list(SCHEMAS[kind].labels)
    assert json.loads(facts["features"])[:2] == ["age", "job=a"]
    assert Schema.from_json(facts["schema"]) == SCHEMAS[kind]


@pytest.mark.parametrize("name", MODELS)
def test_a_named_module_is_the_same_in_onnxruntime(tmp_path, onnxruntime, name):
    shape = (1, 16, 16) if name == "cnn" else (5,)
    rng = np.random.default_rng(0)
    features = rng.uniform(0, 1, (50, *shape)).astype(np.float32)
    train = Records(features, rng.integers(0, 2, 50))
    schema = None if name == "cnn" else SCHEMAS["two"]
    dataset = splits(schema, train, labels=("no", "yes"))
    module = NETWORKS[name].build(shape, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    model = sordino.load_model(saved(tmp_path / "run", module.state_dict(), describe_module(dataset, name)))
    assert export_onnx(model, tmp_path / "model.onnx") == ("label", "probabilities")
    assert onnx_difference(model, tmp_path / "model.onnx", train) < 1e-5


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.Linear(5, 8, bias=False), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)], (5,)),
        ([nn.Sequential(nn.Linear(5, 3), nn.Sigmoid()), nn.Identity(), nn.Linear(3, 2), nn.ELU(0.5)], (5,)),
        (
            [
                nn.Conv2d(2, 4, 3, padding=1, stride=2, groups=2, bias=False),
                nn.MaxPool2d(2, padding=1),
                nn.Flatten(),
                nn.Linear(36, 2),
            ],
            (2, 9, 9),
        ),
    ],
)
def test_a_module_of_common_layers_is_the_same_in_onnxruntime(tmp_path, onnxruntime, layers, shape):
    rng = np.random.default_rng(0)
    train = Records(rng.uniform(0, 1, (40, *shape)).astype(np.float32), rng.integers(0, 2, 40))
    dataset = splits(SCHEMAS["two"] if shape == (5,) else None, train, labels=("no", "yes"))
    module = nn.Sequential(*layers)
    folder = saved(tmp_path / "run", module.state_dict(), describe_module(dataset, "own"))
    model = sordino.load_model(folder, module=module)
    export_onnx(model, tmp_path / "model.onnx")
    assert onnx_difference(model, tmp_path / "model.onnx", train) < 1e-5


@pytest.mark.parametrize(
    "layers", [[nn.GRUCell(5, 2)], [nn.Flatten(2), nn.Linear(5, 2)], [nn.Linear(5, 2), nn.Softplus()]]
)
def test_a_layer_without_a_rule_is_refused_with_another_way(tmp_path, onnxruntime, layers):
    module = nn.Sequential(*layers)
    dataset = splits(SCHEMAS["two"], records(SCHEMAS["two"], 10))
    folder = saved(tmp_path / "run", module.state_dict(), describe_module(dataset, "own"))
    with pytest.raises(InvalidArgument, match=r"torch\.onnx\.export|nn\.Flatten"):
        export_onnx(sordino.load_model(folder, module=module), tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_a_recipe_that_prepares_records_outside_its_module_is_refused(tmp_path, onnxruntime):
    rng = np.random.default_rng(0)
    train = Records(rng.uniform(0, 1, (80, 64)).astype(np.float32), rng.integers(0, 2, 80))
    dataset = splits(None, train, labels=("no", "yes"))
    get_recipe("hashed-words").fit(dataset, epsilon=3.0, delta=1e-4, run_folder=tmp_path / "run")
    with pytest.raises(InvalidArgument, match="prepares records outside"):
        export_onnx(sordino.load_model(tmp_path / "run"), tmp_path / "model.onnx")


def test_without_the_packages_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "find_spec", lambda name: None)
    module = NETWORKS["logistic"].build((5,), 2)
    dataset = splits(SCHEMAS["two"], records(SCHEMAS["two"], 10))
    model = sordino.load_model(saved(tmp_path / "run", module.state_dict(), describe_module(dataset, "logistic")))
    with pytest.raises(DataUnavailable, match=r"Install sordino\[onnx\]"):
        export_onnx(model, tmp_path / "model.onnx")


def test_the_command_writes_the_file_outside_the_run(tmp_path, monkeypatch, onnxruntime):
    monkeypatch.chdir(tmp_path)
    module = NETWORKS["mlp"].build((5,), 2)
    dataset = splits(SCHEMAS["two"], records(SCHEMAS["two"], 10))
    saved(tmp_path / "run", module.state_dict(), describe_module(dataset, "mlp"))
    done = CliRunner().invoke(app, ["export", "run", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["outputs"] == ["label", "probabilities"]
    assert (tmp_path / "run.onnx").is_file()
    done = CliRunner().invoke(app, ["export", "run", "--out", "run/model.onnx"])
    assert done.exit_code == 2
    assert CliRunner().invoke(app, ["export", "run", "--format", "pickle"]).exit_code == 2
