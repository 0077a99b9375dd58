"""Types of columns, formats of files and tables in memory: what each value becomes, the same wherever it comes from."""

import datetime
import json
import math
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.data import (
    BooleanColumn,
    CategoricalColumn,
    DateColumn,
    NumericColumn,
    OrdinalColumn,
    Schema,
    TableFormat,
    load_dataset,
    mapped_table,
)
from sordino.data.discretization import TableDomain
from sordino.data.schema import read_schema
from sordino.errors import InvalidArgument, MissingDeclaration

COLUMNS = (
    NumericColumn(name="dose", low=-1, high=3, missing=True),
    NumericColumn(name="age", low=0, high=100, whole=True),
    NumericColumn(name="cost", low=1, high=100, log=True, missing=True),
    CategoricalColumn(name="ward", categories=("Surgery", "Pädiatrie"), other=True, missing=True),
    OrdinalColumn(name="pain", levels=("none", "some", "bad"), missing=True),
    BooleanColumn(name="smoker", missing=True),
    BooleanColumn(name="insured", true=("ja",), false=("nein",)),
    DateColumn(name="admitted", low="2023-01-01", high="2023-12-31", missing=True),
)
SCHEMA = Schema(columns=COLUMNS, target="again", labels=("0", "1"))
NAMES = [column.name for column in COLUMNS]


def column_of(name):
    return next(column for column in COLUMNS if column.name == name)


def encoded(column, values, kind=None):
    """Features of one column with these entries."""
    schema = Schema(columns=(column,), target="again", labels=("0", "1"))
    frame = pa.table({column.name: pa.array(values, type=kind), "again": ["1"] * len(values)})
    return schema.encode(frame).features.tolist()


HALF_OF_2023 = 2 * (181 / 364) - 1
CASES = {
    "dose": [("1", [0, 0]), ("-9", [-1, 0]), ("1e9", [1, 0]), ("", [0, 1]), ("x", [0, 1]), ("inf", [1, 0])],
    "age": [("25", [-0.5]), ("25.4", [-0.5]), ("24.5", [-0.52]), ("-0.4", [-1]), ("?", [0])],
    "cost": [("10", [0, 0]), ("1", [-1, 0]), ("0", [-1, 0]), ("-3", [-1, 0]), ("1000", [1, 0]), ("NA", [0, 1])],
    "ward": [
        ("Surgery", [1, 0, 0, 0]),
        ("Pädiatrie", [0, 1, 0, 0]),
        ("surgery", [0, 0, 1, 0]),
        ("", [0, 0, 0, 1]),
        ("n/a", [0, 0, 0, 1]),
        ("None", [0, 0, 0, 1]),
    ],
    "pain": [("none", [-1, 0]), ("some", [0, 0]), ("bad", [1, 0]), ("worse", [0, 1]), ("", [0, 1])],
    "smoker": [("Yes", [1, 0]), ("TRUE", [1, 0]), ("1", [1, 0]), ("n", [-1, 0]), ("perhaps", [0, 1]), ("", [0, 1])],
    "insured": [("ja", [1]), ("Nein", [-1]), ("yes", [0])],
    "admitted": [
        ("2023-01-01", [-1, 0]),
        ("2023-12-31", [1, 0]),
        ("2023-07-01", [HALF_OF_2023, 0]),
        ("2023-07-01T00:00:00", [HALF_OF_2023, 0]),
        ("2023-07-01 02:00+02:00", [HALF_OF_2023, 0]),
        ("1815-12-10", [-1, 0]),
        ("9999-12-31", [1, 0]),
        ("2023-02-30", [0, 1]),
        ("01.07.2023", [0, 1]),
        ("20230701", [0, 1]),
        ("", [0, 1]),
    ],
}


@pytest.mark.parametrize(
    ("name", "value", "features"), [(name, *case) for name, cases in CASES.items() for case in cases]
)
def test_what_a_value_becomes(name, value, features):
    assert encoded(column_of(name), [value])[0] == pytest.approx(features, abs=1e-6)


def test_a_listed_value_is_never_missing_and_other_is_no_name_of_a_category():
    column = CategoricalColumn(name="c", categories=("None", "other"), other=True, missing=True)
    assert encoded(column, ["None", "other", "x", ""]) == np.eye(4).tolist()
    assert column.groups == ("None", "other", "(other)", "missing")
    assert column.feature_names == ("c=None", "c=other", "c is other", "c is missing")


