"""`describe`: one charge, intervals that cover the truth as often as they say, and nothing read before."""

import math

import numpy as np
import pytest

import sordino
from sordino import accounting
from sordino.data import BooleanColumn, CategoricalColumn, DateColumn, NumericColumn, OrdinalColumn, Schema
from sordino.description import Estimate, TableDescriber, TableDescription, _Noise, _quantile, _Releases, describe
from sordino.errors import BudgetExceeded, InvalidArgument, MissingDeclaration
from sordino.events import compose
from sordino.ledger import Ledger
from sordino.mechanisms.base import observe_releases
from sordino.randomness import KeyedRNG

SCHEMA = Schema(
    columns=(
        NumericColumn(name="age", low=0, high=100),
        NumericColumn(name="gain", low=0, high=5000),
        CategoricalColumn(name="job", categories=("clerk", "sales", "farm")),
    ),
    target="rich",
    labels=("no", "yes"),
)


def table(count=1500, seed=0):
    generator = np.random.default_rng(seed)
    job = generator.integers(0, 4, count)
    age = generator.normal(30 + 10 * job, 12)
    age[generator.random(count) < 0.05] = np.nan
    gain = np.where(generator.random(count) < 0.7, 0.0, generator.exponential(3000, count))
    return {
        "age": age,
        "gain": gain,
        "job": [("clerk", "sales", "farm", "")[one] for one in job],
        "rich": [("no", "yes")[one] for one in (job > 1).astype(int)],
    }


def truths(source):
    """The table's own values by (column, statistic)."""
    found = {"records": len(source["age"])}
    for name, (low, high) in {"age": (0, 100), "gain": (0, 5000)}.items():
        values = np.clip(source[name][~np.isnan(source[name])], low, high)
        found[name, "mean"] = values.mean()
        found[name, "missing"] = np.isnan(source[name]).sum()
        for level in (0.25, 0.5, 0.75):
            found[name, level] = np.sort(values)[math.ceil(level * len(values)) - 1]
        found[name, "low"] = (values <= low).sum()
        found[name, "part 2"] = ((values >= low + (high - low) / 4) & (values < low + (high - low) / 2)).sum()
    found["job", "sales"] = sum(job == "sales" for job in source["job"])
    found["job", "missing"] = sum(job == "" for job in source["job"])
    return found


def estimates(found: TableDescription) -> dict[object, Estimate]:
    said: dict[object, Estimate] = {"records": found.records}
    for name in ("age", "gain"):
        summary = found.column(name)
        said[name, "mean"], said[name, "missing"] = summary.mean, summary.missing
        said |= {(name, level): estimate for level, estimate in summary.quantiles}
        said[name, "low"], said[name, "part 2"] = summary.histogram[0][1], summary.histogram[2][1]
    jobs = dict(found.column("job").counts)
    said["job", "sales"], said["job", "missing"] = jobs["sales"], jobs["(missing or not listed)"]
    return said


def repeated(source, runs, **given):
    """Descriptions with fresh noise each; what they cost is computed once."""
    describer = TableDescriber(schema=SCHEMA, **{"delta": 1e-6, "bins": 4, "cross": ()} | given).fit(source)
    for _ in range(runs):
        yield _Releases(describer, KeyedRNG()).describe(source, describer.guarantee_)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-6), (0.5, 0.0), (0.05, 1e-6)])
def test_intervals_cover_the_tables_own_values_as_often_as_they_say(epsilon, delta):
    source = table()
    truth, runs = truths(source), 80
    hits: dict[object, int] = dict.fromkeys(truth, 0)
    for found in repeated(source, runs, epsilon=epsilon, delta=delta):
        said = estimates(found)
        for key, value in truth.items():
            hits[key] += said[key].low <= value <= said[key].high
            assert said[key].low <= max(said[key].value, 0) <= said[key].high or said[key].value < 0
    # Five deviations of a binomial at 95 %: 0.95 − 5·√(0.95·0.05/80) ≈ 0.83.
    for key, count in hits.items():
        assert count / runs >= 0.83, key
    assert sum(hits.values()) / (runs * len(hits)) >= 0.935


