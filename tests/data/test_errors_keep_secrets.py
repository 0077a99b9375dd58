"""Whatever a private file holds, no refusal, context included, quotes any of it."""

import datetime
import traceback

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sordino.data import ArraySchema, CategoricalColumn, NumericColumn, Records, Schema, load_dataset
from sordino.errors import InvalidArgument, SordinoError

SECRET = "Zq7secret"
SCHEMA = Schema(
    columns=(NumericColumn(name="age", low=0, high=100), CategoricalColumn(name="job", categories=("clerk", "sales"))),
    target="income",
    labels=("low", "high"),
)
ARRAYS = ArraySchema(labels=("a", "b"), low=0, high=1)


def said(problem):
    """All that a log could show of an exception: its text, its representation, its causes and contexts."""
    seen = []
    while problem is not None:
        seen += [str(problem), repr(problem), *traceback.format_exception(problem)]
        problem = problem.__cause__ or problem.__context__
    return "\n".join(seen)


def attempt(path, **arguments):
    """Load; whatever is refused must be refused by the library's own exception, without the secret."""
    try:
        return load_dataset(path, **arguments)
    except SordinoError as problem:
        quoted = said(problem)
    assert SECRET not in quoted
    return None


fragments = st.sampled_from(
    [SECRET, f'"{SECRET}', f"{SECRET}\n{SECRET}", "\xff", '"', "\0", "\r", ",", "1", "clerk", "low", ""]
)
lines = st.lists(fragments, max_size=5).map(",".join)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.lists(lines, max_size=6), encoding=st.sampled_from(["utf-8", "latin-1", "utf-16"]))
def test_no_error_about_a_csv_file_quotes_it(tmp_path, body, encoding):
    path = tmp_path / "t.csv"
    path.write_bytes(b"age,job,income\n" + "\n".join(body).encode(encoding))
    found = attempt(path, schema=SCHEMA)
    assert found is None or np.isfinite(found.train.features).all()
    attempt(path)
    attempt(path, target="income")


def test_a_malformed_row_does_not_stop_the_others(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(f"age,job,income\n25,clerk,low\n{SECRET},{SECRET},{SECRET},{SECRET}\n75,sales,high\n")
    found = load_dataset(path, schema=SCHEMA)
    assert found.train.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([SECRET, SECRET]),
        pa.array([SECRET.encode() + b"\xff", b"1"]),
        pa.array([[SECRET], []]),
        pa.array([{"a": SECRET}, {"a": ""}]),
        pa.array([datetime.date(1999, 1, 1), None]),
        pa.array([None, None]),
        pa.array([SECRET, None]).dictionary_encode(),
    ],
)
@pytest.mark.parametrize("place", ["age", "job", "income"])
def test_no_error_about_a_parquet_file_quotes_it(tmp_path, column, place):
    fields = {"age": [1.0, 2.0], "job": ["clerk", "sales"], "income": ["low", "high"], place: column}
    pq.write_table(pa.table(fields), tmp_path / "t.parquet")
    attempt(tmp_path / "t.parquet", schema=SCHEMA)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cut=st.integers(0, 400), kind=st.sampled_from(["t.parquet", "t.npz", "t.csv.gz", "t.csv.xz", "t.csv.bz2", "t.idx"])
)
def test_no_error_about_a_damaged_file_quotes_it(tmp_path, cut, kind):
    whole = tmp_path / "whole"
    if kind == "t.parquet":
        pq.write_table(pa.table({"age": [SECRET], "job": [SECRET], "income": [SECRET]}), whole, compression="none")
    elif kind == "t.npz":
        with whole.open("wb") as file:
            np.savez(file, x=np.array([[SECRET]]), y=np.array([0]))
    else:
        whole.write_bytes(SECRET.encode() * 60)
    (tmp_path / kind).write_bytes(whole.read_bytes()[:cut])
    attempt(tmp_path / kind, schema=ARRAYS if kind in ("t.npz", "t.idx") else SCHEMA)


def test_no_error_about_a_pickled_array_quotes_or_runs_it(tmp_path):
    np.savez(tmp_path / "t.npz", x=np.array([[SECRET], [3]], dtype=object), y=np.array([0, 1]))
    with pytest.raises(InvalidArgument) as caught:
        load_dataset(tmp_path / "t.npz", schema=ARRAYS)
    assert SECRET not in said(caught.value)


def test_the_refusal_of_malformed_records_names_no_size():
    with pytest.raises(InvalidArgument) as caught:
        Records(features=np.zeros((7919, 2), dtype=np.float32), labels=np.zeros(7907, dtype=np.int64))
    assert "79" not in str(caught.value)
