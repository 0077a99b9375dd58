"""What a report makes of a run folder: privacy hazards, resumes, ledger, audits, curves, and what is missing."""

import dataclasses
import json
import math

import pytest

from reported_runs import EVERYTHING, FACTS, PLAN, SAMPLED, SAMPLED_PLAN, STEP, STEPS, TRUE_EPSILON, make
from sordino import accounting
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.events import Gaussian, NonPrivate, PoissonSampled, SelfComposed, ZeroConcentratedDP
from sordino.ledger import Ledger
from sordino.report import Audit, build_report, render_html, render_markdown
from sordino.report.build import missing_fields
from sordino.report.formatting import hazards_line
from sordino.runs import Metric, RunFolder

HALF = PoissonSampled(sample_rate=0.5, event=STEP)


def status(report, words):
    (found,) = [item.status for item in report.privacy_hazards if words in item.title]
    return found


def test_numbers_agree_with_the_accountant_asked_directly(tmp_path):
    event = SelfComposed(event=SAMPLED, count=STEPS)
    spent = accounting.epsilon(event, 1e-5)
    report = build_report(make(tmp_path / "run", event=SAMPLED, plan=SAMPLED_PLAN, epsilon=spent.upper))
    assert (report.accounting.interval.lower, report.accounting.interval.upper) == (spent.lower, spent.upper)
    bare = SelfComposed(event=Gaussian(noise_multiplier=3.0), count=STEPS)
    assert report.accounting.without_amplification == pytest.approx(accounting.epsilon(bare, 1e-5).upper, rel=1e-12)
    for rate, found in report.attack_bounds.found:
        exact = accounting.true_positive_rate(event, rate)
        assert exact * (1 - 1e-9) <= found <= exact * 1.02
    assert report.attack_bounds.advantage == pytest.approx(accounting.membership_advantage(event).upper, rel=1e-3)
    for point, level in report.curves.profile[:: len(report.curves.profile) // 5]:
        assert level >= accounting.delta(event, point).lower
    for level in report.user_level:
        group = accounting.group_privacy_event(event, level.size)
        assert level.epsilon == accounting.epsilon(group, 1e-5).upper


def test_mu_of_a_gaussian_run_is_exact(tmp_path):
    curves = build_report(make(tmp_path / "run")).curves
    assert curves.gaussian_mu == pytest.approx(math.sqrt(STEPS) / 25.0, rel=1e-6)
    assert curves.gaussian_regret < 1e-9


def test_a_mechanism_of_which_only_rho_is_known_has_a_risk_from_epsilon_and_delta(tmp_path):
    event = ZeroConcentratedDP(rho=0.001)
    spent = accounting.epsilon(SelfComposed(event=event, count=STEPS), 1e-5).upper
    bounds = build_report(make(tmp_path / "run", event=event, epsilon=spent, told=False)).attack_bounds
    assert not bounds.from_mechanism
    assert dict(bounds.found)[0.01] == pytest.approx(math.exp(spent) * 0.01 + 1e-5)


def test_replacing_and_adding_are_told_apart(tmp_path):
    spent = accounting.epsilon(
        SelfComposed(event=STEP, count=STEPS), 1e-5, neighboring_relation=NeighboringRelation.REPLACE_ONE
    )
    run = make(tmp_path / "run", epsilon=None, plan={"neighboring_relation": "replace_one"})
    report = build_report(run)
    assert report.guarantee.epsilon == spent.upper
    assert "which of two given records" in report.attack_bounds.question


@pytest.mark.parametrize(
    ("words", "change", "expected"),
    [
        ("borne out", {}, "met"),
        ("borne out", {"epsilon": 0.5 * TRUE_EPSILON}, "limitation"),
        ("borne out", {"epsilon": None}, "not stated"),
        ("drawn as they are accounted", {}, "met"),
        (
            "drawn as they are accounted",
            {"event": PoissonSampled(sample_rate=0.5, event=STEP), "plan": {"sample_rate": 0.4}},
            "limitation",
        ),
        ("drawn as they are accounted", {"plan": {"sample_rate": {"schedule": "linear"}}}, "not stated"),
        ("at least what was planned", {}, "met"),
        ("at least what was planned", {"plan": {"noise_multiplier": 25.1}}, "limitation"),
        ("at least what was planned", {"plan": {"noise_multiplier": {"schedule": "linear"}}}, "not stated"),
        ("No more steps", {}, "met"),
        ("No more steps", {"plan": {"steps": STEPS - 1}}, "limitation"),
        ("No more steps", {"plan": {"steps": 0}}, "not stated"),
        ("below 1 / number", {}, "met"),
        ("below 1 / number", {"meta": {"data": {"records": 200_000}}}, "limitation"),
        ("below 1 / number", {"meta": {"data": {}}}, "met"),
        ("below 1 / number", {"meta": {"data": {}}, "plan": {"expected_batch_size": 200_000.0}}, "limitation"),
        ("below 1 / number", {"meta": {"data": {}}, "plan": {"dataset_size_is_public": False}}, "not stated"),
        ("noise cannot be reproduced", {"key": None}, "not stated"),
        ("noise cannot be reproduced", {}, "met"),
        ("noise cannot be reproduced", {"seeded": True, "meta": {"reproducible": False}}, "limitation"),
        ("was shown without noise", {}, "not stated"),
        ("was shown without noise", {"meta": EVERYTHING}, "met"),
        ("was shown without noise", {"meta": EVERYTHING | {"diagnostics": "private"}}, "limitation"),
        ("noise cannot be reproduced", {"meta": {"reproducible": False}}, "met"),
        ("noise cannot be reproduced", {"meta": {"reproducible": True}}, "limitation"),
        ("drawn exactly", {"meta": {"noise_arithmetic": "integer"}}, "met"),
        ("drawn exactly", {"meta": {"noise_arithmetic": "floating point"}}, "limitation"),
        ("drawn exactly", {}, "not stated"),
        ("drawn exactly", {"plan": {"secure_mode": True}}, "met"),
        ("drawn exactly", {"plan": {"secure_mode": False}, "meta": {"noise_arithmetic": "integer"}}, "limitation"),
        ("Resuming", {}, "met"),
        ("Resuming", {"key": None}, "not stated"),
        ("Other access", {}, "not stated"),
        ("Other access", {"meta": EVERYTHING}, "met"),
        ("Other uses", {}, "not stated"),
        ("Other uses", {"meta": EVERYTHING}, "met"),
        ("Other uses", {"meta": EVERYTHING | {"other_uses_are_counted": False}}, "not stated"),
        ("measurement on private", {}, "met"),
        ("measurement on private", {"metrics": {"x": Metric(value=1.0, public=False)}}, "limitation"),
        ("No audit", {}, "not stated"),
    ],
)
def test_each_hazard_is_met_a_limitation_or_not_stated(words, change, expected, tmp_path):
    assert status(build_report(make(tmp_path / "run", **change)), words) == expected


ESTIMATOR = {
    "method": "linear",
    "estimator": "LogisticRegression",
    "parameters": {"epsilon": 1.0, "alpha": None},
    **dict.fromkeys(("noise_multiplier", "max_grad_norm", "sample_rate", "steps", "expected_batch_size"), ...),
}


def of_estimator(path, **changes):
    """A run whose plan has no gradient steps, as `sordino train` makes it with an estimator."""
    plan = {name: value for name, value in (PLAN | ESTIMATOR | changes).items() if value is not ...}
    with RunFolder.create(path, plan=json.dumps(plan), meta=FACTS | EVERYTHING) as run:
        run.append(step=0, event=STEP, epsilon=None)
    return run


def test_what_an_estimator_does_not_have_is_not_applicable_and_not_missing(tmp_path):
    report = build_report(of_estimator(tmp_path / "run"))
    for words in ("drawn as they are accounted", "at least what was planned", "No more steps", "Resuming"):
        assert status(report, words) == "not applicable"
    assert [item.title for item in report.privacy_hazards if item.status == "not stated"] == [
        "The claim is borne out by the transcript",
        "No audit or attack contradicts the claim",
    ]
    assert report.missing == ()
    assert report.mechanism.noise_multiplier == report.mechanism.steps_planned == "not applicable"
    for text in (render_html(report), render_markdown(report)):
        assert "LogisticRegression" in text
        assert "clipping norm C" not in text


def test_a_plan_of_steps_that_lacks_a_number_is_not_taken_for_an_estimator(tmp_path):
    report = build_report(make(tmp_path / "run", plan={"method": "x", "noise_multiplier": None, "sample_rate": None}))
    assert status(report, "at least what was planned") == "not stated"
    assert "noise multiplier" in report.missing


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"meta": EVERYTHING}, "15 checks: 13 met, 1 limitation (none critical), 1 not stated."),
        ({"meta": EVERYTHING | {"noise_arithmetic": "integer"}}, "15 checks: 14 met, no limitations, 1 not stated."),
        ({"meta": EVERYTHING | {"reproducible": True}}, "15 checks: 12 met, 2 limitations (1 critical), 1 not stated."),
    ],
)
def test_one_line_counts_all_checks(change, words, tmp_path):
    report = build_report(make(tmp_path / "run", **change))
    assert hazards_line(report) == words
    for text in (render_html(report), render_markdown(report)):
        assert words in text
        assert "violated" not in text