def test_intervals_are_no_wider_than_the_noise_warrants():
    source = table()
    said = estimates(describe(source, schema=SCHEMA, epsilon=1.0, delta=1e-6, bins=4, cross=()))
    assert said["records"].high - said["records"].low < 80
    assert said["age", "mean"].high - said["age", "mean"].low < 6
    assert said["age", 0.5].high - said["age", 0.5].low < 25
    # Counts alone: half the intervals of a 50 % level miss.
    misses = 0
    for found in repeated(source, 40, epsilon=0.2, confidence=0.5):
        misses += not found.records.low <= 1500 <= found.records.high
    assert 6 <= misses <= 34


def test_noise_that_is_a_third_too_small_in_the_intervals_is_caught(monkeypatch):
    exact = _Noise.variance
    monkeypatch.setattr(_Noise, "variance", lambda self, scale: exact(self, scale) / 2.25)
    source, hits, runs = table(), 0, 40
    for found in repeated(source, runs, epsilon=0.5):
        said = estimates(found)
        hits += sum(said[key].low <= value <= said[key].high for key, value in truths(source).items())
    assert hits / (runs * len(truths(source))) < 0.935


def test_cross_tables_count_pairs_within_their_margin():
    source = table()
    found = describe(
        source, schema=SCHEMA, epsilon=20.0, delta=1e-6, cross=(("job", "rich"), ("rich", "age")), confidence=0.9999
    )
    jobs, ages = found.cross_tables
    assert jobs.rows == ("clerk", "sales", "farm", "(missing or not listed)")
    assert jobs.header == ("no", "yes", "(missing or not listed)")
    for row, job in enumerate(("clerk", "sales", "farm", "")):
        for place, rich in enumerate(("no", "yes")):
            pairs = zip(source["job"], source["rich"], strict=True)
            assert abs(jobs.counts[row][place] - sum(pair == (job, rich) for pair in pairs)) <= jobs.margin
    assert ages.header == ("0 to 25", "25 to 50", "50 to 75", "75 to 100", "(missing)")
    young = sum(not age >= 25 and not math.isnan(age) for age in source["age"])
    assert abs(sum(row[0] for row in ages.counts) - young) <= 3 * ages.margin


def test_by_default_the_target_is_crossed_with_every_short_category():
    long = CategoricalColumn(name="town", categories=tuple(map(str, range(21))))
    schema = Schema(columns=(*SCHEMA.columns, long), target="rich", labels=("no", "yes"))
    found = describe({**table(30), "town": ["3"] * 30}, schema=schema, epsilon=1.0, delta=1e-6)
    assert [one.columns for one in found.cross_tables] == [("job", "rich")]


# ── the budget ──────────────────────────────────────────────────────────────────────────────────────────────


class Listener:
    def __init__(self):
        self.events = []

    def released(self, release, draw):
        self.events.append(release.mechanism.event())
        return draw()


@pytest.mark.parametrize("delta", [1e-6, 0.0])
@pytest.mark.parametrize("cross", [None, (), (("job", "rich"), ("age", "gain"))])
def test_what_ran_is_what_was_charged_and_composes_to_epsilon(delta, cross):
    listener = Listener()
    with observe_releases(listener):
        describer = TableDescriber(schema=SCHEMA, epsilon=0.7, delta=delta, cross=cross).fit(table(100))
    assert (
        tuple(listener.events)
        == describer.events_
        == TableDescriber(schema=SCHEMA, epsilon=0.7, delta=delta, cross=cross).planned_events()
    )
    spent = accounting.epsilon(compose(listener.events), delta).upper
    assert 0.99 * 0.7 <= spent <= 0.7 * (1 + 1e-9)
    if delta:  # independently: Gaussian releases add up in 1/z²
        from sordino.mechanisms import gaussian_mechanism_delta

        multiplier = 1 / math.sqrt(sum(1 / event.noise_multiplier**2 for event in listener.events))
        assert gaussian_mechanism_delta(noise_multiplier=multiplier, epsilon=0.7) <= delta


def test_the_charge_comes_before_the_table_and_a_refusal_reads_nothing(tmp_path):
    Ledger(tmp_path / "l.db").create()
    Ledger(tmp_path / "l.db").declare("people", epsilon=1.0, delta=1e-6)
    account = Ledger(tmp_path / "l.db").account("people")

    class Watched(dict):
        def __getitem__(self, name):
            assert account.spent().epsilon > 0.5
            return super().__getitem__(name)

    describe(Watched(table(50)), schema=SCHEMA, epsilon=0.9, delta=1e-7, ledger=account)

    class Unread(dict):
        def __getitem__(self, name):
            raise AssertionError("read")

    with pytest.raises(BudgetExceeded):
        describe(Unread(table(50)), schema=SCHEMA, epsilon=0.9, delta=1e-7, ledger=account)


