"""What a privacy officer reads first: what ε means, may it be released, who is responsible, what was attacked."""

import json
import math
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from reported_runs import EVERYTHING, PLAN, STEP, STEPS, TRUE_EPSILON, Page, make
from sordino import accounting
from sordino.cli import app
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.events import DiscreteLaplace, NonPrivate, SelfComposed, compose
from sordino.report import Report, build_report, registry_yaml, render_html, render_markdown
from sordino.report.charts import FEWEST_IN_BIN, accuracy_chart, cost_chart, reliability_chart
from sordino.report.formatting import comparison_rows, epsilon_sentences, percent_up
from sordino.report.schema import Accuracy, Bin, Calibration
from sordino.runs import Evaluation, Metric, NoisyTable

EVALUATION = Evaluation(
    records="patients of 2024",
    event=SelfComposed(event=DiscreteLaplace(scale=8.0, sensitivity=1), count=4),
    epsilon=0.5,
    delta=0.0,
    neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    stddev=11.3,
    disjoint=False,
    charge="1f",
    head="",
    tables=(NoisyTable(name="all", values=("all",), right=(8400,), wrong=(1600,)),),
)
ATTACK = {
    "attacks": [
        {"name": "LiRA", "knowledge": "reference models", "auc": 0.52037, "auc_interval": [0.5, 0.54], "advantage": 0.1}
    ],
    "ceiling": {"source": "the whole mechanism", "advantage": 0.1, "auc": 0.55},
    "above_ceiling": [],
    "members": 500,
    "non_members": 500,
    "public": True,
}
OPTIONS = {
    "purpose": "Triage of appointments",
    "owner": "City Hospital",
    "contact": "dpo@example.org",
    "legal_basis": "GDPR Art. 9 (2) (h)",
    "approved_by": "A. Officer, 2026-02-01",
}


def ask(*arguments):
    return CliRunner().invoke(
        app, ["report", *map(str, arguments)], env={"COLUMNS": "300", "NO_COLOR": "1"}, catch_exceptions=False
    )


def texts(report):
    return Page(render_html(report)).text, render_markdown(report)


def hazard(report, words):
    (found,) = [item for item in report.privacy_hazards if words in item.title]
    return found


def test_scope_stands_before_details_and_jargon(tmp_path):
    report = build_report(make(tmp_path / "run", meta=EVERYTHING))
    for text in texts(report):
        places = [
            text.index(words)
            for words in (
                "The guess is correct in at most",
                "15 checks:",
                "May it be released?",
                "What is not covered",
                "What is covered",
                "Other access to the records",
                "Limits on every attack",
                "Details for specialists",
                "How ε was computed",
                "noise multiplier σ",
            )
        ]
        assert places == sorted(places)
        above = text[: text.index("Details for specialists")]
        for jargon in ("accountant", "sampler", "μ =", "amplification", "SHA-256"):
            assert jargon not in above
        assert "1e-05" not in text


def test_epsilon_in_words_is_the_attack_bound_of_the_mechanism(tmp_path):
    report = build_report(make(tmp_path / "run"))
    advantage = accounting.membership_advantage(SelfComposed(event=STEP, count=STEPS)).upper
    words = " ".join(epsilon_sentences(report))
    assert f"correct in at most {percent_up((1 + report.attack_bounds.advantage) / 2)} of cases" in words
    assert report.attack_bounds.advantage == pytest.approx(advantage, rel=1e-3)
    assert "several records is protected less (2 records: ε = 2.02" in words


@pytest.mark.parametrize(("unit", "words"), [("user", "all of their records"), ("client", "one client with all")])
def test_epsilon_in_words_names_the_unit(unit, words, tmp_path):
    report = build_report(make(tmp_path / "run", epsilon=None, plan={"privacy_unit": unit}))
    assert words in " ".join(epsilon_sentences(report))
    assert "several records" not in " ".join(epsilon_sentences(report))


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        ({"meta": EVERYTHING}, "yes, on conditions", "No approval is stated."),
        ({}, "yes, on conditions", "Other access to the records is stated"),
        ({"meta": EVERYTHING | {"approved_by": "A. Officer"}}, "yes, on conditions", "Approved by A. Officer."),
        ({"meta": EVERYTHING | {"diagnostics": "private"}}, "not yet", "shown without noise"),
        ({"epsilon": 0.5 * TRUE_EPSILON}, "not yet", "larger ε than the run claimed"),
        ({"metrics": {"x": Metric(value=1.0, public=False)}}, "not yet", "1 value in metrics.json"),
        ({"meta": {"data": {"records": 200_000}}}, "not yet", "δ is below 1 / number of records"),
        ({"meta": {"reproducible": True}}, "no", "chosen seed"),
        ({"event": NonPrivate(reason="x"), "epsilon": math.inf, "told": False}, "no", "not private"),
    ],
)
def test_whether_it_may_be_released_is_said_with_its_conditions(change, verdict, words, tmp_path):
    report = build_report(make(tmp_path / "run", **change))
    assert report.release.verdict == verdict
    assert words in " ".join([report.release.text, *report.release.conditions])
    for text in texts(report):
        assert "May it be released?" in text
        assert words in text
    assert ("yes" in verdict) == (not report.not_for_release and not report.critical_limitations)


