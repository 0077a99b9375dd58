"""A model is the same after it was written to a run folder and read again; a folder that was changed is refused."""

import json
import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import sordino
from sordino import verification
from sordino.commands.estimators import EstimatorJob, run_estimator
from sordino.commands.running import SILENT
from sordino.data import ArraySchema, CategoricalColumn, DatasetSplits, NumericColumn, Records, Schema
from sordino.errors import InvalidArgument
from sordino.recipes import RecipeTask, get_recipe
from sordino.recipes.tabular import TABULAR_METHODS, make_tabular_task
from sordino.runs import RunFolder

COLUMNS = (NumericColumn(name="age", low=0, high=100), CategoricalColumn(name="job", categories=("a", "b", "c")))
LABELED = Schema(columns=COLUMNS, target="ill", labels=("no", "yes"))
NUMBER = Schema(columns=COLUMNS, target="cost", target_bounds=(0.0, 50.0))


def raw(rows, seed=0):
    rng = np.random.default_rng(seed)
    return {"age": rng.uniform(0, 100, rows).round(1).tolist(), "job": rng.choice(["a", "b", "c", "d"], rows).tolist()}


def table(schema, rows=600):
    from sordino.data.frames import frame_columns
    from sordino.data.tables import encode_features

    columns = raw(rows)
    features = encode_features(frame_columns(columns, schema, with_target=False), schema)
    ages = np.array(columns["age"])
    targets = (ages > 50).astype(np.int64) if schema.labels else ages / 2
    return DatasetSplits(
        name="people",
        train=Records(features, targets),
        test=None,
        labels=schema.labels,
        public=False,
        source="",
        license="",
        schema=schema,
    )


def trained(folder, dataset, method, target=None):
    job = EstimatorJob(
        dataset=dataset,
        method=method,
        target=target,
        epsilon=10.0,
        delta=1e-5,
        seed=None,
    )
    run_estimator(job, folder, None, SILENT)
    return sordino.load_model(folder)


CASES = [(name, LABELED) for name, method in TABULAR_METHODS.items() if method.classifier or method.regressor] + [
    (name, NUMBER) for name, method in TABULAR_METHODS.items() if method.regressor
]


@pytest.mark.parametrize(
    ("method", "schema"), [case for case in CASES if case[0] not in {"dp-sgd", "dp-gd", "network"}]
)
def test_an_estimator_predicts_as_its_parameters_and_what_was_learned_say(tmp_path, method, schema):
    dataset = table(schema)
    model = trained(tmp_path / "run", dataset, method)
    new = raw(50, seed=1)
    found = model.predict(new)
    again = model.predict(pa.table(new))
    assert found.tolist() == again.tolist()
    assert model.predict(model.encode(new).features).tolist() == found.tolist()
    # The learned numbers are those of the file, whatever else the object holds.
    tensors = RunFolder.open(tmp_path / "run").load_model()
    learned = model.estimator.learned_arrays()
    assert learned.keys() == tensors.keys()
    assert all(np.array_equal(learned[name], tensors[name].numpy()) for name in learned)
    assert model.guarantee == model.estimator.guarantee_
    if schema is NUMBER:
        assert np.abs(found - np.array(new["age"]) / 2).mean() < 12
        assert model.score(new, np.array(new["age"]) / 2) > 0
    else:
        wanted = np.where(np.array(new["age"]) > 50, "yes", "no")
        assert (found == wanted).mean() > 0.8
        assert model.score(new, wanted.tolist()) == (found == wanted).mean()
    assert verification.verify(tmp_path / "run").passed


@pytest.mark.slow
@pytest.mark.parametrize("schema", [LABELED, NUMBER], ids=["label", "number"])
def test_a_network_predicts_the_same_again(tmp_path, schema, monkeypatch):
    kept = {}
    from sordino.commands import estimators

    save = estimators._save
    monkeypatch.setattr(
        estimators, "_save", lambda run, job, fitted: (kept.update(fitted=fitted), save(run, job, fitted))
    )
    dataset = table(schema)
    model = trained(tmp_path / "run", dataset, "network")
    rows = make_tabular_task(dataset).train[0]
    assert np.array_equal(model.predict_encoded(dataset.train), kept["fitted"].predict(rows))


def test_a_numeric_column_as_the_target_takes_the_label_as_a_feature(tmp_path):
    model = trained(tmp_path / "run", table(LABELED), "sufficient-statistics", target="age")
    assert [column.name for column in model.schema.columns] == ["job", "ill"]
    assert model.is_regressor
    found = model.predict({"job": ["a", "a"], "ill": ["no", "yes"]})
    assert found[0] < 50 < found[1]


def test_labels_that_are_whole_numbers_come_as_numbers(tmp_path):
    schema = Schema(columns=COLUMNS, target="ill", labels=("0", "1"))
    model = trained(tmp_path / "run", table(schema), "objective")
    assert model.predict(raw(3)).dtype == np.int64
    assert model.classes_.tolist() == [0, 1]


# --- recipes ---------------------------------------------------------------------------------------------------------


def images(shape, rows=80, classes=3):
    rng = np.random.default_rng(0)
    features = rng.uniform(0, 1, (rows, *shape)).astype(np.float32)
    return Records(features, rng.integers(0, classes, rows))


def splits(records, classes=3, schema=None):
    labels = tuple("abcdefghij"[:classes])
    return DatasetSplits(
        name="made",
        train=records,
        test=None,
        labels=labels,
        public=False,
        source="",
        license="",
        schema=schema,
    )


