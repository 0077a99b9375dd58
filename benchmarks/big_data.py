"""Training on up to 10⁸ records: does a private step grow with the dataset? Memory and time, each in a fresh process.

    ./run bench big-data             # the table, kept as benchmarks/results/big-data.json
    ./run bench big-data --quick     # two sizes, nothing is kept

The expected batch stays 256 records while the number of records N grows from 10⁵ to 10⁸. Ways: `sordino.fit` and the
loader of a loop of one's own (`PrivacyEngine.make_private`), on a map-style dataset whose records are computed from
their numbers, and on `MappedArrays` over a (sparse) file with 16 single-precision features a record.

"grown" is what the process's peak resident memory grew by from before the dataset was made until the last step;
"of it file" is the part that is pages of the mapped file, which the system may drop at any time; "step" is the median
processor time between two batches. What `fit` does after the last step, the accounting of the whole run, does not
touch the data; it is told apart as "after".
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from sordino import Plan, PrivacyEngine, fit
from sordino.data import MappedArrays

RESULT = Path(__file__).parent / "results" / "big-data.json"
SIZES, WAYS = (10**5, 10**6, 10**7, 10**8), ("fit", "loader", "fit, file", "loader, file")
FEATURES, BATCH, STEPS, WARM = 16, 256, 40, 10
Record = tuple[Tensor, Tensor]


class Watched(Dataset[Record]):
    """Records computed from their numbers or read from a file, and a note of the processor's clock for every batch."""

    def __init__(self, records: int, file: Path | None) -> None:
        self._records = records
        self._mapped = None if file is None else MappedArrays(file)
        self.clocks: list[float] = []
        self.asked = 0

    def __len__(self) -> int:
        return self._records

    def __getitem__(self, index: int) -> Record:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Record]:
        self.clocks.append(time.process_time())
        self.asked += len(indices)
        places = np.asarray(indices, dtype=np.int64)
        if self._mapped is None:
            rows = (places[:, None] * np.arange(3, 3 + FEATURES) % 101 / 50.5 - 1).astype(np.float32)
        else:
            rows = np.stack([row for (row,) in self._mapped.__getitems__(indices)])
        labels = torch.from_numpy((places * 7 % 101 > 50).astype(np.int64))
        return list(zip(torch.from_numpy(rows), labels, strict=True))


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def memory() -> tuple[float, float]:
    """Peak resident memory and resident pages of files, in MB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return tuple(int(lines[name].split()[0]) / 1024 for name in ("VmHWM", "RssFile"))  # pyright: ignore[reportReturnType]


def one(records: int, way: str, file: str | None) -> dict[str, float]:
    """One run, in this process."""
    torch.set_num_threads(1)
    model = nn.Linear(FEATURES, 2)
    rate, common = BATCH / records, {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    before, pages = memory()
    data = Watched(records, None if file is None else Path(file))
    found: dict[str, float] = {}

    def note() -> None:
        peak, now = memory()
        found.update(grown=peak - before, of_it_file=now - pages, last=data.clocks[-1])

    if way.startswith("fit"):
        plan = Plan(sample_rate=rate, steps=STEPS, expected_batch_size=float(BATCH), delta=1e-9, **common)

        class Noting(torch.optim.SGD):
            def step(self, closure=None):
                super().step(closure)
                note()

        fit(model, losses, data, plan, optimizer=lambda p: Noting(p, lr=0.1), progress=False)
    else:
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=BATCH, shuffle=True),
            **common,
        )
        for (x, y), _ in zip(loader, range(STEPS), strict=False):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            note()
    clocks = data.clocks[WARM:]
    gaps = [b - a for a, b in pairwise(clocks)]
    after, _ = memory()
    return {
        "grown": found["grown"],
        "of_it_file": found["of_it_file"],
        "after": after - before - found["grown"],
        "step_ms": 1e3 * statistics.median(gaps),
        "asked": data.asked,
    }


def sparse(folder: str, records: int) -> Path:
    """An .npy file of zeros that takes no room on the disk."""
    path = Path(folder) / f"{records}.npy"
    if not path.is_file():
        np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(records, FEATURES)).flush()
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10⁵ and 10⁷ records, nothing is kept")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        records, way, file = args.one
        print(json.dumps(one(int(records), way, file or None)))
        return
    rows = []
    print(f"{'way':14} {'records':>10} {'grown MB':>9} {'file MB':>8} {'after MB':>9} {'step ms':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            for records in SIZES[::2] if args.quick else SIZES:
                file = str(sparse(folder, records)) if way.endswith("file") else ""
                call = [sys.executable, __file__, "--one", str(records), way, file]
                answer = subprocess.run(call, capture_output=True, text=True, check=True)
                row = {"way": way, "records": records, **json.loads(answer.stdout.splitlines()[-1])}
                rows.append(row)
                print(
                    f"{way:14} {records:10} {row['grown']:9.1f} {row['of_it_file']:8.1f} {row['after']:9.1f} "
                    f"{row['step_ms']:8.2f}",
                    flush=True,
                )
    if not args.quick:
        facts = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.platform(),
            "torch": torch.__version__,
            "expected_batch_size": BATCH,
            "steps": STEPS,
            "rows": rows,
        }
        RESULT.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
