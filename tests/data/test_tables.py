"""CSV and Parquet files of a user's own, with a declared schema."""

import csv
import gzip
import lzma

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sordino.data import CategoricalColumn, NumericColumn, Schema, load_dataset
from sordino.data.tables import read_columns, to_number
from sordino.errors import InvalidArgument, MissingDeclaration

SCHEMA = Schema(
    columns=(NumericColumn(name="age", low=0, high=100), CategoricalColumn(name="job", categories=("clerk", "sales"))),
    target="income",
    labels=("low", "high"),
)


def written(folder, text, name="t.csv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_numbers_are_scaled_and_categories_are_one_hot(tmp_path):
    found = load_dataset(written(tmp_path, "age,job,income\n25,clerk,low\n100,sales,high\n"), schema=SCHEMA)
    assert np.array_equal(found.train.features, np.array([[-0.5, 1, 0], [1, 0, 1]], dtype=np.float32))
    assert found.train.labels.tolist() == [0, 1]
    assert (found.labels, found.public, found.test, found.schema) == (("low", "high"), False, None, SCHEMA)


@pytest.mark.parametrize(
    ("cell", "feature"),
    [
        ("", 0),
        ("?", 0),
        ("nan", 0),
        ("x", 0),
        ("-5", -1),
        ("1e9", 1),
        ("inf", 1),
        ("-inf", -1),
        (" 75 ", 0.5),
        ("1e999", 1),
    ],
)
def test_a_strange_number_is_clipped_or_becomes_the_midpoint(tmp_path, cell, feature):
    found = load_dataset(written(tmp_path, f"age,job,income\n{cell},clerk,low\n"), schema=SCHEMA)
    assert found.train.features.tolist() == [[feature, 1, 0]]


@pytest.mark.parametrize("cell", ["", "?", "manager", "Clerk"])
def test_an_unlisted_category_is_all_zeros(tmp_path, cell):
    found = load_dataset(written(tmp_path, f"age,job,income\n50,{cell},high\n"), schema=SCHEMA)
    assert found.train.features.tolist() == [[0, 0, 0]]


def test_rows_without_a_listed_label_or_with_too_many_fields_are_left_out(tmp_path):
    text = "age,job,income\n25,clerk,\n25,clerk,middle\n25,clerk,low,extra\n25\n75,sales,high\n"
    found = load_dataset(written(tmp_path, text), schema=SCHEMA)
    assert found.train.features.tolist() == [[0.5, 0, 1]]


def test_an_empty_table_is_an_empty_data_set(tmp_path):
    found = load_dataset(written(tmp_path, "age,job,income\n"), schema=SCHEMA)
    assert found.train.features.shape == (0, 3)


def test_order_of_columns_and_undeclared_columns_do_not_matter(tmp_path):
    text = "\ufeffincome , secret,job, age\nhigh,12,sales,75\n"
    found = load_dataset(written(tmp_path, text), schema=SCHEMA)
    assert found.train.features.tolist() == [[0.5, 0, 1]]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_compressed_and_tab_separated_files_are_read(tmp_path, suffix, pack):
    path = written(tmp_path, pack(b"age\tjob\tincome\n25\tclerk\tlow\n"), f"t.tsv{suffix}")
    assert load_dataset(path, schema=SCHEMA).train.features.tolist() == [[-0.5, 1, 0]]


@pytest.mark.parametrize(
    "ages",
    [
        pa.array([25, None, 100], pa.int64()),
        pa.array([25.0, np.nan, 1e9], pa.float32()),
        pa.array(["25", "?", "100"]),
        pa.array(["25", "?", "100"], pa.large_string()),
        pa.array(["25", "?", "100"], pa.string_view()),
        pa.array(["25", None, "100"]).dictionary_encode(),
        pa.array([25, None, 100], pa.int32()).dictionary_encode(),
        pa.array([25, None, 100], pa.decimal128(5, 1)),
    ],
)
def test_parquet_columns_of_every_kind_give_the_same_features(tmp_path, ages):
    table = pa.table({"age": ages, "job": ["sales", None, "clerk"], "income": ["low", "high", "low"]})
    pq.write_table(table, tmp_path / "t.parquet")
    found = load_dataset(tmp_path / "t.parquet", schema=SCHEMA)
    assert found.train.features.tolist() == [[-0.5, 0, 1], [0, 0, 0], [1, 1, 0]]


def test_labels_may_be_whole_numbers_or_booleans(tmp_path):
    schema = Schema(columns=(NumericColumn(name="age", low=0, high=100),), target="y", labels=("0", "1"))
    pq.write_table(pa.table({"age": [1, 2, 3], "y": [1, 0, 7]}), tmp_path / "t.parquet")
    assert load_dataset(tmp_path / "t.parquet", schema=schema).train.labels.tolist() == [1, 0]
    pq.write_table(pa.table({"age": [1, 2], "y": [1.0, 0.0]}), tmp_path / "t.parquet")
    assert load_dataset(tmp_path / "t.parquet", schema=schema).train.labels.tolist() == [1, 0]
    schema = Schema(columns=schema.columns, target="y", labels=("false", "true"))
    pq.write_table(pa.table({"age": [1, 2], "y": [True, False]}), tmp_path / "t.parquet")
    assert load_dataset(tmp_path / "t.parquet", schema=schema).train.labels.tolist() == [1, 0]


def test_a_header_without_a_declared_column_names_the_column(tmp_path):
    with pytest.raises(InvalidArgument, match="'job', 'income'"):
        load_dataset(written(tmp_path, "age,other\n1,2\n"), schema=SCHEMA)


@pytest.mark.parametrize("header", ["age,age,income", "age,,income"])
def test_a_header_must_name_every_column_once(tmp_path, header):
    with pytest.raises(InvalidArgument, match="once"):
        load_dataset(written(tmp_path, header + "\n1,2,3\n"), schema=SCHEMA)


def test_without_a_schema_the_refusal_says_what_is_missing(tmp_path):
    path = written(tmp_path, "age,job,income\n25,clerk,low\n")
    with pytest.raises(
        MissingDeclaration, match=r"label set of 'income' and bounds .* 'age', 'job'\. .*public_schema_from"
    ):
        load_dataset(path, target="income")
    with pytest.raises(MissingDeclaration, match=r"label column \(target\)"):
        load_dataset(path)
    with pytest.raises(MissingDeclaration, match="target must be a column"):
        load_dataset(path, target="salary")


def test_a_test_file_becomes_the_test_split(tmp_path):
    train = written(tmp_path, "age,job,income\n25,clerk,low\n")
    test = written(tmp_path, "age,job,income\n75,sales,high\n50,sales,low\n", "test.csv")
    found = load_dataset(train, schema=SCHEMA, test=test)
    assert (len(found.train), len(found.test)) == (1, 2)


def test_a_schema_file_serves_as_well(tmp_path):
    (tmp_path / "s.json").write_text(SCHEMA.to_json())
    found = load_dataset(
        written(tmp_path, "age,job,income\n25,clerk,low\n"), schema=tmp_path / "s.json", target="income"
    )
    assert found.schema == SCHEMA
    with pytest.raises(InvalidArgument, match="'income'"):
        load_dataset(tmp_path / "t.csv", schema=SCHEMA, target="age")


def test_a_public_sample_gives_the_schema_and_is_marked(tmp_path):
    sample = written(tmp_path, "age,job,income\n20,b,yes\n70,a,no\n?,NA,yes\n", "sample.csv")
    private = written(tmp_path, "age,job,income\n90,a,yes\n45,c,no\n")
    found = load_dataset(private, target="income", public_schema_from=sample)
    assert found.schema == Schema(
        columns=(NumericColumn(name="age", low=20, high=70), CategoricalColumn(name="job", categories=("a", "b"))),
        target="income",
        labels=("no", "yes"),
        origin="public_sample",
    )
    assert found.train.features.tolist() == [[1, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("age,income\n5,yes\n5,no\n", "bounds of column 'age'"),
        ("age,income\n5,yes\n6,yes\n", "labels of target 'income'"),
        ("age,income\n" + "".join(f"v{i},{i % 2}\n" for i in range(101)), "categories of column 'age'"),
        ("age,income\n,yes\n?,no\n", "categories of column 'age'"),
    ],
)
def test_a_sample_that_does_not_settle_a_column_is_refused(tmp_path, text, said):
    sample = written(tmp_path, text, "sample.csv")
    private = written(tmp_path, "age,income\n90,yes\n")
    with pytest.raises(MissingDeclaration, match=said):
        load_dataset(private, target="income", public_schema_from=sample)


def test_the_private_file_is_no_public_sample(tmp_path):
    path = written(tmp_path, "age,income\n1,yes\n2,no\n")
    (tmp_path / "link.csv").symlink_to(path)
    for sample in (path, tmp_path / "link.csv"):
        with pytest.raises(InvalidArgument, match="public sample"):
            load_dataset(path, target="income", public_schema_from=sample)


def test_misplaced_arguments_are_refused(tmp_path):
    path = written(tmp_path, "age,job,income\n25,clerk,low\n")
    with pytest.raises(MissingDeclaration, match="target"):
        load_dataset(path, public_schema_from=written(tmp_path, "age,job,income\n", "s.csv"))
    with pytest.raises(InvalidArgument, match="alone"):
        load_dataset(path, schema=SCHEMA, public_schema_from=tmp_path / "s.csv", target="income")
    with pytest.raises(InvalidArgument, match="schema"):
        load_dataset("adult", schema=SCHEMA)
    with pytest.raises(InvalidArgument, match="'income'"):
        load_dataset("adult", target="age")
    with pytest.raises(InvalidArgument, match="adult, mnist"):
        load_dataset("adlut")


cells = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
rows = st.tuples(
    st.one_of(cells, st.sampled_from(["1", "50", "x", ""])),
    st.one_of(cells, st.sampled_from(["clerk", "sales"])),
    st.one_of(cells, st.sampled_from(["low", "high"])),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=st.lists(rows, min_size=1, max_size=5), data=st.data())
def test_removing_one_row_removes_at_most_its_own_record(tmp_path, table, data):
    def encoded(part, name):
        with (tmp_path / name).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("age", "job", "income"), *part])
        train = load_dataset(tmp_path / name, schema=SCHEMA).train
        return [(*row, label) for row, label in zip(train.features.tolist(), train.labels.tolist(), strict=True)]

    left_out = data.draw(st.integers(0, len(table) - 1))
    whole = encoded(table, "whole.csv")
    rest = encoded([row for i, row in enumerate(table) if i != left_out], "rest.csv")
    alone = encoded([table[left_out]], "alone.csv")
    assert len(alone) <= 1
    assert sorted(map(str, whole)) == sorted(map(str, rest + alone))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.floats().map(repr),
            st.integers(-(10**18), 10**18).map(str),
            st.from_regex(r"[+-]?[0-9]{0,3}[.,_ ]?[0-9]{0,3}([eE][+-]?[0-9]{1,3})?", fullmatch=True),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_numbers_are_read_as_python_reads_them(tmp_path, written_numbers):
    (tmp_path / "n.csv").write_text("x,y\n" + "".join(f'"{text}",1\n' for text in written_numbers))
    found = read_columns(tmp_path / "n.csv", {"x": "number"})["x"]
    np.testing.assert_array_equal(found, [to_number(text) for text in written_numbers])
