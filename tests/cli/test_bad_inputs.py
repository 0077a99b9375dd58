"""Wrong files, columns, types, numbers and options, on every command: one line, the right exit code, nothing private.

Each input is a line that a shell would be given. The records of `people.csv` hold names and a number that occur nowhere
else, so that a message which quotes a record is seen.
"""

import json
import shlex

import pytest
from typer.testing import CliRunner

from sordino.cli import app
from sordino.ledger import Ledger

SECRETS = ("Zwentibold", "Wiborada", "86421", "7.7531")
SCHEMA = {
    "target": "income",
    "labels": ["low", "high"],
    "columns": [
        {"name": "age", "type": "numeric", "low": 0, "high": 100},
        {"name": "job", "type": "category", "categories": ["clerk", "nurse"]},
    ],
}
NUMBER = {**SCHEMA, "target": "pay", "low": 0, "high": 100_000}
del NUMBER["labels"]
GOOD = "people.csv --schema s.json"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with good and broken files, a ledger with little left, and one run."""
    folder = tmp_path_factory.mktemp("bad")
    names = ("Zwentibold", "Wiborada")
    rows = [
        f"{20 + row % 60},{('clerk', 'nurse')[row % 2]},{names[row % 2]},{86421 + row % 3},{('low', 'high')[row % 2]}"
        for row in range(60)
    ]
    header = "age,job,name,pay,income"
    write = {
        "people.csv": "\n".join([header, *rows]),
        "test.csv": "\n".join(
            [header, *(row.replace("Zwentibold", "X").replace("Wiborada", "Y") for row in rows[:20])]
        ),
        "header.csv": header,
        "empty.csv": "",
        "twice.csv": f"{header},age\n" + "\n".join(f"{row},1" for row in rows),
        "text.csv": "\n".join([header, *(row.replace(row.split(",")[0], "Zwentibold", 1) for row in rows)]),
        "semicolon.csv": "\n".join([header, *rows]).replace(",", ";"),
        "notes.txt": "Zwentibold earns 86421",
        "broken.parquet": "Zwentibold",
        "broken.npz": "Zwentibold",
        "broken.xlsx": "Zwentibold",
        "s.json": json.dumps(SCHEMA),
        "number.json": json.dumps(NUMBER),
        "other.json": json.dumps({**SCHEMA, "columns": [*SCHEMA["columns"], {**SCHEMA["columns"][0], "name": "size"}]}),
        "labels.json": json.dumps({**SCHEMA, "labels": ["yes", "no"]}),
        "turned.json": json.dumps({**SCHEMA, "columns": [{**SCHEMA["columns"][0], "low": 100, "high": 0}]}),
        "kind.json": json.dumps({**SCHEMA, "columns": [{**SCHEMA["columns"][0], "type": "number of years"}]}),
        "array.json": json.dumps({"low": 0, "high": 255, "classes": 10}),
        "list.json": "[1, 2]",
        "broken.json": '{"target": ',
        "draft.toml": 'target = "?"\nlabels = ["?"]\n',
        "space.json": '{"learning_rate": "fast"}',
        "unknown.json": '{"speed": [1, 2]}',
        "event.json": '{"kind": "wish"}',
    }
    for name, text in write.items():
        (folder / name).write_text(text + ("\n" if text else ""), encoding="utf-8")
    (folder / "latin.csv").write_bytes("age,job,näme,pay,income\n30,clerk,Zwentibold,86421,low\n".encode("latin-1"))
    (folder / "folder").mkdir()
    (folder / "plain").write_text("a file", encoding="utf-8")
    Ledger(folder / "l.db").declare("people", epsilon=0.01, delta=1e-6)
    Ledger(folder / "l.db").declare("users", epsilon=9.0, delta=1e-6, privacy_unit="user")
    (folder / "damaged.db").write_text("Zwentibold", encoding="utf-8")
    here = pytest.MonkeyPatch()
    here.chdir(folder)
    made = CliRunner().invoke(app, shlex.split(f"train {GOOD} --epsilon 1 --model naive-bayes --out run"))
    assert made.exit_code == 0, made.stderr
    (folder / "torn").mkdir()
    for name in ("run.json", "plan.json", "transcript.jsonl"):
        (folder / "torn" / name).write_text("Zwentibold", encoding="utf-8")
    yield folder
    here.undo()


# What is wrong, and the exit code: 2 for usage, 3 for a budget, 1 for the rest.
INPUTS = {
    # files
    "train nowhere.csv --schema s.json --epsilon 1": 2,
    "train notes.txt --epsilon 1": 2,
    "train folder --schema s.json --epsilon 1": 2,
    "train empty.csv --schema s.json --epsilon 1": 2,
    "train header.csv --schema s.json --epsilon 1": 2,
    "train twice.csv --schema s.json --epsilon 1": 2,
    "train semicolon.csv --schema s.json --epsilon 1": 2,
    "train latin.csv --schema s.json --epsilon 1": 2,
    "train broken.parquet --schema s.json --epsilon 1": 2,
    "train broken.npz --epsilon 1": 2,
    "train broken.xlsx --schema s.json --epsilon 1": 2,
    "train no-such-set --epsilon 1": 2,
    "train people.csv --epsilon 1": 2,
    "train people.csv --schema nowhere.json --epsilon 1": 2,
    "train people.csv --schema broken.json --epsilon 1": 2,
    "train people.csv --schema list.json --epsilon 1": 2,
    "train people.csv --schema draft.toml --epsilon 1": 2,
    "train people.csv --schema other.json --epsilon 1": 2,
    "train people.csv --schema labels.json --epsilon 1": 2,
    "train people.csv --schema turned.json --epsilon 1": 2,
    "train people.csv --schema kind.json --epsilon 1": 2,
    "train people.csv --schema array.json --epsilon 1": 2,
    "train people.csv --schema people.csv --epsilon 1": 2,
    "train text.csv --schema s.json --epsilon 1 --data-is-public": 2,
    f"train {GOOD} --public-schema-from test.csv --epsilon 1": 2,
    "train people.csv --public-schema-from people.csv --target income --epsilon 1": 2,
    "train people.csv --public-schema-from test.csv --epsilon 1": 2,
    "train people.csv --public-schema-from test.csv --target wish --epsilon 1": 2,
    f"train {GOOD} --epsilon 1 --test people.csv": 2,
    f"train {GOOD} --epsilon 1 --test nowhere.csv": 2,
    f"train {GOOD} --epsilon 1 --test empty.csv": 2,
    # numbers
    f"train {GOOD}": 2,
    f"train {GOOD} --epsilon 0": 2,
    f"train {GOOD} --epsilon -1": 2,
    f"train {GOOD} --epsilon nan": 2,
    f"train {GOOD} --epsilon inf": 2,
    f"train {GOOD} --epsilon much": 2,
    f"train {GOOD} --epsilon 1 --delta 0": 2,
    f"train {GOOD} --epsilon 1 --delta 1.5": 2,
    f"train {GOOD} --epsilon 1 --delta 0.1 --model boosting": 2,
    f"train {GOOD} --epsilon 1 --steps 0": 2,
    f"train {GOOD} --epsilon 1 --steps 1.5": 2,
    f"train {GOOD} --epsilon 1 --batch-size 1000": 2,
    f"train {GOOD} --epsilon 1 --batch-size -3": 2,
    f"train {GOOD} --epsilon 1 --max-grad-norm 0": 2,
    f"train {GOOD} --epsilon 1 --learning-rate nan": 2,
    f"train {GOOD} --epsilon 1 --release-losses -1": 2,
    f"train {GOOD} --epsilon 1 --checkpoint-every 0": 2,
    # options
    f"train {GOOD} --epsilon 1 --model wish": 2,
    f"train {GOOD} --epsilon 1 --model nowhere:model": 2,
    f"train {GOOD} --epsilon 1 --model json:wish": 2,
    f"train {GOOD} --epsilon 1 --model boosting --steps 5": 2,
    f"train {GOOD} --epsilon 1 --seed 5": 2,
    f"train {GOOD} --epsilon 1 --device cuda": 2,
    f"train {GOOD} --epsilon 1 --target name": 2,
    f"train {GOOD} --epsilon 1 --recipe wish": 2,
    f"train {GOOD} --epsilon 1 --recipe scatter": 2,
    f"train {GOOD} --epsilon 1 --separator ab": 2,
    f"train {GOOD} --epsilon 1 --encoding wish": 2,
    f"train {GOOD} --epsilon 1 --diagnostics all": 2,
    f"train {GOOD} --epsilon 1 --out run": 2,
    f"train {GOOD} --epsilon 1 --out plain": 2,
    f"train {GOOD} --epsilon 1 --out plain/run": 2,
    f"train {GOOD} --epsilon 1 --out /proc/run": 2,
    f"train {GOOD} --resume nowhere": 2,
    f"train {GOOD} --resume run": 2,
    f"train {GOOD} --epsilon 1 --resume run": 2,
    f"train {GOOD} --epsilon 1 --ledger l.db": 2,
    f"train {GOOD} --epsilon 1 --ledger l.db --dataset-name nobody": 2,
    f"train {GOOD} --epsilon 1 --ledger nowhere.db --dataset-name people": 1,
    f"train {GOOD} --epsilon 1 --ledger damaged.db --dataset-name people": 1,
    f"train {GOOD} --epsilon 1 --ledger mysql://host/x --dataset-name people": 2,
    f"train {GOOD} --epsilon 1 --ledger l.db --dataset-name people": 3,
    f"train {GOOD} --epsilon 1 --ledger l.db --dataset-name users": 2,
    f"train {GOOD} --epsilon 1 --model boosting --ledger l.db --dataset-name people": 3,
    f"train {GOOD} --epsilon 1 --wish": 2,
    "train": 2,
    "wish": 2,
    "demo --epsilon 0": 2,
    "demo --out run": 2,
    # tune, compare
    f"tune {GOOD} --epsilon 1 --runs 1": 2,
    f"tune {GOOD} --epsilon 1 --shape -1": 2,
    f"tune {GOOD} --epsilon 1 --score both": 2,
    f"tune {GOOD} --epsilon 1 --score public": 2,
    f"tune {GOOD} --epsilon 1 --score-noise 0": 2,
    f"tune {GOOD} --epsilon 1 --space nowhere.json": 2,
    f"tune {GOOD} --epsilon 1 --space space.json": 2,
    f"tune {GOOD} --epsilon 1 --space unknown.json": 2,
    f"tune {GOOD} --epsilon 1 --model logistic": 2,
    f"tune {GOOD} --epsilon 1 --model naive-bayes": 2,
    f"tune {GOOD} --epsilon 1 --ledger l.db --dataset-name people": 3,
    f"tune {GOOD}": 2,
    f"compare {GOOD} --epsilon 1": 2,
    f"compare {GOOD} --epsilon 1 2 --test test.csv": 2,
    f"compare {GOOD} --epsilon one --test test.csv": 2,
    f"compare {GOOD} --epsilon 1 --test test.csv --methods wish": 2,
    f"compare {GOOD} --epsilon 1 --test test.csv --methods ,": 2,
    f"compare {GOOD} --epsilon 1 --test test.csv --plot x.wish": 2,
    f"compare {GOOD} --epsilon 1 --test test.csv --repeats 0": 2,
    f"compare {GOOD} --epsilon 1 --test test.csv --methods dp-gd --ledger l.db --dataset-name people": 3,
    "compare adult --epsilon 1 --ledger l.db --dataset-name people": 2,
    # describe, synthesize, schema
    f"describe {GOOD} --epsilon 0": 2,
    f"describe {GOOD} --epsilon 1 --delta 1": 2,
    f"describe {GOOD} --epsilon 1 --quantiles half": 2,
    f"describe {GOOD} --epsilon 1 --quantiles 2": 2,
    f"describe {GOOD} --epsilon 1 --bins 0": 2,
    f"describe {GOOD} --epsilon 1 --cross age": 2,
    f"describe {GOOD} --epsilon 1 --cross age:wish": 2,
    f"describe {GOOD} --epsilon 1 --confidence 1": 2,
    f"describe {GOOD} --epsilon 1 --out x.txt": 2,
    f"describe {GOOD} --epsilon 1 --out s.json": 2,
    f"describe {GOOD} --epsilon 1 --out /proc/x.json": 2,
    f"describe {GOOD} --epsilon 1 --ledger l.db --dataset-name people": 3,
    f"describe {GOOD} --epsilon 1 --ledger l.db --dataset-name users": 2,
    "describe people.csv --epsilon 1": 2,
    "describe notes.txt --epsilon 1": 2,
    "describe people.csv --schema array.json --epsilon 1": 2,
    f"synthesize {GOOD} --epsilon 1 --method wish": 2,
    f"synthesize {GOOD} --epsilon 1 --rows -1": 2,
    f"synthesize {GOOD} --epsilon 1 --bins 0": 2,
    f"synthesize {GOOD} --epsilon 1 --degree 0": 2,
    f"synthesize {GOOD} --epsilon 1 --out people.csv": 2,
    f"synthesize {GOOD} --epsilon 1 --out nowhere/x.csv": 2,
    f"synthesize {GOOD} --epsilon 1 --seed 3": 2,
    f"synthesize {GOOD} --epsilon 1 --run run": 2,
    f"synthesize {GOOD} --epsilon 1 --ledger l.db --dataset-name people": 3,
    "schema draft nowhere.csv": 2,
    "schema draft people.csv --target wish": 2,
    "schema draft people.csv --out s.json": 2,
    "schema draft people.csv --out x.txt": 2,
    "schema draft people.csv --out nowhere/x.toml": 2,
    "schema draft empty.csv": 2,
    "schema check people.csv": 2,
    "schema check people.csv --schema draft.toml": 2,
    "schema check people.csv --schema other.json": 2,
    f"schema check {GOOD} --delta 0.1": 2,
    f"schema check {GOOD} --epsilon 0": 2,
    f"schema check {GOOD} --epsilon 1 --ledger l.db --dataset-name people": 3,
    # federate
    f"federate {GOOD} --epsilon 1": 2,
    "federate people.csv --epsilon 1": 2,
    "federate adult --epsilon 1 --clients 0": 2,
    "federate adult --epsilon 1 --rounds 0": 2,
    "federate adult --epsilon 1 --cohort 0": 2,
    "federate adult --epsilon 1 --optimizer wish": 2,
    "federate adult --epsilon 1 --model wish": 2,
    "federate adult --epsilon 1 --local-batch-size 0": 2,
    # plan, account
    "plan": 2,
    "plan --epsilon 1": 2,
    "plan --epsilon 0 --delta 1e-5 --sample-rate 0.1 --steps 10": 2,
    "plan --epsilon 1 --delta 0 --sample-rate 0.1 --steps 10": 2,
    "plan --epsilon 1 --delta 1e-5 --sample-rate 2 --steps 10": 2,
    "plan --epsilon 1 --delta 1e-5 --sample-rate 0.1 --steps 0": 2,
    "plan --epsilon 1 --delta 1e-5 --sample-rate 0.1 --steps 10 --epochs 3": 2,
    "plan --epsilon 1 --delta 1e-5 --dataset-size 10 --batch-size 20 --steps 10": 2,
    "plan --epsilon 1 --delta 1e-5 --dataset-size 1000 --batch-sizes a,b --epochs 1": 2,
    "plan --epsilon 1 --delta 1e-5 --epochs 1,2": 2,
    "plan --epsilon 1 --recommend": 2,
    "plan --epsilon 1 --delta 1e-5 --sample-rate 0.1 --steps 10 --noise-multiplier 1": 2,
    "account": 2,
    "account run --steps 3": 2,
    "account --steps 3 --delta 1e-5": 2,
    "account --sample-rate 0.1 --noise-multiplier -1 --steps 3 --delta 1e-5": 2,
    "account --sample-rate 0.1 --noise-multiplier 1 --steps 3": 2,
    "account --sample-rate 0.1 --noise-multiplier 1 --steps 3 --delta 2": 2,
    "account --sample-rate 0.1 --noise-multiplier 1 --steps 3 --delta 0.1 --neighboring-relation friends": 2,
    "account --sample-rate 0.1 --noise-multiplier 1 --steps 3 --delta 0.1 --plot x.wish": 2,
    "account --event wish --delta 0.1": 2,
    "account --event event.json --delta 0.1": 2,
    "account --event broken.json --delta 0.1": 2,
    "account run --privacy-unit user": 2,
    # runs
    "predict nowhere people.csv": 2,
    "predict run nowhere.csv": 2,
    "predict run empty.csv": 2,
    "predict run notes.txt": 2,
    "predict run people.csv --out x.txt": 2,
    "predict run people.csv --out people.csv": 2,
    "predict run people.csv --out run/x.csv": 2,
    "predict run people.csv --out nowhere/x.csv": 2,
    "predict run semicolon.csv --out x.csv": 2,
    "predict run adult --out x.csv": 2,
    "predict torn people.csv": 2,
    "export nowhere": 2,
    "export run --format wish": 2,
    "export run --out run/x.onnx": 2,
    "report nowhere": 2,
    "report torn": 2,
    "report run run": 2,
    "report run --format wish": 2,
    "report run --compare run --format registry": 2,
    "report run --purpose ''": 2,
    "report run --evaluate people.csv": 2,
    "report run --evaluate people.csv --schema s.json": 2,
    "report run --evaluate people.csv --schema s.json --evaluation-epsilon 0": 2,
    "report run --evaluate nowhere.csv --schema s.json --evaluation-epsilon 1": 2,
    "report run --evaluate people.csv --schema labels.json --evaluation-epsilon 1 --dry-run": 2,
    "report run --evaluate people.csv --schema s.json --evaluation-epsilon 1 --evaluation-by name": 2,
    "report run --evaluate people.csv --schema s.json --evaluation-epsilon 1 --ledger l.db --dataset-name people": 3,
    "report run --evaluation-epsilon 1": 2,
    "verify nowhere": 2,
    "verify torn": 2,
    "verify run --ledger nowhere.db": 1,
    "runs show nowhere": 2,
    "runs compare run nowhere": 2,
    "attack nowhere": 2,
    "attack run --references 2": 2,
    "attack run --references 5": 2,
    "attack run --members 0": 2,
    f"attack run --data {GOOD}": 2,
    f"attack run --data {GOOD} --test people.csv": 2,
    f"attack run --data {GOOD} --test test.csv --out run/attack": 2,
    "diagnose nowhere": 2,
    f"diagnose run --data {GOOD}": 2,
    f"diagnose run --data {GOOD} --test test.csv --steps 0": 2,
    "audit nowhere": 2,
    "audit adult": 2,
    "audit adult --epsilon 1 --confidence 1": 2,
    "audit run --epsilon 1": 2,
    "audit replay wish": 2,
    "audit replay nowhere:case": 2,
    "audit conformance --only wish": 2,
    "audit conformance --path wish": 2,
    # ledger, data
    "ledger show nowhere.db": 1,
    "ledger show damaged.db": 1,
    "ledger show l.db nobody": 2,
    "ledger declare l.db people --epsilon 1 --delta 1e-5": 2,
    "ledger declare l.db new --epsilon 0 --delta 1e-5": 2,
    "ledger declare l.db new --epsilon 1 --delta 2": 2,
    "ledger declare l.db new --epsilon 1 --delta 1e-5 --policy wish": 2,
    "ledger declare l.db people --change --epsilon 1 --delta 1e-5": 2,
    "ledger charge l.db people --event wish": 2,
    "ledger charge l.db people --event event.json": 2,
    """ledger charge l.db people --event '{"kind": "gaussian", "noise_multiplier": 1}'""": 3,
    """ledger charge l.db people --event '{"kind": "gaussian", "noise_multiplier": 100}' --privacy-unit user""": 2,
    "ledger release l.db people": 2,
    "ledger release l.db people wish": 2,
    "ledger verify l.db --head wish": 2,
    "ledger export nowhere.db": 1,
    "ledger init mysql://host/x": 2,
    "data show wish": 2,
    "data get wish": 2,
    "explain wish": 2,
    "learn wish": 2,
    "learn --out lesson.ipynb": 2,
}  # fmt: skip


@pytest.mark.parametrize("line", INPUTS)
def test_a_wrong_line_ends_in_one_line_with_its_code_and_nothing_private(place, line):
    before = {path: path.stat().st_mtime_ns for path in place.iterdir()}
    lines = {name: len(Ledger(place / "l.db").account(name).history()) for name in ("people", "users")}
    result = CliRunner().invoke(app, [*shlex.split(line), "--json"])
    assert result.exit_code == INPUTS[line], result.output
    document = json.loads(result.stdout)
    said = [one for one in result.stderr.splitlines() if one.startswith("sordino: ")]
    if "error" in document:
        message = document["error"]["message"]
        assert len(said) == 1
        assert " ".join(message.split()) in said[0]
        assert 20 < len(message) < 700
        assert "Traceback" not in result.output
        assert "unexpectedly" not in message
    else:
        # A check that fails is a result.
        assert line.startswith("verify ")
    assert not any(secret in result.output for secret in SECRETS)
    # Nothing was made, changed or charged.
    after = {path: path.stat().st_mtime_ns for path in place.iterdir()}
    assert set(after) - set(before) <= {place / "runs"}
    assert lines == {name: len(Ledger(place / "l.db").account(name).history()) for name in ("people", "users")}
    assert not list((place / "runs").glob("*")) if (place / "runs").exists() else True


def test_every_command_has_wrong_lines():
    def names(group, before=""):
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from names(command, f"{before}{name} ")
            else:
                yield f"{before}{name}"

    from typer.main import get_command

    # These take nothing that could be wrong, or read what another test breaks.
    free = {"recipes", "data list", "runs list", "ledger history", "audit training"}
    every = set(names(get_command(app)))
    assert {name for name in every if not any(line.startswith(name) for line in INPUTS)} <= free
    assert len(INPUTS) > 100
