"""The chain: what was changed afterwards shows."""

import sqlite3

import pytest

from sordino.accounting import epsilon
from sordino.errors import BudgetExceeded, InvalidArgument, LedgerError
from sordino.events import Gaussian, SelfComposed, to_json
from sordino.ledger import Ledger
from sordino.ledger.store import LedgerEntry, sealed

EVENT = Gaussian(noise_multiplier=10.0)


@pytest.fixture
def used(ledger):
    account = ledger.declare("adult", epsilon=3.0, delta=1e-5)
    for number in range(3):
        account.charge(EVENT, note=f"charge {number}")
    with account.reserve(SelfComposed(event=EVENT, count=2)) as reservation:
        reservation.charge(EVENT)
    return ledger


def tamper(ledger, *statements):
    """What somebody with the file can do: take off the triggers, then anything."""
    connection = sqlite3.connect(ledger.url.removeprefix("sqlite:///"))
    with connection:
        for verb in ("update", "delete", "replace"):
            connection.execute(f"DROP TRIGGER IF EXISTS sordino_no_{verb}")
        for statement, *values in statements:
            connection.execute(statement, values)
    connection.close()


def rewritten(ledger, change):
    """All lines, `change` applied to each as a dict, and sealed again from there on."""
    connection = sqlite3.connect(ledger.url.removeprefix("sqlite:///"))
    cursor = connection.execute("SELECT * FROM sordino_ledger ORDER BY seq")
    names = [column[0] for column in cursor.description]
    rows = [dict(zip(names, row, strict=True)) for row in cursor]
    connection.close()
    previous, statements = "0" * 64, [("DELETE FROM sordino_ledger",)]
    for row in rows:
        entry = sealed(LedgerEntry(**{**change(row), "previous": previous, "digest": ""}))
        previous = entry.digest
        marks = ", ".join("?" * len(names))
        statements.append((f"INSERT INTO sordino_ledger VALUES ({marks})", *(getattr(entry, name) for name in names)))
    tamper(ledger, *statements)


def test_an_honest_ledger_verifies_and_names_its_heads(used):
    heads = used.verify()
    assert heads["adult"].startswith("7:")
    assert used.verify(heads) == heads


def test_lines_can_not_be_changed_by_accident(used):
    connection = sqlite3.connect(used.url.removeprefix("sqlite:///"))
    replacing = "INSERT OR REPLACE INTO sordino_ledger SELECT * FROM sordino_ledger WHERE seq = 2"
    for statement in ("UPDATE sordino_ledger SET note = ''", "DELETE FROM sordino_ledger", replacing):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)
    connection.close()


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        ("UPDATE sordino_ledger SET note = 'another' WHERE seq = 3", 3),
        ("UPDATE sordino_ledger SET who = 'nobody' WHERE seq = 2", 2),
        ("UPDATE sordino_ledger SET at = '2020-01-01' WHERE seq = 4", 4),
        ("UPDATE sordino_ledger SET body = replace(body, '10.0', '90.0') WHERE seq = 3", 3),
        ("UPDATE sordino_ledger SET digest = previous WHERE seq = 4", 4),
        ("DELETE FROM sordino_ledger WHERE seq = 3", 4),
        ("UPDATE sordino_ledger SET body = 'nonsense' WHERE seq = 5", 5),
    ],
)
def test_a_changed_line_is_named(used, statement, line):
    tamper(used, (statement,))
    with pytest.raises(LedgerError, match=f"line {line} of account 'adult'"):
        used.verify()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE sordino_ledger SET body = '' WHERE seq = 7",
        "UPDATE sordino_ledger SET body = '[]' WHERE seq = 7",
        "UPDATE sordino_ledger SET reservation = 'none' WHERE seq = 3",
    ],
)
def test_a_line_that_cannot_be_read_is_told_as_such_where_the_account_is_used(used, statement):
    account = used.account("adult")
    tamper(used, (statement,))
    for use in (lambda: used.account("adult").remaining(), lambda: account.charge(EVENT), used.verify):
        with pytest.raises(LedgerError, match="of account 'adult'"):
            use()


def test_a_line_whose_digest_was_made_anew_breaks_the_next(used):
    entry = used.account("adult").history()[2]
    forged = sealed(LedgerEntry(**{**entry.__dict__, "note": "forged", "digest": ""}))
    tamper(used, ("UPDATE sordino_ledger SET note = ?, digest = ? WHERE seq = 3", forged.note, forged.digest))
    with pytest.raises(LedgerError, match="line 4"):
        used.verify()


@pytest.mark.parametrize(
    ("old", "new", "line", "fault"),
    [
        (to_json(EVENT), to_json(Gaussian(noise_multiplier=90.0)), 2, "totals"),
        ('"epsilon": 3.0', '"epsilon": 0.2', 2, "budget"),
        ('"has_charges": true', '"has_charges": false', 2, "totals"),
        ('"count": 2', '"count": 9', 6, "left"),
    ],
)
def test_a_whole_new_chain_must_still_add_up(used, old, new, line, fault):
    rewritten(used, lambda row: {**row, "body": row["body"].replace(old, new)})
    with pytest.raises(LedgerError, match=f"line {line} .*{fault}"):
        used.verify()


