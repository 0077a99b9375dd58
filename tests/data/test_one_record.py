"""One record moves what is loaded by at most one record, whatever it holds and wherever it stands, in every reader."""

import bz2
import csv
import gzip
import io
import warnings
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sordino.data import ArraySchema, CategoricalColumn, NumericColumn, Schema, load_dataset, mapped_table
from sordino.data import tables as rule
from sordino.errors import InvalidArgument

SCHEMA = Schema(
    columns=(NumericColumn(name="age", low=0, high=100), CategoricalColumn(name="job", categories=("clerk", "sales"))),
    target="income",
    labels=("low", "high"),
)
HEADER = b"age,job,income,remark\n"
ORDINARY = [b"%d,%s,%s,ok" % (20 + k, (b"clerk", b"sales")[k % 2], (b"low", b"high")[k % 3 == 0]) for k in range(40)]


def rows(records):
    return [(*map(float, row), int(label)) for row, label in zip(records.features, records.labels, strict=True)]


def loaded(folder, lines, *, name="t.csv", header=HEADER, pack=bytes, end=b"\n"):
    path = folder / name
    path.write_bytes(pack(header + b"".join(line + end for line in lines)))
    return rows(load_dataset(path, schema=SCHEMA).train)


HOSTILE = {
    "a quote at the end that never closes": b'30,clerk,low,"Fine, he said',
    "a quote in the first cell": b'"30,clerk,low,note',
    "a quote in a needed cell": b'30,"clerk,low,note',
    "only a quote": b'"',
    "three quotes": b'"""',
    "text behind a quote": b'30,clerk,low,"a"b',
    "an inch mark": b'30,clerk,low,a 5" pipe',
    "Latin-1": b"30,clerk,low,Jos\xe9",
    "Latin-1 in a needed cell": b"30,Caf\xe9,low,x",
    "Latin-1 in a line of too many cells": b"30,\xe9,low,x,\xff",
    "UTF-16": "30,clerk,low,x".encode("utf-16"),
    "half of a character": b"30,clerk,low,\xe2\x80",
    "zeros": b"30,cl\0erk,low,\0\0",
    "a carriage return": b"30,clerk,low,a\rb",
    "a carriage return and a whole line": b"30,clerk,low,a\r31,sales,high,b",
    "a carriage return in quotes": b'30,clerk,low,"a\rb"',
    "carriage returns only": b"\r\r\r",
    "other separators of lines": "30,clerk,low,a\u2028b\x0b\x0c\x85c".encode(),
    "too few cells": b"30,clerk",
    "too many cells": b"30,clerk,low,a,b,c",
    "nothing": b"",
    "white space": b"   ",
    "separators only": b",,,",
    "a byte-order mark": b"\xef\xbb\xbf30,clerk,low,x",
    "a remark that is a comment": b"#30,clerk,low,x",
    "a backslash before a quote": b'30,clerk,low,\\"x',
    "huge numbers": b"1" * 5000 + b",clerk,low,x",
    "a null": b"NULL,\\N,low,NA",
    "the header again": HEADER.strip(),
    "a large cell": b"30,clerk,low," + b"x" * (17 << 20),
    "a large cell in quotes": b'30,clerk,low,"' + b"x" * (17 << 20),
}


@pytest.mark.parametrize("place", [0, 13, 40])
@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.csv.gz"])
@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_line_changes_no_other_record(tmp_path, what, name, place):
    if len(HOSTILE[what]) > 1 << 20 and (place != 13 or name.endswith("gz")):
        pytest.skip("large")

    def read(lines):
        if name == "t.tsv":
            lines = [line.replace(b",", b"\t") for line in lines]
            return loaded(tmp_path, lines, name=name, header=HEADER.replace(b",", b"\t"))
        return loaded(tmp_path, lines, name=name, pack=gzip.compress if name.endswith("gz") else bytes)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ordinary = read(ORDINARY)
        found = read([*ORDINARY[:place], HOSTILE[what], *ORDINARY[place:]])
    assert len(ordinary) == 40
    assert found[:place] == ordinary[:place]
    assert found[-(40 - place) :] == ordinary[place:] or place == 40
    assert len(found) in (40, 41)


def test_nothing_is_printed_about_a_line_that_is_not_utf8(tmp_path, capfd):
    loaded(tmp_path, [*ORDINARY, b"30,\xe9"])
    assert capfd.readouterr() == ("", "")


def test_a_line_counts_the_same_wherever_blocks_begin(tmp_path, monkeypatch):
    lines = [*ORDINARY[:5], *(value for value in HOSTILE.values() if len(value) < 1000), *ORDINARY[5:]]
    whole = loaded(tmp_path, lines)
    for size in (1, 2, 7, 100):
        monkeypatch.setattr(rule, "_BLOCK", size)
        assert loaded(tmp_path, lines) == whole


