"""Evaluations on private records: one record moves one cell of a table, pays first, and the intervals hold."""

import json
import math

import numpy as np
import pytest

from reported_runs import EVERYTHING, make
from sordino import accounting
from sordino.definitions import NeighboringRelation
from sordino.errors import BudgetExceeded, InvalidArgument
from sordino.events import compose
from sordino.ledger import Ledger
from sordino.mechanisms.base import observe_releases
from sordino.randomness import KeyedRNG
from sordino.report import build_report, compute_utility, measure_private_utility, render_html, render_markdown
from sordino.report.utility import joint_epsilon, proportion_interval, summarize_evaluation
from sordino.runs import RunFolder
from sordino.verification import verify

CLASSES = ("no", "yes", "maybe")
GROUPS = {"sex": ("a", "b"), "age": ("young", "old")}
RELATIONS = list(NeighboringRelation)


def made_up(count, *, seed=0):
    stream = KeyedRNG(seed=seed, reproducible=True).stream("evaluated", step=0)
    scores = stream.uniform(3 * count).reshape(count, 3) + 0.05
    labels = (stream.uniform(count) * 3).astype(int)
    columns = {"sex": ["a" if part < 0.5 else "c" for part in stream.uniform(count)], "age": ["old"] * count}
    return scores / scores.sum(1, keepdims=True), labels, columns


class Listener:
    """Keeps the exact counts of every table, and lets them out without noise."""

    def __init__(self):
        self.counts, self.moved = [], []

    def released(self, release, draw):
        self.counts.append(release.mechanism.exact_value(release.value))
        self.moved.append(release.mechanism.noise.moved)
        return self.counts[-1]


def exact(predictions, **options):
    listener = Listener()
    with observe_releases(listener):
        measure_private_utility(lambda: predictions, classes=CLASSES, epsilon=1.0, groups=GROUPS, **options)
    return listener


def with_record(predictions, chances, label, sex):
    scores, labels, columns = predictions
    return (
        np.vstack([scores, chances]),
        np.append(labels.astype(float), label),
        {"sex": [*columns["sex"], sex], "age": [*columns["age"], "young"]},
    )


@pytest.mark.parametrize(("chances", "label"), [([0.0, 0.1, 0.9], 2), ([1.0, 0.0, 0.0], 1), ([1e30, 0.0, -1e30], 0)])
def test_one_record_moves_one_count_of_each_table_by_one(chances, label):
    before = exact(made_up(40))
    after = exact(with_record(made_up(40), chances, label, "b"))
    for one, other in zip(before.counts, after.counts, strict=True):
        assert np.abs(other - one).sum() == 1


BROKEN = [
    ([math.nan, 0.0, 1.0], 1),
    ([math.inf, 0.0, 0.0], 0),
    ([0.2, 0.3, 0.5], math.nan),
    ([0.2, 0.3, 0.5], 3),
    ([0.2, 0.3, 0.5], -1),
    ([0.2, 0.3, 0.5], 0.5),
]


@pytest.mark.parametrize(("chances", "label"), BROKEN)
def test_a_record_that_is_broken_or_of_no_class_counts_nowhere(chances, label):
    before, after = exact(made_up(40)), exact(with_record(made_up(40), chances, label, "b"))
    assert all(np.array_equal(one, other) for one, other in zip(before.counts, after.counts, strict=True))


def test_a_replaced_record_moves_two_counts_and_the_mechanism_knows():
    before = exact(
        with_record(made_up(40), [1.0, 0.0, 0.0], 0, "a"), neighboring_relation=NeighboringRelation.REPLACE_ONE
    )
    after = exact(
        with_record(made_up(40), [0.0, 0.0, 1.0], 0, "b"), neighboring_relation=NeighboringRelation.REPLACE_ONE
    )
    changes = [np.abs(b - a).sum() for a, b in zip(before.counts, after.counts, strict=True)]
    assert max(changes) == 2
    assert all(change <= moved for change, moved in zip(changes, before.moved, strict=True))


def test_the_counts_are_those_of_a_slow_count():
    scores, labels, columns = made_up(60)
    # The name of the table leads to its counts: in the order all, confidence, class, sex, age.
    _, confidence, by_class, by_sex, _ = exact((scores, labels, columns)).counts
    slow = np.zeros(30, int), np.zeros(6, int), np.zeros(6, int)
    for score, label, sex in zip(scores, labels, columns["sex"], strict=True):
        wrong = int(np.argmax(score) != label)
        place = next(k for k in range(15) if max(score) <= 1 / 3 + (2 / 3) * (k + 1) / 15 + 1e-12)
        slow[0][2 * place + wrong] += 1
        slow[1][2 * label + wrong] += 1
        slow[2][2 * {"a": 0, "b": 1}.get(sex, 2) + wrong] += 1
    assert [part.tolist() for part in (confidence, by_class, by_sex)] == [part.tolist() for part in slow]


