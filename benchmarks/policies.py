"""Dynamic schedules, clipping methods, projected norms and optimizers side by side: `./run bench policies [--quick]`.

Digits 3 and 5 and UCI Adult play the private data, digits 4 and 6 and a part of Adult the public ones. Learning rates
are picked on the public task, schedules are made from it; the private task is run once for each seed.
"""

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from sordino import Plan, data, fit
from sordino.clipping import (
    AdaClip,
    AutomaticClipping,
    Clipping,
    FlatClipping,
    GlobalClipping,
    GroupedClipping,
    ProjectedClipping,
    PsacClipping,
    QuantileClipping,
)
from sordino.optimizers import AdamBC, DebiasedMomentum, GradientFilter, Kalman, LowPass, settle
from sordino.randomness import Randomness
from sordino.schedules import Listed, excess_risk_bound, influence, least_noise, noise_to_signal, uniform_noise
from sordino.training import LearnedPolicy, estimate_influence, exponential_influence, learn_policy

HERE = Path(__file__).parent
DELTA = 1e-5
Task = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def digits(pair: tuple[int, int], count: int) -> Task:
    mnist = data.load("mnist")

    def part(split: object) -> tuple[Tensor, Tensor]:
        x, y = split.tensors()  # type: ignore[attr-defined]
        keep = ((y == pair[0]) | (y == pair[1])).nonzero().flatten()[:count]
        small = nn.functional.avg_pool2d(x[keep].reshape(-1, 1, 28, 28).float(), 2).flatten(1)
        return 2 * nn.functional.normalize(small, dim=1), (y[keep] == pair[1]).long()

    return part(mnist.train), part(mnist.test)


def adult(count: int) -> tuple[Task, tuple[Tensor, Tensor]]:
    loaded = data.load("adult")
    x, y = loaded.train.tensors()
    x = 2 * nn.functional.normalize(x.float(), dim=1)
    tx, ty = loaded.test.tensors()
    tx = 2 * nn.functional.normalize(tx.float(), dim=1)
    return ((x[:count], y[:count]), (tx[:count], ty[:count])), (x[-1000:], y[-1000:])


