import doctest
import json
import math
import os
import platform
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sordino.runs
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, SordinoError
from sordino.events import Gaussian, NonPrivate, PoissonSampled, SelfComposed, compose
from sordino.runs import Metric, RunFolder
from sordino.runs.folder import environment

STEP = PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0))
EVENTS = st.builds(
    PoissonSampled,
    sample_rate=st.floats(1e-6, 1),
    event=st.builds(Gaussian, noise_multiplier=st.floats(0.1, 100)),
)


def make(path, steps=0):
    run = RunFolder.create(path, plan='{"schema": 1}', meta={"data": "adult"})
    for step in range(steps):
        run.append(step=step, event=STEP, epsilon=0.1 * (step + 1))
    return run


def test_the_module_example_runs():
    assert doctest.testmod(sordino.runs).failed == 0


def test_a_new_run_holds_plan_facts_environment_and_an_empty_transcript(tmp_path):
    with make(tmp_path / "a" / "b"):
        pass
    run = RunFolder.open(tmp_path / "a" / "b")
    assert run.plan == {"schema": 1}
    assert run.meta["data"] == "adult"
    assert run.meta["schema"] == 1
    assert list(run) == []
    assert run.guarantee is None
    assert run.metrics == {}
    assert sorted(os.listdir(run.path)) == [
        "environment.json",
        "manifest.json",
        "plan.json",
        "run.json",
        "transcript.jsonl",
    ]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(EVENTS, max_size=12))
def test_a_transcript_gives_back_exactly_the_events_that_were_written(tmp_path_factory, events):
    path = tmp_path_factory.mktemp("runs") / "run"
    with make(path) as run:
        for step, event in enumerate(events):
            run.append(step=step, event=event, epsilon=None if step % 2 else 0.5)
    read = RunFolder.open(path)
    assert [line.event for line in read] == events
    assert [line.epsilon for line in read] == [None if step % 2 else 0.5 for step in range(len(events))]
    assert read.event() == compose(events)


def test_equal_steps_compose_into_one_counted_event(tmp_path):
    with make(tmp_path / "run", steps=7) as run:
        assert run.event() == SelfComposed(event=STEP, count=7)


def test_an_infinite_epsilon_survives_the_round_trip(tmp_path):
    with make(tmp_path / "run") as run:
        run.append(step=0, event=NonPrivate(reason="noise_multiplier is 0"), epsilon=math.inf)
        assert next(iter(run)).epsilon == math.inf
    assert "Infinity" not in (tmp_path / "run" / "transcript.jsonl").read_text()


def test_a_nan_epsilon_is_refused(tmp_path):
    with make(tmp_path / "run") as run:
        with pytest.raises(ValueError, match="JSON"):
            run.append(step=0, event=STEP, epsilon=math.nan)
        assert list(run) == []


def test_every_line_can_be_read_by_another_process_before_the_run_is_closed(tmp_path):
    code = (
        "import os, sys; from sordino.runs import RunFolder; from sordino.events import Gaussian\n"
        "run = RunFolder.create(sys.argv[1], plan='{}')\n"
        "for step in range(5): run.append(step=step, event=Gaussian(noise_multiplier=1.0), epsilon=1.0)\n"
        "os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
    assert done.returncode == 9
    assert RunFolder.open(tmp_path / "run").event() == SelfComposed(event=Gaussian(noise_multiplier=1.0), count=5)


@pytest.mark.parametrize("step", [1, 3])
def test_a_skipped_or_repeated_step_is_refused_when_writing(tmp_path, step):
    with make(tmp_path / "run", steps=2) as run, pytest.raises(InvalidArgument, match="step must be 2"):
        run.append(step=step, event=STEP, epsilon=None)


def test_a_dropped_line_is_caught_when_reading(tmp_path):
    make(tmp_path / "run", steps=4).close()
    file = tmp_path / "run" / "transcript.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:1] + lines[2:]))
    with pytest.raises(SordinoError, match="hash of what stands before"):
        RunFolder.open(tmp_path / "run").event()


def test_a_torn_last_line_counts_as_a_step(tmp_path):
    make(tmp_path / "run", steps=4).close()
    file = tmp_path / "run" / "transcript.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    run = RunFolder.open(tmp_path / "run")
    assert run.event() == SelfComposed(event=STEP, count=4)
    assert [line.torn for line in run] == [False, False, False, True]


@pytest.mark.parametrize("line", ["[]", '{"step": 0}', '{"step": 0, "event": {"kind": "no_op"}, "epsilon": "x"}'])
def test_a_malformed_line_is_caught_when_reading(tmp_path, line):
    make(tmp_path / "run").close()
    (tmp_path / "run" / "transcript.jsonl").write_text(line + "\n")
    with pytest.raises(InvalidArgument):
        RunFolder.open(tmp_path / "run").event()


def test_a_run_is_never_overwritten(tmp_path):
    make(tmp_path / "run", steps=1).close()
    before = (tmp_path / "run" / "transcript.jsonl").read_bytes()
    with pytest.raises(InvalidArgument, match="never overwritten"):
        make(tmp_path / "run")
    assert (tmp_path / "run" / "transcript.jsonl").read_bytes() == before


def test_a_folder_with_other_files_is_not_taken_for_a_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidArgument):
        make(tmp_path)
    with pytest.raises(InvalidArgument, match="lacks"):
        RunFolder.open(tmp_path)