@pytest.mark.parametrize("neighboring_relation", RELATIONS, ids=lambda neighboring_relation: neighboring_relation.value)
@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_the_noise_is_what_is_stated_and_another_would_have_been_seen(neighboring_relation, delta):
    many = [str(number) for number in range(6000)]
    found = measure_private_utility(
        lambda: (np.zeros((0, 2)), [], {"column": []}),
        classes=("no", "yes"),
        groups={"column": many},
        epsilon=0.7,
        delta=delta,
        neighboring_relation=neighboring_relation,
    )
    table = found.table("column")
    measured = float(np.sqrt(np.mean(np.square([*table.right, *table.wrong]))))
    # Laplace noise has kurtosis 6: the square of a draw varies by √5 of its mean, a normal one by √2.
    width = 4 * math.sqrt((5 if delta == 0 else 2) / 12_000) / 2
    assert abs(measured / found.stddev - 1) < width < 0.045
    assert abs(measured / (0.95 * found.stddev) - 1) > 0.25 * width
    own = {0.0: 4 * math.sqrt(2) / 0.7}.get(delta)
    if own is not None:
        factor = 2 if neighboring_relation is NeighboringRelation.REPLACE_ONE else 1
        assert found.stddev == pytest.approx(factor * own, rel=0.01)


@pytest.mark.parametrize("neighboring_relation", RELATIONS, ids=lambda neighboring_relation: neighboring_relation.value)
@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 0.0), (1.0, 0.0), (1.0, 1e-6), (0.2, 1e-9)])
def test_what_is_charged_comes_to_the_price_and_hardly_less(epsilon, delta, neighboring_relation):
    found = measure_private_utility(
        lambda: made_up(5),
        classes=CLASSES,
        groups=GROUPS,
        epsilon=epsilon,
        delta=delta,
        neighboring_relation=neighboring_relation,
    )
    spent = accounting.epsilon(found.event, delta, neighboring_relation=neighboring_relation).upper
    assert 0.98 * epsilon < spent <= epsilon * (1 + 1e-9)


# ── charge first ────────────────────────────────────────────────────────────────────────────────────────────


def test_it_is_charged_and_noted_before_the_records_are_read(tmp_path):
    account = Ledger(tmp_path / "privacy.db").declare("held out", epsilon=3.0, delta=1e-5)
    run, seen = make(tmp_path / "run"), []

    def reading():
        seen.extend(account.history())
        assert run.evaluations[0].tables is None
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        measure_private_utility(reading, classes=CLASSES, epsilon=1.0, ledger=account, run=run)
    assert seen[-1].kind == "charge"
    assert seen[-1].digest == run.evaluations[0].charge
    assert verify(run, ledger=tmp_path / "privacy.db").item("evaluations").status == "pass"
    report = build_report(run)
    assert report.evaluations[0].shares == ()
    assert "gave no answer" in render_markdown(report)


def test_what_does_not_fit_the_budget_reads_nothing(tmp_path):
    account = Ledger(tmp_path / "privacy.db").declare("held out", epsilon=0.5, delta=1e-5)
    run = make(tmp_path / "run")
    with pytest.raises(BudgetExceeded):
        measure_private_utility(lambda: pytest.fail("read"), classes=CLASSES, epsilon=1.0, ledger=account, run=run)
    assert run.evaluations == ()


def test_records_of_users_are_refused(tmp_path):
    run = make(tmp_path / "run", plan={"privacy_unit": "user"}, epsilon=None)
    with pytest.raises(InvalidArgument, match="user"):
        measure_private_utility(lambda: pytest.fail("read"), classes=CLASSES, epsilon=1.0, run=run)


