"""Dynamic schedules, clipping methods, projected norms, optimizers, learned policies: `./run bench policies [--quick]`.

Digits 3 and 5 and UCI Adult play the private data, digits 4 and 6 and a part of Adult the public ones. Learning rates
are picked on the public task, schedules are made from it; the private task is run once for each seed.
"""

import argparse
import json
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from policy.figures import figures
from policy.joint import joint
from policy.norms import one, projections
from policy.training import adult, base_plan, best_rate, digits, logistic, losses, mean_of, network, table, trained
from torch import Tensor, nn

from sordino import Plan
from sordino.clipping import (
    AdaClip,
    AutomaticClipping,
    Clipping,
    FlatClipping,
    GlobalClipping,
    GroupedClipping,
    PsacClipping,
    QuantileClipping,
)
from sordino.optimizers import AdamBC
from sordino.research import (
    DebiasedMomentum,
    Kalman,
    LearnedSchedule,
    LowPass,
    constant_noise_schedule,
    estimate_influence,
    excess_risk_bound,
    exponential_influence,
    learn_schedule,
    noise_influence,
    noise_to_signal,
    optimal_noise_schedule,
)
from sordino.schedules import ListSchedule

HERE = Path(__file__).parent


def schedules(
    make: Callable[[Tensor], nn.Module], public: tuple[Tensor, Tensor], plan: Plan, rate: float, size: dict[str, int]
) -> dict[str, tuple[Plan, float | ListSchedule]]:
    """Noise of one budget Σ σ⁻², spent in several ways."""
    sigma = plan.step_plan(0).noise_multiplier
    budget = plan.steps / sigma**2
    measured = estimate_influence(
        make(public[0]),
        losses,
        public,
        steps=plan.steps,
        learning_rate=rate,
        perturbation=plan.step_plan(0).gradient_noise_stddev,
        places=size["places"],
    )
    learned: LearnedSchedule = learn_schedule(
        make(public[0]),
        losses,
        tuple(part[:200] for part in public),
        steps=plan.steps,
        budget=budget,
        max_grad_norm=1.0,
        expected_batch_size=plan.step_plan(0).expected_batch_size,
        learning_rate=rate,
        rounds=size["rounds"],
    )
    shapes: dict[str, tuple[ListSchedule, float | ListSchedule]] = {
        "uniform": (constant_noise_schedule(plan.steps, budget=budget), rate),
        "closed form, κ = 20": (
            optimal_noise_schedule(noise_influence(plan.steps, condition_number=20.0), budget=budget),
            rate,
        ),
        "measured on public data": (optimal_noise_schedule(measured, budget=budget), rate),
        "measured, one rate": (optimal_noise_schedule(exponential_influence(measured), budget=budget), rate),
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
            noise = [chosen.step_plan(step).noise_multiplier for step in range(plan.steps)]
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
            rows[way]["noise"] = noise
        table(name, rows, ("loss", "change_percent", "change_sd", "accuracy", "bound", "first_over_last", "epsilon"))
        found[name] = {"rate": rate, "rows": rows}
    return found


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
        rows[name] = {**mean_of(runs), "rate": rate, "noise": plan.step_plan(0).noise_multiplier}
    table(
        "clipping methods, network on digits 3 and 5, ε = 1", rows, ("loss", "loss_sd", "accuracy", "rate", "seconds")
    )
    return rows


def optimizers(size: dict[str, int]) -> dict[str, object]:
    private, public = digits((3, 5), size["records"]), digits((4, 6), size["records"])
    plan = base_plan(len(private[0][0]), 0.5, size["steps"])
    noise = plan.step_plan(0).gradient_noise_stddev
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


def without_infinity(body: object) -> object:
    """JSON has no infinity: null."""
    if isinstance(body, dict):
        return {name: without_infinity(value) for name, value in body.items()}
    return None if isinstance(body, float) and math.isinf(body) else body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two seeds, few records; nothing is kept")
    parts = {part.__name__: part for part in (dynamic, clippings, optimizers, projections, joint)}
    parser.add_argument("--only", choices=sorted(parts), help="one part; the others' results are kept")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "WIDTH"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    quick = chosen.quick
    torch.set_num_threads(1)
    if chosen.one:
        warnings.simplefilter("ignore")
        print(json.dumps(one(chosen.one[0], int(chosen.one[1]))))
        return
    size = {"records": 2000, "steps": 50, "seeds": 5, "places": 8, "rounds": 25, "width": 1024}
    if quick:
        size = {"records": 500, "steps": 10, "seeds": 2, "places": 3, "rounds": 4, "width": 256}
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
