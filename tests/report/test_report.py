import json
import math
import re
import subprocess
import sys

import pytest
from PIL import Image

from reported_runs import EVERYTHING, PLAN, PUBLIC, STEP, STEPS, TRUE_EPSILON, Page, make
from sordino.errors import InvalidArgument
from sordino.events import NonPrivate
from sordino.report import Report, build_report, write_report
from sordino.report.render import render_html
from sordino.runs import Metric, RunFolder


def test_the_page_states_the_guarantee_with_all_it_takes_to_read_it(tmp_path):
    run = make(tmp_path / "run")
    page = Page(render_html(build_report(run)))
    assert run.guarantee.describe().replace("1e-05", "10⁻⁵") in page.text
    assert "1e-05" not in page.text
    assert f"ε = {math.ceil(TRUE_EPSILON * 100) / 100:.2f}" in page.text
    for words in ("one record", "add or remove one", "full batches", "closed form"):
        assert words in page.text
    for heading in (
        "Privacy spent",
        "What privacy costs",
        "May it be released?",
        "Limits on every attack",
        "What is covered",
        "What is not covered",
        "How ε was computed",
        "Privacy profile",
        "The mechanism",
        "Randomness and processes",
        "Checks",
        "Other access to the records",
        "Other uses of the same records",
        "Who is trusted",
        "Audits and attacks",
        "Check it yourself",
    ):
        assert heading in page.text
    assert page.tags.count("svg") == 5


def test_the_page_shows_public_accuracy_beside_the_twin(tmp_path):
    text = Page(render_html(build_report(make(tmp_path / "run")))).text
    for words in ("this model, private 83.6 %", "non-private baseline 84.8 %", "always the majority class 75.4 %"):
        assert words in text


def test_the_page_names_what_is_not_covered(tmp_path):
    text = Page(render_html(build_report(make(tmp_path / "run")))).text
    for words in ("choice of settings", "test records", "size of the dataset", "floating point", "Other uses"):
        assert words in text
    assert "Not for release" not in text


def test_the_page_needs_nothing_from_outside_and_may_load_nothing(tmp_path):
    page = render_html(build_report(make(tmp_path / "run")))
    parsed = Page(page)
    assert not {"link", "img", "iframe", "object", "embed"} & set(parsed.tags)
    assert parsed.tags.count("script") == parsed.tags.count("style") == 1
    assert not [name for name, _ in parsed.attributes if name in {"src", "href", "xlink:href", "srcset", "style"}]
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)
    (policy,) = [value for name, value in parsed.attributes if name == "content" and "default-src" in value]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_values_marked_private_appear_nowhere(tmp_path):
    metrics = {"test_accuracy": Metric(value=0.7312345, public=False), "x": Metric(value=12345.678, public=False)}
    written = write_report(make(tmp_path / "run", metrics=metrics))
    everything = written.page.read_text() + json.dumps(written.report.to_dict())
    for trace in ("0.7312", "73.1 %", "12345", "12,345"):
        assert trace not in everything
    assert "2 measured values are marked private and not shown" in Page(written.page.read_text()).text
    without = write_report(make(tmp_path / "other" / "run", metrics={}))
    assert without.picture.read_bytes() == written.picture.read_bytes()


def test_a_claim_below_the_transcript_is_overruled(tmp_path):
    report = build_report(make(tmp_path / "run", epsilon=0.5 * TRUE_EPSILON))
    assert report.guarantee.epsilon == TRUE_EPSILON
    text = Page(render_html(report)).text
    assert "the transcript says more than the run claimed" in text
    assert "gives a larger ε than was claimed" in text


def test_a_run_that_did_not_finish_is_charged_for_the_steps_it_took(tmp_path):
    report = build_report(make(tmp_path / "run", epsilon=None, metrics={}))
    assert report.guarantee.epsilon == TRUE_EPSILON
    assert "did not finish" in report.guarantee.description


def test_a_seeded_run_is_not_for_release(tmp_path):
    written = write_report(make(tmp_path / "run", meta={"reproducible": True}))
    text = Page(written.page.read_text()).text
    assert "Not for release. The noise came from a chosen seed." in text
    assert "Anyone who knows the seed" in text


def test_a_run_without_noise_promises_nothing(tmp_path):
    event = NonPrivate(reason="noise_multiplier is 0")
    written = write_report(
        make(tmp_path / "run", epsilon=math.inf, event=event, told=False, plan={"noise_multiplier": 0.0})
    )
    text = Page(written.page.read_text()).text
    assert "Not for release. This run is not private." in text
    assert "ε = ∞" in text
    assert "Limits on every attack" not in text
    assert "What is covered" not in text
    assert written.report.to_dict()["guarantee"]["epsilon"] == "inf"