def test_dates_are_read_in_a_pattern_of_their_own_and_always_in_iso():
    column = DateColumn(name="d", low="2023-01-01", high="2023-12-31", format="%d.%m.%Y")
    assert encoded(column, ["31.12.2023", "2023-12-31", "12/31/2023"]) == [[1.0], [1.0], [0.0]]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=9), st.floats().map(repr), st.dates().map(str)), min_size=1, max_size=9))
def test_the_features_of_a_column_have_norm_at_most_one_whatever_it_holds(values):
    for column in COLUMNS:
        for features in encoded(column, values, pa.string()):
            assert len(features) == column.width == len(column.feature_names)
            assert np.isfinite(features).all()
            assert np.linalg.norm(features) <= 1
    assert SCHEMA.data_norm == math.sqrt(len(COLUMNS))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: NumericColumn(name="a", low=0, high=1, log=True), "above 0 on a log scale"),
        (lambda: NumericColumn(name="a", low=0.5, high=1, whole=True), "whole numbers"),
        (lambda: OrdinalColumn(name="a", levels=("one",)), "at least 2"),
        (lambda: BooleanColumn(name="a", true=("Ja",), false=("ja", "n")), "different values"),
        (lambda: DateColumn(name="a", low="2023-01-01", high="2022-01-01"), "in order"),
        (lambda: DateColumn(name="a", low="1.1.2023", high="2024-01-01"), "ISO 8601"),
        (lambda: DateColumn(name="a", low="2023-01-01", high="2024-01-01", format="%H:%M"), "year, month and day"),
        (lambda: DateColumn(name="a", low="2023-01-01", high="2024-01-01", format="dd.mm.yyyy"), "year, month and day"),
        (lambda: TableFormat(separator=";;"), "one character"),
        (lambda: TableFormat(separator='"'), "one character"),
        (lambda: TableFormat(decimal=";"), "decimal"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(make, said):
    with pytest.raises(InvalidArgument, match=said):
        make()


# --- schema files ---


def test_a_schema_with_every_type_survives_json():
    schema = replace(SCHEMA, table_format=TableFormat(separator="tab", decimal=",", encoding="Latin-1"))
    assert Schema.from_json(schema.to_json()) == schema
    assert json.loads(schema.to_json())["format"] == {"separator": "\t", "decimal": ",", "encoding": "iso8859-1"}
    assert "format" not in json.loads(SCHEMA.to_json())


def test_a_schema_in_toml_is_the_same_one(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text(
        """
        target = "again"
        labels = ["0", "1"]
        columns = [
            {name = "dose", type = "numeric", low = -1, high = 3, missing = true},
            {name = "age", type = "integer", low = 0, high = 100},
            {name = "cost", type = "numeric", low = 1, high = 100, log = true, missing = true},
            {name = "ward", type = "category", categories = ["Surgery", "Pädiatrie"], other = true, missing = true},
            {name = "pain", type = "ordinal", levels = ["none", "some", "bad"], missing = true},
            {name = "smoker", type = "boolean", missing = true},
            {name = "insured", type = "boolean", true = ["ja"], false = ["nein"]},
            {name = "admitted", type = "date", low = 2023-01-01, high = "2023-12-31", missing = true},
        ]
        """,
        encoding="utf-8",
    )
    assert read_schema(path) == SCHEMA
    path.write_text("target = \n")
    with pytest.raises(InvalidArgument, match=r"'s\.toml' must be TOML text, but: .*line 1"):
        read_schema(path)


def test_what_a_draft_leaves_open_is_missing():
    fields = {"target": "?", "labels": "?", "columns": [{"name": "a", "type": "?"}, {"name": "b", "type": "ordinal"}]}
    with pytest.raises(MissingDeclaration) as caught:
        Schema.from_dict(fields)
    for part in ("'target'", "'labels'", "'type' of column 'a'", "'levels' of column 'b'"):
        assert part in str(caught.value)
    with pytest.raises(InvalidArgument, match="log of column 'a' must be true or false, got 'yes'"):
        Schema.from_dict(
            {
                "target": "t",
                "labels": ["a", "b"],
                "columns": [{"name": "a", "type": "numeric", "low": 1, "high": 2, "log": "yes"}],
            }
        )
    with pytest.raises(InvalidArgument, match="'levels'"):
        Schema.from_dict(
            {"target": "t", "labels": ["a", "b"], "columns": [{"name": "a", "type": "boolean", "levels": ["a", "b"]}]}
        )


# --- the same records from everywhere ---

ROWS = [
    ("1.5", "40", "12.25", "Surgery", "bad", "yes", "ja", "2023-03-01", "1"),
    ("", "", "", "", "", "", "", "", "0"),
    ("-0.25", "7", "99.5", "Pädiatrie", "none", "no", "nein", "2023-11-30", "0"),
    ("2", "101", "1000", "Elsewhere", "some", "yes", "ja", "2024-02-29", "1"),
    ("0.1", "3", "2.5", "Surgery", "bad", "no", "ja", "2023-06-15", "2"),
]


def written(path, separator=",", decimal=".", encoding="utf-8"):
    def cell(text, name):
        return text.replace(".", decimal) if name in ("dose", "cost") else text

    def quoted(text):
        return f'"{text}"' if separator in text else text

    lines = [separator.join([*NAMES, "again"])]
    lines += [
        separator.join(quoted(cell(text, name)) for text, name in zip(row, [*NAMES, "again"], strict=False))
        for row in ROWS
    ]
    path.write_bytes(("\r\n".join(lines) + "\r\n").encode(encoding))
    return path


def arrow_table():
    """The same table with types of its own."""
    columns = dict(zip([*NAMES, "again"], zip(*ROWS, strict=False), strict=False))
    typed = {name: [text or None for text in texts] for name, texts in columns.items()}
    for name in ("dose", "cost"):
        typed[name] = [None if text is None else float(text) for text in typed[name]]
    typed["age"] = pa.array([None if text is None else int(text) for text in typed["age"]], type=pa.int16())
    typed["smoker"] = [None if text is None else text == "yes" for text in typed["smoker"]]
    typed["ward"] = pa.array(typed["ward"]).dictionary_encode()
    typed["admitted"] = [None if text is None else datetime.date.fromisoformat(text) for text in typed["admitted"]]
    typed["again"] = [int(text) for text in typed["again"]]
    return pa.table(typed)


def same(found, expected):
    assert len(expected) == 4
    np.testing.assert_array_equal(found.features, expected.features)
    np.testing.assert_array_equal(found.labels, expected.labels)


@pytest.mark.parametrize(
    "form",
    [
        TableFormat(separator=";", decimal=",", encoding="cp1252"),
        TableFormat(separator="|", encoding="latin-1"),
        TableFormat(separator="tab"),
        TableFormat(decimal=","),
        TableFormat(encoding="iso8859-15"),
    ],
)
def test_files_in_every_format_give_the_same_records(tmp_path, form):
    expected = load_dataset(written(tmp_path / "plain.csv"), schema=SCHEMA).train
    path = written(tmp_path / "other.csv", form.separator or ",", form.decimal, form.encoding)
    same(load_dataset(path, schema=SCHEMA, table_format=form).train, expected)
    own = replace(SCHEMA, table_format=form)
    same(load_dataset(path, schema=own).train, expected)
    mapped = mapped_table(path, schema=own, folder=tmp_path / "mapped")
    np.testing.assert_array_equal(np.stack([mapped[i][0] for i in range(4)]), expected.features)


def test_parquet_feather_and_tables_in_memory_give_the_same_records(tmp_path):
    expected = load_dataset(written(tmp_path / "plain.csv"), schema=SCHEMA).train
    table = arrow_table()
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    pa.feather.write_feather(table, tmp_path / "t.feather", chunksize=2)
    pa.feather.write_feather(table, tmp_path / "u.feather", compression="uncompressed")
    for name in ("t.parquet", "t.feather", "u.feather"):
        same(load_dataset(tmp_path / name, schema=SCHEMA).train, expected)
    for kind in ("s", "ms", "us", "ns"):
        place = table.column_names.index("admitted")
        stamped = table.set_column(place, "admitted", table["admitted"].cast(pa.timestamp(kind)))
        same(SCHEMA.encode(stamped), expected)
    same(SCHEMA.encode(table), expected)


class Series:
    """A column as pandas has it."""

    def __init__(self, values, kind):
        self.values, self.dtype = values, kind

    def to_numpy(self, dtype=None):
        return self.values if dtype is None else self.values.astype(dtype)

    def __array__(self, dtype=None, copy=None):
        return self.values


class Frame:
    """A table as pandas has it."""

    def __init__(self, series):
        self._series = series

    @property
    def columns(self):
        return list(self._series)

    @property
    def dtypes(self):
        return [series.dtype for series in self._series.values()]

    def __getitem__(self, name):
        return self._series[name]


def test_a_data_frame_of_numbers_dates_and_objects_gives_the_same_records(tmp_path):
    expected = load_dataset(written(tmp_path / "plain.csv"), schema=SCHEMA).train
    texts = dict(zip([*NAMES, "again"], zip(*ROWS, strict=False), strict=False))

    def objects(values):
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return Series(array, array.dtype)

    frame = {name: objects([text or None for text in column]) for name, column in texts.items()}
    for name in ("dose", "age"):
        numbers = np.array([float(text or "nan") for text in texts[name]])
        frame[name] = Series(numbers, numbers.dtype)
    frame["cost"] = objects([12.25, math.nan, Decimal("99.5"), np.int64(1000), "2.5"])
    frame["smoker"] = objects([True, None, np.bool_(False), "yes", False])
    dates = np.array([text or "NaT" for text in texts["admitted"]], dtype="datetime64[ns]")
    frame["admitted"] = Series(dates, dates.dtype)
    frame["again"] = Series(np.array([1.0, 0.0, 0.0, 1.0, 2.0]), np.dtype(float))
    same(SCHEMA.encode(Frame(frame)), expected)
    frame["pain"] = objects(["bad", [1], "none", "some", {}])
    assert SCHEMA.encode(Frame(frame)).features.shape == expected.features.shape
    other = np.zeros(5, dtype="timedelta64[s]")
    with pytest.raises(InvalidArgument, match=r"column 'pain' of the table must hold .* got timedelta64"):
        SCHEMA.encode(Frame({**frame, "pain": Series(other, other.dtype)}))
    del frame["pain"]
    with pytest.raises(InvalidArgument, match=r"the columns of the table must include .* none named 'pain'"):
        SCHEMA.encode(Frame(frame))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"na_values": "?"},
        {"parse_dates": ["admitted"]},
        {"dtype": str},
        {"dtype_backend": "numpy_nullable"},
        {"dtype_backend": "pyarrow"},
        {"dtype": {"ward": "category", "again": "category"}},
    ],
)
def test_pandas_reads_the_same_records(tmp_path, options):
    pandas = pytest.importorskip("pandas")
    path = written(tmp_path / "plain.csv")
    frame = pandas.read_csv(path, **options)
    same(SCHEMA.encode(frame), load_dataset(path, schema=SCHEMA).train)


