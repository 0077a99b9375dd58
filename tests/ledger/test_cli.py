"""`sordino ledger`: documents, pages and exit codes."""

import json

import pytest
from typer.testing import CliRunner

from sordino.cli import app
from sordino.events import Gaussian, SelfComposed, to_json
from sordino.ledger import Ledger

EVENT = to_json(Gaussian(noise_multiplier=10.0))


@pytest.fixture
def place(tmp_path):
    return str(tmp_path / "team.db")


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["ledger", *arguments], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result.stdout


def document(*arguments, code=0):
    return json.loads(run(*arguments, "--json", code=code))


@pytest.fixture
def declared(place):
    run("declare", place, "adult", "--epsilon", "3", "--delta", "1e-5")
    return place


def test_declare_charge_and_show_tell_the_same(declared):
    charged = document("charge", declared, "adult", "--event", EVENT, "--note", "a sum")
    assert charged["line"] == 2
    shown = document("show", declared, "adult")
    assert shown["spent"] == charged["spent"]
    assert shown["spent"]["epsilon"] == pytest.approx(Ledger(declared).account("adult").spent().epsilon)
    assert 0.9 < shown["left"]["fraction"] < 1
    assert document("show", declared)["accounts"] == [shown]


def test_the_page_shows_a_bar_and_the_noise_that_still_fits(declared):
    page = run("show", declared, "adult")
    assert "━" * 40 in page
    assert "100.0 % left" in page
    assert "still fits" in page


def test_a_refused_charge_ends_with_three_and_usage_with_two(declared):
    refused = document(
        "charge", declared, "adult", "--event", to_json(Gaussian(noise_multiplier=0.1)), code=3
    )  # fmt: skip
    assert refused["error"]["kind"] == "BudgetExceeded"
    run("charge", declared, "census", "--event", EVENT, code=2)
    run("charge", declared, "adult", "--event", "nofile.json", code=2)
    run("charge", declared, "adult", "--event", EVENT, "--neighboring-relation", "replace_one", code=2)
    run("declare", declared, "adult", "--epsilon", "4", "--delta", "1e-5", code=2)
    run("release", declared, "adult", code=2)
    run("show", declared + "x", code=1)


def test_a_budget_is_changed_with_a_reason(declared):
    run("declare", declared, "adult", "--epsilon", "4", "--delta", "1e-5", "--change", code=2)
    changed = document(
        "declare", declared, "adult", "--epsilon", "4", "--delta", "1e-5", "--change", "--note", "agreed"
    )  # fmt: skip
    assert changed["budget"]["epsilon"] == 4
    entries = document("history", declared, "adult")["entries"]
    assert [(entry["kind"], entry["note"]) for entry in entries] == [("declare", ""), ("budget", "agreed")]


def test_a_crashed_run_is_released_by_name(declared):
    account = Ledger(declared).account("adult")
    name = account.reserve(SelfComposed(event=Gaussian(noise_multiplier=10.0), count=5)).name
    assert list(document("show", declared, "adult")["reservations"]) == [name]
    drawn = document("charge", declared, "adult", "--event", EVENT, "--reservation", name)
    assert name in drawn["reservations"]
    assert document("release", declared, "adult", name)["reservations"] == {}
    assert document("release", declared, "adult", "--all")["released"] == []


def test_verify_prints_heads_that_it_takes_back(declared):
    head = document("verify", declared)["heads"]["adult"]
    document("charge", declared, "adult", "--event", EVENT)
    run("verify", declared, "--head", f"adult={head}")
    run("verify", declared, "--head", f"adult=2:{'0' * 64}", code=1)
    run("verify", declared, "--head", head, code=2)


def test_export_holds_every_line(declared, tmp_path):
    run("charge", declared, "adult", "--event", EVENT)
    run("export", declared, "--out", str(tmp_path / "ledger.json"))
    exported = json.loads((tmp_path / "ledger.json").read_text())
    assert exported == json.loads(run("export", declared))
    entries = document("history", declared, "adult")["entries"]
    assert [{**line, "epsilon_alone": None} for line in exported["accounts"]["adult"]] == [
        {**line, "epsilon_alone": None} for line in entries
    ]
    assert entries[-1]["epsilon_alone"] > 0
