"""Public cells: every value has one, neighbors differ in one row, and values drawn from a cell lie in it."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.data import BooleanColumn, CategoricalColumn, DateColumn, NumericColumn, OrdinalColumn, Schema
from sordino.data.discretization import DiscreteColumn, TableDomain
from sordino.errors import InvalidArgument

AGE = NumericColumn(name="age", low=-3, high=100)
JOB = CategoricalColumn(name="job", categories=("clerk", "sales"))
SCHEMA = Schema(columns=(AGE, JOB), target="rich", labels=("0", "1"))


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)), st.integers(1, 7))
def test_every_number_has_a_cell_that_holds_what_it_is_clipped_to(numbers, bins):
    column = DiscreteColumn(column=AGE, bins=bins)
    codes = column.codes(np.array(numbers, dtype=float))
    edges = np.concatenate([[AGE.low], column.edges, [AGE.high]])
    for number, code in zip(numbers, codes, strict=True):
        if math.isnan(number):
            assert code == column.size - 1
            continue
        held = min(max(number, AGE.low), AGE.high)
        assert 0 <= code < column.size - 1
        assert edges[code] <= held <= edges[code + 1]
        assert (code == 0) == (held == AGE.low)
        assert (code == column.size - 2) == (held == AGE.high)


@given(st.integers(1, 50), st.floats(0, 1, exclude_min=True, exclude_max=True), st.data())
def test_a_value_drawn_from_a_cell_is_in_that_cell(bins, uniform, data):
    column = DiscreteColumn(column=AGE, bins=bins)
    code = data.draw(st.integers(0, column.size - 2))
    (value,) = column.values(np.array([code]), np.array([uniform]))
    low, high = np.concatenate([[AGE.low], column.edges, [AGE.high]])[code : code + 2]
    assert low - (high - low) / 1000 <= value <= high + (high - low) / 1000
    assert AGE.low <= value <= AGE.high


def test_ranges_near_the_largest_floats_have_cells():
    column = DiscreteColumn(column=NumericColumn(name="x", low=-1.7e308, high=1.7e308), bins=4)
    codes = column.codes(np.array([-1.8e308, -1e308, 0.0, np.nan, 1e308, np.inf]))
    assert codes.tolist() == [0, 1, 3, 6, 4, 5]
    assert np.isfinite(column.values(codes, np.full(6, 0.5))).tolist() == [True, True, True, False, True, True]


def test_a_category_that_is_missing_or_not_listed_is_a_cell_and_a_label_leaves_the_record_out():
    table = {"age": [1, 2, 3, 4], "job": ["clerk", None, "pirate", " sales "], "rich": [0, 1, "1", "2"]}
    codes = TableDomain.of_schema(SCHEMA, bins=4).codes(table)
    assert codes[:, 1].tolist() == [0, 2, 2]
    assert codes[:, 2].tolist() == [0, 1, 1]


def test_files_frames_and_dictionaries_give_the_same_cells(tmp_path):
    table = {"age": [1.5, None, 1e9, 40.0], "job": ["clerk", "sales", "", "pirate"], "rich": [0, 1, 1, 0]}
    arrow = pa.table({"age": table["age"], "job": table["job"], "rich": table["rich"], "other": [1, 2, 3, 4]})
    pa.csv.write_csv(arrow, tmp_path / "t.csv")
    domain = TableDomain.of_schema(SCHEMA, bins=5)
    expected = domain.codes(table)
    for source in (
        arrow,
        tmp_path / "t.csv",
        {**table, "age": np.array([1.5, np.nan, 1e9, 40.0])},
        {**table, "rich": np.array([0, 1, 1, 0])},
    ):
        np.testing.assert_array_equal(domain.codes(source), expected)


def test_adding_a_record_adds_at_most_one_row_and_changes_no_other():
    domain = TableDomain.of_schema(SCHEMA, bins=5)
    table = {"age": [1.0, 99.0], "job": ["clerk", "sales"], "rich": ["0", "1"]}
    before = domain.codes(table)
    for record in ([1e300, "x", "1"], [float("nan"), None, "0"], [object(), object(), object()], ["7", 3, "perhaps"]):
        after = domain.codes({name: [*table[name], value] for name, value in zip(table, record, strict=True)})
        np.testing.assert_array_equal(after[:2], before)
        assert len(after) in (2, 3)


def test_columns_of_different_lengths_and_things_without_columns_are_refused():
    domain = TableDomain.of_schema(SCHEMA)
    with pytest.raises(InvalidArgument, match="one length"):
        domain.codes({"age": [1], "job": ["clerk", "sales"], "rich": ["0", "1"]})
    with pytest.raises(InvalidArgument, match="by name"):
        domain.codes(np.zeros((3, 3)))


def test_a_numeric_target_has_cells_and_leaves_a_record_without_a_number_out():
    schema = Schema(columns=(AGE,), target="price", labels=(), target_bounds=(0.0, 10.0))
    domain = TableDomain.of_schema(schema, bins=2)
    codes = domain.codes({"age": [1, 2, 3, 4, 5], "price": [-5, 4.0, "?", float("inf"), 30]})
    assert codes[:, 1].tolist() == [0, 1, 3]


MANY = Schema(
    columns=(
        NumericColumn(name="kids", low=0, high=10, whole=True),
        OrdinalColumn(name="size", levels=("s", "m", "l")),
        BooleanColumn(name="smoker"),
        DateColumn(name="born", low="2000-01-01", high="2010-01-01"),
    ),
    target="y",
    labels=("0", "1"),
)


def test_every_type_of_column_has_cells_and_values_that_fall_into_them_again(tmp_path):
    table = {
        "kids": [0, 2.4, 99, None],
        "size": ["s", "l", "xl", ""],
        "smoker": ["Yes", "f", "?", "1"],
        "born": ["2000-01-01", "2004-07-01", "someday", "2030-01-01"],
        "y": ["0", "1", "1", "0"],
    }
    domain = TableDomain.of_schema(MANY, bins=2)
    codes = domain.codes(table)
    assert codes.T.tolist() == [[0, 1, 3, 4], [0, 2, 3, 3], [1, 0, 2, 1], [0, 1, 4, 3], [0, 1, 1, 0]]
    pa.csv.write_csv(pa.table(table), tmp_path / "t.csv")
    np.testing.assert_array_equal(domain.codes(tmp_path / "t.csv"), codes)
    drawn = domain.values(codes, np.full(codes.shape, 0.5))
    assert drawn["born"][:3] == ["2000-01-01", "2002-07-02", ""]
    assert drawn["smoker"] == ["true", "false", "", "true"]
    np.testing.assert_array_equal(domain.codes(drawn), codes)


def test_a_column_type_with_its_own_missing_value_is_read_entry_by_entry():
    class Missing:
        def __float__(self):
            raise TypeError("a missing value is no number")

    class Kind:
        kind = "i"

    class Column(list):
        dtype = Kind()

    codes = TableDomain.of_schema(SCHEMA, bins=4).codes(
        {"age": Column([1, Missing(), 3]), "job": ["clerk"] * 3, "rich": Column([0, 1, Missing()])}
    )
    assert codes.tolist() == [[1, 0, 0], [6, 0, 1]]
