"""The ledger's one table and its transactions (floor 2): SQLite with an immediate lock, or PostgreSQL.

A writing transaction holds its lock from before the first read until the commit, so that between the check of a budget
and the line that uses it nobody else writes. A process that dies in between leaves nothing.
"""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING

from sordino.errors import LedgerError
from sordino.ledger.entries import FIRST, Entry, now, sealed, who_am_i
from sordino.ledger.place import file_of, masked

if TYPE_CHECKING:
    import sqlite3

    from sqlalchemy import Connection, Engine, Table

__all__ = ["Page", "accounts", "create", "exists", "reading", "writing"]

_PATIENCE = 120.0  # seconds to wait for the lock
_COLUMNS = tuple(item.name for item in fields(Entry))


class Page:
    """One account inside a transaction."""

    def __init__(self, connection: "Connection", account: str) -> None:
        self._connection, self.account = connection, account
        self._table = _table()

    def last(self) -> Entry | None:
        """The newest line."""
        return self._newest()

    def last_of(self, reservation: str) -> Entry | None:
        """The newest line of a reservation."""
        return self._newest(self._table.c.reservation == reservation)

    def _newest(self, *conditions: object) -> Entry | None:
        table = self._table
        query = table.select().where(table.c.account == self.account, *conditions)  # pyright: ignore[reportArgumentType]
        row = self._connection.execute(query.order_by(table.c.seq.desc()).limit(1)).first()
        return None if row is None else Entry(**row._mapping)  # pyright: ignore[reportPrivateUsage]

    def at(self, seq: int) -> Entry | None:
        """Line `seq`."""
        return self._newest(self._table.c.seq == seq)

    def reservations(self) -> list[Entry]:
        """The newest line of every reservation that was ever made."""
        from sqlalchemy import func, select

        table = self._table
        own = (table.c.account == self.account, table.c.reservation != "")
        newest = select(func.max(table.c.seq)).where(*own).group_by(table.c.reservation)
        return self._entries(table.c.seq.in_(newest))

    def entries(self, kind: str | None = None) -> list[Entry]:
        """All lines, or those of one kind, in order."""
        return self._entries() if kind is None else self._entries(self._table.c.kind == kind)

    def _entries(self, *conditions: object) -> list[Entry]:
        table = self._table
        query = table.select().where(table.c.account == self.account, *conditions)  # pyright: ignore[reportArgumentType]
        rows = self._connection.execute(query.order_by(table.c.seq))
        return [Entry(**row._mapping) for row in rows]  # pyright: ignore[reportPrivateUsage]

    def append(
        self, last: Entry | None, *, kind: str, body: str, run: str = "", note: str = "", reservation: str = ""
    ) -> Entry:
        """Add a line after `last`, the newest."""
        entry = sealed(
            Entry(
                account=self.account,
                seq=1 if last is None else last.seq + 1,
                kind=kind,
                at=now(),
                who=who_am_i(),
                run=run,
                note=note,
                reservation=reservation,
                body=body,
                previous=FIRST if last is None else last.digest,
            )
        )
        self._connection.execute(self._table.insert().values(**{name: getattr(entry, name) for name in _COLUMNS}))
        return entry


@contextmanager
def writing(url: str, account: str) -> Iterator[Page]:
    """A transaction that holds the account's lock; committed at the end of the block, undone by an exception."""
    with _connection(url, writes=True) as connection:
        if connection.dialect.name == "postgresql":
            key = int.from_bytes(hashlib.sha256(account.encode()).digest()[:8], "big", signed=True)
            connection.exec_driver_sql("SET LOCAL synchronous_commit = on")
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({key})")
        yield Page(connection, account)


@contextmanager
def reading(url: str, account: str) -> Iterator[Page]:
    """A transaction that sees one state of the account throughout."""
    with _connection(url, writes=False) as connection:
        yield Page(connection, account)


def accounts(url: str) -> list[str]:
    """Names of all accounts, sorted."""
    from sqlalchemy import select

    with _connection(url, writes=False) as connection:
        return sorted(connection.execute(select(_table().c.account).distinct()).scalars())


def exists(url: str) -> bool:
    """Whether there is a ledger."""
    path = file_of(url)
    if path is not None and not path.is_file():
        return False
    from sqlalchemy import inspect

    with _connection(url, writes=False, check=False) as connection:
        return inspect(connection).has_table(_table().name)


