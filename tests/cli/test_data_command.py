import json

import pytest
from typer.testing import CliRunner

from sordino.cli import app


def call(*arguments):
    return CliRunner().invoke(app, ["data", *arguments], env={"COLUMNS": "100", "NO_COLOR": "1"})


def test_the_list_holds_every_named_set_for_people_and_for_programs():
    body = json.loads(call("list", "--json").stdout)
    names = [item["name"] for item in body["datasets"]]
    assert names[0] == "adult"
    text = call("list").stdout
    assert all(name in text for name in names)


def test_adult_is_shown_with_its_schema_license_and_source():
    body = json.loads(call("show", "adult", "--json").stdout)
    assert body["schema"]["target"] == "income"
    assert body["train_shape"] == [30162, 104]
    text = call("show", "adult").stdout
    for words in ("CC BY 4.0", "30,162 records", "age", "from 17 to 90", "embedded"):
        assert words in text


def test_getting_an_embedded_set_says_where_it_lies():
    assert json.loads(call("get", "adult", "--json").stdout)["name"] == "adult"
    assert "adult" in call("get", "adult").stdout


@pytest.mark.parametrize("command", ["show", "get"])
def test_an_unknown_name_is_exit_code_two_and_names_the_known_ones(command):
    result = call(command, "adlut")
    assert result.exit_code == 2
    assert "adult" in result.stderr
    assert result.stdout == ""