def test_a_closed_run_takes_no_more_steps(tmp_path):
    run = make(tmp_path / "run", steps=1)
    run.close()
    run.close()
    with pytest.raises(InvalidArgument, match="open for writing"):
        run.append(step=1, event=STEP, epsilon=None)


def test_a_model_comes_back_bit_for_bit_also_with_tied_parameters(tmp_path):
    shared = torch.randn(3, 4)
    state = {"a.weight": shared, "b.weight": shared, "c": torch.randn(4, 3).T, "d": torch.arange(3)}
    with make(tmp_path / "run") as run:
        run.save_model(state)
        back = run.load_model()
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_no_draft_is_left_beside_the_model(tmp_path):
    with make(tmp_path / "run") as run:
        run.save_model({"w": torch.zeros(2)})
    assert not [name for name in os.listdir(tmp_path / "run") if "draft" in name]


def test_loading_a_model_that_was_never_saved_names_the_folder(tmp_path):
    with make(tmp_path / "run") as run, pytest.raises(InvalidArgument, match="must hold a model"):
        run.load_model()


@pytest.mark.parametrize("epsilon", [0.0, 0.94687, math.inf])
def test_a_guarantee_comes_back_whole(tmp_path, epsilon):
    guarantee = Guarantee(
        epsilon=epsilon,
        delta=1e-5,
        accountant="contour",
        sampler="Poisson sampling",
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
        privacy_unit=PrivacyUnit.USER,
        caveats=("not for release",),
    )
    with make(tmp_path / "run") as run:
        run.write_guarantee(guarantee)
        assert run.guarantee == guarantee
    assert json.loads((tmp_path / "run" / "guarantee.json").read_text())["description"] == guarantee.describe()


def test_metrics_say_whether_they_are_public_and_anything_unmarked_is_private(tmp_path):
    with make(tmp_path / "run") as run:
        run.write_metrics(
            {"test_accuracy": Metric(value=0.84, public=True, what="x"), "loss": Metric(value=1.0, public=False)}
        )
        assert run.metrics["test_accuracy"] == Metric(value=0.84, public=True, what="x")
        assert not run.metrics["loss"].public
    file = tmp_path / "run" / "metrics.json"
    body = json.loads(file.read_text())
    assert body["test_accuracy"]["visibility"] == "public"
    assert body["loss"]["visibility"] == "private"
    del body["test_accuracy"]["visibility"]
    file.write_text(json.dumps(body))
    assert not RunFolder.open(tmp_path / "run").metrics["test_accuracy"].public


def test_the_environment_does_not_name_the_machine_or_the_user(tmp_path):
    make(tmp_path / "run").close()
    body = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert body["packages"]["torch"].startswith("2.")
    assert body["python"] == platform.python_version()
    assert set(body) == {"python", "system", "machine", "cores", "accelerator", "code", "packages"}


def test_the_environment_names_the_commit_that_a_run_was_made_with_and_whether_it_was_changed(tmp_path, monkeypatch):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment()["code"] is None
    git("init", "-q")
    (tmp_path / "train.py").write_text("1")
    git("add", "train.py")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert environment()["code"] == head
    (tmp_path / "train.py").write_text("2")
    assert environment()["code"] == f"{head}, changed since"


def test_importing_runs_imports_no_torch():
    code = "import sys, sordino.runs; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
