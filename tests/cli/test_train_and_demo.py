import csv
import json
import math
import random

import pytest
import torch
import typer
from typer.testing import CliRunner

from sordino.cli import app
from sordino.cli.app import Commands, exit_code
from sordino.errors import BudgetExceeded, CoupledRecords, DataUnavailable, InvalidArgument, MissingDeclaration
from sordino.runs import RunFolder

SCHEMA = {
    "target": "income",
    "labels": ["low", "high"],
    "columns": [
        {"name": "age", "type": "numeric", "low": 0, "high": 100},
        {"name": "job", "type": "category", "categories": ["clerk", "nurse"]},
    ],
}
QUICK = ["--epsilon", "1", "--steps", "5"]


def write_people(path, records, *, seed):
    generator = random.Random(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["age", "job", "income"])
        for _ in range(records):
            age, job = generator.randint(18, 90), generator.choice(["clerk", "nurse"])
            table.writerow([age, job, "high" if age + 20 * (job == "nurse") > 60 else "low"])


@pytest.fixture
def people(tmp_path, monkeypatch):
    """A working directory with a private file, a public one, and the schema of both."""
    monkeypatch.chdir(tmp_path)
    write_people(tmp_path / "people.csv", 400, seed=1)
    write_people(tmp_path / "public.csv", 100, seed=2)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1"})


def train(*arguments):
    return call("train", "people.csv", "--schema", "schema.json", *QUICK, *arguments)


