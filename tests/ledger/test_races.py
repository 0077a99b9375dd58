"""Many processes, and processes that die: the budget is neither overspent nor lost."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from sordino.errors import LedgerError
from sordino.events import Gaussian
from sordino.ledger import Ledger, store

EVENT = Gaussian(noise_multiplier=30.0)
CAP = 55  # ρ = 1/1800 each; (1, 1e-5) allows 0.0305565952 · 1800 = 55.0019
PROCESSES = 64

DYING = """
import sys, time
from sordino.ledger.store import write_transaction
from sordino.ledger.account import AccountState
from sordino.events import Gaussian
with write_transaction(sys.argv[1], sys.argv[2]) as page:
    AccountState.of(page).charge(Gaussian(noise_multiplier=30.0), note="never committed", run="")
    print("written", flush=True)
    time.sleep(600)
"""


def race(ledger, name):
    """(granted, words) of each process, and the account afterwards."""
    account = ledger.declare(name, epsilon=1.0, delta=1e-5, policy="zcdp")
    command = [sys.executable, Path(__file__).with_name("racing.py"), ledger.url, name, str(PROCESSES)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(" ", 1) for line in done.stdout.splitlines()]
    return [int(granted) for granted, _ in rows], {word for _, word in rows}, account


def holds_exactly_the_cap(ledger, name):
    granted, words, account = race(ledger, name)
    assert words == {"refused"}
    assert len(granted) == PROCESSES
    assert sum(granted) == CAP == len(account.history()) - 1
    ledger.verify()


def test_sixty_four_processes_are_granted_exactly_the_cap_by_sqlite(ledger):
    holds_exactly_the_cap(ledger, "race")


def test_sixty_four_processes_are_granted_exactly_the_cap_by_postgresql(postgres):
    holds_exactly_the_cap(Ledger(postgres), f"race {uuid.uuid4()}")


def dies_and_leaves_nothing(ledger, name):
    account = ledger.declare(name, epsilon=1.0, delta=1e-5, policy="zcdp")
    account.charge(EVENT)
    before = account.history()
    dying = subprocess.Popen([sys.executable, "-c", DYING, ledger.url, name], stdout=subprocess.PIPE, text=True)
    assert dying.stdout is not None
    assert dying.stdout.readline() == "written\n"
    started = time.monotonic()
    dying.send_signal(signal.SIGKILL)
    dying.wait()
    dying.stdout.close()
    account.charge(EVENT)
    assert time.monotonic() - started < 60
    after = account.history()
    assert after[:-1] == before
    assert len(after) == len(before) + 1
    ledger.verify()


def test_a_process_killed_inside_a_transaction_leaves_nothing_in_sqlite(ledger):
    dies_and_leaves_nothing(ledger, "crash")


def test_a_process_killed_inside_a_transaction_leaves_nothing_in_postgresql(postgres):
    dies_and_leaves_nothing(Ledger(postgres), f"crash {uuid.uuid4()}")


def test_postgresql_does_all_that_a_file_does(postgres):
    ledger, name = Ledger(postgres), f"all {uuid.uuid4()}"
    account = ledger.declare(name, epsilon=3.0, delta=1e-5)
    with account.reserve(EVENT, note="x") as reservation:
        reservation.charge(EVENT)
    assert account.event() == EVENT
    assert name in ledger.accounts()
    assert ledger.verify()[name].startswith("3:")
    from sqlalchemy import create_engine
    from sqlalchemy.exc import DatabaseError

    engine = create_engine(ledger.url)
    for statement in ("UPDATE sordino_ledger SET note = 'y'", "DELETE FROM sordino_ledger", "TRUNCATE sordino_ledger"):
        with engine.connect() as connection, pytest.raises(DatabaseError, match="append-only"):
            connection.exec_driver_sql(statement)
    engine.dispose()


def test_a_ledger_that_can_not_be_reached_says_so_without_its_password():
    with pytest.raises(LedgerError) as caught:
        Ledger("postgresql://me:secret@/nowhere?host=/nonexistent").account("x")
    assert "secret" not in str(caught.value)


def test_lines_are_json_that_another_program_can_read(ledger):
    account = ledger.declare("x", epsilon=1.0, delta=1e-5)
    account.charge(EVENT, note="naïve – “quoted”")
    assert json.loads(json.dumps(account.history()[-1].to_dict()))["note"] == "naïve – “quoted”"


DECLARING = """
import os, sys
from sordino.ledger import Ledger, store
Ledger(sys.argv[1]).declare("warm", epsilon=1.0, delta=1e-5)
gate, opening = os.pipe()
children = []
for number in range(16):
    children.append(os.fork())
    if children[-1] == 0:
        os.close(opening)
        os.read(gate, 1)
        status = 1
        try:
            Ledger(sys.argv[2]).declare("adult", epsilon=1.0, delta=1e-5)
            status = 0
        finally:
            os._exit(status)
os.close(gate)
os.close(opening)
sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""


def test_many_processes_may_make_and_declare_the_same_ledger_at_once(tmp_path):
    warm, fresh = tmp_path / "warm.db", tmp_path / "fresh.db"
    done = subprocess.run([sys.executable, "-c", DECLARING, warm, fresh], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(Ledger(fresh).account("adult").history()) == 1


def test_a_mode_that_another_process_holds_is_asked_for_again():
    # SQLite answers a change of the journal's mode at once, and doesn't wait as it does for locks.
    class Connection:
        answers = [sqlite3.OperationalError("database is locked")] * 3

        def execute(self, statement):
            assert statement == "PRAGMA journal_mode = WAL"
            if self.answers:
                raise self.answers.pop()
            return SimpleNamespace(close=lambda: None)

    connection = Connection()
    store._patiently(connection, "PRAGMA journal_mode = WAL")
    assert not connection.answers
    connection.answers = [sqlite3.OperationalError("disk I/O error")]
    with pytest.raises(sqlite3.OperationalError, match="disk"):
        store._patiently(connection, "PRAGMA journal_mode = WAL")