def test_truth_values_match_labels_as_pandas_prints_them():
    schema = Schema(columns=(COLUMNS[0],), target="again", labels=("False", "True"))
    table = pa.table({"dose": [1.0, 2.0], "again": [True, False]})
    assert schema.encode(table).labels.tolist() == [1, 0]


@pytest.mark.parametrize("what", [[[1, 2]], np.ones((2, 2)), "people.csv"])
def test_only_tables_with_named_columns_are_encoded(what):
    with pytest.raises(InvalidArgument, match="must be a DataFrame"):
        SCHEMA.encode(what)


# --- formats ---


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3,5", 3.5),
        ("1.234,5", 1234.5),
        ("1.234", 1234.0),
        ("-0,25", -0.25),
        ("45,5%", 45.5),
        ("3.5", None),
        ("1e3", 1000.0),
        ("1,234.5", None),
        ("nan", None),
        ("true", 1.0),
        (",5", 0.5),
    ],
)
def test_numbers_with_a_decimal_comma(tmp_path, text, value):
    path = tmp_path / "t.csv"
    path.write_text(f"dose;again\n{text};1\n")
    column = NumericColumn(name="dose", low=-2000, high=2000, missing=True)
    schema = Schema(
        columns=(column,), target="again", labels=("0", "1"), table_format=TableFormat(separator=";", decimal=",")
    )
    features = load_dataset(path, schema=schema).train.features[0]
    assert features.tolist() == pytest.approx([0.0, 1.0] if value is None else [value / 2000, 0.0], abs=1e-7)