def create(url: str) -> None:
    """Make the table, unless it is there."""
    if exists(url):
        return
    from sqlalchemy.schema import CreateIndex, CreateTable

    table = _table()
    with _connection(url, writes=True, check=False) as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(73210)")
        connection.execute(CreateTable(table, if_not_exists=True))
        for index in sorted(table.indexes, key=lambda one: str(one.name)):
            connection.execute(CreateIndex(index, if_not_exists=True))
        for statement in _APPEND_ONLY[connection.dialect.name]:
            connection.exec_driver_sql(statement)


_APPEND_ONLY = {
    "sqlite": [
        f"CREATE TRIGGER IF NOT EXISTS sordino_no_{verb.lower()} BEFORE {verb} ON sordino_ledger "
        "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
        for verb in ("UPDATE", "DELETE")
    ]
    # INSERT OR REPLACE deletes without firing the trigger above.
    + [
        "CREATE TRIGGER IF NOT EXISTS sordino_no_replace BEFORE INSERT ON sordino_ledger WHEN EXISTS "
        "(SELECT 1 FROM sordino_ledger WHERE account = NEW.account AND seq = NEW.seq) "
        "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
    ],
    "postgresql": [
        "CREATE OR REPLACE FUNCTION sordino_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the ledger is append-only'; END $$",
        "CREATE OR REPLACE TRIGGER sordino_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON sordino_ledger "
        "FOR EACH STATEMENT EXECUTE FUNCTION sordino_append_only()",
    ],
}


@contextmanager
def _connection(url: str, *, writes: bool, check: bool = True) -> Iterator["Connection"]:
    path = file_of(url)
    if check and path is not None and not path.is_file():
        raise LedgerError(f"ledger must exist, got no file {str(path)!r}. Run `sordino ledger init {path.name}`.")
    from sqlalchemy.exc import DatabaseError

    try:
        with _engine(url).connect().execution_options(sordino_writes=writes) as connection:
            if not writes and connection.dialect.name == "postgresql":
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection
    except DatabaseError as error:
        # Neither a password nor the row is repeated.
        raise LedgerError(
            f"ledger {masked(url)!r} must be readable and writable, got {type(error.orig).__name__}: "
            f"{str(error.orig).splitlines()[0] if str(error.orig) else ''}. Nothing was written. Check that it exists, "
            "is a ledger, and is not locked by another program."
        ) from error


def _patiently(connection: "sqlite3.Connection", statement: str) -> None:
    """Carry out what SQLite refuses at once, without its own waiting, while another process changes the mode."""
    from sqlite3 import OperationalError

    until = time.monotonic() + _PATIENCE
    while True:
        try:
            connection.execute(statement).close()
        except OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.02)
        else:
            return


@lru_cache(maxsize=1)
def _table() -> "Table":
    from sqlalchemy import Column, Index, Integer, MetaData, Table, Text

    table = Table(
        "sordino_ledger",
        MetaData(),
        Column("account", Text, primary_key=True),
        Column("seq", Integer, primary_key=True, autoincrement=False),
        *(Column(name, Text, nullable=False) for name in _COLUMNS[2:]),
    )
    Index("sordino_ledger_reservation", table.c.account, table.c.reservation, table.c.seq)
    return table


@lru_cache(maxsize=64)
def _engine(url: str) -> "Engine":
    """Connections are opened for each transaction, so that nothing is shared with forked processes."""
    try:
        from sqlalchemy import create_engine, event
        from sqlalchemy.pool import NullPool

        local = url.startswith("sqlite:")
        wait = {"timeout": _PATIENCE} if local else {"connect_timeout": int(_PATIENCE), "client_encoding": "utf8"}
        engine = create_engine(url, poolclass=NullPool, connect_args=wait)
    except ModuleNotFoundError as error:
        raise LedgerError(
            f"a ledger must have its driver, got no module {error.name!r}. Run pip install 'sordino[postgres]'."
        ) from error
    if not local:
        return engine

    @event.listens_for(engine, "connect")
    def _configure(connection, _record) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "fullfsync = ON", "checkpoint_fullfsync = ON"):
            _patiently(connection, f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection) -> None:
        writes = connection.get_execution_options().get("sordino_writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
