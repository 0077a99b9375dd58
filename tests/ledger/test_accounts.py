"""Accounts: what is charged, reserved, given back and refused."""

import math
import pickle

import pytest

from sordino import accounting
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import BudgetExceeded, InvalidArgument, LedgerError, UnsupportedEvent
from sordino.events import (
    ApproximateDP,
    Gaussian,
    Laplace,
    NonPrivate,
    NoOp,
    ParallelComposed,
    PoissonSampled,
    PureDP,
    SelfComposed,
    TruncatedPoissonSampled,
    compose,
)
from sordino.ledger import Ledger

STEP = PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0))


def granted(purse, event, most=100_000):
    for number in range(most):
        try:
            purse.charge(event)
        except BudgetExceeded:
            return number
    raise AssertionError("the budget has no end")


def test_a_charge_is_written_with_its_event_who_when_what_and_run(account):
    charge = account.charge(STEP, note="one step", run="run-7")
    line = account.history()[-1]
    assert (line.event, line.note, line.run, line.kind, line.seq) == (STEP, "one step", "run-7", "charge", 2)
    assert charge.digest == line.digest
    assert "@" in line.who
    assert line.at.endswith("+00:00")


def test_zcdp_grants_exactly_the_steps_that_fit(ledger):
    # σ = 10 is ρ = 0.005; (1, 1e-5) allows ρ = 0.0305565952: six steps.
    account = ledger.declare("six", epsilon=1.0, delta=1e-5, policy="zcdp")
    assert granted(account, Gaussian(noise_multiplier=10.0)) == 6
    assert account.remaining().measure == "ρ"
    assert account.remaining().amount == pytest.approx(0.0305565952 - 0.03, abs=1e-9)


@pytest.mark.parametrize("policy", ["renyi", "zcdp"])
def test_whatever_was_granted_costs_at_most_the_budget(ledger, policy):
    account = ledger.declare("x", epsilon=1.0, delta=1e-5, policy=policy)
    steps = granted(account, Gaussian(noise_multiplier=8.0))
    sigma = 8.0 / math.sqrt(steps)
    assert steps > 1
    assert accounting.delta(Gaussian(noise_multiplier=sigma), 1.0).upper <= 1e-5
    assert account.spent().epsilon == pytest.approx(accounting.epsilon(account.event(), 1e-5).upper)


def test_renyi_uses_most_of_what_zcdp_could(ledger):
    fine = Gaussian(noise_multiplier=60.0)
    reached = {}
    for policy in ("renyi", "zcdp"):
        account = ledger.declare(policy, epsilon=3.0, delta=1e-5, policy=policy)
        account.charge(SelfComposed(event=fine, count=600))
        left = account.remaining()
        reached[policy] = 600 / 7200 + left.amount
    assert 0.9 < reached["renyi"] / reached["zcdp"] < 1


def test_a_refusal_writes_nothing_and_a_smaller_charge_still_fits(account):
    before = account.history()
    with pytest.raises(BudgetExceeded, match="adult"):
        account.charge(Gaussian(noise_multiplier=0.3))
    assert account.history() == before
    account.charge(Gaussian(noise_multiplier=3.0))


def test_events_without_protection_are_refused(account):
    with pytest.raises(BudgetExceeded):
        account.charge(NonPrivate(reason="noise_multiplier is 0"))
    with pytest.raises(BudgetExceeded):
        account.charge(Gaussian(noise_multiplier=0.0))


def test_composition_is_of_events_and_not_of_epsilons(account):
    parts = [
        Laplace(noise_multiplier=5.0),
        Gaussian(noise_multiplier=6.0),
        SelfComposed(event=STEP, count=2000),
        SelfComposed(event=PoissonSampled(sample_rate=0.02, event=Gaussian(noise_multiplier=5.0)), count=500),
    ]
    for part in parts:
        account.charge(part)
    alone = sum(accounting.epsilon(part, 1e-5).upper for part in parts)
    assert account.spent().epsilon < 0.65 * alone
    assert account.spent().epsilon == pytest.approx(accounting.epsilon(compose(parts), 1e-5).upper, rel=1e-6)


