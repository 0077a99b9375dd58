"""AIM, MST and independent columns: what is charged, that nothing is read before or beside it, and what comes out."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest

from sordino import accounting
from sordino.accounting.filters import ZCDPFilter
from sordino.accounting.rdp import rho_to_epsilon
from sordino.data import CategoricalColumn, NumericColumn, Schema
from sordino.errors import BudgetExceeded, InvalidArgument, MissingDeclaration
from sordino.events import BoundedRange, Gaussian, ZeroConcentratedDP, compose
from sordino.ledger import Ledger
from sordino.mechanisms.base import observe_releases
from sordino.randomness import KeyedRNG
from sordino.synthesis import TableSynthesizer
from sordino.synthesis.synthesizer import ChargedMarginals, all_cliques, default_degree

METHODS = ("aim", "mst", "independent")
SCHEMA = Schema(
    columns=(
        NumericColumn(name="age", low=0, high=100),
        CategoricalColumn(name="job", categories=("clerk", "sales", "farm")),
        CategoricalColumn(name="town", categories=("north", "south")),
    ),
    target="rich",
    labels=("no", "yes"),
)


def table(count=4000, seed=0):
    generator = np.random.default_rng(seed)
    town = generator.integers(0, 2, count)
    job = np.where(generator.random(count) < 0.8, 2 * town, generator.integers(0, 3, count))
    age = np.clip(generator.normal(30 + 20 * job, 8), 0, 100)
    rich = (age + generator.normal(0, 10, count) > 55).astype(int)
    return {
        "age": age.tolist(),
        "job": [("clerk", "sales", "farm")[one] for one in job],
        "town": [("north", "south")[one] for one in town],
        "rich": [("no", "yes")[one] for one in rich],
    }


def synthesizer(method="aim", **given):
    return TableSynthesizer(**({"schema": SCHEMA, "epsilon": 1.0, "delta": 1e-6, "method": method, "bins": 5} | given))


class Listener:
    """Writes down the event of each mechanism that is used, whoever uses it."""

    def __init__(self):
        self.events = []

    def released(self, release, draw):
        self.events.append(release.mechanism.event())
        return draw()


# ── the budget ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("epsilon", [0.1, 3.0])
def test_the_mechanisms_that_ran_compose_to_the_guarantee_by_two_accountants(method, epsilon):
    listener = Listener()
    with observe_releases(listener):
        fitted = synthesizer(method, epsilon=epsilon).fit(table(400))
        fitted.sample(10)
    assert tuple(listener.events) == fitted.releases_
    # ρ by the closed forms: 1/(2σ²) of Gaussian noise, ε²/8 of a selection.
    rho = math.fsum(
        1 / (2 * event.noise_multiplier**2) if isinstance(event, Gaussian) else event.epsilon**2 / 8
        for event in listener.events
    )
    (charged,) = fitted.events_
    assert isinstance(charged, ZeroConcentratedDP)
    assert charged.rho * (1 - 1e-6) < rho <= charged.rho
    assert rho_to_epsilon(rho, 1e-6) <= fitted.guarantee_.epsilon <= epsilon
    assert accounting.epsilon(compose(listener.events), 1e-6).upper <= epsilon
    # The Rényi divergences by dp-accounting; a selection as ε²/8-zCDP, which it doesn't know by itself.
    orders = 1 + np.geomspace(1e-3, 1e4, 4000)
    other = dp_accounting.rdp.RdpAccountant(orders)
    for event in listener.events:
        gaussian = isinstance(event, Gaussian)
        other.compose(
            dp_accounting.GaussianDpEvent(event.noise_multiplier)
            if gaussian
            else dp_accounting.ZCDpEvent(event.epsilon**2 / 8)
        )
    assert other.get_epsilon(1e-6) <= epsilon * (1 + 1e-4)
    assert other.get_epsilon(1e-6) >= 0.99 * epsilon


def test_a_selection_without_its_event_is_caught(monkeypatch):
    def uncharged(self, event):
        if not isinstance(event, BoundedRange):
            charge(self, event)

    charge = ChargedMarginals._charge
    monkeypatch.setattr(ChargedMarginals, "_charge", uncharged)
    listener = Listener()
    with observe_releases(listener):
        fitted = synthesizer("mst").fit(table(50))
    assert tuple(listener.events) != fitted.releases_


def test_what_does_not_fit_the_filter_is_not_read():
    guard = ZCDPFilter(epsilon=0.1, delta=1e-6)
    records = ChargedMarginals(np.zeros((5, 2), dtype=np.int64), (2, 3), privacy_filter=guard, rng=KeyedRNG())
    listener = Listener()
    with observe_releases(listener):
        with pytest.raises(BudgetExceeded):
            records.measure((0,), 1e-3)
        with pytest.raises(BudgetExceeded):
            records.select({(0,): np.zeros(2)}, {(0,): 1}, stddev=0.0, epsilon=100.0)
    assert listener.events == []
    assert guard.spent == 0


def test_the_charge_is_in_the_ledger_before_the_table_is_read(tmp_path):
    place = tmp_path / "ledger.db"
    Ledger(place).create()
    Ledger(place).declare("people", epsilon=1.0, delta=1e-6)
    account = Ledger(place).account("people")

    class Watched(dict):
        def __getitem__(self, name):
            assert account.spent().epsilon > 0.5
            return super().__getitem__(name)

    synthesizer(epsilon=0.9, delta=1e-6, ledger=account).fit(Watched(table(50)))

    class Unread(dict):
        def __getitem__(self, name):
            raise AssertionError("read")

    with pytest.raises(BudgetExceeded):
        synthesizer(epsilon=0.9, delta=1e-6, ledger=account).fit(Unread(table(50)))


@pytest.mark.parametrize("method", METHODS)
def test_what_is_charged_does_not_depend_on_the_records(method):
    planned = synthesizer(method).planned_events()
    for records in (table(0), table(1), table(200)):
        fitted = synthesizer(method).fit(records)
        assert fitted.events_ == planned
        assert fitted.sample(3).num_rows == 3


# ── sensitivity, by brute force over neighbors ──────────────────────────────────────────────────────────────────


def scores(codes, sizes, expected, weights, stddev):
    records = ChargedMarginals(codes, sizes, privacy_filter=ZCDPFilter(epsilon=1.0, delta=1e-6), rng=KeyedRNG())
    return np.array([records.score(clique, expected[clique], weights[clique], stddev) for clique in expected])


def test_no_record_moves_a_score_by_more_than_its_weight_and_some_move_it_that_far():
    sizes = (3, 2, 2)
    cliques = all_cliques(sizes, 3, 100)
    generator = np.random.default_rng(2)
    expected = {clique: 3 * generator.random([sizes[c] for c in clique]) for clique in cliques}
    weights = {clique: 1 + 2 * len(clique) for clique in cliques}
    largest = np.zeros(len(cliques))
    for count in (0, 1, 6):
        codes = np.stack([generator.integers(0, size, count) for size in sizes], axis=1)
        before = scores(codes, sizes, expected, weights, 0.7)
        for record in itertools.product(*map(range, sizes)):
            after = scores(np.vstack([codes, record]).astype(np.int64), sizes, expected, weights, 0.7)
            largest = np.maximum(largest, np.abs(after - before))
    limits = np.array([weights[clique] for clique in cliques], dtype=float)
    assert (largest <= limits).all()  # exactly: no allowance for rounding
    np.testing.assert_allclose(largest, limits, rtol=1e-12)


def test_the_largest_weight_is_the_sensitivity_of_a_selection(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "sordino.synthesis.synthesizer.ExponentialMechanism.release", lambda self, given: seen.append(self) or 0
    )
    guard = ZCDPFilter(epsilon=5.0, delta=1e-6)
    records = ChargedMarginals(np.zeros((5, 2), dtype=np.int64), (2, 3), privacy_filter=guard, rng=KeyedRNG())
    expected = {(0,): np.zeros(2), (1,): np.zeros(3)}
    records.select(expected, {(0,): 4, (1,): 9, (0, 1): 50}, stddev=1.0, epsilon=0.1)
    assert seen[0].sensitivity == 9.0
    assert records.events == [BoundedRange(epsilon=0.1)]


def test_huge_and_negative_expectations_leave_scores_finite():
    codes = np.zeros((5, 1), dtype=np.int64)
    found = scores(codes, (3,), {(0,): np.array([1e300, -1e300, np.inf])}, {(0,): 7}, 1e12)
    assert np.isfinite(found).all()


# ── what comes out ──────────────────────────────────────────────────────────────────────────────────────────────


def distance(one, other, columns):
    """Total variation between two tables' shares on some columns; ages in 5 parts."""
    counts = []
    for source in (one, other):
        ages = [-1 if age is None else math.ceil(age / 20) for age in source["age"]]
        cells = [ages if name == "age" else source[name] for name in columns]
        found = {}
        for cell in zip(*cells, strict=True):
            found[cell] = found.get(cell, 0) + 1 / len(cells[0])
        counts.append(found)
    keys = set(counts[0]) | set(counts[1])
    return sum(abs(counts[0].get(key, 0) - counts[1].get(key, 0)) for key in keys) / 2


