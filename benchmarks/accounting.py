"""Privacy accountants side by side: ε, certified width and seconds, ours against the libraries that are installed.

    ./run bench accounting [--quick] [--json FILE]

Each case is one schedule of Poisson-sampled Gaussian steps (or several); ★ marks the typical ones. Seconds are
process-CPU seconds of a warm answer, the smallest of several; who needs more than 20 by the clock is stopped.
"short" marks an ε below the truth. Under the table: whether ours is the tightest sound answer on every row, and how
much faster than dp-accounting's PLD on the typical rows.
"""

import argparse
import importlib.util
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
from types import ModuleType

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
    typical: bool = False

    def event(self) -> Event:
        return Composed(
            events=tuple(
                SelfComposed(event=PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma)), count=count)
                for q, sigma, count in self.steps
            )
        )


def one(name: str, q: float, sigma: float, count: int, delta: float, *, typical: bool = False) -> Case:
    return Case(name, ((q, sigma, count),), delta, typical)


CASES = [
    one("Abadi: q .01, σ 4, 10 000 steps", 0.01, 4.0, 10_000, 1e-5, typical=True),
    one("MNIST tutorial: 256/60000, σ 1.1, 14 062", 256 / 60000, 1.1, 14_062, 1e-5, typical=True),
    one("large batch: 4096/50000, σ 3, 2500", 4096 / 50000, 3.0, 2500, 1e-5, typical=True),
    one("language model: q 1e-4, σ .6, 100 000", 1e-4, 0.6, 100_000, 1e-9, typical=True),
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


def _opake_native() -> ModuleType:
    """Opake's compiled accountant itself: its package can't be imported on every Python 3.11."""
    core = find_spec("opake.api.accounting.core")
    assert core is not None
    assert core.submodule_search_locations is not None
    (path,) = Path(next(iter(core.submodule_search_locations))).glob("opake_accounting*.so")
    spec = importlib.util.spec_from_file_location("opake_accounting", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def opake(case: Case) -> tuple[float, float]:
    native = _opake_native()
    config = native.DiscretizationConfig()
    total = native.identity_pld(config)
    for q, sigma, count in case.steps:
        total = total.compose(native.poisson_pld(native.gaussian_pld(sigma, config), q).self_compose(count))
    return float(total.epsilon_at(case.delta)), math.nan


PEERS: dict[str, tuple[str, Callable[[Case], tuple[float, float]]]] = {
    "sordino": ("sordino", lambda case: sordino(case, "auto")),
    "sordino rdp": ("sordino", lambda case: sordino(case, "rdp")),
    "dp-accounting PLD": ("dp_accounting", dp_accounting_pld),
    "dp-accounting RDP": ("dp_accounting", dp_accounting_rdp),
    "Opacus PRV": ("opacus", opacus("prv")),
    "Opacus RDP": ("opacus", opacus("rdp")),
    "prv-accountant": ("prv_accountant", prv_accountant),
    "opake": ("opake", opake),
}


class TooSlowError(Exception):
    """A method took more than `LIMIT` seconds of processor time."""


def stop(_signum: int, _frame: object) -> None:
    raise TooSlowError


def measure(method: Callable[[Case], tuple[float, float]], case: Case, enough: float) -> Answer:
    """The smallest of several warm answers: three, and more until `enough` seconds are spent."""
    best, value, width, spent = math.inf, math.nan, math.nan, 0.0
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for repeat in range(100):
                start = time.process_time()
                value, width = method(case)
                spent += time.process_time() - start
                best = min(best, time.process_time() - start)
                # The first call of all imports: it stands alone only when the next would be slow too.
                if (spent > enough and repeat >= 2) or (repeat >= 1 and spent > 6):
                    break
    except TooSlowError:
        if math.isfinite(best):
            return Answer(value, width, best)
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


def summary(found: list[tuple[Case, dict[str, Answer]]]) -> list[str]:
    """What the table shows: tightest, sound, and faster by how much."""
    lines = []
    loose = []
    for case, answers in found:
        ours = answers["sordino"]
        truth = ours.epsilon - ours.width
        sound = [a.epsilon for name, a in answers.items() if name != "sordino" and a.epsilon >= truth * (1 - 1e-9)]
        if any(value < ours.epsilon * (1 - 1e-9) for value in sound):
            loose.append(case.name)
    lines.append("tightest sound answer on every row" if not loose else f"not the tightest on: {'; '.join(loose)}")
    widest = max(answers["sordino"].width / answers["sordino"].epsilon for _, answers in found)
    lines.append(f"widest certified interval: {widest:.1e} of ε")
    ratios = [
        (case, answers["dp-accounting PLD"].seconds / answers["sordino"].seconds)
        for case, answers in found
        if "dp-accounting PLD" in answers and math.isfinite(answers["dp-accounting PLD"].seconds)
    ]
    if ratios:
        lines += [
            f"{'★' if case.typical else ' '} {ratio:6.1f} × faster than dp-accounting PLD: {case.name}"
            for case, ratio in ratios
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats; leave out the schedule of 1000")
    parser.add_argument("--json", type=Path, default=None, help="also write the numbers here")
    options = parser.parse_args()
    peers = {name: method for name, (module, method) in PEERS.items() if find_spec(module) is not None}
    enough = 0.1 if options.quick else 0.5
    epsilon(CASES[0].event(), 1e-5)  # imports
    table = Table(title="ε · CPU time; width is our certified error", expand=True)
    for column in ("case", "width", *peers):
        table.add_column(column, overflow="fold")
    found: list[tuple[Case, dict[str, Answer]]] = []
    for case in CASES if options.quick else [*CASES, SCHEDULE]:
        answers = {}
        for name, method in peers.items():
            slow = len(case.steps) > 100 and not name.startswith("sordino")
            answers[name] = Answer(math.nan, math.nan, math.nan, "minutes") if slow else measure(method, case, enough)
        ours = answers["sordino"]
        star = "★ " if case.typical else ""
        cells = (shown(answer, ours.epsilon - ours.width) for answer in answers.values())
        table.add_row(star + case.name, f"{ours.width:.1e}", *cells)
        found.append((case, answers))
    console = Console(width=None if options.json is None else 200)
    console.print(table)
    missing = [name for name, (module, _) in PEERS.items() if find_spec(module) is None]
    for line in [*summary(found), *(f"{name}: not installed" for name in missing)]:
        console.print(line, highlight=False)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            {"case": case.name, "answers": {name: asdict(a) for name, a in answers.items()}} for case, answers in found
        ]
        options.json.write_text(json.dumps(_record(rows), indent=1, ensure_ascii=False) + "\n")


def _record(rows: list[dict[str, object]]) -> dict[str, object]:
    versions = {}
    for package in ("numpy", "scipy", "dp-accounting", "opacus", "prv-accountant", "opake-accounting"):
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
