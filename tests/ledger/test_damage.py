"""A ledger that was damaged or changed is refused by name: never a raw error, never less spent than was charged."""

import json
import random
import shutil
import sqlite3

import pytest

from sordino.errors import SordinoError
from sordino.events import Gaussian, SelfComposed
from sordino.ledger import Ledger

EVENT = Gaussian(noise_multiplier=10.0)
ASKED = {
    "spent": lambda ledger: ledger.account("adult").spent().epsilon,
    "remaining": lambda ledger: ledger.account("adult").remaining(),
    "history": lambda ledger: ledger.account("adult").history(),
    "event": lambda ledger: ledger.account("adult").event(),
    "reservations": lambda ledger: ledger.account("adult").reservations(),
    "budget": lambda ledger: ledger.account("adult").budget,
    "charge": lambda ledger: ledger.account("adult").charge(EVENT),
    "accounts": lambda ledger: ledger.accounts(),
    "verify": lambda ledger: ledger.verify(),
}
# What a cell may hold that no line was written with.
STRANGE = (None, "", -1, 0, 2**62, 1e308, "x", b"\xff\xfe", "null", "[]", "{}", "NaN", "[" * 100_000)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """The bytes of a ledger's file, its lines, and what is spent."""
    path = tmp_path_factory.mktemp("ledger") / "privacy.db"
    account = Ledger(path).declare("adult", epsilon=3.0, delta=1e-5)
    for number in range(2):
        account.charge(EVENT, note=f"charge {number}")
    with account.reserve(SelfComposed(event=EVENT, count=2)) as reservation:
        reservation.charge(EVENT)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    cursor = connection.execute("SELECT * FROM sordino_ledger ORDER BY seq")
    names = [column[0] for column in cursor.description]
    lines = [dict(zip(names, row, strict=True)) for row in cursor]
    connection.close()
    return path.read_bytes(), lines, account.spent().epsilon


def asked(path, honest, name):
    """Ask a damaged ledger."""
    try:
        answer = ASKED[name](Ledger(path))
    except SordinoError:
        return
    if name == "spent":
        assert answer >= honest[2] * (1 - 1e-12)


def changed(path, honest, statement, *values):
    """The ledger's file after somebody took off the triggers and did this."""
    for old in path.parent.glob(f"{path.name}*"):
        old.unlink()
    path.write_bytes(honest[0])
    connection = sqlite3.connect(path)
    try:
        with connection:
            for verb in ("update", "delete", "replace"):
                connection.execute(f"DROP TRIGGER IF EXISTS sordino_no_{verb}")
            connection.execute(statement, values)
    except (sqlite3.Error, OverflowError):
        return False
    finally:
        connection.close()
    return True


@pytest.mark.parametrize("name", ASKED)
def test_bytes_that_are_cut_off_flipped_or_lost(tmp_path, honest, name):
    chance, whole = random.Random(name), honest[0]
    damaged = [whole[:size] for size in (0, 1, 100, 4096, len(whole) - 1, chance.randrange(len(whole)))]
    for number in range(12):
        copy, start = bytearray(whole), chance.randrange(len(whole) - 2048)
        if number % 3:
            for _ in range(chance.choice([1, 4, 30])):
                copy[chance.randrange(len(copy))] = chance.randrange(256)
        else:
            copy[start : start + 2048] = bytes(2048)
        damaged.append(bytes(copy))
    damaged.append(b"no database at all\n" * 500)
    for number, content in enumerate(damaged):
        path = tmp_path / f"{number}.db"
        path.write_bytes(content)
        asked(path, honest, name)
    asked(tmp_path, honest, name)


@pytest.mark.slow
@pytest.mark.parametrize("column", ["account", "seq", "kind", "at", "reservation", "body", "previous", "digest"])
def test_a_cell_that_holds_something_else(tmp_path, honest, column):
    chance, path = random.Random(column), tmp_path / "privacy.db"
    for strange in STRANGE:
        seq = chance.randrange(1, len(honest[1]) + 1)
        for name in ASKED:
            if changed(path, honest, f"UPDATE sordino_ledger SET {column} = ? WHERE seq = ?", strange, seq):
                asked(path, honest, name)


@pytest.mark.parametrize(
    ("column", "strange"), [("seq", "x"), ("body", "[]"), ("reservation", b"\xff"), ("digest", "")]
)
def test_the_newest_line_with_a_cell_that_holds_something_else(tmp_path, honest, column, strange):
    path = tmp_path / "privacy.db"
    assert changed(path, honest, f"UPDATE sordino_ledger SET {column} = ? WHERE seq = ?", strange, len(honest[1]))
    for name in sorted(set(ASKED) - {"accounts"}):
        asked(path, honest, name)
    with pytest.raises(SordinoError):
        Ledger(path).verify()


def mutations(value):
    """JSON values near `value`."""
    if isinstance(value, dict):
        yield from ({**value, key: other} for key in value for other in mutations(value[key]))
        yield from ({key: value[key] for key in value if key != gone} for gone in value)
    elif isinstance(value, list):
        yield from (
            [*value[:at], other, *value[at + 1 :]] for at in range(len(value)) for other in mutations(value[at])
        )
        yield []
    else:
        yield from (None, -1, 0, 1e308, 10**400, "x", True, [], {})


def reseal(line, body):
    """The line with another body and the digest that belongs to it: what a program with a fault would write."""
    from sordino.ledger.store import LedgerEntry, sealed

    return sealed(LedgerEntry(**{**line, "body": body})).digest


@pytest.mark.parametrize("seq", [1, 2, 4, 6])
def test_a_body_with_another_value_and_its_own_digest_is_told_or_refused(tmp_path, honest, seq):
    """A digest that fits says nothing of what spending is, but reading it never ends in a raw error."""
    path, line = tmp_path / "privacy.db", honest[1][seq - 1]
    bodies = [json.dumps(body) for body in mutations(json.loads(line["body"]))]
    for body in random.Random(seq).sample(bodies, 8):
        for name in ASKED:
            statement = "UPDATE sordino_ledger SET body = ?, digest = ? WHERE seq = ?"
            assert changed(path, honest, statement, body, reseal(line, body), seq)
            try:
                ASKED[name](Ledger(path))
            except SordinoError:
                continue
            if seq < len(honest[1]):
                with pytest.raises(SordinoError):
                    Ledger(path).verify()


def test_a_line_taken_out_of_the_middle_takes_nothing_from_what_is_spent(tmp_path, honest):
    path = tmp_path / "privacy.db"
    for seq in range(1, len(honest[1])):
        for name in ASKED:
            assert changed(path, honest, "DELETE FROM sordino_ledger WHERE seq = ?", seq)
            asked(path, honest, name)
    with pytest.raises(SordinoError):
        Ledger(path).verify()
    shutil.rmtree(tmp_path)