def test_declarations_are_stored_with_the_run_and_shown_in_every_form(tmp_path):
    run = make(tmp_path / "run", meta=EVERYTHING)
    for text in texts(build_report(run)):
        assert text.count("--purpose") == text.count("--legal-basis") == 1
    first = dict(list(OPTIONS.items())[:2])
    options = [part for name, text in first.items() for part in (f"--{name.replace('_', '-')}", text)]
    assert ask(run.path, *options).exit_code == 0
    later = {name: text for name, text in OPTIONS.items() if name not in first} | {"owner": "City\nHospital 2"}
    options = [part for name, text in later.items() for part in (f"--{name.replace('_', '-')}", text)]
    done = ask(run.path, "--format", "md", *options)
    assert done.exit_code == 0, done.stderr
    wanted = OPTIONS | {"owner": "City Hospital 2"}
    report = build_report(run)
    assert report.declarations.model_dump() == wanted
    assert Report.from_json(report.to_json()).declarations == report.declarations
    for text in (*(one.replace("\\", "") for one in texts(report)), done.stdout):
        assert all(words in text for words in wanted.values())
        assert "--purpose" not in text
    assert "declarations.json" in run.manifest["files"]
    assert "City Hospital 2" in registry_yaml(report)
    assert "Triage of appointments" in registry_yaml(report)


def test_declarations_for_several_runs_empty_ones_and_a_garbled_file_are_refused(tmp_path):
    run, other = make(tmp_path / "run"), make(tmp_path / "other")
    assert ask(run.path, "--compare", other.path, "--owner", "x").exit_code == 2
    assert ask(run.path, "--owner", " ").exit_code == 2
    assert not (run.path / "declarations.json").exists()
    (run.path / "declarations.json").write_text("{")
    with pytest.raises(InvalidArgument, match=r"declarations\.json must"):
        build_report(run)


def test_the_headline_counts_training_and_private_evaluations_together(tmp_path):
    run = make(tmp_path / "run", meta=EVERYTHING)
    alone = build_report(run)
    run.write_evaluations([EVALUATION])
    report = build_report(run)
    event = compose([SelfComposed(event=STEP, count=STEPS), EVALUATION.event])
    together = accounting.epsilon(event, 1e-5).upper
    assert report.headline_epsilon == together > alone.headline_epsilon == TRUE_EPSILON
    bound = accounting.membership_advantage(event).upper
    assert report.attack_bounds.advantage == pytest.approx(bound, rel=1e-3)
    assert alone.attack_bounds.advantage < report.attack_bounds.advantage
    for text in texts(report):
        assert f"ε = {math.ceil(100 * together) / 100:.2f}" in text[:300]
        assert f"Training and 1 private evaluation together (training alone: ε = {0.94:.2f})." in text
    assert f"accepts ε = {math.ceil(100 * together) / 100:.2f}" in report.release.conditions[0]


def test_a_person_in_disjoint_records_only_adds_nothing_to_the_headline(tmp_path):
    run = make(tmp_path / "run", meta=EVERYTHING)
    alone = build_report(run)
    run.write_evaluations([replace(EVALUATION, disjoint=True)])
    report = build_report(run)
    assert report.headline_epsilon == alone.headline_epsilon
    assert report.attack_bounds.advantage >= alone.attack_bounds.advantage
    weaker = accounting.membership_advantage(EVALUATION.event).upper
    most = max(weaker, alone.attack_bounds.advantage)
    assert report.attack_bounds.advantage == pytest.approx(most, rel=1e-3)


def test_attacks_on_public_records_are_shown(tmp_path):
    run = make(tmp_path / "run", meta=EVERYTHING)
    (run.path / "attack.json").write_text(json.dumps(ATTACK))
    report = build_report(run)
    assert hazard(report, "No audit").status == "met"
    assert ask(run.path, "--out", tmp_path / "elsewhere.html").exit_code == 0
    assert "attack.json" not in run.manifest["files"]
    assert ask(run.path).exit_code == 0
    assert "attack.json" in run.manifest["files"]
    for text in texts(report):
        assert "AUC 0.520 (0.500 to 0.540)" in text
        assert "largest AUC that the claim allows" in text


