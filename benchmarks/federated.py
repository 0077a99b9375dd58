"""Client-level privacy on MNIST over 1000 simulated users, beside federated averaging without privacy.

    ./run bench federated                 # every row that is missing, kept as benchmarks/results/federated.json
    ./run bench federated --models cnn    # the same, of one model
    ./run bench federated --page          # only the tables of docs/federated.md
    ./run bench federated --quick         # ten rounds, ε = 8, nothing is kept

Users: the 60 000 training records dealt to 1000 users, 60 each, either evenly or so that each user has records of two
digits only (shards, as McMahan et al. 2017 split them). A model's settings are the same for every ε and both splits,
and were chosen on the last 10 000 training records; accuracy is that of the 10 000 test records. Rows come one by one,
the most wanted first, and a row that is there is not run again: a benchmark that was cut off goes on.

The same seed deals the same records, draws the same cohorts and the same noise for every way, so ways are compared
seed by seed. "dynamic" spends the same ε over rounds of unequal noise, `optimal_noise_schedule(influence(…))`.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from sordino import KeyedRNG
from sordino.clipping import QuantileClipping
from sordino.data import load_dataset
from sordino.definitions import PrivacyUnit
from sordino.federated import LocalTraining, fed_avgm, simulate, split_clients
from sordino.research import noise_influence, optimal_noise_schedule
from sordino.training import Plan

HERE = Path(__file__).parent
RESULT, PAGE = HERE / "results" / "federated.json", HERE.parent / "docs" / "federated.md"
USERS, DELTA, CONDITION = 1000, 1e-5, 20.0
Pair = tuple[Tensor, Tensor]


def logistic() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.Tanh(),
        nn.Conv2d(8, 16, 5, stride=2, padding=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(784, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"logistic": logistic, "cnn": cnn}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is the same for all rows of a model."""

    rounds: int = 60
    rate: float = 0.5
    bound: float = 0.3
    local_rate: float = 0.1
    local_batch: int = 10
    server_rate: float = 0.3