@pytest.mark.parametrize(("method", "most"), [("aim", 0.05), ("mst", 0.08), ("independent", 0.6)])
def test_synthetic_tables_resemble_the_table_on_pairs_of_columns(method, most):
    source = table()
    drawn = synthesizer(method, epsilon=2.0).fit(source).sample().to_pydict()
    assert abs(len(drawn["age"]) - 4000) < 200
    pairs = list(itertools.combinations(source, 2))
    assert np.mean([distance(source, drawn, pair) for pair in pairs]) < most
    assert max(distance(source, drawn, (name,)) for name in source) < 0.12


def test_independent_columns_lose_the_dependence_that_aim_keeps():
    source = table()
    alone = synthesizer("independent", epsilon=5.0).fit(source).sample().to_pydict()
    joint = synthesizer("aim", epsilon=5.0).fit(source).sample().to_pydict()
    assert distance(source, alone, ("job", "town")) > 4 * distance(source, joint, ("job", "town"))


def test_the_model_stays_within_its_size():
    fitted = synthesizer("aim", epsilon=50.0, degree=3, max_model_mb=60 * 8 / 2**20).fit(table())
    tables = sum(math.prod(fitted.domain_.sizes[c] for c in clique) for clique in fitted.model_.tree.cliques)
    assert tables <= 60
    larger = synthesizer("aim", epsilon=50.0, degree=3).fit(table())
    assert max(len(one.columns) for one in larger.measured_) == 3


