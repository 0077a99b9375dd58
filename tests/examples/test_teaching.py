"""The teaching page is true: its blocks run one after the other, and its tables are what they print."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "teaching.md").read_text()


@pytest.fixture(scope="module")
def names():
    found = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL):
        exec(compile(block, "teaching.md", "exec"), found)
    return found


def test_the_table_of_errors_is_what_the_mechanism_gives(names):
    rows = re.findall(r"^\| ([\d.]+) \| ([\d ]+) \|$", TEXT, flags=re.MULTILINE)
    assert len(rows) == 6
    for epsilon, error in rows:
        assert names["errors"][float(epsilon)] == pytest.approx(float(error.replace(" ", "")), rel=0.1)


def test_the_table_of_compositions_is_what_is_computed(names):
    many, few = names["compared"](1.0, 160, 1e-6), names["compared"](0.1, 100, 1e-5)
    rows = re.findall(r"^\| ([a-z][^|]*) \| ([\d.]+) \| ([\d.]+) \|$", TEXT, flags=re.MULTILINE)
    assert len(rows) == 5
    for (title, first, second), name in zip(rows, many, strict=True):
        assert title.split()[0].strip(",") == name.split()[0].strip(",")
        assert (float(first), float(second)) == (round(many[name], 2), round(few[name], 2))
