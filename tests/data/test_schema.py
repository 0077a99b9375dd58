import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.data import ArraySchema, CategoricalColumn, NumericColumn, Schema
from sordino.data.schema import read_schema
from sordino.errors import InvalidArgument, MissingDeclaration

words = st.text(min_size=1, max_size=8).map(str.strip).filter(bool)
bounds = st.tuples(st.floats(-1e9, 1e9, allow_subnormal=False), st.floats(-1e9, 1e9, allow_subnormal=False)).filter(
    lambda pair: pair[0] < pair[1]
)


@st.composite
def schemas(draw):
    names = draw(st.lists(words, min_size=2, max_size=5, unique=True))
    columns = tuple(
        NumericColumn(name=name, low=(pair := draw(bounds))[0], high=pair[1])
        if draw(st.booleans())
        else CategoricalColumn(name=name, categories=tuple(draw(st.lists(words, min_size=1, max_size=4, unique=True))))
        for name in names[1:]
    )
    labels = tuple(draw(st.lists(words, min_size=2, max_size=4, unique=True)))
    return Schema(columns=columns, target=names[0], labels=labels)


@given(schemas())
def test_a_schema_survives_json(schema):
    assert Schema.from_json(schema.to_json()) == schema
    assert len(schema.feature_names) == schema.width()


@given(bounds)
def test_an_array_schema_survives_json(pair):
    schema = ArraySchema(labels=("a", "b"), low=pair[0], high=pair[1])
    assert ArraySchema.from_json(schema.to_json()) == schema


COMPLETE = {
    "target": "income",
    "labels": ["low", "high"],
    "columns": [
        {"name": "age", "type": "numeric", "low": 0, "high": 100},
        {"name": "job", "type": "category", "categories": ["clerk", "sales"]},
    ],
}


def without(path):
    fields = json.loads(json.dumps(COMPLETE))
    holder = fields
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (("target",), "'target'"),
        (("labels",), "'labels'"),
        (("columns",), "'columns'"),
        (("columns", 0, "low"), "'low' of column 'age'"),
        (("columns", 0, "high"), "'high' of column 'age'"),
        (("columns", 1, "categories"), "'categories' of column 'job'"),
        (("columns", 1, "type"), "'type' of column 'job'"),
    ],
)
def test_a_missing_declaration_is_named(path, named):
    with pytest.raises(MissingDeclaration, match=named):
        Schema.from_json(without(path))


def test_every_missing_declaration_is_named_at_once():
    text = json.dumps({"columns": [{"name": "age", "type": "numeric"}, {"name": "job", "type": "category"}]})
    with pytest.raises(MissingDeclaration) as caught:
        Schema.from_json(text)
    for part in ("'target'", "'labels'", "'low', 'high' of column 'age'", "'categories' of column 'job'"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s["columns"][0].update(low=100), "low < high"),
        (lambda s: s["columns"][0].update(high="100"), "must be a number"),
        (lambda s: s["columns"][0].update(hihg=1), "hihg"),
        (lambda s: s["columns"][1].update(categories=["a", "a"]), "different"),
        (lambda s: s["columns"][1].update(categories=[]), "at least 1"),
        (lambda s: s["columns"][1].update(name="age"), "once each"),
        (lambda s: s["columns"][1].update(name=" job"), "white space"),
        (lambda s: s["columns"][1].update(type="text"), "numeric, integer, category, ordinal, boolean, date"),
        (lambda s: s.update(target="age"), "not a feature"),
        (lambda s: s.update(labels=["low"]), "at least 2"),
        (lambda s: s.update(labels="low"), "must be a list"),
        (lambda s: s.update(columns=[]), "at least one column"),
        (lambda s: s.update(bounds={}), "bounds"),
        (lambda s: s.update(origin="guessed"), "public_sample"),
    ],
)
def test_a_wrong_declaration_is_refused(change, said):
    fields = json.loads(json.dumps(COMPLETE))
    change(fields)
    with pytest.raises(InvalidArgument, match=said):
        Schema.from_json(json.dumps(fields))


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_a_file_that_is_no_schema_is_refused(tmp_path, text):
    path = tmp_path / "schema.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match="JSON"):
        read_schema(path)


def test_either_kind_of_schema_is_read_from_a_file(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(COMPLETE))
    assert isinstance(read_schema(path), Schema)
    path.write_text('{"array": {"low": 0, "high": 1}, "labels": ["a", "b"]}')
    assert read_schema(path) == ArraySchema(labels=("a", "b"), low=0, high=1)
    with pytest.raises(InvalidArgument, match="readable"):
        read_schema(tmp_path / "none.json")


@pytest.mark.parametrize("text", ['{"array": {"low": 0}, "labels": ["a", "b"]}', '{"array": {"low": 0, "high": 1}}'])
def test_an_array_schema_must_be_complete(text):
    with pytest.raises(MissingDeclaration):
        ArraySchema.from_json(text)
