"""One line of the ledger and the chain that holds the lines together (floor 2)."""

import getpass
import hashlib
import json
import socket
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime

from sordino.events import Event, Nothing, from_dict

__all__ = ["Entry", "FIRST", "now", "sealed", "who_am_i"]

FIRST = "0" * 64
"""What the first entry of an account names as its predecessor's digest."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of an account. Lines are only ever added.

    Args:
        account: name of the data set's account.
        seq: number of the line in its account, from 1.
        kind: ``declare``, ``budget``, ``reserve``, ``charge`` or ``release``.
        at: when, UTC, ISO 8601.
        who: user and machine that wrote the line.
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
        """The body, read."""
        return json.loads(self.body)

    @property
    def event(self) -> Event:
        """What was charged, reserved or released; `Nothing` for a budget."""
        body = self.contents.get("event")
        return Nothing() if body is None else from_dict(body)

    def seal(self) -> str:
        """The digest that the line must have."""
        text = json.dumps(astuple(self)[:-1], ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, object]:
        """As plain JSON types, the body read."""
        names = ("account", "seq", "kind", "at", "who", "run", "note", "reservation")
        chain = {"previous": self.previous, "digest": self.digest}
        return {**{name: getattr(self, name) for name in names}, **self.contents, **chain}


def sealed(entry: Entry) -> Entry:
    """The line with its digest."""
    return replace(entry, digest=entry.seal())


def now() -> str:
    """The time, UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def who_am_i() -> str:
    """user@machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
