"""The ledger's one table and its transactions: SQLite with an immediate lock, or PostgreSQL.

A writing transaction holds its lock from before the first read until the commit, so that between the check of a budget
and no other process writes the line that uses it. A process that dies in between leaves nothing.
"""

import getpass
import hashlib
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from sordino.errors import InvalidArgument, LedgerError, SordinoError
from sordino.events import Event, NoOp, from_dict
from sordino.installation import require

if TYPE_CHECKING:
    import sqlite3

    from sqlalchemy import Connection, Engine, Table


# ----------------------------------------------------------------------------------------------------------------------
# One line of the ledger and the chain that holds the lines together.
# ----------------------------------------------------------------------------------------------------------------------


FIRST = "0" * 64
"""What the first entry of an account names as its predecessor's digest."""


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """A line of an account. Lines are only ever added.

    Args:
        account: name of the dataset's account.
        seq: number of the line in its account, from 1.
        kind: ``declare``, ``budget``, ``reserve``, ``charge`` or ``release``.
        at: when, UTC, ISO 8601.
        who: user and machine that wrote the line; on PostgreSQL also the role that was logged in, which the server
            compares with its own.
        run: the run it belongs to, or empty.
        note: what it was for, in the user's words.
        reservation: the reservation it belongs to, or empty.
        body: JSON: the event or budget, the account's totals after the line, what is left of the reservation.
        previous: digest of the line before.
        digest: SHA-256 of all the above.
    """

    account: str
    seq: int
    kind: str
    at: str
    who: str
    run: str
    note: str
    reservation: str
    body: str
    previous: str
    digest: str = ""

    @property
    def contents(self) -> dict[str, object]:
        """The body, read.

        Raises:
            LedgerError: it is no JSON object.
        """
        with _readable(self):
            body = json.loads(self.body)
            if not isinstance(body, dict):
                raise TypeError
            return body

    @property
    def event(self) -> Event:
        """What was charged, reserved or released; `NoOp` for a budget.

        Raises:
            LedgerError: there is something else.
        """
        body = self.contents.get("event")
        with _readable(self):
            return NoOp() if body is None else from_dict(body)

    @property
    def left(self) -> Event:
        """What is left of the reservation after the line.

        Raises:
            LedgerError: there is something else.
        """
        body = self.contents
        with _readable(self):
            return from_dict(body["left"])

    @property
    def totals(self) -> tuple[float, ...]:
        """What the account has charged after the line, in its filter's measures.

        Raises:
            LedgerError: there is something else.
        """
        body = self.contents
        with _readable(self):
            given = body["totals"]
            if not isinstance(given, list) or not all(type(one) in {int, float, str} for one in given):
                raise TypeError
            totals = tuple(float(value) for value in given)
            if not all(value >= 0 for value in totals):
                raise ValueError
            return totals

    @property
    def budget_at(self) -> int:
        """The line that declares the budget in force.

        Raises:
            LedgerError: there is something else.
        """
        found = self.contents.get("budget_at")
        with _readable(self):
            if type(found) is not int or not 1 <= found <= self.seq:
                raise TypeError
            return found

    def check(self) -> "LedgerEntry":
        """The line itself, if it is as it was written.

        Raises:
            LedgerError: another type, or another digest than its own.
        """
        with _readable(self):
            values = astuple(self)
            kinds = [int if name == "seq" else str for name in _COLUMNS]
            if any(type(value) is not kind for value, kind in zip(values, kinds, strict=True)):
                raise TypeError
            if self.seal() != self.digest:
                raise ValueError
        return self

    def seal(self) -> str:
        """The digest that the line must have."""
        text = json.dumps(astuple(self)[:-1], ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, object]:
        """As plain JSON types, the body read."""
        names = ("account", "seq", "kind", "at", "who", "run", "note", "reservation")
        chain = {"previous": self.previous, "digest": self.digest}
        return {**{name: getattr(self, name) for name in names}, **self.contents, **chain}


_COLUMNS = tuple(item.name for item in fields(LedgerEntry))


