"""Whatever a command does, a function of `sordino.commands` does, with options of the same names."""

import inspect
import json
import shlex

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import sordino
from sordino import commands
from sordino.cli import app
from sordino.commands import TableOptions
from sordino.errors import SordinoError
from sordino.ledger import Ledger
from sordino.runs import RunFolder

# A line that a shell would be given, for every command.
LINES = {
    "account": "--sample-rate 0.01 --noise-multiplier 4 --steps 10 --delta 1e-5",
    "attack": "run",
    "audit conformance": "",
    "audit replay": "",
    "audit training": "adult --epsilon 1",
    "compare": "adult",
    "data get": "adult",
    "data list": "",
    "data show": "adult",
    "demo": "",
    "describe": "adult --epsilon 1",
    "diagnose": "run",
    "explain": "",
    "export": "run",
    "federate": "adult --epsilon 1",
    "learn": "",
    "ledger charge": "l.db people --event '{}'",
    "ledger declare": "l.db people --epsilon 1 --delta 1e-6",
    "ledger export": "l.db",
    "ledger history": "l.db people",
    "ledger init": "l.db",
    "ledger release": "l.db people --all",
    "ledger show": "l.db",
    "ledger verify": "l.db",
    "plan": "--epsilon 1 --delta 1e-5 --sample-rate 0.01 --steps 10",
    "predict": "run new.csv",
    "recipes": "",
    "report": "run",
    "runs compare": "run run",
    "runs list": "",
    "runs show": "run",
    "schema check": "people.csv --schema s.json",
    "schema draft": "people.csv",
    "synthesize": "adult --epsilon 1",
    "train": "adult --epsilon 1",
    "tune": "adult --epsilon 1",
    "verify": "run",
}
# Options that only say what is printed, or are a second way to write one that is a parameter.
PRINTING = {"as_json", "help", "more", "others", "strict", "anchor"}


def all_commands(command=None, words=()):
    command = get_command(app) if command is None else command
    if not hasattr(command, "commands"):
        yield " ".join(words), command
        return
    for name, inner in command.commands.items():
        yield from all_commands(inner, (*words, name))


COMMANDS = dict(all_commands())


# Functions that are not called as their commands are: another function of the package has that name.
NAMES = {"describe": "describe_file", "tune": "tune_estimator", "audit training": "audit_with_canaries"}


def name_of(words):
    return NAMES.get(words, words.replace(" ", "_"))


def function_of(words):
    return getattr(commands, name_of(words))


def test_every_command_has_a_line_here():
    assert set(LINES) == set(COMMANDS)


@pytest.mark.parametrize("words", sorted(COMMANDS))
def test_a_command_has_a_function_with_parameters_of_the_same_names(words):
    parameters = inspect.signature(function_of(words)).parameters
    taken = set(parameters)
    if "table" in parameters:
        taken |= set(TableOptions.__annotations__)
    options = {option.name for option in COMMANDS[words].params} - PRINTING
    if "account" not in taken and "dataset_name" in options:  # --ledger and --dataset-name are one account
        options.remove("dataset_name")
    assert options <= taken
    required = {
        name for name, one in parameters.items() if one.default is one.empty and one.kind is not one.VAR_KEYWORD
    }
    assert required == {option.name for option in COMMANDS[words].params if option.required}