@pytest.mark.parametrize("source", [table(0), table(1), {**table(2), "age": [1e308, -math.inf]}])
def test_tables_of_few_or_extreme_records_are_described_without_a_word(source):
    found = describe(source, schema=SCHEMA, epsilon=1.0, delta=1e-6)
    for summary in found.columns[:2]:
        low, high = (0, 100) if summary.name == "age" else (0, 5000)
        assert low <= summary.mean.low <= summary.mean.value <= summary.mean.high <= high
        for _, estimate in summary.quantiles:
            assert low <= estimate.low <= estimate.value <= estimate.high <= high
    assert found.records.low >= 0
    assert "epsilon" in found.to_dict()


def test_a_table_without_numbers_is_described():
    schema = Schema(columns=(SCHEMA.columns[2],), target="rich", labels=("no", "yes"))
    found = describe(table(100), schema=schema, epsilon=1.0, delta=0.0)
    assert [summary.name for summary in found.columns] == ["job", "rich"]


def test_a_numeric_target_is_described_and_missing_targets_are_counted():
    schema = Schema(columns=(SCHEMA.columns[2],), target="age", labels=(), target_bounds=(0.0, 100.0))
    source = table(2000)
    found = describe(source, schema=schema, epsilon=5.0, delta=1e-6, confidence=1 - 1e-9)
    missing = np.isnan(source["age"]).sum()
    assert found.column("age").missing.low <= missing <= found.column("age").missing.high
    assert [one.columns for one in found.cross_tables] == [("job", "age")]


def test_a_quantile_of_exact_counts_is_in_its_cell():
    noise = _Noise(confidence=0.95, pure=False)
    counts, edges = np.array([5.0, 0.0, 10.0, 85.0]), np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    for level, (low, high) in {0.04: (0, 1), 0.1: (2, 3), 0.151: (3, 4), 0.9: (3, 4)}.items():
        found = _quantile(counts, edges, level, 1e-12, noise)
        assert (found.low, found.high) == (low, high)
        assert low <= found.value <= high


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"schema": None}, MissingDeclaration),
        ({"delta": None}, MissingDeclaration),
        ({"epsilon": 0.0}, InvalidArgument),
        ({"quantiles": (0.5, 1.0)}, InvalidArgument),
        ({"bins": 0}, InvalidArgument),
        ({"confidence": 1.0}, InvalidArgument),
        ({"cross": (("job", "pay"),)}, InvalidArgument),
        ({"cross": (("job", "job"),)}, InvalidArgument),
        ({"random_state": 3}, InvalidArgument),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_charged(given, error):
    with pytest.raises(error):
        TableDescriber(**({"schema": SCHEMA, "epsilon": 1.0, "delta": 1e-6} | given)).planned_events()


def test_every_type_of_column_is_described():
    schema = Schema(
        columns=(
            NumericColumn(name="kids", low=0, high=10, whole=True),
            OrdinalColumn(name="size", levels=("s", "m", "l")),
            BooleanColumn(name="smoker"),
            DateColumn(name="born", low="2000-01-01", high="2010-01-01"),
        ),
        target="rich",
        labels=("no", "yes"),
    )
    source = {
        "kids": [0, 2, 3] * 300,
        "size": ["s", "l", "xl"] * 300,
        "smoker": ["yes", "no", "?"] * 300,
        "born": ["2001-02-03", "2009-01-01", ""] * 300,
        "rich": ["no", "yes", "no"] * 300,
    }
    found = describe(source, schema=schema, epsilon=50.0, delta=1e-6, cross=(("smoker", "born"),), confidence=1 - 1e-9)
    smoker = [round(estimate.value / 100) for _, estimate in found.column("smoker").counts]
    assert smoker == [3, 3, 3]
    born = {part: round(estimate.value / 100) for part, estimate in found.column("born").counts}
    assert sorted(born.values())[-3:] == [3, 3, 3]
    assert born["(missing)"] == 3
    assert found.column("kids").mean.low <= 5 / 3 <= found.column("kids").mean.high
    assert found.cross_tables[0].header[-1] == "(missing)"


def test_the_short_form_is_public():
    assert sordino.describe is describe