@pytest.mark.parametrize(
    ("name", "shape"),
    [("adult-logistic", None), ("logistic-pixels", (1, 8, 8)), ("hashed-words", (64,)), ("pca-mlp", (1, 9, 9))],
)
def test_a_recipe_gives_its_model_again(tmp_path, name, shape):
    dataset = table(LABELED, 200) if shape is None else splits(images(shape))
    fitted = get_recipe(name).fit(dataset, epsilon=3.0, delta=1e-4, run_folder=tmp_path / "run")
    model = sordino.load_model(tmp_path / "run")
    assert model.kind == "recipe"
    assert np.array_equal(model.predict_encoded(dataset.train), fitted.predict(dataset.train))
    assert np.array_equal(model.probabilities(dataset.train), fitted.predict_proba(dataset.train))
    assert verification.verify(tmp_path / "run").passed


@pytest.mark.parametrize("name", ["tanh-cnn", "scatter", "wrn-fast", "logistic-sgd"])
def test_every_recipe_without_a_public_model_can_restore(name):
    shape = (1, 16, 16)
    task = RecipeTask(data="x", shape=shape, classes=3, dataset_size=5000, schema=None, epsilon=3.0, delta=1e-5)
    prepared = get_recipe(name).prepare(task)
    assert prepared.restore is not None


# --- modules ---------------------------------------------------------------------------------------------------------


def own(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes))


def module_run(folder, model, factory=own):
    from sordino.recipes.saved_model import describe_module

    dataset = table(LABELED)
    run = RunFolder.create(folder, plan="{}")
    module = factory((4,), 2)
    run.save_model(module.state_dict())
    run.close()
    run.write_model_description(describe_module(dataset, model))
    return module


def test_a_module_of_the_users_own_must_be_given_again(tmp_path):
    module = module_run(tmp_path / "run", "own")
    with pytest.raises(InvalidArgument, match=r"a run folder holds no code.*module:factory"):
        sordino.load_model(tmp_path / "run")
    new = raw(20)
    for given in (own, own((4,), 2)):
        model = sordino.load_model(tmp_path / "run", module=given)
        features = torch.from_numpy(model.encode(new).features)
        wanted = module(features).detach().double().softmax(1).numpy()
        assert np.allclose(model.predict_proba(new), wanted, atol=1e-12)
    with pytest.raises(InvalidArgument, match="parameters of another module"):
        sordino.load_model(tmp_path / "run", module=lambda shape, classes: nn.Linear(9, classes))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    trained(folder, table(LABELED), "objective")
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    import shutil

    return shutil.copytree(whole, tmp_path / "copy")


def edit(folder, **changes):
    file = folder / "model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "PCA"},
        {"model": "os.system"},
        {"kind": "pickle"},
        {"parameters": {"rm": 1}},
        {"inputs": {}},
        {"shape": "x"},
    ],
)
def test_a_changed_description_is_refused_with_a_manifest_and_without(copied, changes):
    edit(copied, **changes)
    with pytest.raises(InvalidArgument, match=r"model\.json must be the file that manifest\.json lists"):
        sordino.load_model(copied)
    assert not verification.verify(copied).passed
    (copied / "manifest.json").unlink()
    with pytest.raises(InvalidArgument):
        sordino.load_model(copied).predict(raw(3))


def test_a_description_put_into_a_run_without_one_fails_verification(tmp_path, whole):
    with RunFolder.create(tmp_path / "run", plan="{}"):
        pass
    (tmp_path / "run" / "model.json").write_bytes((whole / "model.json").read_bytes())
    assert verification.verify(tmp_path / "run").item("files").status == "fail"


def test_nothing_is_unpickled(copied):
    class Harm:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    (copied / "manifest.json").unlink()
    (copied / "model.safetensors").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(InvalidArgument, match="must be a safetensors file"):
        sordino.load_model(copied)


def test_a_run_without_a_description_says_what_to_do(tmp_path):
    run = RunFolder.create(tmp_path / "run", plan="{}")
    run.save_model({"weight": torch.zeros(2)})
    run.close()
    with pytest.raises(InvalidArgument, match=r"RunFolder\.open\(run\)\.load_model\(\)"):
        sordino.load_model(tmp_path / "run")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"age": [1.0]}, "none named 'job'"),
        (np.zeros((2, 3)), "must have shape"),
        (np.full((2, 4), 40.0), r"encoded features in \[-1, 1\]"),
        (np.array([["1", "a"]]), "a table with named columns"),
        (5, "must have shape"),
    ],
)
def test_records_of_another_form_are_refused(whole, given, words):
    with pytest.raises(InvalidArgument, match=words):
        sordino.load_model(whole).predict(given)


def test_missing_and_unlisted_values_are_read_as_in_training(whole):
    model = sordino.load_model(whole)
    odd = {"age": [None, "?", "1e9", "50"], "job": ["z", None, " a ", "b"]}
    assert model.encode(odd).features.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0]]
    pandas = pytest.importorskip("pandas")
    mixed = pandas.DataFrame({"job": odd["job"], "age": [np.nan, "?", 1e9, 50]})
    assert model.encode(mixed).features.tolist() == model.encode(odd).features.tolist()


def test_arrays_have_the_range_that_was_declared(tmp_path):
    schema = ArraySchema(labels=("a", "b"), low=-1.0, high=3.0)
    rng = np.random.default_rng(0)
    dataset = DatasetSplits(
        name="made",
        train=Records(rng.uniform(0, 1, (300, 5)).astype(np.float32), rng.integers(0, 2, 300)),
        test=None,
        labels=("a", "b"),
        public=False,
        source="",
        license="",
        schema=None,
        array_schema=schema,
    )
    model = trained(tmp_path / "run", dataset, "objective")
    assert model.array_schema == schema
    rows = make_tabular_task(dataset).train[0]
    assert np.array_equal(model.predict_encoded(dataset.train), model.fitted.predict(rows))