@contextmanager
def _readable(entry: LedgerEntry) -> Iterator[None]:
    """Raise a `LedgerError` that names the line for whatever reading it raises."""
    try:
        yield
    except (SordinoError, AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise changed_line(entry) from error


def changed_line(entry: LedgerEntry) -> LedgerError:
    """What is raised for a line that is not as it was written."""
    return LedgerError(
        f"line {entry.seq!r} of account {entry.account!r} must be as it was written, got another content. Restore the "
        "ledger from a copy; what it says now is not to be trusted."
    )


def sealed(entry: LedgerEntry) -> LedgerEntry:
    """The line with its digest."""
    return replace(entry, digest=entry.seal())


def now() -> str:
    """The time, UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def current_user() -> str:
    """user@machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


# ----------------------------------------------------------------------------------------------------------------------
# Where a ledger lies: a file on a local disk, or a PostgreSQL database.
# ----------------------------------------------------------------------------------------------------------------------


# File systems whose locks, or whose shared memory, do not reach all machines that may write.
_REMOTE = ("nfs", "cifs", "smb", "afs", "ceph", "glusterfs", "sshfs", "9p", "lustre", "beegfs", "gpfs", "ncp", "ocfs")
_MOUNTS = Path("/proc/self/mounts")


def ledger_url(place: str | Path) -> str:
    """The URL of a ledger that is named by a path or a URL.

    Raises:
        InvalidArgument: another database than SQLite or PostgreSQL, a ledger in memory, or a network file system.
    """
    require("ledger", "sqlalchemy", user="a ledger")
    text = str(place)
    if re.match(r"postgresql(\+psycopg)?://", text):
        return re.sub(r"^postgresql(\+psycopg)?://", "postgresql+psycopg://", text)
    if text.startswith("sqlite:///"):
        text = text.removeprefix("sqlite:///")
    elif "://" in text:
        raise InvalidArgument(
            f"ledger must be a file or postgresql://…, got {redact_password(text)!r}. "
            "Those two lock as a ledger needs it."
        )
    if not text or text == ":memory:" or text.startswith("file:"):
        raise InvalidArgument(f"ledger must be a file that outlives the process, got {text!r}. Name a file.")
    path = Path(text).expanduser().absolute()
    kind = _file_system(path)
    if any(name in kind for name in _REMOTE):
        raise InvalidArgument(
            f"ledger must be on a local disk, got a {kind} file system at {str(path)!r}: its locks don't hold between "
            "machines, so that two runs could spend the same budget. Use a local file, or PostgreSQL."
        )
    return f"sqlite:///{path}"


def ledger_file(url: str) -> Path | None:
    """The file behind a URL; None for PostgreSQL."""
    return Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:") else None


def redact_password(url: str) -> str:
    """The URL without its password."""
    return re.sub(r"(://[^:/@]*):.*@", r"\1:***@", url)


def _file_system(path: Path) -> str:
    """The type of the file system that will hold `path`; empty where it is not known."""
    if not _MOUNTS.is_file():
        return ""
    there = path.resolve()
    found = ("", "")
    for line in _MOUNTS.read_text(errors="replace").splitlines():
        fields = line.split(" ")
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields[1])
        if there.is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, fields[2])
    return found[1].lower()


# ----------------------------------------------------------------------------------------------------------------------
# The ledger's one table and its transactions: SQLite with an immediate lock, or PostgreSQL.
# ----------------------------------------------------------------------------------------------------------------------


_PATIENCE = 120.0  # seconds to wait for the lock