def test_synthetic_values_are_in_the_schema_and_can_be_learned_from_again():
    source = table(300)
    source["age"][0], source["job"][1], source["rich"][2] = math.nan, "pirate", "perhaps"
    drawn = synthesizer("mst", epsilon=0.5).fit(source).sample(500)
    values = drawn.to_pydict()
    assert all(age is None or 0 <= age <= 100 for age in values["age"])
    assert set(values["job"]) <= {"clerk", "sales", "farm", ""}
    assert set(values["rich"]) <= {"no", "yes"}
    assert synthesizer("mst").fit(drawn).sample(2).num_rows == 2


def test_samples_differ_and_a_chosen_seed_is_marked():
    fitted = synthesizer("mst").fit(table(100))
    assert fitted.sample(50).to_pydict() != fitted.sample(50).to_pydict()
    one, other = (synthesizer("mst", random_state=3, reproducible=True).fit(table(100)) for _ in range(2))
    assert one.sample(50).to_pydict() == other.sample(50).to_pydict()
    assert "fixed seed: not for release" in one.guarantee_.caveats


def test_degrees_follow_the_number_of_columns():
    assert [default_degree(columns) for columns in (1, 2, 19, 20, 200)] == [3, 3, 3, 2, 2]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"schema": None}, MissingDeclaration),
        ({"delta": None}, MissingDeclaration),
        ({"delta": 0.0}, InvalidArgument),
        ({"epsilon": -1.0}, InvalidArgument),
        ({"method": "gan"}, InvalidArgument),
        ({"bins": 0}, InvalidArgument),
        ({"degree": 0}, InvalidArgument),
        ({"max_model_mb": 0.0}, InvalidArgument),
        ({"random_state": 1}, InvalidArgument),
    ],
)
def test_wrong_parameters_are_refused(given, error):
    with pytest.raises(error):
        synthesizer(**given).fit(table(5))


def test_a_table_without_a_declared_column_is_refused_by_name():
    source = table(5)
    del source["job"]
    with pytest.raises(InvalidArgument, match="'job'"):
        synthesizer().fit(source)


def test_a_fitted_synthesizer_holds_no_key_and_can_be_saved():
    import pickle

    from sordino.randomness import KeyedRNG

    job = CategoricalColumn(name="job", categories=("clerk", "sales"))
    schema = Schema(columns=(job,), target="rich", labels=("no", "yes"))
    table = {"job": ["clerk", "sales"] * 50, "rich": ["no", "yes"] * 50}
    fitted = TableSynthesizer(schema=schema, epsilon=5.0, delta=1e-6, method="mst").fit(table)
    assert not any(isinstance(value, KeyedRNG) for value in vars(fitted).values())
    loaded = pickle.loads(pickle.dumps(fitted))
    assert loaded.sample(5).num_rows == 5
    first, second = fitted.sample(200), fitted.sample(200)
    assert first != second
