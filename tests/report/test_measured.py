import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reported_runs import make
from sordino.errors import InvalidArgument
from sordino.report import build_report, compute_label_utility, compute_utility, render_html, render_markdown
from sordino.report.utility import read_utility


def slow_calibration(chances, labels, bins):
    """Record by record: sort into bins, then the gaps."""
    inside = [[] for _ in range(bins)]
    for row, label in zip(chances, labels, strict=True):
        best = max(range(len(row)), key=lambda k: (row[k], -k))
        for k in range(bins):
            if k / bins < row[best] <= (k + 1) / bins:
                inside[k].append((row[best], best == label))
    gaps = [(abs(np.mean([c for c, _ in part]) - np.mean([r for _, r in part])), len(part)) for part in inside if part]
    return sum(gap * count for gap, count in gaps) / len(labels), max(gap for gap, _ in gaps)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(2, 5), st.sampled_from([1, 3, 10, 15]), st.integers(0, 2**32 - 1))
def test_calibration_errors_are_those_of_a_slow_count(records, classes, bins, seed):
    draw = np.random.default_rng(seed)
    chances = draw.dirichlet(np.ones(classes) * 0.7, size=records)
    labels = draw.integers(0, classes, size=records)
    found = compute_utility(chances, labels, public=True, bins=bins)
    ece, mce = slow_calibration(chances.tolist(), labels.tolist(), bins)
    assert found["test_ece"].value == pytest.approx(ece, abs=1e-12)
    assert found["test_mce"].value == pytest.approx(mce, abs=1e-12)
    assert found["test_accuracy"].value == pytest.approx((chances.argmax(1) == labels).mean())


def test_a_model_that_knows_what_it_knows_is_calibrated_and_one_that_boasts_is_not():
    draw = np.random.default_rng(5)
    sure = draw.uniform(0.5, 1.0, size=40_000)
    labels = (draw.uniform(size=sure.size) > sure).astype(int)
    honest = compute_utility(np.stack([sure, 1 - sure], axis=1), labels, public=True)["test_ece"].value
    boast = sure**0.3
    proud = compute_utility(np.stack([boast, 1 - boast], axis=1), labels, public=True)["test_ece"].value
    assert honest < 0.01
    assert proud > 0.1


def test_subgroups_are_measured_apart_and_survive_the_run_folder(tmp_path):
    chances = [[0.9, 0.1]] * 6
    metrics = compute_utility(
        chances, [0, 0, 1, 0, 1, 1], public=True, groups={"sex": ["a", "a", "a", "b: c", "b: c", "b: c"]}
    )
    shown = build_report(make(tmp_path / "run", metrics=metrics)).utility
    assert [(group.column, group.value, group.records) for group in shown.subgroups] == [
        ("sex", "a", 3),
        ("sex", "b: c", 3),
    ]
    assert [round(group.accuracy, 6) for group in shown.subgroups] == [round(2 / 3, 6), round(1 / 3, 6)]
    assert all(group.lower < group.accuracy < group.upper for group in shown.subgroups)
    assert shown == read_utility(metrics)


def test_the_interval_of_a_share_is_wilsons():
    # 7 of 10: Wilson 95 % interval (0.3968, 0.8922), by hand from the formula.
    metrics = compute_utility([[0.9, 0.1]] * 10, [0] * 7 + [1] * 3, public=True, groups={"g": ["x"] * 10})
    (group,) = read_utility(metrics).subgroups
    assert (group.lower, group.upper) == (pytest.approx(0.39677, abs=1e-4), pytest.approx(0.89221, abs=1e-4))


def test_private_records_are_refused():
    with pytest.raises(InvalidArgument, match="public must be True"):
        compute_utility([[0.5, 0.5]], [0], public=False)


@pytest.mark.parametrize(
    ("chances", "labels", "groups", "words"),
    [
        ([[0.5, 0.6]], [0], None, "sum to 1"),
        ([[float("nan"), 1.0]], [0], None, "sum to 1"),
        ([[0.5, 0.5]], [2], None, "below 2"),
        ([[0.5, 0.5]], [0, 1], None, "shapes"),
        ([0.5, 0.5], [0, 1], None, "shapes"),
        ([[0.5, 0.5]], [0], {"sex": []}, "one value a record"),
        ([[0.5, 0.5]], [0], {"a:b": ["x"]}, "without a colon"),
    ],
)
def test_what_is_no_prediction_is_refused(chances, labels, groups, words):
    with pytest.raises(InvalidArgument, match=words):
        compute_utility(chances, labels, public=True, groups=groups)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["ill", "well"], {"ill": "2 right, 1 not", "well": "1 right, 2 not"}),
        (["a", "b", "c"], {"a": "2 right, 1 not", "b": "1 right, 2 not", "c": "0 right, 0 not"}),
        ([], {"0": "2 right, 1 not", "1": "1 right, 2 not"}),
    ],
)
def test_records_of_each_label_go_by_its_name(tmp_path, labels, said):
    classes = max(len(labels), 2)
    predicted, right = [0, 0, 1, 0, 0, 1], [0, 0, 0, 1, 1, 1]
    metrics = compute_label_utility(predicted, right, classes=classes, public=True)
    run = make(tmp_path / "run", metrics=metrics)
    if labels:
        run.write_model_description({"labels": labels})
    report = build_report(run)
    for name, words in said.items():
        assert (f"label {name}", words) in report.utility.figures
        assert f"| label {name} | {words} |" in render_markdown(report)


def test_accuracies_by_a_numeric_label_come_in_its_order(tmp_path):
    groups = {"label": ["10"] * 40 + ["2"] * 40, "ward": ["b"] * 40 + ["a"] * 40}
    chances = [[1.0, 0.0]] * 80
    for columns, order in ((["label"], ["2", "10"]), (["ward"], ["b", "a"])):
        metrics = compute_utility(chances, [0] * 80, public=True, groups={name: groups[name] for name in columns})
        run = make(tmp_path / columns[0], metrics=metrics)
        assert [one.value for one in build_report(run).utility.subgroups] == order


def test_a_run_without_noisy_steps_has_no_laboratory_and_no_steps_of_training(tmp_path):
    steps = build_report(make(tmp_path / "steps"))
    assert "<h2>Laboratory" in render_html(steps)
    assert "Every step of training" in [remark.title for remark in steps.covered]
    stages = steps.model_copy(
        update={"mechanism": steps.mechanism.model_copy(update={"noise_multiplier": "not applicable"})}
    )
    assert "<h2>Laboratory" not in render_html(stages)
    assert "laboratory" not in render_html(stages).lower()
