import json
import math
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sordino.accounting import epsilon
from sordino.cli import app, main
from sordino.commands.pictures import first_steps, number_of_steps
from sordino.commands.planning import subsampled_gaussian
from sordino.events import Composed, Gaussian, NoOp, PoissonSampled, SelfComposed, to_json
from sordino.runs import RunFolder

HEAVY = ("torch", "matplotlib", "pandas", "sklearn", "transformers", "sqlalchemy", "scipy.stats", "scipy.optimize")
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
    assert body["neighboring_relation"] == "add_or_remove_one"
    assert body["privacy_unit"] == "record"
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
    assert body["privacy_unit"] == "user"
    expected = document(
        "account", "--sample-rate", "0.01", "--noise-multiplier", "4", "--steps", "20", "--delta", "1e-5"
    )
    assert body["epsilon"] == expected["epsilon"]


def test_the_relation_of_a_run_cannot_be_chosen_afterwards(tmp_path):
    RunFolder.create(tmp_path / "run", plan=PLAN).close()
    result = call("account", str(tmp_path / "run"), "--neighboring-relation", "replace_one")
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
    for words in ("ε = 0.94687 at δ = 1e-05", "one record", "add or remove one", "Poisson sampling", "contour", "rdp"):
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


def test_account_says_what_an_attacker_reaches_and_what_is_left_without_sampling():
    # Exact rates of the reference table for q = 256/60000, σ = 1.1, 14 062 steps.
    body = document(
        "account", "--sample-rate", str(256 / 60000), "--noise-multiplier", "1.1", "--steps", "14062", "--delta", "1e-5"
    )
    assert body["attack"]["advantage"] == pytest.approx(0.2244615, abs=1e-5)
    assert body["attack"]["true_positive_rate"]["0.01"] == pytest.approx(0.0402047, abs=1e-6)
    assert body["attack"]["true_positive_rate"]["0.001"] == pytest.approx(0.0060503, abs=1e-6)
    bare = document("account", "--sample-rate", "1", "--noise-multiplier", "1.1", "--steps", "14062", "--delta", "1e-5")
    assert body["epsilon_without_amplification"] == bare["epsilon"] > 6000
    assert "without amplification" in call("account", *EXAMPLE).stdout
    assert "true positives ≤ 1.92 % at 1 % false positives" in " ".join(call("account", *EXAMPLE).stdout.split())


def test_an_event_without_a_curve_has_no_attack_and_still_an_epsilon():
    body = document("account", "--event", '{"kind": "zero_concentrated_dp", "rho": 0.1}', "--delta", "1e-5")
    assert body["attack"] is None
    assert 0 < body["epsilon"] < 5


def test_all_asks_the_slow_accountants_and_none_is_below_the_best():
    quick, every = document("account", *EXAMPLE), document("account", *EXAMPLE, "--all")
    assert set(quick["accountants"]) < set(every["accountants"])
    assert {"pld", "moments", "tcdp", "advanced"} <= set(every["accountants"])
    assert min(every["accountants"].values()) == every["epsilon"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_draws_a_picture_of_the_named_kind(tmp_path, suffix):
    target = tmp_path / f"curve.{suffix}"
    body = document("account", *EXAMPLE, "--plot", str(target))
    assert body["plot"] == str(target)
    start = target.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in start
    if suffix == "svg":
        again = tmp_path / "again.svg"
        document("account", *EXAMPLE, "--plot", str(again))
        assert again.read_bytes() == target.read_bytes()


@pytest.mark.parametrize(("name", "words"), [("curve.pdf", ".png or .svg"), ("nowhere/curve.png", "existing folder")])
def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path, name, words):
    result = call("account", *EXAMPLE, "--plot", str(tmp_path / name))
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_plot_of_a_run_without_protection_says_so_instead_of_failing(tmp_path):
    event = '{"kind": "non_private", "reason": "printed"}'
    assert (
        document("account", "--event", event, "--delta", "1e-5", "--plot", str(tmp_path / "a.png"))["epsilon"] == "inf"
    )
    assert (tmp_path / "a.png").stat().st_size > 1000


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=4), st.integers(0, 60))
def test_the_first_steps_of_a_run_are_as_many_as_asked_for(blocks, count):
    event = Composed(
        events=tuple(
            SelfComposed(event=SelfComposed(event=Gaussian(noise_multiplier=float(i + 1)), count=inner), count=outer)
            for i, (outer, inner) in enumerate(blocks)
        )
    )
    total = sum(outer * inner for outer, inner in blocks)
    assert number_of_steps(event) == total
    first = first_steps(event, min(count, total))
    assert flatten_count(first) == min(count, total)