def test_the_curve_is_the_transcripts_own_or_else_computed(tmp_path):
    told = build_report(make(tmp_path / "told")).curves.spent
    assert [(point.steps, point.epsilon) for point in told[:3]] == [(0, 0.0), (1, 0.01), (2, 0.02)]
    computed = build_report(make(tmp_path / "silent", told=False)).curves.spent
    assert computed[0].steps == 0
    assert computed[-1].steps == STEPS
    assert computed[-1].epsilon == TRUE_EPSILON
    spent = [point.epsilon for point in computed]
    assert spent == sorted(spent)


def test_a_long_run_is_drawn_with_few_points_and_ends_at_its_last_step(tmp_path):
    with RunFolder.create(tmp_path / "run", plan=json.dumps(PLAN)) as run:
        for step in range(1000):
            run.append(step=step, event=STEP, epsilon=float(step))
    curve = build_report(run).curves.spent
    assert len(curve) <= 241
    assert (curve[-1].steps, curve[-1].epsilon) == (1000, 999.0)


def test_a_run_without_steps_has_a_report(tmp_path):
    RunFolder.create(tmp_path / "run", plan=json.dumps(PLAN)).close()
    report = write_report(RunFolder.open(tmp_path / "run")).report
    assert report.guarantee.epsilon == 0


def test_a_plan_that_was_garbled_is_refused_by_name(tmp_path):
    with pytest.raises(InvalidArgument, match=r"plan\.json must hold"):
        build_report(make(tmp_path / "run", epsilon=None, plan={"neighboring_relation": "cousins"}))


def test_the_picture_is_a_wide_png_that_differs_with_what_was_measured(tmp_path):
    first = write_report(make(tmp_path / "a" / "run"))
    second = write_report(make(tmp_path / "b" / "run", metrics={}))
    with Image.open(first.picture) as image:
        assert image.size == (1600, 900)
        colors = image.convert("RGB").getcolors(1 << 24)
        assert len(colors) > 50
    assert first.picture.read_bytes() != second.picture.read_bytes()


def test_a_report_can_be_written_elsewhere_and_again(tmp_path):
    run = make(tmp_path / "run")
    written = write_report(run, folder=tmp_path / "elsewhere")
    assert written.page.parent == written.picture.parent == tmp_path / "elsewhere"
    assert not (run.path / "report.html").exists()
    again = write_report(run, folder=tmp_path / "elsewhere")
    assert again.page.read_text() == render_html(written.report)


@pytest.mark.parametrize("event", [STEP, NonPrivate(reason="noise_multiplier is 0")])
def test_the_report_as_json_has_no_infinities_and_round_trips(event, tmp_path):
    epsilon = TRUE_EPSILON if event is STEP else math.inf
    report = build_report(make(tmp_path / "run", event=event, epsilon=epsilon, meta=EVERYTHING))
    body = report.to_dict()
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    assert body["schema_version"] == 1
    assert Report.from_json(report.to_json()) == report
    assert render_html(Report.from_json(report.to_json())) == render_html(report)


def test_json_of_another_version_or_with_a_misspelt_field_is_refused_by_name(tmp_path):
    body = build_report(make(tmp_path / "run")).to_dict()
    with pytest.raises(InvalidArgument, match="schema_version"):
        Report.from_json(json.dumps(body | {"schema_version": 2}))
    with pytest.raises(InvalidArgument, match="epsilom"):
        Report.from_json(json.dumps(body | {"guarantee": body["guarantee"] | {"epsilom": 1.0}}))
    with pytest.raises(InvalidArgument, match="delta"):
        Report.from_json(json.dumps(body | {"guarantee": body["guarantee"] | {"delta": 1.5}}))


def test_reports_are_made_without_torch(tmp_path):
    make(tmp_path / "run")
    code = (
        "import sys; from sordino.report import write_report; from sordino.runs import RunFolder\n"
        "write_report(RunFolder.open(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)


def test_a_bound_shared_by_many_steps_is_drawn_where_it_is_tight(tmp_path):
    with RunFolder.create(tmp_path / "run", plan=json.dumps(PLAN)) as run:
        for step in range(9):
            run.append(step=step, event=STEP, epsilon=float(step // 3 + 1))
    assert [(point.steps, point.epsilon) for point in build_report(run).curves.spent] == [
        (0, 0.0),
        (3, 1.0),
        (6, 2.0),
        (9, 3.0),
    ]


def test_a_cost_of_privacy_is_claimed_only_beside_a_twin(tmp_path):
    metrics = {name: metric for name, metric in PUBLIC.items() if name != "baseline_test_accuracy"}
    text = Page(render_html(build_report(make(tmp_path / "run", metrics=metrics)))).text
    assert "How well it predicts" in text
    assert "this model, private 83.6 %" in text
    assert "What privacy costs" not in text
    assert "next to a non-private baseline" not in text