@pytest.mark.parametrize(
    "options",
    [
        {"classes": ("one",)},
        {"classes": ("a", "a")},
        {"epsilon": 0.0},
        {"delta": 1.0},
        {"bins": 0},
        {"groups": {"class": ("a",)}},
        {"groups": {"sex": ("other",)}},
        {"groups": {"sex": ("a", "a")}},
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_read(options):
    with pytest.raises(InvalidArgument):
        measure_private_utility(lambda: pytest.fail("read"), **({"classes": CLASSES, "epsilon": 1.0} | options))


@pytest.mark.parametrize(
    "predictions",
    [
        ([[0.5, 0.5]], [0]),
        ([[0.2, 0.3, 0.5]], [0, 1]),
        ([[0.2, 0.3, 0.5]], [0], {"sex": ["a"]}),
        ([[0.2, 0.3, 0.5]], [0], {"sex": ["a"], "age": ["old", "old"]}),
    ],
)
def test_what_is_no_prediction_is_refused_without_a_number_of_the_records(predictions):
    with pytest.raises(InvalidArgument) as caught:
        measure_private_utility(lambda: predictions, classes=CLASSES, groups=GROUPS, epsilon=1.0)
    assert "1" not in str(caught.value).replace("(records, 3)", "")


def test_the_refusal_of_private_records_names_what_can_be_bought():
    with pytest.raises(InvalidArgument, match="private_utility"):
        compute_utility([[0.9, 0.1]], [0], public=False)


# ── what it says ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("right", "wrong"), [(80, 20), (5, 0), (0, 3), (1, 999)])
def test_without_noise_the_interval_is_wilsons(right, wrong):
    total, z = right + wrong, 1.959963984540054
    middle = (right + z * z / 2) / (total + z * z)
    half = z / (total + z * z) * math.sqrt(right * wrong / total + z * z / 4)
    low, high = proportion_interval(right, wrong, stddev=0.0)
    assert (low, high) == pytest.approx((max(0.0, middle - half), min(1.0, middle + half)), abs=1e-9)


@pytest.mark.parametrize(("records", "share", "stddev"), [(400, 0.85, 10.0), (150, 0.6, 20.0), (2000, 0.97, 30.0)])
@pytest.mark.parametrize("laplace", [False, True])
def test_intervals_hold_the_true_share_and_those_that_forget_the_noise_do_not(records, share, stddev, laplace):
    stream, times = KeyedRNG(seed=7, reproducible=True).stream("coverage", step=0), 1500
    right = (stream.uniform(times * records).reshape(times, records) < share).sum(1)
    flat = stream.uniform(2 * times).reshape(times, 2)
    if laplace:
        noise = -np.sign(flat - 0.5) * np.log(1 - 2 * np.abs(flat - 0.5)) * stddev / math.sqrt(2)
    else:
        noise = (
            stddev
            * np.sqrt(-2 * np.log(flat[:, :1]))
            * np.hstack([np.cos(2 * np.pi * flat[:, 1:]), np.sin(2 * np.pi * flat[:, 1:])])
        )
    width = math.log(20) / math.sqrt(2) if laplace else 1.959963984540054
    covered = forgetful = 0
    for count, (one, other) in zip(right, noise, strict=True):
        counts = count + one, records - count + other
        low, high = proportion_interval(*counts, stddev=stddev, width=width)
        covered += low <= share <= high
        low, high = proportion_interval(max(counts[0], 0.0), max(counts[1], 0.0), stddev=0.0)
        forgetful += low <= share <= high
    assert covered / times > 0.935
    assert forgetful / times < 0.92


def test_counts_that_say_nothing_give_the_whole_interval():
    assert proportion_interval(-3, 2, stddev=10.0) == (0.0, 1.0)
    assert proportion_interval(4, 3, stddev=10.0) == (0.0, 1.0)


def test_accuracy_calibration_and_groups_are_near_those_measured_without_noise():
    stream = KeyedRNG(seed=3, reproducible=True).stream("calibration", step=0)
    confidence = 0.5 + 0.5 * stream.uniform(20_000)
    right = stream.uniform(20_000) < confidence - 0.1
    sexes = ["a" if part < 0.3 else "b" for part in stream.uniform(20_000)]
    chances = np.stack([confidence, 1 - confidence], axis=1)
    labels = np.where(right, 0, 1)
    told = compute_utility(chances, labels, public=True, groups={"sex": sexes})
    # The intervals hold in 95 of 100 draws of noise; these are one draw, the same every time.
    found = measure_private_utility(
        lambda: (chances, labels, {"sex": sexes}),
        classes=("no", "yes"),
        groups={"sex": ("a", "b")},
        epsilon=1.0,
        rng=KeyedRNG(seed=3, reproducible=True),
    )
    shown = summarize_evaluation(found)
    whole = shown.shares[0]
    assert whole.column == "all"
    assert abs(whole.accuracy - told["test_accuracy"].value) < 0.005
    assert whole.lower < told["test_accuracy"].value < whole.upper
    assert whole.upper - whole.lower < 0.02
    assert abs(whole.records - 20_000) < 5 * whole.records_noise
    assert shown.calibration.expected_error == pytest.approx(0.1, abs=0.02)
    assert shown.calibration_noise < 0.01
    by_sex = {share.value: share for share in shown.shares if share.column == "sex"}
    assert by_sex["a"].lower < told["subgroup:sex:a:accuracy"].value < by_sex["a"].upper
    assert by_sex["other"].describe() == "not known"


def test_costs_add_up_unless_the_records_are_declared_disjoint(tmp_path):
    run = make(tmp_path / "run")
    claim = build_report(run).guarantee.epsilon
    trained = run.event()
    first = measure_private_utility(lambda: made_up(9), classes=CLASSES, epsilon=0.5, run=run, disjoint=True)
    assert build_report(run).epsilon_together == pytest.approx(max(claim, 0.5))
    second = measure_private_utility(lambda: made_up(9), classes=CLASSES, epsilon=2.0, run=run)
    expected = accounting.epsilon(compose([trained, second.event]), 1e-5).upper
    assert build_report(run).epsilon_together == pytest.approx(expected)
    assert max(claim, 2.0) < expected <= claim + 2.0
    third = measure_private_utility(lambda: made_up(9), classes=CLASSES, epsilon=9.0, run=run, disjoint=True)
    expected = accounting.epsilon(compose([first.event, third.event]), 1e-5).upper
    assert build_report(run).epsilon_together == pytest.approx(expected)
    # A budget that was spent step by step: the claim stands, and pure costs are added to it.
    given = {"claimed": 5.0, "delta": 1e-5, "neighboring_relation": NeighboringRelation.ADD_OR_REMOVE_ONE}
    assert joint_epsilon([second], trained, **given) == pytest.approx(7.0, rel=1e-6)


def test_page_and_markdown_show_what_was_bought(tmp_path):
    run = make(tmp_path / "run", metrics={}, meta=EVERYTHING)
    measure_private_utility(
        lambda: made_up(300), classes=CLASSES, epsilon=3.0, groups=GROUPS, run=run, records="a clinic"
    )
    report = build_report(run)
    page, text = render_html(report), render_markdown(report)
    for words in ("Private evaluation", "a clinic", "training and evaluations together"):
        assert words in page
        assert words in text
    assert "Accuracy by sex" in page
    assert "evaluated on private records once" in page
    assert report.from_json(report.to_json()) == report


# ── the run folder ──────────────────────────────────────────────────────────────────────────────────────────


def test_evaluations_survive_the_folder_and_verify(tmp_path):
    run = make(tmp_path / "run")
    found = [
        measure_private_utility(lambda: made_up(9), classes=CLASSES, groups=GROUPS, epsilon=1.0, delta=delta, run=run)
        for delta in (0.0, 1e-6)
    ]
    assert RunFolder.open(run.path).evaluations == tuple(found)
    assert verify(run).item("evaluations").status == "pass"
    assert verify(run).item("files").status == "pass"


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 0.5},
        {"stddev": 1.0},
        {"head": "0" * 64},
        {"neighboring_relation": "replace_one"},
        {"tables": []},
        {"event": {"kind": "gaussian", "noise_multiplier": 1.0}},
        {"disjoint": "yes"},
    ],
)
def test_an_evaluation_that_does_not_fit_its_price_is_caught(tmp_path, change):
    run = make(tmp_path / "run")
    measure_private_utility(lambda: made_up(9), classes=CLASSES, epsilon=1.0, run=run)
    body = json.loads((run.path / "evaluations.json").read_text())
    body["evaluations"][0] |= change
    run._put_json("evaluations.json", body)
    assert verify(run).item("evaluations").status == "fail"