SETTINGS = {"logistic": Settings(), "cnn": Settings(rounds=30, local_rate=0.3, local_batch=20)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Which run; ε None is federated averaging without privacy."""

    model: str
    split: str
    epsilon: float | None
    seed: int
    noise: str = "uniform"


def order() -> Iterator[Row]:
    """All rows, the most wanted first; of each block every ε before the next seed."""
    every, private = (None, 1.0, 3.0, 8.0), (1.0, 3.0, 8.0)

    def block(
        model: str, split: str, epsilons: tuple[float | None, ...], seeds: range, noise: str = "uniform"
    ) -> Iterator[Row]:
        for seed in seeds:
            for epsilon in epsilons:
                yield Row(model=model, split=split, epsilon=epsilon, seed=seed, noise=noise)

    yield from block("logistic", "even", every, range(3))
    yield from block("cnn", "even", every, range(1))
    yield from block("logistic", "even", private, range(3), "dynamic")
    yield from block("logistic", "shards", every, range(3))
    yield from block("cnn", "shards", every, range(1))
    yield from block("logistic", "even", private, range(3, 5))
    yield from block("logistic", "even", private, range(3, 5), "dynamic")
    yield from block("cnn", "even", every, range(1, 3))
    yield from block("cnn", "shards", every, range(1, 3))


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def users_of(labels: np.ndarray, split: str, seed: int) -> np.ndarray:
    """The user of each record."""
    numbers = np.random.default_rng(seed)
    of = np.empty(len(labels), dtype=np.int64)
    if split == "even":
        of[numbers.permutation(len(labels))] = np.arange(len(labels)) % USERS
        return of
    shards = np.array_split(np.argsort(labels, kind="stable"), 2 * USERS)
    for place, shard in enumerate(numbers.permutation(2 * USERS)):
        of[shards[shard]] = place // 2
    return of


def plan_for(row: Row, chosen: Settings) -> Plan:
    values = {
        "steps": chosen.rounds,
        "sample_rate": chosen.rate,
        "expected_batch_size": USERS * chosen.rate,
        "delta": DELTA,
        "privacy_unit": PrivacyUnit.CLIENT,
        "dataset_size_is_public": True,
    }
    if row.epsilon is None:
        return Plan(noise_multiplier=0.0, max_grad_norm=1e3, **values)
    clipping = QuantileClipping(quantile=0.5, learning_rate=0.2, count_noise=USERS * chosen.rate / 10)
    shape = None
    if row.noise == "dynamic":
        shape = optimal_noise_schedule(noise_influence(chosen.rounds, condition_number=CONDITION), budget=1.0)
    return Plan.for_epsilon(
        target_epsilon=row.epsilon, clipping=clipping, max_grad_norm=chosen.bound, noise_shape=shape, **values
    )


def run(data: tuple[Pair, Pair], row: Row, chosen: Settings) -> dict[str, object]:
    """One federated training, measured on the records kept aside."""
    (x, y), (test_x, test_y) = data
    torch.manual_seed(row.seed)
    model = MODELS[row.model]()
    clients = split_clients((x, y), users_of(y.numpy(), row.split, row.seed), num_clients=USERS)
    plan = plan_for(row, chosen)
    start = time.process_time()
    result = simulate(
        model,
        losses,
        clients,
        plan,
        local=LocalTraining(learning_rate=chosen.local_rate, epochs=1, batch_size=chosen.local_batch),
        optimizer=lambda parameters: fed_avgm(parameters, learning_rate=chosen.server_rate),
        rng=KeyedRNG(seed=row.seed, reproducible=True),
        clients_per_batch=32 if row.model == "logistic" else 1,
    )
    with torch.no_grad():
        scores = model(test_x)
    return {
        **asdict(row),
        "spent": None if row.epsilon is None else result.guarantee.epsilon,
        "noise_first": plan.step_plan(0).noise_multiplier,
        "noise_last": plan.step_plan(plan.steps - 1).noise_multiplier,
        "accuracy": float((scores.argmax(1) == test_y).double().mean()),
        "loss": float(nn.functional.cross_entropy(scores, test_y)),
        "cpu_seconds": time.process_time() - start,
        "settings": asdict(chosen),
    }


# ── what is kept ────────────────────────────────────────────────────────────────────────────────────────────


def kept() -> list[dict]:
    return json.loads(RESULT.read_text())["rows"] if RESULT.is_file() else []


def is_there(row: Row, rows: list[dict]) -> bool:
    wanted = {**asdict(row), "settings": asdict(SETTINGS[row.model])}
    return any(all(there.get(name) == value for name, value in wanted.items()) for there in rows)


def keep(made: dict[str, object]) -> None:
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.platform(),
        "torch": torch.__version__,
        "users": USERS,
        "delta": DELTA,
        "condition_number": CONDITION,
        "rows": [*kept(), made],
    }
    draft = RESULT.with_suffix(".draft")
    draft.write_text(json.dumps(facts, indent=1) + "\n")
    draft.replace(RESULT)


# ── the page ────────────────────────────────────────────────────────────────────────────────────────────────


def page() -> None:
    """The tables of docs/federated.md between their marks, from the rows that were kept."""
    rows = [row for row in kept() if row["settings"] == asdict(SETTINGS[row["model"]])]
    text = PAGE.read_text(encoding="utf-8")
    for name, table in (("table", table_of(rows)), ("dynamic", dynamic_of(rows))):
        begin, end = f"<!-- {name}: made by benchmarks/federated.py -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        after = rest.split(end, 1)[1]
        text = f"{before}{begin}{table}{end}{after}"
    PAGE.write_text(text, encoding="utf-8")


def table_of(rows: list[dict]) -> str:
    lines = ["| model | users have | ε = 1 | ε = 3 | ε = 8 | without privacy |", "|---|---|---|---|---|---|"]
    for model, words in (("logistic", "logistic regression"), ("cnn", "convolutions")):
        for split, digits in (("even", "all digits"), ("shards", "two digits each")):
            cells = [cell([row for row in rows if same(row, model, split, e)]) for e in (1.0, 3.0, 8.0, None)]
            lines.append(f"| {words} | {digits} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def same(row: dict, model: str, split: str, epsilon: float | None, noise: str = "uniform") -> bool:
    return (row["model"], row["split"], row["epsilon"], row["noise"]) == (model, split, epsilon, noise)


def cell(rows: list[dict]) -> str:
    """Mean ± standard deviation over the seeds, in %."""
    values = [100 * row["accuracy"] for row in rows]
    if not values:
        return "not measured"
    if len(values) == 1:
        return f"{values[0]:.1f} (one run)"
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f} ({len(values)})"


def dynamic_of(rows: list[dict]) -> str:
    lines = [
        "| ε | noise multiplier, uniform | dynamic, first to last | test loss, uniform | dynamic "
        "| change, seed by seed | accuracy, uniform | dynamic |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for epsilon in (1.0, 3.0, 8.0):
        arms = {
            noise: {row["seed"]: row for row in rows if same(row, "logistic", "even", epsilon, noise)}
            for noise in ("uniform", "dynamic")
        }
        seeds = sorted(set(arms["uniform"]) & set(arms["dynamic"]))
        if len(seeds) < 2:
            continue
        flat, shaped = ([arms[noise][seed] for seed in seeds] for noise in ("uniform", "dynamic"))
        change = [100 * (b["loss"] / a["loss"] - 1) for a, b in zip(flat, shaped, strict=True)]
        means = [statistics.fmean(row["loss"] for row in arm) for arm in (flat, shaped)]
        lines.append(
            f"| {epsilon:g} | {flat[0]['noise_first']:.2f} "
            f"| {shaped[0]['noise_first']:.2f} to {shaped[0]['noise_last']:.2f} "
            f"| {means[0]:.4f} | {means[1]:.4f} | {statistics.fmean(change):+.2f} ± {statistics.stdev(change):.2f} % "
            f"| {cell(flat)} | {cell(shaped)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ten rounds at ε = 8, nothing is kept")
    parser.add_argument("--page", action="store_true", help="only the tables of docs/federated.md")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--splits", nargs="+", default=["even", "shards"], choices=["even", "shards"])
    parser.add_argument("--noise", nargs="+", default=["uniform", "dynamic"], choices=["uniform", "dynamic"])
    parser.add_argument("--seeds", type=int, default=5, help="no seed from this one on")
    parser.add_argument("--validate", nargs="*", metavar="NAME=VALUE", help="settings, on the last training records")
    parser.add_argument("--epsilon", type=float, default=3.0, help="for --validate")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.page:
        return page()
    found = load_dataset("mnist")
    assert found.test is not None
    data = (found.train.tensors(), found.test.tensors())
    if args.quick or args.validate is not None:
        return once(data, args)
    for row in order():
        asked = row.model in args.models and row.split in args.splits and row.noise in args.noise
        if asked and row.seed < args.seeds and not is_there(row, kept()):
            made = run(data, row, SETTINGS[row.model])
            keep(made)
            page()
            print(json.dumps(made), flush=True)
    return page()


def once(data: tuple[Pair, Pair], args: argparse.Namespace) -> None:
    """One row for each model, kept nowhere."""
    (x, y), test = data
    if args.validate is not None:
        (x, y), test = (x[:50_000], y[:50_000]), (x[50_000:], y[50_000:])
    given = dict(pair.split("=") for pair in args.validate or ["rounds=10"])
    for model in args.models:
        usual = asdict(SETTINGS[model])
        chosen = Settings(**(usual | {name: type(usual[name])(value) for name, value in given.items()}))
        row = Row(model=model, split=args.splits[0], epsilon=args.epsilon if not args.quick else 8.0, seed=0)
        print(json.dumps(run(((x, y), test), row, chosen)), flush=True)


if __name__ == "__main__":
    main()