@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize(("length", "kept"), [(64, 3), (65, 2), (200, 2)])
def test_only_the_line_that_is_too_long_is_left_out(tmp_path, monkeypatch, block, length, kept):
    monkeypatch.setattr(rule, "LONGEST_LINE", 64)
    monkeypatch.setattr(rule, "_BLOCK", block)
    start = b"30,clerk,low,"
    long = start + b"x" * (length - len(start))
    for lines in ([long, *ORDINARY[:2]], [ORDINARY[0], long, ORDINARY[1]], [*ORDINARY[:2], long]):
        assert len(loaded(tmp_path, lines)) == kept


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_line_ends_and_a_missing_last_one_make_no_difference(tmp_path, end):
    expected = loaded(tmp_path, ORDINARY)
    assert loaded(tmp_path, ORDINARY, end=end) == expected
    (tmp_path / "t.csv").write_bytes(HEADER.strip() + end + end.join(ORDINARY))
    assert rows(load_dataset(tmp_path / "t.csv", schema=SCHEMA).train) == expected
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf" + HEADER + b"\n\r\n".join(ORDINARY))
    assert rows(load_dataset(tmp_path / "t.csv", schema=SCHEMA).train) == expected


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (HEADER.replace(b"\n", b"\r") + b"\r".join(ORDINARY), "carriage return"),
        (b'age,job,"income,remark\n', "close each quoted cell"),
        ("age,job,income,remark\n".encode("utf-16"), "UTF-8"),
        (b"age,job,income,re\xe9\n", "UTF-8"),
        (b"x" * 65 + b"\n", "at most 64 bytes"),
    ],
)
def test_a_header_that_is_none_is_refused_by_its_fault(tmp_path, monkeypatch, header, said):
    monkeypatch.setattr(rule, "LONGEST_LINE", 64 if said.startswith("at most") else 1 << 24)
    (tmp_path / "t.csv").write_bytes(header)
    with pytest.raises(InvalidArgument, match=said):
        load_dataset(tmp_path / "t.csv", schema=SCHEMA)


def test_cells_of_several_lines_are_read_and_hold_nothing_of_their_neighbors(tmp_path):
    notes = ['said "better",\nplan 3', "one\n\ntwo\r\nthree", "ends with a break\n", 'quoted "so"\n"and so", too', "x"]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([[20 + k, "clerk", "low", note] for k, note in enumerate(notes)])
    lines = text.getvalue().encode().removesuffix(b"\r\n")
    expected = loaded(tmp_path, [b"%d,clerk,low,x" % (20 + k) for k in range(5)])
    assert loaded(tmp_path, [lines]) == expected
    # A line that stays open takes none of the lines of the record behind it.
    records = [csv_line(20 + k, note) for k, note in enumerate(notes)]
    for place in range(6):
        assert loaded(tmp_path, [*records[:place], b'30,clerk,low,"Fine', *records[place:]]) == expected


def csv_line(age, note):
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="").writerow([age, "clerk", "low", note])
    return text.getvalue().encode()


fragment = st.sampled_from(
    [
        b'"',
        b",",
        b'""',
        b"\r",
        b"\0",
        b"\xff",
        b"30",
        b"clerk",
        b"low",
        b" ",
        b'"a',
        b'a"',
        b'","',
        b'5"',
        b"\\",
        b"\xe2",
    ]
)
hostile = st.one_of(
    st.lists(fragment, max_size=12).map(b"".join),
    st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")),
    st.sampled_from([line for line in HOSTILE.values() if len(line) < 1000]),
    st.tuples(
        st.sampled_from([b"30", b'"4"']),
        st.sampled_from([b"clerk", b'"sales"']),
        st.just(b"low"),
        st.lists(fragment, max_size=4).map(b"".join),
    ).map(b",".join),
)
proper = st.tuples(st.integers(0, 99), st.text(st.sampled_from('a",\n '), max_size=8)).map(
    lambda record: csv_line(*record)
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.lists(hostile | proper, max_size=4),
    line=hostile,
    after=st.lists(hostile | proper, max_size=4),
    block=st.sampled_from([1, 5, 1 << 20]),
)
def test_any_line_between_any_records_adds_at_most_its_own(tmp_path, before, line, after, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule, "_BLOCK", block)
        without = loaded(tmp_path, [*before, *after])
        # Not within a record of several lines: that would be another record, not one more.
        assume(loaded(tmp_path, before) + loaded(tmp_path, after) == without)
        found = loaded(tmp_path, [*before, line, *after])
    assert not Counter(without) - Counter(found)
    assert len(found) <= len(without) + 1
    rest = iter(found)
    assert all(record in rest for record in without)  # in the same order


