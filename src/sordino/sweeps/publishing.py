"""What a sweep leaves in its folder: the picture, and the table in three forms (floor 6)."""

import json
from collections.abc import Mapping
from pathlib import Path

from sordino.runs.files import write_bytes
from sordino.sweeps.figure import draw
from sordino.sweeps.sweep import Sweep
from sordino.sweeps.tables import comma_separated, document, markdown, rows
from sordino.sweeps.training import Outcome

__all__ = ["publish"]


def publish(sweep: Sweep, outcomes: Mapping[str, Outcome], folder: str | Path) -> dict[str, Path]:
    """Write ``NAME.png``, ``NAME.json``, ``NAME.csv`` and ``NAME.md`` into `folder`, from what is finished so far.

    Guarantee: none; the records are public. Cells without one carry "no guarantee" in every form.

    Returns:
        The path of each, by its suffix.
    """
    at = Path(folder)
    at.mkdir(parents=True, exist_ok=True)
    found = rows(sweep, outcomes)
    body = json.dumps(document(sweep, found), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    texts = {"json": body, "csv": comma_separated(sweep, found), "md": markdown(sweep, found)}
    paths = {suffix: at / f"{sweep.name}.{suffix}" for suffix in ("png", *texts)}
    for suffix, text in texts.items():
        write_bytes(paths[suffix], text.encode())
    draw(sweep, found, paths["png"])
    return paths
