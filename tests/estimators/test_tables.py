"""Tables from other libraries: columns of texts, dates or objects are refused by their type, never read as noise."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from sordino.errors import InvalidArgument
from sordino.estimators import KMeans, LinearRegression, LogisticRegression, StandardScaler
from sordino.mechanisms import PrivateMean, PrivateQuantile, make_budget
from sordino.mechanisms.base import to_float_array
from sordino.training.engine import PrivacyEngine
from sordino.training.fit import fit
from sordino.training.plan import Plan


class Kind:
    """A column's type as pandas tells it."""

    def __init__(self, kind, name):
        self.kind, self.name = kind, name

    def __str__(self):
        return self.name


class PolarsKind:
    def __init__(self, name, numbers):
        self._name, self._numbers = name, numbers

    def is_numeric(self):
        return self._numbers

    def __str__(self):
        return self._name


class Frame:
    """A table with types for its columns, as pandas and Polars have them."""

    def __init__(self, types, values):
        self._types, self._values = types, np.asarray(values)
        self.shape = self._values.shape

    @property
    def columns(self):
        return list(self._types)

    @property
    def dtypes(self):
        return list(self._types.values())

    def __getitem__(self, name):
        raise KeyError(name)

    def __array__(self, dtype=None, copy=None):
        return self._values if dtype is None else self._values.astype(dtype)

    def __len__(self):
        return len(self._values)


class Series:
    """A column of texts, as pandas and Polars have it."""

    dtype = Kind("O", "str")

    def __init__(self, values):
        self._values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self._values, dtype=object)


NUMBERS = (
    Kind("f", "float64"),
    Kind("i", "Int64"),
    Kind("b", "boolean"),
    PolarsKind("Float64", True),
    PolarsKind("Boolean", False),
)
OTHERS = (
    *(Kind("O", name) for name in ("object", "str", "string", "category")),
    Kind("M", "datetime64[ns]"),
    Kind("m", "timedelta64[ns]"),
    Kind("c", "complex128"),
    PolarsKind("String", False),
    PolarsKind("Datetime", False),
)
MODELS = [
    LogisticRegression(epsilon=1.0, delta=1e-6, data_norm=2.0, classes=(0, 1)),
    LinearRegression(epsilon=1.0, delta=1e-6, data_norm=2.0, target_bounds=(-1.0, 1.0)),
    KMeans(2, epsilon=1.0, delta=1e-6, bounds=(-1.0, 1.0)),
    StandardScaler(epsilon=1.0, delta=1e-6, bounds=(-1.0, 1.0)),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("kind", OTHERS, ids=str)
def test_a_column_that_holds_no_numbers_is_refused_by_name_and_type(model, kind):
    values = np.random.default_rng(0).uniform(-1, 1, size=(300, 2)).astype(object)
    values[:, 1] = "Zq7secret"
    frame = Frame({"age": NUMBERS[0], "town": kind}, values)
    with pytest.raises(InvalidArgument, match=r"'town' \(") as refusal:
        model.fit(frame, np.zeros(300))
    assert "Zq7" not in str(refusal.value)
    assert "300" not in str(refusal.value)
    assert not hasattr(model, "guarantee_")


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
def test_columns_of_numbers_and_booleans_are_read_and_what_is_missing_is_absent(kind):
    values = np.array([[1.0, True], [None, False], [2, 3.5]], dtype=object)
    found = to_float_array(Frame({"a": NUMBERS[0], "b": kind}, values), "X")
    np.testing.assert_array_equal(found, [[1.0, 1.0], [np.nan, 0.0], [2.0, 3.5]])


def test_an_arrow_table_is_refused_by_its_types():
    table = pa.table({"a": [1.0, 2.0], "b": ["x", "y"]})
    with pytest.raises(InvalidArgument, match=r"'b' \(string\)"):
        MODELS[0].fit(table, [0, 1])


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_an_array_of_objects_is_refused_and_its_advice_works(model):
    values = np.full((300, 2), 0.5).astype(object)
    values[3, 1] = None
    with pytest.raises(InvalidArgument, match=r"got object. Convert it with X.astype\(float\)"):
        model.fit(values, np.zeros(300))
    model.fit(values.astype(float), np.zeros(300))


@pytest.mark.parametrize("values", [Series(["1", "Zq7"] * 9), Frame({"a": OTHERS[0]}, [["Zq7"]] * 9)])
def test_mechanisms_refuse_columns_of_texts_by_their_type(values):
    for mechanism in (
        PrivateMean(budget=make_budget(epsilon=1.0, delta=0.0), bounds=(0.0, 1.0)),
        PrivateQuantile(epsilon=1.0, quantile=0.5, bounds=(0.0, 1.0)),
    ):
        with pytest.raises(InvalidArgument, match=r"numeric type|numbers or booleans") as refusal:
            mechanism.release(values)
        assert "Zq7" not in str(refusal.value)


@pytest.mark.parametrize("table", [pa.table({"a": [1.0] * 20}), Frame({"a": NUMBERS[0]}, [[1.0]] * 20)])
def test_training_refuses_tables_before_anything_is_charged(table, tmp_path):
    plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5, steps=2, expected_batch_size=9.0, delta=1e-5)
    model = nn.Linear(1, 2)

    def losses(model, x, y):
        return F.cross_entropy(model(x), y, reduction="none")

    with pytest.raises(InvalidArgument, match=r"data must be tensors or a torch Dataset.*schema.encode"):
        fit(model, losses, table, plan, run_folder=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
    engine, optimizer = PrivacyEngine(), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidArgument, match=r"dataset of data_loader must be tensors.*schema.encode"):
        engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(table, batch_size=5),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_targets_of_texts_are_refused():
    with pytest.raises(InvalidArgument, match="y must be of a numeric type"):
        MODELS[1].fit(np.zeros((3, 2)), np.array(["a", "b", "c"], dtype=object))


def test_rows_of_different_lengths_are_refused_without_their_number():
    with pytest.raises(InvalidArgument, match="different lengths") as refusal:
        MODELS[0].fit([[1.0, 2.0], *([[1.0]] * 298)], np.zeros(299))
    assert "299" not in str(refusal.value)
    assert refusal.value.__context__ is None


def test_one_missing_entry_in_a_list_changes_its_record_only():
    rows = [[1.0, 2.0], [None, 3.0], [10**400, 1.0], [0.5, 0.5]]
    found = to_float_array(rows, "X")
    assert found[[0, 3]].tolist() == [[1.0, 2.0], [0.5, 0.5]]
    assert np.isnan(found[[1, 2], 0]).all()
