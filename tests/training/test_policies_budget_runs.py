"""Budgets that adapt in run folders: the transcript is the filter's memory, and what is claimed can be verified."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from sordino import accounting, fit
from sordino.errors import BudgetExceeded, InvalidArgument
from sordino.events import Composed, Gaussian, PoissonSampled
from sordino.ledger import Ledger
from sordino.report import build_report
from sordino.runs import RunFolder
from sordino.training import AdaptiveBudget, Plan, StepParameters
from sordino.verification import verify

DATA = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(60).long()
# By hand: the Gaussian filter of (1, 1e-5) admits seven steps of noise 10, see test_policies_adaptive.py.
SEVEN = 7


class Crash(Exception):
    """Stands for a process that ends in the middle."""


def plan(**changes):
    values = {
        "noise_multiplier": 10.0,
        "max_grad_norm": 1.0,
        "sample_rate": 1.0,
        "steps": 50,
        "expected_batch_size": 60.0,
        "delta": 1e-5,
    }
    return Plan(**{**values, **changes})


def losses(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def budget(choose=lambda step, released: 10.0, **changes):
    return AdaptiveBudget(**{"epsilon": 1.0, "choose": choose, **changes})


def run_until(crash, path, *, the_budget=None, the_plan=None, **options):
    def stop(done):
        if done == crash:
            raise Crash

    where = {"resume_from": path} if path.exists() else {"run_folder": path}
    return fit(
        nn.Linear(3, 2), losses, DATA, the_plan or plan(), budget=the_budget or budget(), progress=False,
        on_step=stop, checkpoint_every=2, **where, **options,
    )  # fmt: skip


def test_the_transcript_holds_what_each_step_asked_for_and_the_claim_is_the_budget(tmp_path):
    asked = [12.0, 9.0, 20.0, 7.0]
    result = run_until(
        None, tmp_path / "run", the_budget=budget(lambda step, released: asked[step]), the_plan=plan(steps=4)
    )
    run = RunFolder.open(tmp_path / "run")
    assert [line.event for line in run] == [Gaussian(noise_multiplier=sigma) for sigma in asked]
    assert run.guarantee == result.guarantee
    assert run.guarantee.epsilon == 1.0
    assert any("ε is a budget that a filter kept" in caveat for caveat in run.guarantee.caveats)
    found = verify(run.path)
    assert found.passed, found
    realized = accounting.epsilon(Composed(events=tuple(line.event for line in run)), 1e-5).upper
    assert realized < 0.9
    assert f"{realized:.6g}" in found.item("guarantee").detail
    assert json.loads((run.path / "run.json").read_text())["budget"]["filter"] == "gaussian"


@pytest.mark.parametrize(
    ("changes", "name", "choice"),
    [
        ({}, "gaussian", 10.0),
        ({}, "zcdp", 10.0),
        ({"sample_rate": 0.5}, "renyi", StepParameters(noise_multiplier=8.0, sample_rate=0.4)),
    ],
)
def test_a_crash_and_a_resume_never_overspend(tmp_path, changes, name, choice):
    def options():
        return {
            "the_budget": budget(lambda step, released: choice, filter=name),
            "the_plan": plan(**{"steps": 400, **changes}),
        }

    alone = run_until(None, tmp_path / "alone", **options())
    assert alone.budget_exhausted
    with pytest.raises(Crash):
        run_until(5, tmp_path / "run", **options())
    result = run_until(None, tmp_path / "run", **options())
    run = RunFolder.open(tmp_path / "run")
    assert result.budget_exhausted
    # Step 4 was taken twice, from the checkpoint after step 4; both times were paid from the one budget.
    assert result.steps == alone.steps - 1
    assert len(list(run)) == alone.steps
    assert accounting.epsilon(run.event(), 1e-5).upper <= 1.0
    assert verify(run.path).passed
    report = build_report(run)
    assert report.guarantee.epsilon == 1.0
    assert report.accounting.agrees


def test_a_resumed_choice_sees_the_norm_that_was_released_before(tmp_path):
    seen = []

    def choose(step, released):
        seen.append((step, released.remaining, released.last_gradient_norm))
        return 10.0

    with pytest.raises(Crash):
        run_until(5, tmp_path / "run", the_budget=budget(choose))
    before, seen[:] = list(seen), []
    run_until(None, tmp_path / "run", the_budget=budget(choose))
    first = seen[0]
    assert first[0] == 4
    assert first[2] == pytest.approx(before[4][2], rel=1e-12)
    assert first[1] == pytest.approx(before[4][1] - (before[0][1] - before[1][1]), rel=1e-9)


def test_a_run_whose_budget_is_spent_can_be_resumed_and_does_nothing(tmp_path):
    first = run_until(None, tmp_path / "run")
    assert first.steps == SEVEN
    again = run_until(None, tmp_path / "run")
    assert (again.budget_exhausted, len(list(RunFolder.open(tmp_path / "run")))) == (True, SEVEN)
    assert verify(tmp_path / "run").passed


def test_another_budget_or_none_is_refused_when_resuming(tmp_path):
    with pytest.raises(Crash):
        run_until(3, tmp_path / "run")
    for other in (budget(epsilon=2.0), budget(filter="zcdp")):
        with pytest.raises(InvalidArgument, match="budget must be that of the run folder"):
            run_until(None, tmp_path / "run", the_budget=other)
    with pytest.raises(InvalidArgument, match="budget must be that of the run folder"):
        fit(nn.Linear(3, 2), losses, DATA, plan(), resume_from=tmp_path / "run", progress=False)
    with pytest.raises(Crash):
        fit(nn.Linear(3, 2), losses, DATA, plan(), run_folder=tmp_path / "plain", progress=False, on_step=crash)
    with pytest.raises(InvalidArgument, match="budget must be that of the run folder"):
        run_until(None, tmp_path / "plain")


def crash(_):
    raise Crash


def test_a_torn_line_ends_the_budget(tmp_path):
    with pytest.raises(Crash):
        run_until(3, tmp_path / "run")
    file = tmp_path / "run" / "transcript.jsonl"
    content = file.read_bytes()
    last = content.rstrip(b"\n").rfind(b"\n")
    file.write_bytes(content[: last + 60])
    result = run_until(None, tmp_path / "run")
    assert result.budget_exhausted
    assert result.steps == 2, "the model of the last checkpoint"
    found = verify(tmp_path / "run")
    assert found.passed, found
    assert "torn line counts as the rest" in found.item("plan").detail


def changed(folder, edit):
    """The run, written again as someone would who can write to its folder: hashes and manifest fit."""
    run = RunFolder.open(folder)
    lines = [(line.step, line.event) for line in run]
    other = RunFolder.create(folder.with_name("forged"), plan=json.dumps(run.plan), meta={"budget": run.meta["budget"]})
    segment = run.segments()[0]
    other.begin(key=segment.key, first_step=0, most=segment.most)
    for step, event in edit(lines):
        other.append(step=step, event=event, epsilon=1.0)
    other.save_model({"weight": torch.zeros(1)})
    other.write_guarantee(run.guarantee)
    other.close()
    return verify(other.path)


@pytest.mark.parametrize(
    ("edit", "item", "words"),
    [
        (lambda lines: [*lines, (len(lines), Gaussian(noise_multiplier=10.0))], "plan", "does not fit"),
        (lambda lines: [(0, Gaussian(noise_multiplier=1.0))], "plan", "does not fit"),
        (lambda lines: [(0, Gaussian(noise_multiplier=1.0))], "guarantee", "comes to"),
        (
            lambda lines: [(0, PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=1.0)))],
            "plan",
            "Gaussian filter must be charged Gaussians",
        ),
    ],
)
def test_a_transcript_that_spends_more_than_its_budget_fails(tmp_path, edit, item, words):
    run_until(None, tmp_path / "run")
    honest = changed(tmp_path / "run", lambda lines: lines)
    assert honest.item("plan").status == honest.item("guarantee").status == "pass"
    (tmp_path / "forged").rename(tmp_path / "honest")
    found = changed(tmp_path / "run", edit)
    assert found.item(item).status == "fail"
    assert words in found.item(item).detail


def test_a_claim_below_its_budget_fails(tmp_path):
    run_until(None, tmp_path / "run", the_plan=plan(steps=2))
    run = RunFolder.open(tmp_path / "run")
    run.write_guarantee(replace(run.guarantee, epsilon=0.6))
    assert "it states ε = 0.6" in verify(run.path).item("guarantee").detail


@pytest.mark.parametrize("change", [{"sampler": "none"}, {"accountant": "pld"}, {"caveats": ()}])
def test_a_claim_in_other_words_than_its_budget_fails(tmp_path, change):
    run_until(None, tmp_path / "run", the_plan=plan(steps=2))
    run = RunFolder.open(tmp_path / "run")
    assert verify(run.path).item("guarantee").status == "pass"
    run.write_guarantee(replace(run.guarantee, **change))
    assert verify(run.path).item("guarantee").status == "fail"


def test_a_ledger_pays_once_for_a_run_and_its_resumes(tmp_path):
    account = Ledger(tmp_path / "privacy.db").declare("records", epsilon=1.2, delta=3e-5)
    with pytest.raises(Crash):
        run_until(3, tmp_path / "run", ledger=account)
    spent = account.spent().epsilon
    run_until(None, tmp_path / "run", ledger=account)
    assert account.spent().epsilon == spent
    charges = {line.charge for line in RunFolder.open(tmp_path / "run")}
    assert len(charges) == 1
    found = verify(tmp_path / "run", ledger=tmp_path / "privacy.db")
    assert found.passed, found
    assert found.item("ledger").status == "pass"
    # Another run has no share in it.
    with pytest.raises(BudgetExceeded):
        run_until(None, tmp_path / "other", ledger=account)


def test_a_run_without_an_end_is_reported_with_its_budget(tmp_path):
    with pytest.raises(Crash):
        run_until(3, tmp_path / "run")
    report = build_report(RunFolder.open(tmp_path / "run"))
    assert report.guarantee.epsilon == 1.0
    assert any("budget" in caveat for caveat in report.guarantee.caveats)
    assert verify(tmp_path / "run").passed


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from test_policies_budget_runs import budget, run_until
folder = Path({folder!r})
run_until(None, folder, the_budget=budget(lambda step, released: (time.sleep(0.05), 10.0)[1]))
"""


def test_a_killed_process_and_its_resume_stay_within_the_budget(tmp_path):
    here, folder = os.path.dirname(__file__), tmp_path / "run"
    code = KILLED.format(here=here, folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    transcript = folder / "transcript.jsonl"
    while process.poll() is None and not (transcript.exists() and transcript.read_bytes().count(b"\n") >= 4):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    run_until(None, folder)
    run = RunFolder.open(folder)
    assert len(list(run)) == SEVEN
    assert len(run.segments()) == 2
    assert verify(folder).passed