@pytest.mark.parametrize("place", [0.02, 0.5, 0.97])
def test_one_flipped_bit_in_the_answers_is_caught(tmp_path, place):
    run = make(tmp_path / "run")
    measure_private_utility(lambda: made_up(9), classes=CLASSES, epsilon=1.0, run=run)
    content = bytearray((run.path / "evaluations.json").read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    (run.path / "evaluations.json").write_bytes(bytes(content))
    assert verify(run).item("files").status == "fail"


def test_a_charge_that_the_ledger_does_not_hold_is_caught(tmp_path):
    run = make(tmp_path / "run")
    for name in ("one", "other"):
        Ledger(tmp_path / f"{name}.db").declare("held out", epsilon=3.0, delta=1e-5)
    account = Ledger(tmp_path / "one.db").account("held out")
    measure_private_utility(lambda: made_up(9), classes=CLASSES, epsilon=1.0, run=run, ledger=account)
    assert verify(run).item("evaluations").status == "not checked"
    assert verify(run, ledger=tmp_path / "one.db").item("evaluations").status == "pass"
    assert verify(run, ledger=tmp_path / "other.db").item("evaluations").status == "fail"


def test_nothing_that_is_written_but_the_noisy_counts_depends_on_a_record(tmp_path):
    contents = []
    for number, count in enumerate((40, 41)):
        run = make(tmp_path / f"{number}" / "run")
        measure_private_utility(
            lambda count=count: made_up(count), classes=CLASSES, epsilon=1.0, groups=GROUPS, run=run
        )
        body = json.loads((run.path / "evaluations.json").read_text())["evaluations"][0]
        for table in body["tables"]:
            table["right"], table["wrong"] = len(table["right"]), len(table["wrong"])
        contents.append(body | {"head": ""})
    assert contents[0] == contents[1]