def test_pure_events_are_never_dearer_than_their_sum(ledger):
    account = ledger.declare("pure", epsilon=1.0, delta=0.0)
    assert granted(account, PureDP(epsilon=0.25)) == 4
    assert account.spent().epsilon == pytest.approx(1.0)
    with pytest.raises(BudgetExceeded):
        account.charge(Gaussian(noise_multiplier=1e6))


def test_events_with_a_delta_of_their_own_share_an_eighth_of_delta(ledger):
    account = ledger.declare("approximate", epsilon=3.0, delta=8e-6)
    assert granted(account, ApproximateDP(epsilon=0.01, delta=2.49e-7)) == 4


def test_parallel_events_cost_their_dearest_part(ledger):
    account = ledger.declare("parallel", epsilon=1.0, delta=0.0)
    account.charge(ParallelComposed(events=(PureDP(epsilon=0.3), PureDP(epsilon=0.7))))
    assert account.remaining().amount == pytest.approx(0.3)


def test_events_without_a_price_are_refused_by_name(ledger):
    truncated = TruncatedPoissonSampled(
        sample_rate=0.01, dataset_size=1000, max_batch_size=40, event=Gaussian(noise_multiplier=4.0)
    )
    with pytest.raises(UnsupportedEvent, match="pld"):
        ledger.declare("a", epsilon=1.0, delta=1e-5).charge(truncated)
    with pytest.raises(UnsupportedEvent):
        ledger.declare("b", epsilon=1.0, delta=1e-5, policy="zcdp").charge(STEP)


# --- reservations ------------------------------------------------------------------------------------------------


def test_a_reservation_counts_at_once_and_gives_back_what_was_not_drawn(account):
    plan = SelfComposed(event=STEP, count=1000)
    empty = account.remaining().fraction
    with account.reserve(plan, note="a run") as reservation:
        reserved = account.remaining().fraction
        reservation.charge(SelfComposed(event=STEP, count=10))
        assert account.remaining().fraction == pytest.approx(reserved, rel=1e-12)
        assert account.event() == SelfComposed(event=STEP, count=10)
    assert reserved < account.remaining().fraction < empty
    assert [line.kind for line in account.history()] == ["declare", "reserve", "charge", "release"]
    assert account.history()[2].note == "a run"


def test_a_reservation_gives_only_what_was_reserved(account):
    with account.reserve(SelfComposed(event=STEP, count=3)) as reservation:
        reservation.charge(SelfComposed(event=STEP, count=2))
        for event in (SelfComposed(event=STEP, count=2), Gaussian(noise_multiplier=100.0)):
            with pytest.raises(BudgetExceeded, match="left of reservation"):
                reservation.charge(event)
        reservation.charge(STEP)
        assert reservation.remaining_event() == NoOp()
    with pytest.raises(BudgetExceeded):
        reservation.charge(STEP)


def test_what_a_crashed_run_reserved_stays_until_it_is_released(account):
    name = account.reserve(SelfComposed(event=STEP, count=1000)).name
    account.reservation(name).charge(STEP)
    assert account.remaining().open_reservations == 1
    account.reservation(name).close()
    account.reservation(name).close()
    assert account.remaining().open_reservations == 0
    assert account.event() == STEP
    with pytest.raises(BudgetExceeded):
        account.reservation(name).charge(STEP)


def test_reservations_can_not_be_overbooked(ledger):
    account = ledger.declare("x", epsilon=1.0, delta=1e-5, policy="zcdp")
    first = account.reserve(SelfComposed(event=Gaussian(noise_multiplier=10.0), count=4))
    with pytest.raises(BudgetExceeded):
        account.reserve(SelfComposed(event=Gaussian(noise_multiplier=10.0), count=3))
    with pytest.raises(BudgetExceeded):
        account.charge(SelfComposed(event=Gaussian(noise_multiplier=10.0), count=3))
    first.close()
    account.charge(SelfComposed(event=Gaussian(noise_multiplier=10.0), count=6))


def test_a_part_of_a_reservation_gives_nothing_back(account):
    with account.reserve(SelfComposed(event=STEP, count=10)) as whole:
        with whole.reserve(SelfComposed(event=STEP, count=4)) as part:
            part.charge(STEP)
        assert whole.remaining_event() == SelfComposed(event=STEP, count=9)