def test_a_consistent_new_chain_and_a_cut_end_show_against_heads_that_were_noted(used):
    heads = used.verify()
    rewritten(used, lambda row: {**row, "note": "all different"})
    used.verify()
    with pytest.raises(LedgerError, match="rewritten or cut"):
        used.verify(heads)


def test_a_cut_end_shows_against_the_head(used):
    heads = used.verify()
    tamper(used, ("DELETE FROM sordino_ledger WHERE seq > 5",))
    used.verify()
    with pytest.raises(LedgerError, match="rewritten or cut"):
        used.verify(heads)
    tamper(used, ("DELETE FROM sordino_ledger",))
    with pytest.raises(LedgerError, match="rewritten or cut"):
        used.verify(heads)


def test_old_heads_stay_good_while_the_account_grows(used):
    heads = used.verify()
    used.account("adult").charge(EVENT)
    assert used.verify(heads) != heads


def test_a_head_in_another_form_is_refused(used):
    with pytest.raises(InvalidArgument, match="SEQ:DIGEST"):
        used.verify({"adult": "latest"})


def test_a_copy_of_the_file_is_the_ledger(used, tmp_path):
    copy = tmp_path / "copy.db"
    copy.write_bytes((tmp_path / "privacy.db").read_bytes())
    assert Ledger(copy).verify() == used.verify()


@pytest.mark.parametrize("policy", ["renyi", "zcdp"])
def test_a_reservation_that_just_fits_verifies_however_finely_it_is_drawn(ledger, policy):
    account = ledger.declare(policy, epsilon=1.0, delta=1e-5, policy=policy)
    low, high = 50.0, 100.0  # noise multipliers of 300 steps: too many, and fitting
    while low < (middle := (low + high) / 2) < high:
        try:
            account.check_charge(SelfComposed(event=Gaussian(noise_multiplier=middle), count=300))
            high = middle
        except BudgetExceeded:
            low = middle
    step = Gaussian(noise_multiplier=high)
    reservation = account.reserve(SelfComposed(event=step, count=300))
    for _ in range(30):  # each sum is rounded up
        reservation.charge(step)
    ledger.verify()
    with pytest.raises(BudgetExceeded):
        account.charge(step)


@pytest.fixture
def fixed_before(ledger):
    """An account whose events are named before the first charge: declare, reserve, two charges, release."""
    account = ledger.declare("plan", epsilon=1.0, delta=1e-5, policy="pld")
    with account.reserve(SelfComposed(event=EVENT, count=3)) as reservation:
        reservation.charge(EVENT)
        reservation.charge(EVENT)
    ledger.verify()
    return ledger


def test_what_is_fixed_before_the_first_charge_is_added_up_again(fixed_before):
    # Three Gaussians of noise multiplier 10 have ε 0.66 at δ = 1e-5, by their one of 10/√3.
    assert 0.6 < epsilon(Gaussian(noise_multiplier=10 / 3**0.5), 1e-5).upper < 0.7
    rewritten(fixed_before, lambda row: {**row, "body": row["body"].replace('"epsilon": 1.0', '"epsilon": 0.6')})
    with pytest.raises(LedgerError, match=r"line 2 .*goes beyond the budget"):
        fixed_before.verify()


def test_less_noise_than_the_budget_allows_shows_though_every_line_says_the_same(fixed_before):
    rewritten(fixed_before, lambda row: {**row, "body": row["body"].replace("10.0", "1.0")})
    with pytest.raises(LedgerError, match=r"line 2 .*goes beyond the budget"):
        fixed_before.verify()


@pytest.mark.parametrize(
    ("line", "change", "fault"),
    [
        (4, lambda row: {**row, "reservation": ""}, "adds an event after the first charge"),
        (4, lambda row: {**row, "kind": "reserve"}, "reserves under a name that was used"),
        (3, lambda row: {**row, "kind": "gift"}, "is of an unknown kind"),
        (1, lambda row: {**row, "kind": "budget"}, "declares the account in the wrong place"),
        (
            3,
            lambda row: {
                **row,
                "body": row["body"].replace(to_json(EVENT), to_json(SelfComposed(event=EVENT, count=4)), 1),
            },
            "takes more from its reservation than was left",
        ),
    ],
)
def test_a_new_chain_with_a_line_that_no_ledger_writes_is_told(fixed_before, line, change, fault):
    rewritten(fixed_before, lambda row: change(row) if row["seq"] == line else row)
    with pytest.raises(LedgerError, match=f"line {line} of account 'plan' {fault}"):
        fixed_before.verify()
