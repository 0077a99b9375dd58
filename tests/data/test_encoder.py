"""`SchemaEncoder`: the columns of the schema, with scikit-learn's manners and no privacy spent."""

import numpy as np
import pyarrow as pa
import pytest
from sklearn.base import clone
from sklearn.pipeline import make_pipeline

from sordino.data import CategoricalColumn, NumericColumn, Schema, SchemaEncoder, load_dataset
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.estimators import LogisticRegression

SCHEMA = Schema(
    columns=(
        NumericColumn(name="age", low=0, high=100, missing=True),
        CategoricalColumn(name="job", categories=("clerk", "sales"), other=True),
    ),
    target="income",
    labels=("low", "high"),
)


def table(count=60):
    ages = [None if k % 7 == 0 else k for k in range(count)]
    jobs = [("clerk", "sales", "nurse", "")[k % 4] for k in range(count)]
    incomes = ["high" if k > count / 2 else "low" for k in range(count)]
    return pa.table({"job": jobs, "note": ["x"] * count, "age": ages, "income": incomes})


def test_it_makes_the_columns_of_the_schema_and_of_the_commands(tmp_path):
    found = SchemaEncoder(SCHEMA).fit_transform(table())
    np.testing.assert_array_equal(found, SCHEMA.encode(table()).features)
    lines = [
        f"{age if age is not None else ''},{job},{income}"
        for job, _, age, income in zip(*table().to_pydict().values(), strict=True)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["age,job,income", *lines]) + "\n")
    np.testing.assert_array_equal(found, load_dataset(tmp_path / "t.csv", schema=SCHEMA).train.features)


def test_every_row_stays_in_its_place_and_the_target_is_not_needed():
    rows = table().drop_columns(["income", "note"])
    assert SchemaEncoder(SCHEMA).fit(table()).transform(rows).shape == (60, 5)


def test_it_has_scikit_learns_manners():
    encoder = clone(SchemaEncoder(SCHEMA)).fit(table())
    assert encoder.get_feature_names_out().tolist() == list(SCHEMA.feature_names)
    assert encoder.feature_names_in_.tolist() == ["age", "job"]
    assert encoder.guarantee_.epsilon == 0
    assert encoder.events_ == ()
    assert hasattr(encoder, "set_output")
    model = LogisticRegression(epsilon=5.0, delta=1e-6, data_norm=SCHEMA.data_norm, classes=SCHEMA.labels)
    pipeline = make_pipeline(SchemaEncoder(SCHEMA), model).fit(table(4000), table(4000)["income"].to_pylist())
    assert pipeline[-1].coef_.shape == (1, 5)
    assert set(pipeline.predict(table())) <= {"low", "high"}


@pytest.mark.parametrize("schema", [None, "schema.json"])
def test_a_schema_must_be_declared(schema):
    with pytest.raises((InvalidArgument, MissingDeclaration), match="schema must be"):
        SchemaEncoder(schema).fit(table())


def test_tables_without_a_declared_column_are_refused_and_arrays_too():
    encoder = SchemaEncoder(SCHEMA).fit(table())
    with pytest.raises(InvalidArgument, match="none named 'age'"):
        encoder.transform(table().drop_columns(["age"]))
    with pytest.raises(InvalidArgument, match="must be a DataFrame"):
        encoder.transform(np.zeros((3, 2)))


def test_pandas_frames_can_be_asked_for():
    pytest.importorskip("pandas")
    found = SchemaEncoder(SCHEMA).set_output(transform="pandas").fit_transform(table().to_pandas())
    assert list(found.columns) == list(SCHEMA.feature_names)