def flatten_count(event):
    return 0 if event == NoOp() else number_of_steps(event)


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
        "plan", "--epsilon", "1", "--delta", "1e-5", "--dataset-size", "6000", "--batch-size", "60", "--epochs", "2.5"
    )
    assert body["sample_rate"] == 0.01
    assert body["steps"] == 250
    assert body["dataset_size_is_public"]


GOAL = ["plan", "--epsilon", "3", "--delta", "1e-5"]


def test_plan_finds_the_most_steps_the_largest_rate_and_the_least_delta():
    def spent(q, z, t, delta):
        return epsilon(
            SelfComposed(event=PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=z)), count=t), delta
        )

    steps = document(*GOAL, "--sample-rate", "0.01", "--noise-multiplier", "1")
    assert steps["found"] == "steps"
    assert spent(0.01, 1.0, steps["steps"], 1e-5).upper <= 3 < spent(0.01, 1.0, steps["steps"] + 1, 1e-5).upper
    rate = document(*GOAL, "--steps", "1000", "--noise-multiplier", "1")
    assert rate["found"] == "sample_rate"
    assert (
        spent(rate["sample_rate"], 1.0, 1000, 1e-5).upper
        <= 3
        < spent(1.001 * rate["sample_rate"], 1.0, 1000, 1e-5).upper
    )
    batch = document(*GOAL, "--steps", "1000", "--noise-multiplier", "1", "--dataset-size", "60000")
    size = round(batch["batch_size"])
    assert spent(size / 60000, 1.0, 1000, 1e-5).upper <= 3 < spent((size + 1) / 60000, 1.0, 1000, 1e-5).upper
    least = document("plan", "--epsilon", "3", "--sample-rate", "0.01", "--noise-multiplier", "1", "--steps", "1000")
    assert least["found"] == "delta"
    assert spent(0.01, 1.0, 1000, least["delta"]).upper <= 3 < spent(0.01, 1.0, 1000, 0.998 * least["delta"]).upper


def test_a_table_calibrates_every_cell_and_marks_the_cheapest_for_its_noise():
    body = document(*GOAL, "--dataset-size", "60000", "--batch-sizes", "1024,4096", "--epochs", "10,40")
    cells = {(cell["batch_size"], cell["epochs"]): cell for cell in body["table"]}
    assert set(cells) == {(1024, 10), (1024, 40), (4096, 10), (4096, 40)}
    single = document(*GOAL, "--dataset-size", "60000", "--batch-size", "4096", "--epochs", "40")
    chosen = cells[4096, 40]
    assert single["noise_multiplier"] == chosen["noise_multiplier"]
    assert single["steps"] == chosen["steps"] == 586
    for cell in cells.values():
        assert cell["signal"] == pytest.approx(cell["sample_rate"] * cell["steps"] ** 0.5 / cell["noise_multiplier"])
        # No run gives more signal than the full batch: that is one Gaussian with the μ that ε and δ allow.
        assert cell["signal"] <= body["signal_ceiling"]
    best = max(cell["signal"] for cell in cells.values())
    enough = [cell for cell in cells.values() if cell["signal"] >= 0.9 * best]
    (marked,) = [cell for cell in cells.values() if cell["cheapest"]]
    assert marked in enough
    assert marked["epochs"] == min(cell["epochs"] for cell in enough)
    assert marked["signal"] == max(cell["signal"] for cell in enough if cell["epochs"] == marked["epochs"])
    text = call(*GOAL, "--dataset-size", "60000", "--batch-sizes", "1024,4096", "--epochs", "10,40").stdout
    assert "★" in text
    assert "Sander" in text