def logistic(x: Tensor) -> nn.Module:
    model = nn.Linear(x.shape[1], 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def network(x: Tensor, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(x.shape[1], 16), nn.Tanh(), nn.Linear(16, 2))


def trained(
    make: Callable[[Tensor], nn.Module],
    task: Task,
    plan: Plan,
    *,
    seed: int,
    rate: float | Listed,
    optimizer: Optimizers | None = None,
    rule: GradientFilter | None = None,
) -> dict[str, float]:
    """One private run: last training loss, test accuracy, seconds a step."""
    (x, y), (tx, ty) = task
    model = make(x)
    first = rate.values[0] if isinstance(rate, Listed) else rate
    made = (optimizer or partial(torch.optim.SGD, lr=first))(list(model.parameters()))
    scheduler = None
    if isinstance(rate, Listed):
        scheduler = torch.optim.lr_scheduler.LambdaLR(made, rate.relative(plan.steps))
    if rule is not None:
        rule.attach(made)
    ends: list[float] = []
    fit(
        model,
        losses,
        (x, y),
        plan,
        optimizer=made,
        scheduler=scheduler,
        progress=False,
        on_step=lambda _: ends.append(time.perf_counter()),
        randomness=Randomness(seed=seed, reproducible=True),
    )
    seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
    settle(made)
    with torch.no_grad():
        loss = float(losses(model, x, y).mean())
        accuracy = float((model(tx).argmax(1) == ty).float().mean())
    return {"loss": loss, "accuracy": accuracy, "seconds": seconds}


def mean_of(runs: list[dict[str, float]]) -> dict[str, float]:
    found = {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}
    spread = statistics.stdev(run["loss"] for run in runs) if len(runs) > 1 else 0.0
    return {**found, "loss_sd": spread}


def base_plan(records: int, epsilon: float, steps: int, clipping: Clipping | None = None) -> Plan:
    """Full batches: exact accounting, and the theorems' setting."""
    return Plan.for_epsilon(
        target_epsilon=epsilon,
        delta=DELTA,
        sample_rate=1.0,
        steps=steps,
        max_grad_norm=1.0,
        expected_batch_size=float(records),
        dataset_size_is_public=True,
        clipping=clipping,
    )


def schedules(
    make: Callable[[Tensor], nn.Module], public: tuple[Tensor, Tensor], plan: Plan, rate: float, size: dict[str, int]
) -> dict[str, tuple[Plan, float | Listed]]:
    """Noise of one budget Σ σ⁻², spent in several ways."""
    sigma = plan.at(0).noise_multiplier
    budget = plan.steps / sigma**2
    measured = estimate_influence(
        make(public[0]),
        losses,
        public,
        steps=plan.steps,
        learning_rate=rate,
        perturbation=plan.at(0).gradient_noise,
        places=size["places"],
    )
    learned: LearnedPolicy = learn_policy(
        make(public[0]),
        losses,
        tuple(part[:200] for part in public),
        steps=plan.steps,
        budget=budget,
        max_grad_norm=1.0,
        expected_batch_size=plan.at(0).expected_batch_size,
        learning_rate=rate,
        rounds=size["rounds"],
    )
    shapes: dict[str, tuple[Listed, float | Listed]] = {
        "uniform": (uniform_noise(plan.steps, budget=budget), rate),
        "closed form, κ = 20": (least_noise(influence(plan.steps, condition_number=20.0), budget=budget), rate),
        "measured on public data": (least_noise(measured, budget=budget), rate),
        "measured, one rate": (least_noise(exponential_influence(measured), budget=budget), rate),
        "learned noise": (learned.noise_shape(), rate),
        "learned noise and rate": (learned.noise_shape(), learned.learning_rate_schedule()),
    }
    return {name: (replace(plan, noise_multiplier=noise), pace) for name, (noise, pace) in shapes.items()}


def dynamic(size: dict[str, int]) -> dict[str, object]:
    private, public = digits((3, 5), size["records"]), digits((4, 6), size["records"])
    adult_task, adult_public = adult(size["records"])
    tasks = {
        "logistic regression, digits 3 and 5": (logistic, private, public[0], 0.3),
        "network 196-16-2, digits 3 and 5": (network, private, public[0], 0.5),
        "logistic regression, Adult": (logistic, adult_task, adult_public, 0.3),
    }
    found: dict[str, object] = {}
    for name, (make, task, open_data, epsilon) in tasks.items():
        plan = base_plan(len(task[0][0]), epsilon, size["steps"])
        rate = best_rate(make, (open_data, open_data), plan, (0.1, 0.3, 1.0, 3.0))
        rows: dict[str, dict[str, float]] = {}
        reference: list[float] = []
        for way, (chosen, pace) in schedules(make, open_data, plan, rate, size).items():
            runs = [trained(make, task, chosen, seed=seed, rate=pace) for seed in range(size["seeds"])]
            noise = [chosen.at(step).noise_multiplier for step in range(plan.steps)]
            alpha = noise_to_signal(
                dimensions=sum(p.numel() for p in make(task[0][0]).parameters()),
                lipschitz=1.0,
                budget=sum(value**-2 for value in noise),
                smoothness=1.0,
                records=float(len(task[0][0])),
                excess=0.6,
            )
            bound = excess_risk_bound(noise, condition_number=20.0, alpha=alpha)
            # One seed draws the same noise for every schedule: differences are taken seed by seed.
            reference = reference or [run["loss"] for run in runs]
            changes = [100 * (run["loss"] / other - 1) for run, other in zip(runs, reference, strict=True)]
            rows[way] = {**mean_of(runs), "bound": bound, "epsilon": chosen.guarantee().epsilon}
            rows[way] |= {"first_over_last": noise[0] / noise[-1], "change_percent": statistics.fmean(changes)}
            rows[way]["change_sd"] = statistics.stdev(changes)
        table(name, rows, ("loss", "change_percent", "change_sd", "accuracy", "bound", "first_over_last", "epsilon"))
        found[name] = {"rate": rate, "rows": rows}
    return found


def best_rate(
    make: Callable[[Tensor], nn.Module],
    task: Task,
    plan: Plan,
    rates: Iterable[float] = (0.5, 2.0, 8.0),
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    rule: GradientFilter | None = None,
) -> float:
    """The learning rate with the least loss on public records."""

    def loss(rate: float) -> float:
        made = None if optimizer is None else partial(optimizer, lr=rate)
        run = trained(make, task, plan, seed=100, rate=rate, optimizer=made, rule=rule)
        return run["loss"] if run["loss"] == run["loss"] else float("inf")

    return min(rates, key=loss)


def clippings(size: dict[str, int]) -> dict[str, object]:
    private, public = digits((3, 5), size["records"]), digits((4, 6), size["records"])
    methods: dict[str, Clipping] = {
        "flat": FlatClipping(),
        "per layer": GroupedClipping(by="layer"),
        "automatic": AutomaticClipping(),
        "psac": PsacClipping(),
        "global": GlobalClipping(),
        "quantile": QuantileClipping(quantile=0.5, count_noise=len(private[0][0]) / 20),
        "adaclip": AdaClip(),
    }
    rows: dict[str, dict[str, float]] = {}
    for name, method in methods.items():
        plan = base_plan(len(private[0][0]), 1.0, size["steps"], method)
        rate = best_rate(network, public, plan)
        runs = [trained(network, private, plan, seed=seed, rate=rate) for seed in range(size["seeds"])]
        rows[name] = {**mean_of(runs), "rate": rate, "noise": plan.at(0).noise_multiplier}
    table(
        "clipping methods, network on digits 3 and 5, ε = 1", rows, ("loss", "loss_sd", "accuracy", "rate", "seconds")
    )
    return rows


def optimizers(size: dict[str, int]) -> dict[str, object]:
    private, public = digits((3, 5), size["records"]), digits((4, 6), size["records"])
    plan = base_plan(len(private[0][0]), 0.5, size["steps"])
    noise = plan.at(0).gradient_noise
    bias_corrected = partial(AdamBC, noise_stddev=noise, floor=(0.1 * noise) ** 2)
    fast, slow = (0.5, 2.0, 8.0), (0.003, 0.01, 0.03, 0.1)
    choices = {
        "SGD": (torch.optim.SGD, None, fast),
        "SGD, low pass": (torch.optim.SGD, LowPass(), fast),
        "SGD, debiased momentum": (torch.optim.SGD, DebiasedMomentum(), fast),
        "SGD, Kalman": (torch.optim.SGD, Kalman(gain=0.5), fast),
        "Adam": (torch.optim.Adam, None, slow),
        "AdamBC": (bias_corrected, None, slow),
        "AdamBC, low pass": (bias_corrected, LowPass(), slow),
    }
    rows: dict[str, dict[str, float]] = {}
    for name, (kind, rule, rates) in choices.items():
        rate = best_rate(network, public, plan, rates, kind, rule)
        runs = [
            trained(network, private, plan, seed=seed, rate=rate, optimizer=partial(kind, lr=rate), rule=rule)
            for seed in range(size["seeds"])
        ]
        rows[name] = {**mean_of(runs), "rate": rate}
    table("optimizers, network on digits 3 and 5, ε = 0.5", rows, ("loss", "loss_sd", "accuracy", "rate"))
    return rows


def projections(size: dict[str, int]) -> dict[str, object]:
    """One noise multiplier for all; what it costs and how long a step takes, runs taking turns."""
    private = digits((3, 5), size["records"])
    flat = base_plan(len(private[0][0]), 1.0, max(3, size["steps"] // 6))
    ways: dict[str, Clipping] = {"exact": FlatClipping()}
    ways |= {f"r = {count}": ProjectedClipping(projections=count) for count in (1, 5, 10, 50)}
    plans = {name: replace(flat, clipping=method) for name, method in ways.items()}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in plans}
    for seed in range(size["seeds"]):
        for name, plan in plans.items():
            runs[name].append(trained(network, private, plan, seed=seed, rate=2.0))
    rows = {name: {**mean_of(found), "epsilon": plans[name].guarantee().epsilon} for name, found in runs.items()}
    fastest = min(run["seconds"] for run in runs["exact"])
    for name, found in runs.items():
        rows[name]["time_ratio"] = min(run["seconds"] for run in found) / fastest
    table("norms by projections, network on digits 3 and 5", rows, ("loss", "accuracy", "epsilon", "time_ratio"))
    return rows


def table(title: str, rows: dict[str, dict[str, float]], columns: tuple[str, ...]) -> None:
    print(f"\n{title}\n{'':26}" + "".join(f"{column:>16}" for column in columns))
    for name, row in rows.items():
        print(f"{name:26}" + "".join(f"{row[column]:16.4g}" for column in columns), flush=True)


def without_infinity(body: object) -> object:
    """JSON has no infinity: null."""
    if isinstance(body, dict):
        return {name: without_infinity(value) for name, value in body.items()}
    return None if isinstance(body, float) and math.isinf(body) else body


def figures(found: dict[str, dict[str, object]], folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained", sharey=True)
    for axis, (name, body) in zip(axes, found["dynamic"].items(), strict=True):
        rows = body["rows"]  # type: ignore[index]
        change = [row["change_percent"] for row in rows.values()]
        error = [row.get("change_sd", 0.0) for row in rows.values()]
        axis.barh(list(rows), change, xerr=error, color="#4477aa", error_kw={"lw": 1})
        axis.axvline(0, color="black", lw=0.8)
        axis.invert_yaxis()
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("final loss against uniform noise, %")
    figure.savefig(folder / "policies-schedules.png", dpi=110)
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for axis, part, title in zip(
        axes,
        ("clippings", "optimizers", "projections"),
        ("clipping, ε = 1", "optimizers, ε = 0.5", "norms"),
        strict=True,
    ):
        rows = found[part]
        axis.barh(list(rows), [row["loss"] for row in rows.values()], xerr=[row["loss_sd"] for row in rows.values()])  # type: ignore[index]
        axis.invert_yaxis()
        axis.set_title(f"{title}: network on digits 3 and 5", fontsize=9)
        axis.set_xlabel("final training loss")
    figure.savefig(folder / "policies-methods.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two seeds, few records; nothing is kept")
    parts = {part.__name__: part for part in (dynamic, clippings, optimizers, projections)}
    parser.add_argument("--only", choices=sorted(parts), help="one part; the others' results are kept")
    chosen = parser.parse_args()
    quick = chosen.quick
    torch.set_num_threads(1)
    size = {"records": 2000, "steps": 50, "seeds": 5, "places": 8, "rounds": 25}
    if quick:
        size = {"records": 500, "steps": 10, "seeds": 2, "places": 3, "rounds": 4}
    start = time.perf_counter()
    found = {name: part(size) for name, part in parts.items() if chosen.only in (None, name)}
    print(f"\n{time.perf_counter() - start:.0f} s on {platform.machine()}, one thread")
    if not quick:
        kept = HERE / "results" / "policies.json"
        body = json.loads(kept.read_text()) if chosen.only and kept.is_file() else {}
        body |= {"made": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "size": size, **found}
        body = without_infinity(body)
        kept.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n")
        if set(parts) <= set(body):
            figures(body, HERE.parent / "docs" / "images")


if __name__ == "__main__":
    main()