def document(*arguments):
    result = train(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_training_on_a_private_file_leaves_a_complete_run_folder(people):
    body = document("--out", "run")
    run = RunFolder.open("run")
    assert body["epsilon"] == run.guarantee.epsilon
    assert 0.99 < body["epsilon"] <= 1
    assert body["description"] == run.guarantee.describe()
    assert len(list(run)) == body["steps"] == 5
    assert [line.epsilon for line in run] == sorted(line.epsilon for line in run)
    for file in ("model.safetensors", "report.html", "report.png", "metrics.json", "environment.json"):
        assert (people / "run" / file).stat().st_size > 0
    assert set(run.load_model()) == {"2.weight", "2.bias"}


def test_secure_noise_is_in_the_plan_and_in_the_report_and_costs_no_epsilon(people):
    body = document("--out", "run", "--secure-mode")
    run = RunFolder.open("run")
    assert run.plan["secure_mode"] is True
    assert "secure noise" in run.meta["settings"]
    assert "integers on a grid, drawn exactly" in (people / "run" / "report.html").read_text()
    floats = document("--out", "floats")
    assert RunFolder.open("floats").plan["secure_mode"] is False
    assert body["epsilon"] == floats["epsilon"]
    refused = train("--model", "output", "--secure-mode")
    assert refused.exit_code == 2
    assert "secure noise" in refused.stderr


def test_the_transcript_accounts_for_what_was_claimed(people):
    claimed = document("--out", "run")["epsilon"]
    accounted = json.loads(call("account", "run", "--json").stdout)
    assert accounted["interval"]["upper"] == pytest.approx(claimed, rel=1e-9)


def test_nothing_is_measured_on_private_records(people):
    result = train("--out", "run")
    assert result.exit_code == 0
    assert "accuracy" not in result.output
    assert json.loads((people / "run" / "metrics.json").read_text()) == {}
    assert "Not measured" in (people / "run" / "report.html").read_text()


def test_no_path_and_no_host_is_in_the_run_folder(people):
    document("--out", "run")
    for file in (people / "run").iterdir():
        assert str(people).encode() not in file.read_bytes()


MEASURED = {"majority_accuracy", "test_accuracy", "test_auc", "test_balanced_accuracy", "test_ece", "test_mce"}


def test_a_public_test_file_is_measured_with_the_private_model_alone(people):
    metrics = document("--out", "run", "--test", "public.csv")["metrics"]
    assert set(metrics) == MEASURED


def test_public_data_have_a_twin(people):
    metrics = document("--out", "run", "--test", "public.csv", "--data-is-public")["metrics"]
    assert set(metrics) == MEASURED | {"baseline_test_accuracy"}
    assert metrics["baseline_test_accuracy"] > metrics["majority_accuracy"]


def test_the_page_for_people_names_everything_an_epsilon_needs(people):
    text = train("--test", "public.csv").stdout
    for words in ("(ε = 1.00, δ = 1e-05)", "one record", "add or remove one", "full batches", "accountant", "report"):
        assert words in text
    assert "test accuracy, private" in text
    assert "baseline" not in text


def test_runs_are_numbered_and_never_overwritten(people):
    first, second = document()["run"], document()["run"]
    assert first.endswith("-1")
    assert second.endswith("-2")
    result = train("--out", first)
    assert result.exit_code == 2
    assert "never overwritten" in result.stderr


def test_a_missing_schema_is_named_before_anything_is_made(people):
    result = call("train", "people.csv", "--target", "income", "--epsilon", "1")
    assert result.exit_code == 2
    assert "'age', 'job'" in result.stderr
    assert not (people / "runs").exists()


def test_the_schema_may_come_from_a_public_sample(people):
    result = call("train", "people.csv", "--target", "income", "--public-schema-from", "public.csv", *QUICK, "--json")
    assert result.exit_code == 0, result.stderr
    assert 0.99 < json.loads(result.stdout)["epsilon"] <= 1


def test_settings_given_by_hand_are_used_and_named(people):
    body = document(
        *("--out", "run", "--model", "mlp", "--batch-size", "40", "--max-grad-norm", "0.5", "--learning-rate", "0.25")
    )
    run = RunFolder.open("run")
    assert body["sampler"] == "Poisson sampling at rate 0.1"
    assert 0.99 < body["epsilon"] <= 1
    assert run.plan["max_grad_norm"] == 0.5
    assert run.plan["expected_batch_size"] == 40
    assert run.meta["training"]["learning_rate"] == 0.25
    assert "by hand: steps, batch size, clipping norm, learning rate" in run.meta["settings"]


def test_a_smaller_batch_lowers_the_learning_rate_when_none_is_given(people):
    document("--out", "whole")
    document("--out", "part", "--batch-size", "20")
    whole, part = (RunFolder.open(name).meta["training"]["learning_rate"] for name in ("whole", "part"))
    assert part < whole


def test_a_seeded_run_repeats_itself_and_is_marked_not_for_release(people):
    seeded = ["--model", "mlp", "--seed", "7", "--reproducible"]
    first, second = document("--out", "a", *seeded), document("--out", "b", *seeded)
    models = [RunFolder.open(name).load_model() for name in ("a", "b")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert any("not for release" in caveat for caveat in first["caveats"])
    assert first["description"] == second["description"]
    assert "Not for release" in (people / "a" / "report.html").read_text()


def test_runs_without_a_seed_differ(people):
    document("--out", "a")
    document("--out", "b")
    models = [RunFolder.open(name).load_model() for name in ("a", "b")]
    assert not torch.equal(models[0]["2.weight"], models[1]["2.weight"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", "1"], "reproducible"),
        (["--reproducible"], "seed must be"),
        (["--epsilon", "0"], "epsilon must be"),
        (["--delta", "1"], "delta must be"),
        (["--delta", "0.01"], "delta must be below"),
        (["--batch-size", "401"], "batch_size must be"),
        (["--max-grad-norm", "-1"], "max_grad_norm must be"),
        (["--learning-rate", "0"], "learning_rate must be"),
        (["--steps", "0"], "steps must be"),
        (["--model", "transformer"], "model must be one of"),
        (["--model", "cnn"], "CNN"),
        (["--model", "nowhere:make"], "can be imported"),
        (["--model", "json:nothing"], "must name a function"),
    ],
)
def test_wrong_use_is_one_line_with_exit_code_two_and_leaves_no_folder(people, arguments, words):
    result = train("--out", "run", *arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stderr.strip().count("\n") == 0
    assert not (people / "run").exists()


OWN = """
import torch

class Stopping(torch.nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls > 30:
            raise KeyboardInterrupt
        return super().forward(x)

def linear(shape, classes):
    print("made")
    return torch.nn.Linear(*shape, classes)

def batch_norm(shape, classes):
    return torch.nn.Sequential(torch.nn.BatchNorm1d(*shape), torch.nn.Linear(*shape, classes))

def failing(shape, classes):
    raise RuntimeError("record 17: Alice, 1.2.1980")

def stopping(shape, classes):
    return Stopping(*shape, classes)
"""


@pytest.fixture
def own(people, monkeypatch):
    """A name for a module of the user's own, fresh in every test."""
    name = f"own_{people.name}".replace("-", "_")
    (people / f"{name}.py").write_text(OWN)
    return name


def test_a_model_of_ones_own_is_trained_and_what_it_prints_stays_off_stdout(people, own):
    body = document("--out", "run", "--model", f"{own}:linear")
    assert set(RunFolder.open("run").load_model()) == {"weight", "bias"}
    assert body["steps"] == 5


def test_a_model_that_mixes_records_is_refused_with_exit_code_one_and_leaves_no_folder(people, own):
    result = train("--out", "run", "--model", f"{own}:batch_norm")
    assert result.exit_code == 1
    assert "BatchNorm" in result.stderr
    assert not (people / "run").exists()


def test_the_message_of_an_unforeseen_error_is_withheld(people, own):
    result = train("--out", "run", "--model", f"{own}:failing")
    assert result.exit_code == 1
    assert "RuntimeError was raised unexpectedly" in result.stderr
    assert "Alice" not in result.output
    assert not (people / "run").exists()


def test_an_interrupted_run_keeps_what_it_was_charged(people, own):
    result = train("--out", "run", "--model", f"{own}:stopping", "--steps", "200", "--json")
    assert result.exit_code == 130
    body = json.loads(result.stdout)
    assert body["interrupted"]
    charged = len(list(RunFolder.open("run")))
    assert body["steps"] <= charged < 200
    assert body["epsilon"] < 0.9
    accounted = json.loads(call("account", "run", "--json").stdout)
    assert accounted["interval"]["upper"] == pytest.approx(body["epsilon"], rel=1e-9)


def test_a_record_with_unreadable_cells_changes_no_word_of_the_output(people):
    plain = train("--out", "run")
    text = (people / "people.csv").read_text().splitlines()
    (people / "people.csv").write_text("\n".join([text[0], "nan,,high", *text[2:]]) + "\n")
    odd = train("--out", "odd")
    assert odd.stdout.replace("odd", "run") == plain.stdout
    assert sorted(p.name for p in (people / "odd").iterdir()) == sorted(p.name for p in (people / "run").iterdir())


def test_exit_codes_follow_the_kind_of_error():
    assert exit_code(InvalidArgument("x")) == 2
    assert exit_code(MissingDeclaration("x")) == 2
    assert exit_code(BudgetExceeded("x")) == 3
    assert exit_code(CoupledRecords("x")) == exit_code(DataUnavailable("x")) == exit_code(ValueError("x")) == 1


def test_a_refused_budget_ends_with_exit_code_three_and_one_line():
    tiny = typer.Typer(cls=Commands)

    @tiny.callback()
    def nothing() -> None: ...

    @tiny.command()
    def spend() -> None:
        raise BudgetExceeded("ε must stay ≤ 1, got 1.1 with this step. Stop here.")

    result = CliRunner().invoke(tiny, ["spend"])
    assert result.exit_code == 3
    assert result.stderr.startswith("sordino: ε must stay ≤ 1")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo, run once."""
    folder = tmp_path_factory.mktemp("demo")
    result = CliRunner().invoke(app, ["demo", "--json", "--out", str(folder / "run")])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout), folder / "run", result


def test_the_demo_is_private_accurate_and_beside_its_twin(demo):
    body, _, _ = demo
    assert 0.99 < body["epsilon"] <= 1
    assert body["delta"] == 1e-5
    assert body["metrics"]["test_accuracy"] >= 0.83
    assert body["metrics"]["baseline_test_accuracy"] >= 0.83
    assert math.isclose(body["metrics"]["majority_accuracy"], 0.7543, abs_tol=1e-4)


def test_the_demo_shows_progress_on_stderr_and_one_document_on_stdout(demo):
    body, _, result = demo
    assert "30,162 public census records" in result.stderr
    assert "ε ≤ 1.00" in result.stderr
    assert result.stdout.count("\n") == 1
    assert body["steps"] > 0


def test_the_report_of_the_demo_shows_both_accuracies(demo):
    body, run, _ = demo
    page = (run / "report.html").read_text()
    assert f"{100 * body['metrics']['test_accuracy']:.1f} %" in page
    assert "non-private baseline" in page
    again = json.loads(CliRunner().invoke(app, ["report", str(run), "--json"]).stdout)
    assert again["guarantee"]["description"] == body["description"]
    assert again["page"] == str(run / "report.html")
    # What a default run does not do is a limitation with its severity; nothing of it is critical.
    found = {item["title"]: (item["status"], item["severity"]) for item in again["privacy_hazards"]}
    limits = [what for what in found.values() if what[0] == "limitation"]
    assert limits == [("limitation", "theoretical")]
    assert found["Noise is drawn exactly"] in limits
    assert again["release"]["verdict"] == "yes, on conditions"
    assert again["missing"] == []
    assert "violated" not in page


def test_the_report_command_for_people_says_where_the_page_is(demo):
    _, run, _ = demo
    text = CliRunner().invoke(app, ["report", str(run), "--out", str(run / "copy")], env={"COLUMNS": "300"}).stdout
    assert "ε = 1.00" in text
    assert "report.html" in text
    assert (run / "copy" / "report.png").is_file()
