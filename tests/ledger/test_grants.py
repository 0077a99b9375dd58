"""The rights that the page names are enough for work, and stop everything else; a line names the role that wrote it."""

import re
import uuid
from pathlib import Path

import pytest

from sordino.errors import LedgerError
from sordino.events import Gaussian
from sordino.ledger import Ledger

PAGE = Path(__file__).parents[2] / "docs" / "ledger.md"
EVENT = Gaussian(noise_multiplier=10.0)
ROLES = {"carla": "curators", "anna": "analysts", "otto": "auditors"}


@pytest.fixture(scope="module")
def url_of(postgres):
    """A database with a ledger and the page's grants, and the URL by which each role enters it."""
    from sqlalchemy import create_engine

    base = f"sordino_{uuid.uuid4().hex[:8]}"
    engine = create_engine(Ledger(postgres).url, isolation_level="AUTOCOMMIT")
    grants = re.search(r"^```sql\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert grants is not None
    inside = re.sub(r"/\w+(\?|$)", rf"/{base}\1", postgres)
    own = create_engine(Ledger(inside).url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {base}")
    Ledger(inside).create()
    with own.connect() as connection:
        for statement in grants[1].split(";"):
            if statement.strip():
                connection.exec_driver_sql(statement)
        for name, role in ROLES.items():
            connection.exec_driver_sql(f"CREATE ROLE {name} LOGIN IN ROLE {role}")
    try:
        yield lambda name: re.sub(r"://[^@]*@", f"://{name}@", inside)
    finally:
        own.dispose()
        with engine.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {base} WITH (FORCE)")
            for name in (*ROLES, *ROLES.values()):
                connection.exec_driver_sql(f"DROP ROLE {name}")
        engine.dispose()


def test_curators_declare_analysts_spend_and_auditors_verify(url_of):
    Ledger(url_of("carla")).declare("stays", epsilon=3.0, delta=1e-5)
    account = Ledger(url_of("anna")).account("stays")
    account.charge(EVENT, note="a sum")
    with account.reserve(EVENT, note="a run") as reservation:
        reservation.charge(EVENT)
    lines = Ledger(url_of("otto")).account("stays").history()
    assert [line.who.rpartition(", role ")[2] for line in lines] == ["carla", "anna", "anna", "anna"]
    assert Ledger(url_of("otto")).verify()["stays"].startswith("4:")

    for name in ("anna", "otto"):
        with pytest.raises(LedgerError):
            Ledger(url_of(name)).declare("more", epsilon=9.0, delta=1e-5)
        with pytest.raises(LedgerError):
            Ledger(url_of(name)).account("stays").change_budget(epsilon=9.0, note="I need more")
    with pytest.raises(LedgerError):
        Ledger(url_of("otto")).account("stays").charge(EVENT)
    assert account.budget().epsilon == 3.0


@pytest.mark.parametrize("name", ["carla", "anna", "otto"])
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE sordino_ledger SET note = 'y'",
        "DELETE FROM sordino_ledger",
        "TRUNCATE sordino_ledger",
        "DROP TABLE sordino_ledger",
        "DROP TRIGGER sordino_append_only ON sordino_ledger",
        "ALTER TABLE sordino_ledger DISABLE ROW LEVEL SECURITY",
        "INSERT INTO sordino_ledger SELECT account, seq + 1, 'charge', at, 'boss@desk, role carla2', run, note, "
        "reservation, body, digest, 'x' FROM sordino_ledger",
    ],
)
def test_nothing_that_was_written_can_be_changed_and_no_line_has_another_name(url_of, name, statement):
    from sqlalchemy import create_engine
    from sqlalchemy.exc import DatabaseError

    account = f"written {uuid.uuid4()}"
    Ledger(url_of("carla")).declare(account, epsilon=3.0, delta=1e-5)
    engine = create_engine(Ledger(url_of(name)).url)
    with engine.connect() as connection, pytest.raises(DatabaseError):
        connection.exec_driver_sql(statement)
    engine.dispose()
    assert Ledger(url_of("otto")).verify()[account].startswith("1:")


def test_a_line_in_the_name_of_another_role_is_refused_by_the_server_itself(url_of, monkeypatch):
    from sordino.ledger import store

    Ledger(url_of("carla")).declare("named", epsilon=3.0, delta=1e-5)
    monkeypatch.setattr(store.AccountTransaction, "_role", lambda _: ", role carla")
    with pytest.raises(LedgerError, match="must name the role that writes it"):
        Ledger(url_of("anna")).account("named").charge(EVENT)


def test_a_file_has_no_roles(account):
    account.charge(EVENT)
    assert "role" not in account.history()[-1].who