def test_attacks_above_the_bound_refute_the_claim(tmp_path):
    run = make(tmp_path / "run", meta=EVERYTHING)
    (run.path / "attack.json").write_text(json.dumps(ATTACK | {"above_ceiling": ["LiRA"]}))
    report = build_report(run)
    assert hazard(report, "No audit").status == "limitation"
    assert report.release.verdict == "not yet"


def test_attacks_on_private_records_are_withheld_and_are_a_limitation(tmp_path):
    run = make(tmp_path / "run", meta=EVERYTHING)
    (run.path / "attack.json").write_text(json.dumps(ATTACK | {"public": False}))
    report = build_report(run)
    assert report.attacks is None
    shown = render_html(report) + report.to_json()
    assert "0.52037" not in shown
    assert "AUC" not in shown
    found = hazard(report, "measurement on private")
    assert (found.status, found.severity) == ("limitation", "critical")
    assert "attack.json" in found.text


@pytest.mark.parametrize("body", ["{", "[]", "{}", '{"public": true, "attacks": []}', '{"public": true}'])
def test_an_attack_file_that_is_none_is_refused(body, tmp_path):
    run = make(tmp_path / "run")
    (run.path / "attack.json").write_text(body)
    with pytest.raises(InvalidArgument, match=r"attack\.json must"):
        build_report(run)


@pytest.mark.parametrize(
    ("stated", "expected"), [({}, "met"), ({"clients": 200}, "met"), ({"clients": 10**6}, "limitation")]
)
def test_delta_is_held_against_the_number_of_units_not_of_records(stated, expected, tmp_path):
    plan = {"privacy_unit": "client", "expected_batch_size": 100.0, "sample_rate": 0.5}
    meta = EVERYTHING | {"data": {"records": 10**9, **stated}}
    report = build_report(make(tmp_path / "run", epsilon=None, plan=plan, meta=meta))
    assert hazard(report, "δ is below 1 / number of clients").status == expected


def test_long_names_are_wrapped_and_never_cut():
    name = "a subgroup whose name is so long that it fits no single line of the drawing, with a tail"
    drawing = accuracy_chart([Accuracy(name=name, value=0.5), Accuracy(name="short", value=0.6)])
    assert "…" not in drawing
    assert set(name.split()) <= set(re.sub(r"<[^>]*>", " ", drawing).split())


def test_labels_of_runs_do_not_overlap():
    drawing = cost_chart([(f"run number {k}", 1.0 + k / 1000, 0.8) for k in range(8)])
    places = [
        (float(x), float(y), 6.4 * len(text), side)
        for x, y, side, text in re.findall(
            r'class="note" x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">([^<]*)<', drawing
        )
    ]
    assert len(places) == 8
    boxes = [(x - w if side == "end" else x, y, w) for x, y, w, side in places]
    for k, (left, y, width) in enumerate(boxes):
        assert left >= -0.1
        for other, up, wide in boxes[:k]:
            assert abs(y - up) >= 12.9 or left >= other + wide or other >= left + width


def test_bins_with_too_few_records_are_not_drawn_and_the_others_have_intervals():
    bins = tuple(
        Bin(records=count, confidence=0.5 + k / 10, accuracy=0.6)
        for k, count in enumerate((FEWEST_IN_BIN - 1, FEWEST_IN_BIN, 500))
    )
    drawing = reliability_chart(Calibration(expected_error=0.1, maximum_error=0.2, bins=bins))
    assert drawing.count('class="dot"') == 2
    lengths = [
        float(low) - float(high) for low, high in re.findall(r'span thin".*?y1="([\d.]+)" y2="([\d.]+)"', drawing)
    ]
    assert len(lengths) == 2
    assert lengths[0] > 3 * lengths[1] > 0
    assert reliability_chart(Calibration(expected_error=0.1, maximum_error=0.2, bins=bins[:1])) == ""


def test_a_plan_without_clients_in_its_facts_takes_them_from_batch_and_rate(tmp_path):
    plan = {"privacy_unit": "client", "expected_batch_size": 100.0, "sample_rate": 0.5}
    report = build_report(make(tmp_path / "run", epsilon=None, plan=plan, meta={"data": {}}))
    assert "number of clients is 200" in hazard(report, "number of clients").text
    assert PLAN["dataset_size_is_public"]


def test_runs_side_by_side_tell_training_from_everything_together(tmp_path):
    one, two = make(tmp_path / "one", meta=EVERYTHING), make(tmp_path / "two", meta=EVERYTHING)
    assert "ε of training alone" not in dict(comparison_rows([build_report(one), build_report(two)]))
    two.write_evaluations([EVALUATION])
    rows = dict(comparison_rows([build_report(one), build_report(two)]))
    assert rows["ε of training alone"] == ["0.94", "0.94"]
    assert float(rows["ε"][0]) == 0.94 < float(rows["ε"][1])