def test_accounts_and_reservations_survive_pickling(account):
    reservation = account.reserve(STEP)
    again, drawn = pickle.loads(pickle.dumps((account, reservation)))
    assert again == account
    drawn.charge(STEP)
    assert again.event() == STEP


# --- declarations ------------------------------------------------------------------------------------------------


def test_a_budget_is_declared_once_and_changed_by_a_line(ledger, account):
    assert ledger.declare("adult", epsilon=3.0, delta=1e-5) == account
    with pytest.raises(InvalidArgument, match="declared once"):
        ledger.declare("adult", epsilon=4.0, delta=1e-5)
    account.charge(Gaussian(noise_multiplier=2.0))
    with pytest.raises(BudgetExceeded):
        account.charge(Gaussian(noise_multiplier=1.2))
    with pytest.raises(InvalidArgument, match="why"):
        account.change_budget(epsilon=6.0, note=" ")
    orders = account.budget().orders
    account.change_budget(epsilon=6.0, note="board decision")
    account.charge(Gaussian(noise_multiplier=1.2))
    assert account.budget().orders == orders
    assert [line.kind for line in account.history()] == ["declare", "charge", "budget", "charge"]
    with pytest.raises(BudgetExceeded, match="cover"):
        account.change_budget(epsilon=1.0, note="too late")


def test_other_relations_and_units_are_refused_with_advice(account):
    event = Gaussian(noise_multiplier=10.0)
    with pytest.raises(InvalidArgument, match="neighboring_relation must be add_or_remove_one"):
        account.charge(event, neighboring_relation=NeighboringRelation.REPLACE_ONE)
    with pytest.raises(InvalidArgument, match="privacy_unit must be record"):
        account.reserve(event, privacy_unit=PrivacyUnit.USER)
    reservation = account.reserve(event)
    with pytest.raises(InvalidArgument, match="neighboring_relation must be"):
        reservation.charge(event, neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("epsilon", {"epsilon": 0.0}),
        ("epsilon", {"epsilon": math.inf}),
        ("delta", {"delta": 1.0}),
        ("delta", {"delta": 0.0, "policy": "zcdp"}),
        ("policy", {"policy": "hope"}),
        ("privacy_unit", {"privacy_unit": "household"}),
        ("neighboring_relation", {"neighboring_relation": "sibling"}),
        ("name", {"name": " "}),
    ],
)
def test_a_wrong_declaration_names_what_is_wrong(ledger, name, wrong):
    with pytest.raises(InvalidArgument, match=name):
        ledger.declare(**({"name": "x", "epsilon": 1.0, "delta": 1e-5} | wrong))


def test_what_is_not_there_is_said_plainly(tmp_path, ledger, account):
    with pytest.raises(InvalidArgument, match="declared"):
        ledger.account("census")
    with pytest.raises(LedgerError, match="init"):
        Ledger(tmp_path / "typo.db").account("adult")
    (tmp_path / "text.db").write_text("no ledger at all, but long enough to be looked at as one" * 40)
    with pytest.raises(LedgerError, match="Nothing was written"):
        Ledger(tmp_path / "text.db").account("adult")


def test_a_password_is_never_shown():
    ledger = Ledger("postgresql://user:secret@host/base")
    assert "secret" not in repr(ledger)
    from sordino.ledger import Account, Reservation

    assert "secret" not in repr(Account(ledger.url, "a")) + repr(Reservation(ledger.url, "a", "r"))


@pytest.mark.parametrize("place", ["", ":memory:", "file:x?mode=memory", "mysql://host/base", "sqlite:///:memory:"])
def test_places_that_can_not_hold_a_ledger_are_refused(place):
    with pytest.raises(InvalidArgument, match="ledger must be"):
        Ledger(place)


def test_network_file_systems_are_refused(tmp_path, monkeypatch):
    from sordino.ledger import store

    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/home {tmp_path}/far nfs4 rw 0 0\n")
    monkeypatch.setattr(store, "_MOUNTS", mounts)
    Ledger(tmp_path / "near.db")
    with pytest.raises(InvalidArgument, match="nfs4"):
        Ledger(tmp_path / "far" / "privacy.db")
