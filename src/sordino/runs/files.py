"""How a run folder's files are written and read: whole or not at all, plain JSON, fingerprints (floor 2)."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from sordino.errors import InvalidArgument

__all__ = ["decode", "encode", "fingerprint", "parse", "write_bytes", "write_json"]


def encode(value: float | None) -> float | str | None:
    """JSON has no ∞: it is written as the string "inf". NaN is refused when the text is made."""
    return "inf" if value is not None and math.isinf(value) and value > 0 else value


def decode(value: object) -> float | None:
    """The number that `encode` wrote."""
    if value is None or value == "inf":
        return None if value is None else math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(f"value must be a number, 'inf' or null, got {value!r}. The run folder was changed.")
    return float(value)


def parse(text: str, name: str) -> dict[str, object]:
    """The JSON object in `text`; `name` says in an error which file it was."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"{name} must be JSON, got text that fails at {error.pos}. Check the file.") from error
    if not isinstance(body, dict):
        raise InvalidArgument(f"{name} must be a JSON object, got {type(body).__name__}. Check the file.")
    return body


def fingerprint(path: Path) -> dict[str, object]:
    """SHA-256 and size of a file."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def write_json(path: Path, body: Mapping[str, object]) -> None:
    """Write a JSON object, indented, as `write_bytes` does."""
    write_bytes(path, (json.dumps(body, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Atomic: a reader sees the old file or the whole new one, also after a power cut."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