class AccountTransaction:
    """One account inside a transaction."""

    def __init__(self, connection: "Connection", account: str) -> None:
        self._connection, self.account = connection, account
        self._table = _table()

    def last(self) -> LedgerEntry | None:
        """The newest line."""
        return self._newest()

    def last_of(self, reservation: str) -> LedgerEntry | None:
        """The newest line of a reservation."""
        return self._newest(self._table.c.reservation == reservation)

    def _newest(self, *conditions: object) -> LedgerEntry | None:
        table = self._table
        query = table.select().where(table.c.account == self.account, *conditions)  # pyright: ignore[reportArgumentType]
        row = self._connection.execute(query.order_by(table.c.seq.desc()).limit(1)).first()
        return None if row is None else LedgerEntry(**row._mapping).check()  # pyright: ignore[reportPrivateUsage]

    def at(self, seq: int) -> LedgerEntry | None:
        """Line `seq`."""
        return self._newest(self._table.c.seq == seq)

    def reservations(self) -> list[LedgerEntry]:
        """The newest line of every reservation that was ever made."""
        from sqlalchemy import func, select

        table = self._table
        own = (table.c.account == self.account, table.c.reservation != "")
        newest = select(func.max(table.c.seq)).where(*own).group_by(table.c.reservation)
        return [entry.check() for entry in self._entries(table.c.seq.in_(newest))]

    def entries(self, kind: str | None = None) -> list[LedgerEntry]:
        """All lines, or those of one kind, in order.

        Raises:
            LedgerError: a line is not as it was written, or one between two others is gone.
        """
        found, previous = [entry.check() for entry in self.raw_entries()], FIRST
        for number, entry in enumerate(found, start=1):
            if entry.seq != number or entry.previous != previous:
                raise changed_line(entry)
            previous = entry.digest
        return [entry for entry in found if kind in {None, entry.kind}]

    def raw_entries(self) -> list[LedgerEntry]:
        """All lines in order, as they are found."""
        return self._entries()

    def _entries(self, *conditions: object) -> list[LedgerEntry]:
        table = self._table
        query = table.select().where(table.c.account == self.account, *conditions)  # pyright: ignore[reportArgumentType]
        rows = self._connection.execute(query.order_by(table.c.seq))
        return [LedgerEntry(**row._mapping) for row in rows]  # pyright: ignore[reportPrivateUsage]

    def append(
        self, last: LedgerEntry | None, *, kind: str, body: str, run: str = "", note: str = "", reservation: str = ""
    ) -> LedgerEntry:
        """Add a line after `last`, the newest."""
        entry = sealed(
            LedgerEntry(
                account=self.account,
                seq=1 if last is None else last.seq + 1,
                kind=kind,
                at=now(),
                who=current_user() + self._role(),
                run=run,
                note=note,
                reservation=reservation,
                body=body,
                previous=FIRST if last is None else last.digest,
            )
        )
        self._connection.execute(self._table.insert().values(**{name: getattr(entry, name) for name in _COLUMNS}))
        return entry

    def _role(self) -> str:
        """The database role that is logged in, as a line names it; a file has none."""
        if self._connection.dialect.name != "postgresql":
            return ""
        return f", role {self._connection.exec_driver_sql('SELECT session_user').scalar_one()}"


@contextmanager
def write_transaction(url: str, account: str) -> Iterator[AccountTransaction]:
    """A transaction that holds the account's lock; committed at the end of the block, undone by an exception."""
    with _connection(url, writes=True) as connection:
        if connection.dialect.name == "postgresql":
            key = int.from_bytes(hashlib.sha256(account.encode()).digest()[:8], "big", signed=True)
            connection.exec_driver_sql("SET LOCAL synchronous_commit = on")
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({key})")
        yield AccountTransaction(connection, account)


@contextmanager
def read_transaction(url: str, account: str) -> Iterator[AccountTransaction]:
    """A transaction that sees one state of the account throughout."""
    with _connection(url, writes=False) as connection:
        yield AccountTransaction(connection, account)


def accounts(url: str) -> list[str]:
    """Names of all accounts, sorted."""
    from sqlalchemy import select

    with _connection(url, writes=False) as connection:
        names = connection.execute(select(_table().c.account).distinct()).scalars()
        return sorted(str(name) for name in names)


def exists(url: str) -> bool:
    """Whether there is a ledger."""
    path = ledger_file(url)
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
        # Anyone who may write lines can't write them in the name of another role.
        "CREATE OR REPLACE FUNCTION sordino_own_role() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF right(NEW.who, length(session_user) + 7) <> ', role ' || session_user THEN "
        "RAISE EXCEPTION 'a line must name the role that writes it'; END IF; RETURN NEW; END $$",
        "CREATE OR REPLACE TRIGGER sordino_own_role BEFORE INSERT ON sordino_ledger "
        "FOR EACH ROW EXECUTE FUNCTION sordino_own_role()",
    ],
}


@contextmanager
def _connection(url: str, *, writes: bool, check: bool = True) -> Iterator["Connection"]:
    require("ledger", "sqlalchemy", user="a ledger")
    path = ledger_file(url)
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
            f"ledger {redact_password(url)!r} must be readable and writable, got {type(error.orig).__name__}: "
            f"{str(error.orig).splitlines()[0] if str(error.orig) else ''}. Nothing was written. Check that it exists, "
            "is a ledger, and is not locked by another program."
        ) from error
    except UnicodeDecodeError as error:
        raise LedgerError(
            f"ledger {redact_password(url)!r} must hold text, got bytes that are none. Restore it from a copy; what it "
            "says now is not to be trusted."
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
            f"a ledger must have its driver, got no module {error.name!r}. Install sordino[postgres]."
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