def test_a_table_without_batch_sizes_takes_powers_of_two():
    body = document(*GOAL, "--dataset-size", "60000", "--epochs", "10,20")
    assert sorted({cell["batch_size"] for cell in body["table"]}) == [128, 512, 2048, 8192]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*GOAL, "--batch-sizes", "64,128", "--epochs", "10"], "a table must be given"),
        ([*GOAL, "--batch-sizes", "64,x", "--epochs", "10", "--dataset-size", "1000"], "must be numbers with commas"),
        ([*GOAL, "--batch-sizes", "64,-1", "--epochs", "10", "--dataset-size", "1000"], "must be finite numbers > 0"),
        (
            [*GOAL, "--batch-sizes", "64,2000", "--epochs", "10", "--dataset-size", "1000"],
            "batch_size must be ≤ records",
        ),
        ([*GOAL, "--batch-sizes", "64", "--epochs", "10", "--dataset-size", "1000", "--steps", "9"], "Drop them"),
        ([*GOAL, "--sample-rate", ".1", "--steps", "9", "--noise-multiplier", "2"], "left one of"),
        (["plan", "--epsilon", "3", "--sample-rate", ".1", "--steps", "9"], "all but one of"),
        ([*GOAL, "--noise-multiplier", "1", "--epochs", "9"], "all but one of"),
    ],
)
def test_a_plan_with_too_much_or_too_little_says_so(arguments, words):
    result = call(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "10"], "--sample-rate, or --dataset-size with --batch-size"),
        (["--steps", "10", "--dataset-size", "10"], "--sample-rate, or --dataset-size with --batch-size"),
        (["--steps", "10", "--sample-rate", "0.1", "--dataset-size", "10"], "--sample-rate, or --dataset-size"),
        (["--sample-rate", "0.1"], "--steps or --epochs"),
        (["--steps", "10", "--epochs", "1", "--sample-rate", "0.1"], "--steps or --epochs"),
        (["--steps", "10", "--dataset-size", "10", "--batch-size", "11"], "batch_size must be ≤ records"),
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
        [
            "plan",
            "--epsilon",
            "3",
            "--delta",
            "1e-5",
            "--dataset-size",
            "60000",
            "--batch-size",
            "4096",
            "--epochs",
            "20,40",
        ],
        ["--help"],
        ["train", "--help"],
        ["demo", "--help"],
        ["data", "list"],
        ["--version"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_light_commands_load_nothing_heavy(arguments):
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr))\n"
        "sys.argv = ['sordino', *sys.argv[1:]]\n"
        "from sordino.cli import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(
    ("given", "count"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
    ids=["default", "count", "policy"],
)
def test_torchs_threads_spin_shortly_unless_the_user_says_how_they_wait(monkeypatch, given, count):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = []
    monkeypatch.setattr(sys.modules[main.__module__], "app", lambda **_: seen.append(os.environ.get("GOMP_SPINCOUNT")))
    main()
    assert seen == [count]


