"""Build the embedded Adult files from the raw files of the UCI repository.

``python -m sordino.data.pack_adult RAW_FOLDER`` reads ``adult.data`` and ``adult.test`` (plain or ``.gz``), leaves out
the rows with a missing value and the sampling weight ``fnlwgt``, and writes ``adult-train.csv.xz`` and
``adult-test.csv.xz`` into the package. The same input gives the same bytes of CSV.
"""

import csv
import gzip
import io
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path

from sordino.errors import DataUnavailable

COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "income",
)
_DROPPED = COLUMNS.index("fnlwgt")


def pack(raw: Path, target: Path) -> dict[str, int]:
    """Write both embedded files into `target`; returns the number of rows of each."""
    counts = {}
    for source, name in (("adult.data", "adult-train.csv.xz"), ("adult.test", "adult-test.csv.xz")):
        rows = [row for row in _rows(raw, source) if "?" not in row]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_kept(list(COLUMNS)))
        writer.writerows(_kept(row) for row in rows)
        (target / name).write_bytes(lzma.compress(text.getvalue().encode(), preset=9 | lzma.PRESET_EXTREME))
        counts[name] = len(rows)
    return counts


def _rows(raw: Path, name: str) -> Iterator[list[str]]:
    for path in (raw / name, raw / f"{name}.gz"):
        if path.exists():
            text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            for row in csv.reader(io.StringIO(text.decode("ascii")), skipinitialspace=True):
                # The test file opens with a comment line and ends its labels with a full stop.
                if len(row) == len(COLUMNS):
                    yield [*row[:-1], row[-1].rstrip(".")]
            return
    raise DataUnavailable(f"{raw} must hold {name} or {name}.gz, got neither. Place the raw UCI files there.")


def _kept(row: list[str]) -> list[str]:
    return row[:_DROPPED] + row[_DROPPED + 1 :]


if __name__ == "__main__":
    sys.stdout.write(f"{pack(Path(sys.argv[1]), Path(__file__).parent / 'files')}\n")