@pytest.mark.parametrize(
    "name",
    [
        "utf-16",
        "utf-32",
        "utf-7",
        "shift_jis",
        "big5",
        "gb18030",
        "iso2022_jp",
        "hz",
        "cp037",
        "rot13",
        "base64",
        "unicode_escape",
        "raw_unicode_escape",
        "punycode",
        "nonsense",
        "",
    ],
)
def test_encodings_in_which_bytes_of_two_records_could_meet_are_refused(name):
    with pytest.raises(InvalidArgument, match="one byte a character"):
        TableFormat(encoding=name)


@pytest.mark.parametrize(
    "name", ["utf8", "UTF-8", "ascii", "latin1", "cp1252", "cp1250", "iso8859-15", "koi8-r", "mac-roman"]
)
def test_encodings_of_one_byte_are_accepted(name):
    TableFormat(encoding=name)


@pytest.mark.parametrize(
    "form", [TableFormat(encoding="latin-1"), TableFormat(encoding="cp1252"), TableFormat(decimal=",")]
)
@pytest.mark.parametrize(
    "line", [b"\xff\xfe\x81\x8d", b'"', b'"a', b"\x85\x0b\x0c", b"\xe4" * 70000, b"1,5,6", b"\x00"]
)
def test_a_hostile_line_changes_no_other_record_in_other_formats(tmp_path, monkeypatch, form, line):
    schema = Schema(columns=(column_of("dose"),), target="again", labels=("0", "1"), table_format=form)

    def read(lines):
        path = tmp_path / "t.csv"
        path.write_bytes(b"dose,again,note\n" + b"".join(text + b"\n" for text in lines))
        records = load_dataset(path, schema=schema).train
        return [(*map(float, row), int(label)) for row, label in zip(records.features, records.labels, strict=False)]

    plain = [b"%d,%d,ok" % (k % 3, k % 2) for k in range(20)]
    ordinary = read(plain)
    for size in (64, 1 << 24):
        monkeypatch.setattr("sordino.data.tables._BLOCK", size)
        assert read(plain) == ordinary
        found = read([*plain[:9], b"1,1," + line, *plain[9:]])
        assert found[:9] == ordinary[:9]
        assert found[-11:] == ordinary[9:]
        assert len(found) in (20, 21)


