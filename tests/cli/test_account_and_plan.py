import json
import math
import resource
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sordino.cli import app
from sordino.events import Gaussian, PoissonSampled, SelfComposed, to_json
from sordino.runs import RunFolder

EXAMPLE = ["--sample-rate", "0.01", "--noise-multiplier", "4", "--steps", "10000", "--delta", "1e-5"]
EVENT = SelfComposed(event=PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0)), count=10_000)
PLAN = json.dumps(
    {"delta": 1e-5, "neighboring_relation": "add_or_remove_one", "privacy_unit": "user", "sample_rate": 0.01}
)


def call(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100", "NO_COLOR": "1"})


def document(*arguments):
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_account_gives_the_known_answer_for_the_textbook_run():
    # ε = 0.9468668 at δ = 1e-5: agrees with two independent accountants to the digits shown.
    body = document("account", *EXAMPLE)
    assert body["epsilon"] == 0.94687
    assert body["accountants"]["contour"] == 0.94687
    assert 1.03 < body["accountants"]["rdp"] < 1.04
    assert body["interval"]["lower"] <= 0.9468668008 <= body["interval"]["upper"] + 1e-9
    assert body["interval"]["upper"] <= body["epsilon"]
    assert body["accountant"] == "contour"
    assert body["delta"] == 1e-5
    assert body["relation"] == "add_or_remove_one"
    assert body["unit"] == "example"
    assert body["sampler"] == "Poisson sampling at rate 0.01"
    assert list(body)[:2] == ["epsilon", "accountants"]


def test_account_says_the_same_of_the_event_as_of_its_description(tmp_path):
    file = tmp_path / "event.json"
    file.write_text(to_json(EVENT))
    described = document("account", *EXAMPLE)
    assert document("account", "--event", to_json(EVENT), "--delta", "1e-5") == described
    assert document("account", "--event", str(file), "--delta", "1e-5") == described
    assert json.dumps(described["event"], sort_keys=True) == to_json(EVENT)


def test_account_reads_a_run_folder_with_its_own_delta_relation_and_unit(tmp_path):
    with RunFolder.create(tmp_path / "run", plan=PLAN) as run:
        for step in range(20):
            run.append(step=step, event=EVENT.event, epsilon=None)
    body = document("account", str(tmp_path / "run"))
    assert body["event"]["count"] == 20
    assert body["unit"] == "user"
    expected = document(
        "account", "--sample-rate", "0.01", "--noise-multiplier", "4", "--steps", "20", "--delta", "1e-5"
    )
    assert body["epsilon"] == expected["epsilon"]


def test_the_relation_of_a_run_cannot_be_chosen_afterwards(tmp_path):
    RunFolder.create(tmp_path / "run", plan=PLAN).close()
    result = call("account", str(tmp_path / "run"), "--relation", "replace_one")
    assert result.exit_code == 2
    assert "as the run was planned" in result.stderr


def test_no_noise_is_an_infinite_epsilon_and_no_steps_are_none():
    assert document("account", "--sample-rate", "0.1", "--noise-multiplier", "0", "--steps", "3", "--delta", "1e-5")[
        "epsilon"
    ] == ("inf")
    assert (
        document("account", "--sample-rate", "0.1", "--noise-multiplier", "1", "--steps", "0", "--delta", "1e-5")[
            "epsilon"
        ]
        == 0
    )


def test_account_for_people_names_everything_an_epsilon_needs():
    text = call("account", *EXAMPLE).stdout
    for words in ("ε = 0.94687 at δ = 1e-05", "one example", "add or remove one", "Poisson sampling", "contour", "rdp"):
        assert words in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "exactly one of"),
        (["--sample-rate", "0.1"], "--noise-multiplier, --steps must be given"),
        (EXAMPLE[:-2], "--delta must be given"),
        ([*EXAMPLE, "--event", "{}"], "exactly one of"),
        (["--event", "nowhere.json", "--delta", "1e-5"], "must be JSON or a file"),
        (["--event", '{"kind": "magic"}', "--delta", "1e-5"], "kind must be one of"),
        ([*EXAMPLE[:-1], "1.5"], "delta must be a number in (0, 1)"),
        (["--sample-rate", "1.5", *EXAMPLE[2:]], "sample_rate must be"),
        (["--sample-rate", "0.1", "--noise-multiplier", "-1", *EXAMPLE[4:]], "noise_multiplier must be"),
        (["nowhere", "--delta", "1e-5"], "must be a run folder"),
    ],
)
def test_wrong_use_of_account_is_one_line_and_exit_code_two(arguments, words):
    result = call("account", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr
    assert result.stderr.strip().count("\n") == 0
    assert "Traceback" not in result.stderr


def test_an_unknown_option_is_exit_code_two():
    assert call("account", "--noise-multiplyer", "4").exit_code == 2


def test_an_error_with_json_is_one_document_on_stdout_and_one_line_on_stderr():
    result = call("account", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["kind"] == "InvalidArgument"
    assert result.stderr.startswith("sordino: ")


@pytest.mark.parametrize("target", [0.1, 1.0, 8.0])
def test_plan_comes_close_to_the_target_and_never_above_it(target):
    body = document("plan", "--epsilon", str(target), "--delta", "1e-5", "--sample-rate", "0.02", "--steps", "300")
    assert 0.999 * target < body["interval"]["upper"] <= target
    assert body["epsilon"] <= target
    again = document(
        "account",
        *("--sample-rate", "0.02", "--noise-multiplier", str(body["noise_multiplier"]), "--steps", "300"),
        *("--delta", "1e-5"),
    )
    assert again["epsilon"] == body["epsilon"]


def test_plan_from_records_marks_the_size_of_the_data_set_as_public():
    body = document(
        "plan", "--epsilon", "1", "--delta", "1e-5", "--records", "6000", "--batch-size", "60", "--epochs", "2.5"
    )
    assert body["sample_rate"] == 0.01
    assert body["steps"] == 250
    assert body["dataset_size_is_public"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "10"], "--sample-rate, or --records with --batch-size"),
        (["--steps", "10", "--records", "10"], "--sample-rate, or --records with --batch-size"),
        (["--steps", "10", "--sample-rate", "0.1", "--records", "10"], "--sample-rate, or --records"),
        (["--sample-rate", "0.1"], "--steps or --epochs"),
        (["--steps", "10", "--epochs", "1", "--sample-rate", "0.1"], "--steps or --epochs"),
        (["--steps", "10", "--records", "10", "--batch-size", "11"], "batch_size must be ≤ records"),
    ],
)
def test_an_incomplete_plan_says_what_is_missing(arguments, words):
    result = call("plan", "--epsilon", "1", "--delta", "1e-5", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_plan_for_people_states_noise_and_epsilon():
    text = call("plan", "--epsilon", "1", "--delta", "1e-5", "--sample-rate", "0.01", "--steps", "100").stdout
    assert "noise multiplier" in text
    assert "≤ 1 for δ = 1e-05" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["account", *EXAMPLE, "--json"],
        ["plan", "--epsilon", "1", "--delta", "1e-5", "--sample-rate", "0.01", "--steps", "1000"],
        ["--help"],
        ["train", "--help"],
        ["demo", "--help"],
        ["data", "list"],
        ["--version"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_light_commands_end_within_a_second_and_leave_torch_alone(arguments):
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules, 'matplotlib' in sys.modules, file=sys.stderr))\n"
        "sys.argv = ['sordino', *sys.argv[1:]]\n"
        "from sordino.cli import main\n"
        "main()"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr.strip() == "False False"
    # Processor time, not the clock: the machine may be busy with other work.
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 1


def test_the_module_runs_as_the_command_does():
    done = subprocess.run([sys.executable, "-m", "sordino", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("sordino ")


def test_the_textbook_epsilon_is_not_understated_by_its_printed_digits():
    body = document("account", *EXAMPLE)
    assert body["epsilon"] >= body["interval"]["upper"]
    assert math.isclose(body["epsilon"], 0.9468668, abs_tol=1e-5)