@pytest.mark.parametrize(("bound", "expected"), [(0.3, "met"), (3.0, "limitation")])
def test_an_audit_is_held_against_the_claim(bound, expected, tmp_path):
    run = make(tmp_path / "run")
    audit = Audit(
        method="one run", canaries=1000, guesses=200, correct=150, alpha=0.05, epsilon_lower=bound, attacker="white box"
    )
    (run.path / "audit.json").write_text(audit.model_dump_json())
    report = build_report(run)
    assert status(report, "No audit") == expected
    for text in (render_html(report), render_markdown(report)):
        assert f"ε ≥ {bound:.2f} with 95 % confidence" in text
        assert "1,000 canaries, 200 guesses, 150 right" in text


def resumed(path, key):
    run = make(path, epsilon=None, steps=30)
    with RunFolder.resume(run.path) as again:
        again.begin(key=key, first_step=20, most=STEP)
        for step in range(20, STEPS):
            again.append(step=step, event=STEP, epsilon=None)
    return again


def test_a_resumed_run_is_charged_for_repeated_steps_and_says_so(tmp_path):
    report = build_report(resumed(tmp_path / "run", key="another"))
    assert (report.process.segments, report.process.repeated_steps) == (2, 10)
    assert report.mechanism.steps_charged == STEPS + 10
    exact = accounting.epsilon(SelfComposed(event=STEP, count=STEPS + 10), 1e-5).upper
    assert report.guarantee.epsilon == exact
    assert status(report, "Resuming") == "met"
    assert not report.not_for_release