def test_a_header_with_another_separator_or_encoding_is_told_with_the_option(tmp_path):
    for separator, option in ((";", "';'"), ("\t", "tab"), ("|", r"'\|'")):
        path = written(tmp_path / "t.csv", separator)
        with pytest.raises(InvalidArgument, match=f"give --separator {option}"):
            load_dataset(path, schema=SCHEMA)
    path = tmp_path / "u.csv"
    path.write_bytes("dose,größe,again\n".encode("latin-1"))
    with pytest.raises(InvalidArgument, match="--encoding latin-1"):
        load_dataset(path, schema=SCHEMA)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("t.xlsx", "CSV UTF-8"),
        ("t.XLS", "CSV UTF-8"),
        ("t.json", "Parquet"),
        ("t.sav", "CSV"),
        ("t.sqlite", "Export"),
        ("t.txt", "csv"),
    ],
)
def test_files_of_other_programs_are_refused_by_name_with_what_to_do(tmp_path, name, advice):
    (tmp_path / name).write_bytes(b"dose,again\n1,1\n")
    with pytest.raises(InvalidArgument, match=rf"\.csv, \.tsv, \.parquet or \.feather file, got .*{advice}"):
        load_dataset(tmp_path / name, schema=SCHEMA)


def test_a_damaged_feather_file_is_refused_without_contents(tmp_path):
    (tmp_path / "t.feather").write_bytes(b"ARROW1Zq7secret" * 9)
    with pytest.raises(InvalidArgument, match="readable table") as refusal:
        load_dataset(tmp_path / "t.feather", schema=SCHEMA)
    assert "Zq7" not in str(refusal.value)
    assert refusal.value.__cause__ is refusal.value.__context__ is None


def test_a_public_sample_gives_dates_and_the_format_of_the_file(tmp_path):
    sample, private = tmp_path / "sample.csv", tmp_path / "t.csv"
    sample.write_text("admitted;dose;again\n2023-01-01;1,5;0\n2023-12-31;2;1\n;;\n")
    private.write_text("admitted;dose;again\n2023-12-31;1,75;0\n")
    form = TableFormat(separator=";", decimal=",")
    found = load_dataset(private, target="again", public_schema_from=sample, table_format=form)
    assert found.schema.columns == (
        DateColumn(name="admitted", low="2023-01-01", high="2023-12-31"),
        NumericColumn(name="dose", low=1.5, high=2.0),
    )
    assert found.schema.table_format == form
    assert found.train.features.tolist() == [[1.0, 0.0]]


def test_columns_of_every_type_are_cut_into_cells(tmp_path):
    schema = replace(SCHEMA, table_format=TableFormat(separator=";", decimal=","))
    domain = TableDomain.of_schema(schema, bins=4)
    assert domain.sizes == (7, 7, 7, 3, 4, 3, 3, 7, 2)
    codes = domain.codes(written(tmp_path / "t.csv", ";", ","))
    assert len(codes) == 4
    assert ((codes >= 0) & (codes < domain.sizes)).all()
