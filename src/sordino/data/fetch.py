"""Fetching a named set into the cache: checksum first, then an atomic rename (floor 1).

A file appears under its name only when its checksum was right, so that an interrupted or tampered download can never be
taken for data.
"""

import gzip
import hashlib
import http.client
import os
import tempfile
import urllib.request
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

from sordino.data.adult import FILES
from sordino.data.catalogue import NamedSet, RemoteFile, named_set
from sordino.data.places import cache_folder, existing, find
from sordino.errors import DataUnavailable

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["fetch_file", "get", "matches", "unavailable"]

_CHUNK = 1 << 18
_TIMEOUT_S = 30.0


def get(name: str) -> Path:
    """The folder that holds a named set in its canonical form, downloaded into the user's cache if need be.

    Args:
        name: A name from `available`.

    Returns:
        The folder with the set's files.

    Raises:
        InvalidArgument: If no set has this name.
        DataUnavailable: If it can't be fetched; the message names the files, their checksums and where to place them.
    """
    wanted = named_set(name)
    if not wanted.files:
        return FILES
    found = find(wanted, layouts=wanted.layouts[:1])
    if found is not None and found.origin != "cache":
        return found.files[0].parent
    folder = cache_folder(name)
    missing = [file for file in wanted.files if not matches(existing(folder / file.name), file)]
    problems = _fetch_all(missing, folder) if missing else []
    if problems:
        raise unavailable(wanted, problems)
    return folder


def unavailable(wanted: NamedSet, problems: list[str]) -> DataUnavailable:
    """The refusal that tells which files to place where."""
    files = "; ".join(
        f"{file.name} (SHA-256{' of the unzipped contents' if file.unzipped else ''} {file.sha256}) from {file.urls[0]}"
        for file in wanted.files
    )
    reasons = f" ({'; '.join(problems)})" if problems else ""
    return DataUnavailable(
        f"the data set {wanted.name!r} must be on this machine, and fetching it failed{reasons}. "
        f"Place these files in {cache_folder(wanted.name)}, or in a folder {wanted.name}/ under the one that the "
        f"environment variable SORDINO_DATA names: {files}. {wanted.note}".rstrip()
    )


def _fetch_all(files: list[RemoteFile], folder: Path) -> list[str]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    # On standard error: standard output may be a program's input.
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for file in files:
            problems = fetch_file(file, folder, progress=progress)
            if problems:
                return problems
    return []


def fetch_file(file: RemoteFile, folder: Path, *, progress: "Progress | None" = None) -> list[str]:
    """Download one file into `folder`; the file is there only if its checksum is right.

    Args:
        file: What to fetch.
        folder: Where to; made if need be.
        progress: A bar to advance, if any.

    Returns:
        Empty on success; otherwise one line for each address that failed.
    """
    problems = []
    for url in file.urls:
        host = urlsplit(url).hostname
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".part", dir=folder)
        except OSError as problem:
            return [f"{folder}: {problem.strerror}"]
        try:
            with os.fdopen(handle, "wb") as out:
                _download(url, out, file.name, progress)
            if matches(Path(part), file):
                os.replace(part, folder / file.name)
                return []
            problems.append(f"{file.name} from {host}: wrong checksum, discarded")
        except (OSError, http.client.HTTPException) as problem:
            problems.append(f"{file.name} from {host}: {problem}")
        finally:
            Path(part).unlink(missing_ok=True)
    return problems


def _download(url: str, out: IO[bytes], name: str, progress: "Progress | None") -> None:
    if urlsplit(url).scheme not in ("http", "https"):
        raise OSError("only http and https addresses are fetched")
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:  # noqa: S310 - the scheme was checked above
        length = reply.headers.get("Content-Length", "")
        task = progress.add_task(name, total=int(length) if length.isdigit() else None) if progress else None
        while chunk := reply.read(_CHUNK):
            out.write(chunk)
            if progress is not None and task is not None:
                progress.advance(task, len(chunk))
    out.flush()
    os.fsync(out.fileno())


def matches(path: Path | None, file: RemoteFile) -> bool:
    """Whether a file is there with the right checksum; an unpacked one counts where the checksum is of the contents."""
    if path is None:
        return False
    zipped = file.unzipped and path.name.endswith((".gz", ".part"))
    digest = hashlib.sha256()
    try:
        with gzip.open(path, "rb") if zipped else path.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    except (OSError, EOFError, zlib.error):
        return False
    return digest.hexdigest() == file.sha256
