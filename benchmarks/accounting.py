"""Privacy accountants side by side: ε, certified width and seconds, ours against the libraries that are installed.

    ./run bench accounting [--quick] [--json FILE]

Each case is one schedule of Poisson-sampled Gaussian steps (or several). A library that is not installed is left out.
Seconds are process-CPU seconds of one warm answer, the smallest of three; who needs more than 20 by the clock is
stopped. "short" marks an ε below the truth.
"""

import argparse
import json
import math
import platform
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from sordino.accounting import epsilon
from sordino.events import Composed, Event, Gaussian, PoissonSampled, SelfComposed

RESULTS = Path(__file__).parent / "results"
LIMIT = 20.0
"""Seconds by the clock after which a method is stopped: a processor timer would coarsen what is measured."""


@dataclass(frozen=True)
class Case:
    name: str
    steps: tuple[tuple[float, float, int], ...]
    delta: float

    def event(self) -> Event:
        return Composed(
            events=tuple(
                SelfComposed(event=PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma)), count=count)
                for q, sigma, count in self.steps
            )
        )


def one(name: str, q: float, sigma: float, count: int, delta: float) -> Case:
    return Case(name, ((q, sigma, count),), delta)


CASES = [
    one("Abadi: q .01, σ 4, 10 000 steps", 0.01, 4.0, 10_000, 1e-5),
    one("MNIST tutorial: 256/60000, σ 1.1, 14 062", 256 / 60000, 1.1, 14_062, 1e-5),
    one("large batch: 4096/50000, σ 3, 2500", 4096 / 50000, 3.0, 2500, 1e-5),
    one("language model: q 1e-4, σ .6, 100 000", 1e-4, 0.6, 100_000, 1e-9),
    one("rare: q 1e-5, σ 1, 1 000 000", 1e-5, 1.0, 1_000_000, 1e-5),
    one("much noise: q .01, σ 100, 10 000", 0.01, 100.0, 10_000, 1e-5),
    one("little noise: q .01, σ .3, 1000", 0.01, 0.3, 1000, 1e-5),
    one("few steps: q .01, σ 1, 10", 0.01, 1.0, 10, 1e-5),
    one("one step: q .01, σ 1", 0.01, 1.0, 1, 1e-5),
    one("δ 1e-30: q .01, σ 1, 1000", 0.01, 1.0, 1000, 1e-30),
    one("10 000 000 steps: q 1e-3, σ 2", 1e-3, 2.0, 10_000_000, 1e-6),
    Case("10 distinct (q, σ), 500 steps each", tuple((0.002 * (i + 1), 0.8 + 0.1 * i, 500) for i in range(10)), 1e-6),
]
SCHEDULE = Case(
    "1000 distinct (q, σ)",
    tuple(
        (float(q), float(s), 1)
        for q, s in zip(np.linspace(0.005, 0.02, 1000), np.linspace(0.8, 1.5, 1000), strict=True)
    ),
    1e-5,
)


@dataclass(frozen=True)
class Answer:
    epsilon: float
    width: float
    seconds: float
    note: str = ""


def sordino(case: Case, accountant: str) -> tuple[float, float]:
    interval = epsilon(case.event(), case.delta, accountant=accountant)
    return interval.upper, interval.width


def dp_accounting_pld(case: Case) -> tuple[float, float]:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    for q, sigma, count in case.steps:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), count)
    return float(accountant.get_epsilon(case.delta)), math.nan


def dp_accounting_rdp(case: Case) -> tuple[float, float]:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    for q, sigma, count in case.steps:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), count)
    return float(accountant.get_epsilon(case.delta)), math.nan


def opacus(kind: str) -> Callable[[Case], tuple[float, float]]:
    def answer(case: Case) -> tuple[float, float]:
        from opacus.accountants import create_accountant

        accountant = create_accountant(kind)
        accountant.history = [(sigma, q, count) for q, sigma, count in case.steps]
        return float(accountant.get_epsilon(case.delta)), math.nan

    return answer


