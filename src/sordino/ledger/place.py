"""Where a ledger lies (floor 2): a file on a local disk, or a PostgreSQL database."""

import re
from pathlib import Path

from sordino.errors import InvalidArgument

__all__ = ["file_of", "masked", "url_of"]

# File systems whose locks, or whose shared memory, do not reach all machines that may write.
_REMOTE = ("nfs", "cifs", "smb", "afs", "ceph", "glusterfs", "sshfs", "9p", "lustre", "beegfs", "gpfs", "ncp", "ocfs")
_MOUNTS = Path("/proc/self/mounts")


def url_of(place: str | Path) -> str:
    """The URL of a ledger that is named by a path or a URL.

    Raises:
        InvalidArgument: another database than SQLite or PostgreSQL, a ledger in memory, or a network file system.
    """
    text = str(place)
    if re.match(r"postgresql(\+psycopg)?://", text):
        return re.sub(r"^postgresql(\+psycopg)?://", "postgresql+psycopg://", text)
    if text.startswith("sqlite:///"):
        text = text.removeprefix("sqlite:///")
    elif "://" in text:
        raise InvalidArgument(
            f"ledger must be a file or postgresql://…, got {masked(text)!r}. Those two lock as a ledger needs it."
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


def file_of(url: str) -> Path | None:
    """The file behind a URL; None for PostgreSQL."""
    return Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:") else None


def masked(url: str) -> str:
    """The URL without its password."""
    return re.sub(r"(://[^:/@]*):.*@", r"\1:***@", url)


def _file_system(path: Path) -> str:
    """The type of the file system that will hold `path`; empty where it can't be told."""
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
