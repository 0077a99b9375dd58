"""What a report makes of a run folder: pitfalls, resumes, ledger, audits, curves, and what is missing."""

import dataclasses
import json
import math

import pytest

from reported_runs import EVERYTHING, PLAN, SAMPLED, SAMPLED_PLAN, STEP, STEPS, TRUE_EPSILON, make
from sordino import accounting
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.events import Gaussian, NonPrivate, PoissonSampled, SelfComposed, ZeroConcentratedDP
from sordino.ledger import Ledger
from sordino.report import Audit, build_report, render_html, render_markdown
from sordino.report.build import missing_fields
from sordino.runs import Metric, RunFolder

HALF = PoissonSampled(sample_rate=0.5, event=STEP)


def status(report, words):
    (found,) = [item.status for item in report.pitfalls if words in item.title]
    return found


def test_numbers_agree_with_the_accountant_asked_directly(tmp_path):
    event = SelfComposed(event=SAMPLED, count=STEPS)
    spent = accounting.epsilon(event, 1e-5)
    report = build_report(make(tmp_path / "run", event=SAMPLED, plan=SAMPLED_PLAN, epsilon=spent.upper))
    assert (report.accounting.interval.lower, report.accounting.interval.upper) == (spent.lower, spent.upper)
    bare = SelfComposed(event=Gaussian(noise_multiplier=3.0), count=STEPS)
    assert report.accounting.without_amplification == pytest.approx(accounting.epsilon(bare, 1e-5).upper, rel=1e-12)
    for rate, found in report.risk.found:
        exact = accounting.true_positive_rate(event, rate)
        assert exact * (1 - 1e-9) <= found <= exact * 1.02
    assert report.risk.advantage == pytest.approx(accounting.membership_advantage(event).upper, rel=1e-3)
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
    risk = build_report(make(tmp_path / "run", event=event, epsilon=spent, told=False)).risk
    assert not risk.from_mechanism
    assert dict(risk.found)[0.01] == pytest.approx(math.exp(spent) * 0.01 + 1e-5)


def test_replacing_and_adding_are_told_apart(tmp_path):
    spent = accounting.epsilon(
        SelfComposed(event=STEP, count=STEPS), 1e-5, neighboring_relation=NeighboringRelation.REPLACE_ONE
    )
    run = make(tmp_path / "run", epsilon=None, plan={"neighboring_relation": "replace_one"})
    report = build_report(run)
    assert report.guarantee.epsilon == spent.upper
    assert "which of two given records" in report.risk.question


@pytest.mark.parametrize(
    ("words", "change", "expected"),
    [
        ("borne out", {}, "ok"),
        ("borne out", {"epsilon": 0.5 * TRUE_EPSILON}, "violated"),
        ("borne out", {"epsilon": None}, "unknown"),
        ("drawn as they are accounted", {}, "ok"),
        (
            "drawn as they are accounted",
            {"event": PoissonSampled(sample_rate=0.5, event=STEP), "plan": {"sample_rate": 0.4}},
            "violated",
        ),
        ("drawn as they are accounted", {"plan": {"sample_rate": {"schedule": "linear"}}}, "unknown"),
        ("at least what was planned", {}, "ok"),
        ("at least what was planned", {"plan": {"noise_multiplier": 25.1}}, "violated"),
        ("at least what was planned", {"plan": {"noise_multiplier": {"schedule": "linear"}}}, "unknown"),
        ("No more steps", {}, "ok"),
        ("No more steps", {"plan": {"steps": STEPS - 1}}, "violated"),
        ("No more steps", {"plan": {"steps": 0}}, "unknown"),
        ("below one in the number", {}, "ok"),
        ("below one in the number", {"meta": {"data": {"records": 200_000}}}, "violated"),
        ("below one in the number", {"meta": {"data": {}}}, "unknown"),
        ("draw the noise again", {"key": None}, "unknown"),
        ("draw the noise again", {}, "ok"),
        ("draw the noise again", {"seeded": True, "meta": {"reproducible": False}}, "violated"),
        ("shown without noise", {}, "unknown"),
        ("shown without noise", {"meta": EVERYTHING}, "ok"),
        ("shown without noise", {"meta": EVERYTHING | {"diagnostics": "private"}}, "violated"),
        ("draw the noise again", {"meta": {"reproducible": False}}, "ok"),
        ("draw the noise again", {"meta": {"reproducible": True}}, "violated"),
        ("drawn exactly", {"meta": {"noise_arithmetic": "integer"}}, "ok"),
        ("drawn exactly", {"meta": {"noise_arithmetic": "floating point"}}, "violated"),
        ("drawn exactly", {}, "unknown"),
        ("drawn exactly", {"plan": {"secure_mode": True}}, "ok"),
        ("drawn exactly", {"plan": {"secure_mode": False}, "meta": {"noise_arithmetic": "integer"}}, "violated"),
        ("Resuming", {}, "ok"),
        ("Resuming", {"key": None}, "unknown"),
        ("Other access", {}, "unknown"),
        ("Other access", {"meta": EVERYTHING}, "ok"),
        ("Other uses", {}, "unknown"),
        ("Other uses", {"meta": EVERYTHING}, "ok"),
        ("measured on private", {}, "ok"),
        ("measured on private", {"metrics": {"x": Metric(value=1.0, public=False)}}, "violated"),
        ("No audit", {}, "unknown"),
    ],
)
def test_each_pitfall_is_found_absent_or_unknown(words, change, expected, tmp_path):
    assert status(build_report(make(tmp_path / "run", **change)), words) == expected


@pytest.mark.parametrize(("bound", "expected"), [(0.3, "ok"), (3.0, "violated")])
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
    assert status(report, "Resuming") == "ok"
    assert not report.not_for_release


def test_two_processes_with_one_key_are_not_for_release(tmp_path):
    report = build_report(resumed(tmp_path / "run", key="k"))
    assert status(report, "Resuming") == "violated"
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
    for name in ("released", "mechanism", "composition", "touches"):
        poorer = {
            "released": None,
            "mechanism": whole.mechanism.model_copy(update={"sample_rate": None}),
            "composition": whole.composition.model_copy(update={"text": None}),
            "touches": tuple(touch.model_copy(update={"text": None}) for touch in whole.touches),
        }[name]
        assert missing_fields(whole.model_copy(update={name: poorer}))


def test_a_debug_run_is_not_for_release_and_a_run_without_noise_is_not_private(tmp_path):
    assert build_report(make(tmp_path / "debug", meta={"debug": True})).not_for_release
    event = NonPrivate(reason="noise_multiplier is 0")
    report = build_report(make(tmp_path / "bare", event=event, epsilon=math.inf, told=False))
    assert report.not_for_release == "This run is not private."
    assert report.risk is None
    assert report.curves.profile == ()