def test_a_mapped_table_has_the_same_records(tmp_path):
    lines = [*ORDINARY[:9], *(line for line in HOSTILE.values() if len(line) < 1000), *ORDINARY[9:]]
    expected = loaded(tmp_path, lines, name="t.csv.bz2", pack=bz2.compress)
    mapped = mapped_table(tmp_path / "t.csv.bz2", schema=SCHEMA, folder=tmp_path / "mapped")
    assert [(*map(float, row), int(label)) for row, label in mapped.__getitems__(range(len(mapped)))] == expected


# --- Parquet ---------------------------------------------------------------------------------------------------------

VALUES = {
    "numbers": ([1.0, 50.0], [None, np.nan, np.inf, -np.inf, 1e308], pa.float64()),
    "half precision": (np.array([1, 50], np.float16), np.array([np.nan, np.inf], np.float16), pa.float16()),
    "whole numbers": ([1, 50], [None, 2**64 - 1, 0], pa.uint64()),
    "texts": (["1", "50"], [None, "", "x", "45%", "1,234", "\0", "9" * 400], pa.string()),
    "bytes": ([b"1", b"50"], [None, b"\xff", b"\0" * 9], pa.binary()),
    "booleans": ([True, False], [None, True], pa.bool_()),
    "dictionary": (["1", "50"], [None, "\ud7ff"], pa.dictionary(pa.int8(), pa.string())),
}


@pytest.mark.parametrize("place", ["age", "job", "income"])
@pytest.mark.parametrize("kind", VALUES)
def test_a_strange_value_of_a_parquet_column_changes_no_other_record(tmp_path, kind, place):
    usual, strange, type_ = VALUES[kind]

    def read(values):
        fields = {"age": [20] * len(values), "job": ["clerk"] * len(values), "income": ["low"] * len(values)}
        pq.write_table(pa.table(fields | {place: pa.array(values, type_)}), tmp_path / "t.parquet", row_group_size=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            whole = rows(load_dataset(tmp_path / "t.parquet", schema=SCHEMA).train)
            mapped = mapped_table(tmp_path / "t.parquet", schema=SCHEMA, folder=tmp_path / "m", rows=3)
        assert [(*map(float, row), int(label)) for row, label in mapped.__getitems__(range(len(mapped)))] == whole
        return whole

    usual, strange = list(usual), list(strange)
    expected = read(usual * 2)
    for value in strange:
        found = read([*usual, value, *usual])
        assert not Counter(expected) - Counter(found)
        assert len(found) <= len(expected) + 1


def test_a_text_column_with_bytes_that_are_no_text_stops_nothing(tmp_path):
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([b"Caf\xe9", b"30"]).buffers())
    for place in ("age", "job", "income"):
        fields = {"age": [20, 20], "job": ["clerk", "clerk"], "income": ["low", "low"], place: broken}
        for name, column in (("plain", broken), ("dictionary", broken.cast(pa.binary()).dictionary_encode())):
            pq.write_table(pa.table(fields | {place: column}), tmp_path / f"{name}.parquet")
            found = load_dataset(tmp_path / f"{name}.parquet", schema=SCHEMA).train
            assert len(found) == (0 if place == "income" else 2)


def test_a_nested_or_dated_column_is_refused_by_its_type(tmp_path):
    for column in (pa.array([[1], None]), pa.array([None, 3], pa.date32()), pa.array([1, None], pa.timestamp("s"))):
        for place in ("age", "job", "income"):
            fields = {"age": [1, 2], "job": ["clerk", None], "income": ["low", "low"], place: column}
            pq.write_table(pa.table(fields), tmp_path / "t.parquet")
            with pytest.raises(InvalidArgument, match=f"column {place!r}.*must hold numbers, texts or booleans"):
                load_dataset(tmp_path / "t.parquet", schema=SCHEMA)


