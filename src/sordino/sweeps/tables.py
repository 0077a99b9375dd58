"""Results as a table: one row for each setting, seeds taken together; CSV, Markdown and JSON (floor 6)."""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from sordino.definitions import round_up
from sordino.sweeps.cell import Cell
from sordino.sweeps.settings import Value
from sordino.sweeps.store import plain
from sordino.sweeps.sweep import Sweep
from sordino.sweeps.training import Outcome

__all__ = ["NOTHING", "Row", "caveat", "comma_separated", "document", "heads", "line", "markdown", "rows"]

NOTHING = "no guarantee"
"""What stands where ε would, for cells that protect nobody."""


_WORDS = {"batch_size": "B", "max_grad_norm": "C", "target_epsilon": "target ε", "pca_noise_multiplier": "σ of PCA"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Cells that differ in the seed alone.

    Args:
        cell: the first of them.
        outcomes: of those that are finished.
        failures: what went wrong in the others that were tried.
        missing: how many were not tried.
    """

    cell: Cell
    outcomes: tuple[Outcome, ...]
    failures: tuple[str, ...]
    missing: int

    @property
    def values(self) -> dict[str, Value]:
        """What the grid says of them."""
        return {name: value for name, value in self.cell.told.items() if name != "seed"}

    @property
    def epsilon(self) -> float | None:
        """ε by the accountant, or None where nothing is guaranteed."""
        return self.cell.epsilon

    def measured(self, name: str) -> tuple[float, ...]:
        """One number of every finished outcome that has it."""
        found = [getattr(outcome, name) for outcome in self.outcomes]
        return tuple(float(value) for value in found if value is not None)

    def mean(self, name: str) -> float | None:
        """Mean of `measured`, or None where there is none."""
        found = self.measured(name)
        return math.fsum(found) / len(found) if found else None

    def spread(self, name: str) -> float | None:
        """Standard deviation over the seeds (with n − 1), or None for fewer than two."""
        found, mean = self.measured(name), self.mean(name)
        if mean is None or len(found) < 2:
            return None
        return math.sqrt(math.fsum((value - mean) ** 2 for value in found) / (len(found) - 1))


def rows(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> tuple[Row, ...]:
    """The rows of a sweep, in the order of its cells."""
    together: dict[object, list[Cell]] = {}
    for cell in sweep.cells:
        together.setdefault(replace(cell.settings, seed=0), []).append(cell)
    found = []
    for cells in together.values():
        tried = [outcomes[cell.key] for cell in cells if cell.key in outcomes]
        found.append(
            Row(
                cell=cells[0],
                outcomes=tuple(outcome for outcome in tried if outcome.failure is None),
                failures=tuple(outcome.failure for outcome in tried if outcome.failure is not None),
                missing=len(cells) - len(tried),
            )
        )
    return tuple(found)


def caveat(sweep: Sweep) -> str:
    """What ε in the table means, and what it doesn't."""
    size = f"{sweep.source.records:,} records"
    return (
        f"ε is what one run with these settings, fixed beforehand, would guarantee on {size}: add or remove one, "
        "size treated as public. Measured on public records. Choosing settings by such a table on private records is "
        "a release of its own: `sordino tune` puts it on the bill."
    )


_COLUMNS = ("epsilon", "delta", "noise_multiplier", "steps", "accuracy", "spread", "seeds", "seconds", "memory_mb")


def _cells_of(row: Row) -> dict[str, float | int | str | None]:
    epsilon = row.epsilon
    return {
        "epsilon": NOTHING if epsilon is None else "inf" if math.isinf(epsilon) else epsilon,
        "delta": row.cell.settings.delta if row.cell.is_private else None,
        "noise_multiplier": float(row.cell.plan.at(0).noise_multiplier),
        "steps": row.cell.settings.steps,
        "accuracy": row.mean("accuracy"),
        "spread": row.spread("accuracy"),
        "seeds": len(row.outcomes),
        "seconds": row.mean("seconds"),
        "memory_mb": row.mean("memory"),
    }


def comma_separated(sweep: Sweep, found: tuple[Row, ...]) -> str:
    """The table as CSV: settings that vary, then what was found."""
    text = io.StringIO()
    shown = [name for name in sweep.axes if name not in _COLUMNS]
    writer = csv.DictWriter(text, [*shown, *_COLUMNS, "failures"], lineterminator="\n")
    writer.writeheader()
    for row in found:
        settings = {name: row.cell.value(name) for name in shown}
        writer.writerow({**settings, **_cells_of(row), "failures": "; ".join(row.failures)})
    return text.getvalue()


def heads(sweep: Sweep) -> list[str]:
    """The columns that are read: settings that vary, then what was found."""
    return [
        *(_WORDS.get(name, name.replace("_", " ")) for name in _settings_shown(sweep)),
        *("σ", "ε", "δ", "steps", "accuracy", "seconds"),
        *(["MB"] if sweep.is_isolated else []),
    ]


def line(sweep: Sweep, row: Row) -> list[str]:
    """One row as it is read, in the order of `heads`."""
    told = ["–" if (value := row.cell.value(name)) is None else _plain(value) for name in _settings_shown(sweep)]
    epsilon, spread, accuracy = row.epsilon, row.spread("accuracy"), row.mean("accuracy")
    seconds, memory = row.mean("seconds"), row.mean("memory")
    noise = float(row.cell.plan.at(0).noise_multiplier)
    found = [
        f"{noise:.4g}" if noise else "0",
        NOTHING if epsilon is None else round_up(epsilon, 3),
        f"{row.cell.settings.delta:g}" if row.cell.is_private else "–",
        f"{row.cell.settings.steps:,}",
        ("failed" if row.failures else "–")
        if accuracy is None
        else f"{100 * accuracy:.1f} %" + (f" ± {100 * spread:.1f}" if spread is not None else ""),
        "–" if seconds is None else f"{seconds:.1f}",
    ]
    return [*told, *found, *(["–" if memory is None else f"{memory:.0f}"] if sweep.is_isolated else [])]


def _settings_shown(sweep: Sweep) -> list[str]:
    return [name for name in sweep.axes if name not in ("noise_multiplier", "steps", "delta")]


def _plain(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def markdown(sweep: Sweep, found: tuple[Row, ...]) -> str:
    """The table as Markdown."""
    columns = heads(sweep)
    lines = [f"# {sweep.title}", "", *([sweep.note, ""] if sweep.note else []), caveat(sweep), ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(line(sweep, row)) + " |" for row in found]
    failures = [f"- {row.cell.words}: {failure}" for row in found for failure in row.failures]
    return "\n".join([*lines, *(["", "Failed:", "", *failures] if failures else [])]) + "\n"


def document(sweep: Sweep, found: tuple[Row, ...]) -> dict[str, object]:
    """Everything as one JSON object: settings, ε or "no guarantee", what was measured, and the courses."""
    return {
        "name": sweep.name,
        "title": sweep.title,
        "data": asdict(sweep.source),
        "caveat": caveat(sweep),
        "axes": list(sweep.axes),
        "cells": [
            {
                "settings": {name: row.cell.value(name) for name in sweep.axes},
                "guarantee": None if (guarantee := row.cell.guarantee()) is None else guarantee.sentence(),
                **_cells_of(row),
                "accuracies": list(row.measured("accuracy")),
                "courses": [plain(outcome)["course"] for outcome in row.outcomes],
                "failures": list(row.failures),
                "missing": row.missing,
            }
            for row in found
        ],
    }
