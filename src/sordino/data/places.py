"""Where a named set may lie on this machine (floor 1).

In order: the folder named by the environment variable ``SORDINO_DATA``, the user's cache, the folder of the operating
system's package.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from sordino.data.catalogue import Layout, NamedSet

__all__ = ["Found", "cache_folder", "existing", "find"]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A set that is on this machine: its files in the layout's order, and in whose folder."""

    layout: Layout
    files: tuple[Path, ...]
    origin: str


def cache_folder(name: str) -> Path:
    """The folder of one set in the user's cache; it need not exist."""
    from platformdirs import user_cache_path

    return user_cache_path("sordino") / "data" / name


def find(wanted: NamedSet, *, layouts: tuple[Layout, ...] | None = None) -> Found | None:
    """The first complete copy of a set on this machine, or None.

    Args:
        wanted: The set.
        layouts: The layouts to accept; all of the set's when None.
    """
    for origin, folder, shared_root in _folders(wanted):
        for layout in wanted.layouts if layouts is None else layouts:
            for place in (folder, shared_root) if layout.shared and shared_root else (folder,):
                files = tuple(existing(place / name) for name in layout.files)
                if all(file is not None for file in files):
                    return Found(layout=layout, files=tuple(file for file in files if file), origin=origin)
    return None


def _folders(wanted: NamedSet) -> list[tuple[str, Path, Path | None]]:
    folders: list[tuple[str, Path, Path | None]] = []
    declared = os.environ.get("SORDINO_DATA")
    if declared:
        root = Path(declared).expanduser()
        folders.append(("SORDINO_DATA", root / wanted.name, root))
    folders.append(("cache", cache_folder(wanted.name), None))
    if wanted.packaged is not None:
        folders.append(("system package", wanted.packaged, None))
    return folders


def existing(path: Path) -> Path | None:
    """The file itself, or the unpacked form of a gzipped IDX file, if either is there."""
    for candidate in (path, path.with_suffix("")) if path.name.endswith("-ubyte.gz") else (path,):
        if candidate.is_file():
            return candidate
    return None