# --- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [np.nan, np.inf, -np.inf, -1.0, 0.5, 2.0, 1e300])
def test_a_missing_label_of_an_array_leaves_one_record_out(tmp_path, label):
    x = np.arange(24.0).reshape(6, 4) / 24
    schema = ArraySchema(labels=("a", "b"), low=0, high=1)
    np.savez(tmp_path / "t.npz", x=x, y=np.array([0, 1, 0, label, 1, 1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load_dataset(tmp_path / "t.npz", schema=schema).train
    assert found.labels.tolist() == [0, 1, 0, 1, 1]
    np.testing.assert_allclose(found.features, np.delete(x, 3, axis=0), rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.longdouble("1e4000")])
def test_a_strange_number_of_an_array_changes_its_record_only(tmp_path, value):
    x = np.full((3, 4), 0.25, dtype=np.longdouble)
    x[1, 2] = value
    np.savez(tmp_path / "t.npz", x=x, y=np.array([True, False, True]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load_dataset(tmp_path / "t.npz", schema=ArraySchema(labels=("a", "b"), low=0, high=1)).train
    assert found.labels.tolist() == [1, 0, 1]
    assert found.features[[0, 2]].tolist() == [[0.25] * 4] * 2
    assert np.isfinite(found.features).all()


def test_arrays_of_objects_and_texts_are_refused_by_their_type(tmp_path):
    for labels in (np.array([0, None]), np.array(["a", "b"])):
        np.savez(tmp_path / "t.npz", x=np.zeros((2, 2)), y=labels)
        with pytest.raises(InvalidArgument, match=r"t\.npz"):
            load_dataset(tmp_path / "t.npz", schema=ArraySchema(labels=("a", "b"), low=0, high=1))


# --- what a cell says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "parquet", "dictionary"])
@pytest.mark.parametrize(
    ("cell", "feature"),
    [
        ("45%", -0.1),
        ("45 %", -0.1),
        ("1,234", 1),
        ("-1,234.5", -1),
        ("+0,050", 0),
        ("True", -0.98),
        ("FALSE", -1),
        ("%", 0),
        ("1,23", 0),
        ("12,34,567", 0),
        ("1.234,5", 0),
        ("yes", 0),
        ("2020-01-01", 0),
        ("٥٠", 0.0),
    ],
)
def test_a_number_written_as_text_is_read_cell_by_cell(tmp_path, kind, cell, feature):
    if kind == "csv":
        (tmp_path / "t.csv").write_text(f'age,job,income\n"{cell}",clerk,low\n20,clerk,low\n', encoding="utf-8")
    else:
        column = pa.array([cell, "20"])
        column = column.dictionary_encode() if kind == "dictionary" else column
        pq.write_table(pa.table({"age": column, "job": ["clerk"] * 2, "income": ["low"] * 2}), tmp_path / "t.parquet")
    found = load_dataset(tmp_path / ("t.csv" if kind == "csv" else "t.parquet"), schema=SCHEMA).train
    np.testing.assert_allclose(found.features[:, 0], [feature, -0.6], atol=1e-6)


def test_booleans_are_numbers_where_numbers_are_declared_and_texts_where_categories_are(tmp_path):
    truth = [True, False, None]
    schema = Schema(
        columns=(NumericColumn(name="a", low=0, high=1), CategoricalColumn(name="b", categories=("true", "false"))),
        target="y",
        labels=("false", "true"),
    )
    pq.write_table(pa.table({"a": truth, "b": truth, "y": [True, False, True]}), tmp_path / "t.parquet")
    found = load_dataset(tmp_path / "t.parquet", schema=schema).train
    assert found.features.tolist() == [[1, 1, 0], [-1, 0, 1], [0, 0, 0]]
    assert found.labels.tolist() == [1, 0, 1]


def test_numbers_are_categories_at_their_own_precision(tmp_path):
    schema = Schema(
        columns=(CategoricalColumn(name="a", categories=("0.1", "2", str(2**53 + 1))),), target="y", labels=("0", "1")
    )
    expected = [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    for type_ in (pa.float32(), pa.float64()):
        pq.write_table(pa.table({"a": pa.array([0.1, 2.0, None], type_), "y": [0, 1, 0]}), tmp_path / "t.parquet")
        assert load_dataset(tmp_path / "t.parquet", schema=schema).train.features.tolist() == expected
    pq.write_table(pa.table({"a": [2**53 + 1, 2, 2**53], "y": [0, 1, 0]}), tmp_path / "t.parquet")
    assert load_dataset(tmp_path / "t.parquet", schema=schema).train.features.tolist() == [
        [0, 0, 1],
        [0, 1, 0],
        [0, 0, 0],
    ]


def test_a_public_sample_reads_cells_by_the_same_rule(tmp_path):
    (tmp_path / "sample.csv").write_text('a,b,y\n"10%",True,10\n"1,250",False,9\n')
    (tmp_path / "private.csv").write_text('a,b,y\n"630",True,9\n')
    found = load_dataset(tmp_path / "private.csv", target="y", public_schema_from=tmp_path / "sample.csv")
    assert found.schema.columns == (
        NumericColumn(name="a", low=10, high=1250),
        CategoricalColumn(name="b", categories=("False", "True")),
    )
    assert found.labels == ("9", "10")
    assert found.train.features.tolist() == [[0, 0, 1]]