def test_two_processes_with_one_key_are_not_for_release(tmp_path):
    report = build_report(resumed(tmp_path / "run", key="k"))
    assert status(report, "Resuming") == "limitation"
    assert report.not_for_release == "Two processes of the run drew noise from the same key."


def test_a_seed_is_found_wherever_it_is_told(tmp_path):
    assert build_report(make(tmp_path / "segment", seeded=True)).not_for_release
    assert build_report(make(tmp_path / "facts", meta={"reproducible": True})).not_for_release
    run = make(tmp_path / "claim")
    caveats = ("fixed seed: not for release",)
    run.write_guarantee(dataclasses.replace(run.guarantee, caveats=caveats))
    assert build_report(run).not_for_release == "The noise came from a chosen seed."
    assert "chosen seed" in build_report(run).process.rng


def test_a_ledger_tells_what_else_was_spent(tmp_path):
    book = Ledger(tmp_path / "privacy.db")
    account = book.declare("adult", epsilon=5.0, delta=1e-5)
    book.declare("other", epsilon=5.0, delta=1e-5)
    account.charge(Gaussian(noise_multiplier=10.0), run="before")
    with RunFolder.create(tmp_path / "run", plan=json.dumps(PLAN)) as run:
        digest = account.charge(SelfComposed(event=STEP, count=2), run="run").digest
        for step in range(2):
            run.append(step=step, event=STEP, epsilon=None, charge=digest)
    account.charge(Gaussian(noise_multiplier=20.0), run="after")
    known = build_report(run, ledger=tmp_path / "privacy.db").composition
    assert (known.account, known.budget) == ("adult", 5.0)
    assert known.spent == account.spent().epsilon
    assert "1 charge came before its first, 1 charge after its last, from 2 other runs or uses" in known.text
    assert "1 charges" not in known.text
    assert "was not given" in build_report(run).composition.text
    with pytest.raises(InvalidArgument, match="ledger must hold charges of this run"):
        build_report(make(tmp_path / "stranger"), ledger=tmp_path / "privacy.db")


def test_what_is_missing_is_named_and_a_run_that_says_all_misses_nothing(tmp_path):
    whole = build_report(make(tmp_path / "whole", meta=EVERYTHING))
    assert whole.missing == ()
    bare = build_report(make(tmp_path / "bare", key=None, plan={"max_grad_norm": None}))
    assert "clipping norm" in bare.missing
    assert "processes and resumes" in bare.missing
    assert "tuning and choice of settings" in bare.missing
    for name in ("released", "mechanism", "composition", "data_accesses"):
        poorer = {
            "released": None,
            "mechanism": whole.mechanism.model_copy(update={"sample_rate": None}),
            "composition": whole.composition.model_copy(update={"text": None}),
            "data_accesses": tuple(access.model_copy(update={"text": None}) for access in whole.data_accesses),
        }[name]
        assert missing_fields(whole.model_copy(update={name: poorer}))


def test_a_debug_run_is_not_for_release_and_a_run_without_noise_is_not_private(tmp_path):
    assert build_report(make(tmp_path / "debug", meta={"debug": True})).not_for_release
    event = NonPrivate(reason="noise_multiplier is 0")
    report = build_report(make(tmp_path / "bare", event=event, epsilon=math.inf, told=False))
    assert report.not_for_release == "This run is not private."
    assert report.attack_bounds is None
    assert report.curves.profile == ()