def test_the_module_runs_as_the_command_does():
    done = subprocess.run([sys.executable, "-m", "sordino", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("sordino ")


def test_the_textbook_epsilon_is_not_understated_by_its_printed_digits():
    body = document("account", *EXAMPLE)
    assert body["epsilon"] >= body["interval"]["upper"]
    assert math.isclose(body["epsilon"], 0.9468668, abs_tol=1e-5)


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "sordino", "account", "--sample-rate", "0.01", "--noise-multiplier", "4", "--json"]
    command += ["--steps", "10", "--delta", "1e-5", "--all"]
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_the_unit_of_a_run_cannot_be_chosen_afterwards(tmp_path):
    RunFolder.create(tmp_path / "run", plan=PLAN).close()
    result = call("account", str(tmp_path / "run"), "--privacy-unit", "record")
    assert result.exit_code == 2
    assert "--privacy-unit must be user, as the run was planned" in result.stderr
    assert document("account", *EXAMPLE, "--privacy-unit", "client")["privacy_unit"] == "client"


@pytest.mark.parametrize(
    "line",
    [
        "--epsilon 1e-7 --delta 1e-6 --sample-rate 0.01 --steps 100",
        "--epsilon 0.0001 --delta 1e-5 --dataset-size 1000 --batch-size 10 --steps 1000",
        "--epsilon 0.123456789 --delta 1.23456789e-5 --sample-rate 0.01 --steps 100",
        "--epsilon 3 --delta 1e-5 --sample-rate 0.0123456789 --steps 777",
        "--epsilon 2 --delta 1e-5 --noise-multiplier 1.23456789 --sample-rate 0.01",
        "--epsilon 2 --delta 1e-5 --noise-multiplier 1.23456789 --steps 500",
        "--epsilon 2.34567891 --noise-multiplier 1.2 --sample-rate 0.01 --steps 500",
        "--epsilon 0.00001234 --delta 1e-5 --sample-rate 1 --steps 1",
    ],
)
def test_every_line_of_a_plan_is_true(line):
    """ε as printed is at most the target as printed, and what is printed, typed in again, keeps the target."""
    page = CliRunner().invoke(app, ["plan", *line.split()])
    assert page.exit_code == 0, page.stderr
    said = re.search(r"ε = (\S+) ≤ (\S+) for δ = (\S+)", " ".join(page.stdout.split()))
    assert said is not None
    cost, target, delta = (float(one) for one in said.groups())
    assert 0 < cost <= target == float(line.split()[1])
    shown = dict(re.findall(r"^ *(noise multiplier|sample rate|steps) {2,}(\S+) *$", page.stdout, re.MULTILINE))
    event = subsampled_gaussian(
        sample_rate=float(shown["sample rate"]),
        noise_multiplier=float(shown["noise multiplier"]),
        steps=int(shown["steps"].replace(",", "")),
    )
    assert epsilon(event, delta).upper <= target
    document = json.loads(CliRunner().invoke(app, ["plan", *line.split(), "--json"]).stdout)
    assert document["epsilon"] <= document["target_epsilon"] == target


@pytest.mark.parametrize(
    "line",
    [
        "--epsilon 1e-9 --delta 1e-9 --dataset-size 1000 --batch-size 10 --steps 100000",
        "--epsilon 0.001 --delta 1e-5 --noise-multiplier 1 --sample-rate 0.1",
        "--epsilon 0.0001 --delta 1e-5 --noise-multiplier 1 --steps 1000 --dataset-size 1000",
    ],
)
def test_a_target_that_can_not_be_kept_is_a_usage_error_by_the_name_of_the_option(line):
    result = CliRunner().invoke(app, ["plan", *line.split()])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("sordino: epsilon must ")


def test_a_small_epsilon_is_not_shown_as_zero():
    result = CliRunner().invoke(
        app, ["account", "--sample-rate", "0.01", "--noise-multiplier", "4000", "--steps", "100", "--delta", "1e-12"]
    )
    assert result.exit_code == 0
    assert "0.00000" not in result.stdout


def test_the_picture_of_an_account_has_strong_composition_where_it_is_defined():
    from sordino.commands.pictures import _published_composition
    from sordino.events import Gaussian, Laplace, PoissonSampled, SelfComposed

    run = SelfComposed(event=PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0)), count=10_000)
    series = _published_composition(run, [100, 10_000], 1e-5)
    assert [count for count, _ in series] == [100, 10_000]
    assert round(series[1][1], 2) == 9.34
    assert _published_composition(SelfComposed(event=Laplace(noise_multiplier=1.0), count=3), [1, 3], 1e-5) == []