@pytest.mark.parametrize("words", sorted(COMMANDS))
def test_a_command_calls_its_function_once_and_nothing_else(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    calls = []

    def record(name):
        def function(*arguments, **options):
            calls.append(name)
            raise SordinoError("called. Go on.")

        return function

    for name in commands.__all__:
        if inspect.isfunction(getattr(commands, name)):
            monkeypatch.setattr(commands, name, record(name))
    result = CliRunner().invoke(app, [*words.split(), *shlex.split(LINES[words])])
    assert calls == [name_of(words)]
    assert result.exit_code == 1


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{20 + row % 60},{('clerk', 'nurse')[row % 2]},{('low', 'high')[(row // 3) % 2]}" for row in range(300)]
    (tmp_path / "people.csv").write_text("\n".join(["age,job,income", *rows]))
    (tmp_path / "test.csv").write_text("\n".join(["age,job,income", *rows[:50], "77,clerk,low"]))
    schema = {
        "target": "income",
        "labels": ["low", "high"],
        "columns": [
            {"name": "age", "type": "numeric", "low": 0, "high": 100},
            {"name": "job", "type": "category", "categories": ["clerk", "nurse"]},
        ],
    }
    (tmp_path / "s.json").write_text(json.dumps(schema))
    return tmp_path


def printed(line):
    result = CliRunner().invoke(app, [*shlex.split(line), "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


FILE = {"schema": "s.json", "test": "test.csv"}
SEEDED = {"seed": 7, "reproducible": True}


@pytest.mark.parametrize("model", ["logistic", "sufficient-statistics", "dp-gd"])
def test_training_gives_the_same_run_by_both(place, model):
    model = "objective" if model == "sufficient-statistics" else model
    line = f"train people.csv --epsilon 3 --model {model} --schema s.json --test test.csv --seed 7 --reproducible"
    mine = commands.train("people.csv", epsilon=3, model=model, out="python", **FILE, **SEEDED)
    theirs = printed(f"{line} --out cli")
    ours = mine.to_dict()
    for files in ("run", "model", "report", "picture"):
        del theirs[files], ours[files]
    assert ours == theirs
    kept = [RunFolder.open(name).load_model() for name in ("python", "cli")]
    assert all((kept[0][name] == kept[1][name]).all() for name in kept[1])
    assert sorted(path.name for path in (place / "python").iterdir()) == sorted(
        path.name for path in (place / "cli").iterdir()
    )


def test_a_charge_and_its_dry_run_are_the_same_by_both(place):
    book = Ledger("l.db")
    book.declare("one", epsilon=5, delta=1e-5)
    book.declare("other", epsilon=5, delta=1e-5)
    line = "--epsilon 1 --model objective --schema s.json --ledger l.db --dataset-name other"
    options = {"epsilon": 1, "model": "objective", "schema": "s.json", "ledger": book.account("one")}
    asked = commands.train("people.csv", dry_run=True, **options)
    there = printed(f"train people.csv {line} --dry-run")
    assert asked.fits
    assert asked.to_dict()["cost"] == there["cost"]
    assert not len(book.account("one").history()) - len(book.account("other").history())
    commands.train("people.csv", out="python", **options)
    printed(f"train people.csv {line} --out cli")
    assert book.account("one").spent().epsilon == book.account("other").spent().epsilon > 0


def test_statistics_and_synthetic_tables_are_the_same_by_both(place):
    mine = commands.describe_file("people.csv", epsilon=2, schema="s.json", run="d1", **SEEDED).to_dict()
    theirs = printed("describe people.csv --epsilon 2 --schema s.json --run d2 --seed 7 --reproducible")
    del mine["run"], theirs["run"]
    assert mine == theirs
    made = commands.synthesize(
        "people.csv", epsilon=2, schema="s.json", method="independent", out="one.csv", run="s1", **SEEDED
    )
    printed(
        "synthesize people.csv --epsilon 2 --schema s.json --method independent --out two.csv --run s2 --seed 7 "
        "--reproducible"
    )
    assert (place / "one.csv").read_bytes() == (place / "two.csv").read_bytes()
    assert made.table.num_rows == len((place / "one.csv").read_text().splitlines()) - 1


def test_predictions_reports_and_checks_are_the_same_by_both(place):
    commands.train("people.csv", epsilon=3, model="objective", out="run", **FILE, **SEEDED)
    mine = commands.predict("run", "test.csv", out="one.csv", probabilities=True, data_is_public=True)
    theirs = printed("predict run test.csv --out two.csv --probabilities --data-is-public")
    assert (place / "one.csv").read_bytes() == (place / "two.csv").read_bytes()
    assert mine.to_dict()["metrics"] == theirs["metrics"]
    assert commands.verify("run").to_dict()["head"] == printed("verify run")["head"]
    assert commands.runs_show("run").to_dict() == printed("runs show run")
    assert commands.schema_check("people.csv", schema="s.json").to_dict() == printed(
        "schema check people.csv --schema s.json"
    )
    written = commands.report("run", format="json", out="one.json")
    printed("report run --format json --out two.json")
    assert not written.not_stated
    assert json.loads((place / "one.json").read_text()) == json.loads((place / "two.json").read_text())


def test_an_evaluation_is_charged_by_both(place):
    commands.train("people.csv", epsilon=3, model="objective", out="run", **FILE)
    account = Ledger("l.db").declare("people", epsilon=5, delta=1e-5)
    asked = commands.evaluate("run", "people.csv", epsilon=0.5, schema="s.json", ledger=account, dry_run=True)
    printed(
        "report run --evaluate people.csv --schema s.json --evaluation-epsilon 0.5 --ledger l.db --dataset-name people"
    )
    assert account.spent().epsilon == pytest.approx(asked.cost.upper, rel=1e-3)
    commands.evaluate("run", "people.csv", epsilon=0.5, schema="s.json", ledger=account)
    assert account.spent().epsilon > 1.5 * asked.cost.upper


def test_records_that_are_loaded_go_in_as_files_do(place):
    loaded = sordino.data.load_dataset("people.csv", schema="s.json", test="test.csv")
    mine = commands.train(loaded, epsilon=3, model="objective", out="one", **SEEDED)
    other = commands.train("people.csv", epsilon=3, model="objective", out="two", **FILE, **SEEDED)
    assert {name: metric.value for name, metric in mine.metrics.items()} == {
        name: metric.value for name, metric in other.metrics.items()
    }
    assert mine.metrics
    with pytest.raises(sordino.InvalidArgument, match="schema must be left out"):
        commands.train(loaded, epsilon=3, model="objective", schema="s.json")
    private = sordino.data.load_dataset("people.csv", schema="s.json", test="test.csv", test_is_public=False)
    assert not commands.train(private, epsilon=3, model="objective", out="three").metrics


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        (
            "account",
            {"sample_rate": 0.01, "noise_multiplier": 4, "steps": 100, "delta": 1e-5},
            "account --sample-rate 0.01 --noise-multiplier 4 --steps 100 --delta 1e-5",
        ),
        (
            "plan",
            {"epsilon": 1, "delta": 1e-5, "sample_rate": 0.01, "steps": 50},
            "plan --epsilon 1 --delta 1e-5 --sample-rate 0.01 --steps 50",
        ),
        (
            "plan",
            {"epsilon": 3, "delta": 1e-5, "dataset_size": 6000, "batch_sizes": [256], "epochs": [1, 2]},
            "plan --epsilon 3 --delta 1e-5 --dataset-size 6000 --batch-sizes 256 --epochs 1,2",
        ),
        ("explain", {"name": "CoupledRecords"}, "explain CoupledRecords"),
        ("explain", {}, "explain"),
        ("learn", {}, "learn"),
        ("data_show", {"name": "adult"}, "data show adult"),
    ],
)
def test_what_is_computed_without_records_is_the_same_by_both(name, options, line):
    mine = getattr(commands, name)(**options).to_dict()
    assert json.loads(json.dumps(mine)) == printed(line)


def test_ledgers_are_the_same_by_both(place):
    commands.ledger_init("l.db")
    commands.ledger_declare("l.db", "people", epsilon=3, delta=1e-6)
    commands.ledger_charge("l.db", "people", event=sordino.events.Gaussian(noise_multiplier=5.0), note="why")
    assert commands.ledger_show("l.db", "people")[0].to_dict() == printed("ledger show l.db people")
    assert commands.ledger_history("l.db", "people").to_dict() == printed("ledger history l.db people")
    assert commands.ledger_verify("l.db") == printed("ledger verify l.db")["heads"]
    assert commands.ledger_export("l.db") == printed("ledger export l.db")
