"""Opening a run folder for writing (floor 2): one process at a time, and a torn last line made whole."""

import fcntl
import os
from pathlib import Path

from sordino.errors import InvalidArgument
from sordino.runs.files import write_bytes
from sordino.runs.transcript import Follower

__all__ = ["locked", "mend", "umask"]


def umask() -> int:
    """Which rights new files don't get; there is no way to ask without setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def locked(path: Path) -> int:
    """A lock on the folder that ends with this process, however it ends."""
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise InvalidArgument(
            f"run must not be open elsewhere, got {str(path)!r}, which another process is writing, or "
            "another engine in this one. Wait for its end; an engine lets go of it with detach()."
        ) from error
    return lock


def mend(transcript: Path, follower: Follower) -> None:
    """Follow the transcript to its end; put a whole line in place of a torn one, in one atomic step."""
    content = transcript.read_bytes()
    whole, _, fragment = content.rpartition(b"\n")
    for raw in whole.split(b"\n") if whole else ():
        follower.read(raw)
    if fragment:
        line = follower.torn(fragment)
        mended = b"" if line is None else follower.written(line)
        write_bytes(transcript, content[: len(content) - len(fragment)] + mended)
