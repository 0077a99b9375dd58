"""`sordino explain` finds what messages name, and the addresses in messages are those of the site."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sordino import errors
from sordino.cli import app
from sordino.commands.documentation import _all_sections

ROOT = Path(__file__).parents[2]
KINDS = [getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)]


def explained(name):
    result = CliRunner().invoke(app, ["explain", name, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_is_explained_by_its_name_and_by_what_its_message_says(kind):
    found = explained(kind.__name__)
    assert found["section"] == kind.section
    assert len(found["text"]) > 20
    message = str(kind("What happened."))
    if kind.section:
        name, address = re.fullmatch(r"What happened\. \(`sordino explain (\S+)` or (\S+)\)", message).groups()
        assert explained(name) == found
        assert found["address"] == address
    else:
        assert message == "What happened."


@pytest.mark.parametrize(
    ("name", "page", "section"),
    [
        ("coupled records", "limitations", "coupled-records"),
        ("docs/limitations.md#coupled-records", "limitations", "coupled-records"),
        ("tuning", "tuning", ""),
        ("docs/tuning.md", "tuning", ""),
        ("report#declarations", "report", "declarations"),
        ("run-folders", "limitations", "run-folders"),
    ],
)
def test_pages_and_sections_are_found_as_they_are_written(name, page, section):
    found = explained(name)
    assert (found["page"], found["section"]) == (page, section)


def test_a_section_ends_where_the_next_one_begins():
    text = explained("UnsupportedModule")["text"]
    assert "GroupNorm" in text
    assert "CoupledRecords" not in text


def test_a_name_that_is_none_gets_the_close_ones():
    result = CliRunner().invoke(app, ["explain", "CoupledRecord", "--json"])
    assert result.exit_code == 2
    assert "Close to it: CoupledRecords" in json.loads(result.stdout)["error"]["message"]


def test_without_a_name_all_names_are_listed_and_explained():
    listed = json.loads(CliRunner().invoke(app, ["explain", "--json"]).stdout)
    assert set(listed["errors"]) == {kind.__name__ for kind in KINDS}
    for name in (*listed["sections"], *listed["pages"]):
        assert explained(name)["title"]


def test_no_page_has_two_sections_of_one_name():
    places = [(section.page, section.anchor) for section in _all_sections() if section.page == "limitations"]
    assert len(places) == len(set(places))


def test_the_address_is_one_and_the_same_everywhere():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Documentation"] == errors.DOCUMENTATION
    site = re.search(r"^site_url: (\S+)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert f"{site[1]}latest/" == errors.DOCUMENTATION


def test_every_page_that_a_message_names_exists():
    named = set()
    for path in (ROOT / "src").rglob("*.py"):
        named |= set(re.findall(r"`sordino explain ([a-z#-]+)`", path.read_text(encoding="utf-8")))
    assert "tuning" in named
    for name in named:
        explained(name)