def prv_accountant(case: Case) -> tuple[float, float]:
    from prv_accountant import PRVAccountant
    from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism

    mechanisms = [
        PoissonSubsampledGaussianMechanism(sampling_probability=q, noise_multiplier=s) for q, s, _ in case.steps
    ]
    counts = [count for _, _, count in case.steps]
    accountant = PRVAccountant(
        prvs=mechanisms, max_self_compositions=counts, eps_error=0.01, delta_error=case.delta / 1000
    )
    low, _, high = accountant.compute_epsilon(case.delta, counts)
    return float(high), float(high - low)


PEERS: dict[str, tuple[str, Callable[[Case], tuple[float, float]]]] = {
    "sordino": ("sordino", lambda case: sordino(case, "auto")),
    "sordino rdp": ("sordino", lambda case: sordino(case, "rdp")),
    "dp-accounting PLD": ("dp_accounting", dp_accounting_pld),
    "dp-accounting RDP": ("dp_accounting", dp_accounting_rdp),
    "Opacus PRV": ("opacus", opacus("prv")),
    "Opacus RDP": ("opacus", opacus("rdp")),
    "prv-accountant": ("prv_accountant", prv_accountant),
}


class TooSlowError(Exception):
    """A method took more than `LIMIT` seconds of processor time."""


def stop(_signum: int, _frame: object) -> None:
    raise TooSlowError


def measure(method: Callable[[Case], tuple[float, float]], case: Case, repeats: int) -> Answer:
    best, value, width = math.inf, math.nan, math.nan
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(repeats):
                start = time.process_time()
                value, width = method(case)
                best = min(best, time.process_time() - start)
                if best > 0.5:
                    break
    except TooSlowError:
        return Answer(math.nan, math.nan, math.nan, f"> {LIMIT:g} s")
    except Exception as error:  # a peer's failure is a result, not an error of ours
        return Answer(math.nan, math.nan, math.nan, type(error).__name__)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Answer(value, width, best)


def shown(answer: Answer, truth: float) -> str:
    if answer.note:
        return answer.note
    text = f"{answer.epsilon:.6g} · {1000 * answer.seconds:.3g} ms"
    if answer.epsilon < truth * (1 - 1e-9):
        text += " short"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat; leave out the schedule of 1000")
    parser.add_argument("--json", type=Path, default=None, help="also write the numbers here")
    options = parser.parse_args()
    peers = {name: method for name, (module, method) in PEERS.items() if find_spec(module) is not None}
    repeats = 1 if options.quick else 3
    epsilon(CASES[0].event(), 1e-5)  # imports and caches
    table = Table(title="ε · CPU time; width is our certified error", expand=True)
    for column in ("case", "width", *peers):
        table.add_column(column, overflow="fold")
    rows: list[dict[str, object]] = []
    for case in CASES if options.quick else [*CASES, SCHEDULE]:
        answers = {}
        for name, method in peers.items():
            slow = len(case.steps) > 100 and not name.startswith("sordino")
            answers[name] = Answer(math.nan, math.nan, math.nan, "minutes") if slow else measure(method, case, repeats)
        ours = answers["sordino"]
        truth = ours.epsilon - ours.width
        table.add_row(case.name, f"{ours.width:.1e}", *(shown(answer, truth) for answer in answers.values()))
        rows.append({"case": case.name, "answers": {name: asdict(answer) for name, answer in answers.items()}})
    Console(width=None if options.json is None else 200).print(table)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(_record(rows), indent=1, ensure_ascii=False) + "\n")


def _record(rows: list[dict[str, object]]) -> dict[str, object]:
    versions = {}
    for package in ("numpy", "scipy", "dp-accounting", "opacus", "prv-accountant"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "versions": versions,
        "rows": json.loads(json.dumps(rows).replace("NaN", "null")),
    }


if __name__ == "__main__":
    main()
