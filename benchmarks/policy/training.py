"""Tasks and single private runs that the parts of `./run bench policies` share."""

import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from sordino import Plan, data, fit
from sordino.clipping import Clipping
from sordino.optimizers import GradientFilter
from sordino.randomness import KeyedRNG
from sordino.research import restore_parameters
from sordino.schedules import ListSchedule

DELTA = 1e-5
Task = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def digits(pair: tuple[int, int], count: int) -> Task:
    mnist = data.load_dataset("mnist")

    def part(split: object) -> tuple[Tensor, Tensor]:
        x, y = split.tensors()  # type: ignore[attr-defined]
        keep = ((y == pair[0]) | (y == pair[1])).nonzero().flatten()[:count]
        small = nn.functional.avg_pool2d(x[keep].reshape(-1, 1, 28, 28).float(), 2).flatten(1)
        return 2 * nn.functional.normalize(small, dim=1), (y[keep] == pair[1]).long()

    return part(mnist.train), part(mnist.test)


def adult(count: int) -> tuple[Task, tuple[Tensor, Tensor]]:
    loaded = data.load_dataset("adult")
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
    rate: float | ListSchedule,
    optimizer: Optimizers | None = None,
    rule: GradientFilter | None = None,
) -> dict[str, float]:
    """One private run: last training loss, test accuracy, seconds a step."""
    (x, y), (tx, ty) = task
    model = make(x)
    first = rate.values[0] if isinstance(rate, ListSchedule) else rate
    made = (optimizer or partial(torch.optim.SGD, lr=first))(list(model.parameters()))
    scheduler = None
    if isinstance(rate, ListSchedule):
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
        rng=KeyedRNG(seed=seed, reproducible=True),
    )
    seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
    restore_parameters(made)
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


def table(title: str, rows: dict[str, dict[str, float]], columns: tuple[str, ...]) -> None:
    print(f"\n{title}\n{'':26}" + "".join(f"{column:>16}" for column in columns))
    for name, row in rows.items():
        print(f"{name:26}" + "".join(f"{row[column]:16.4g}" for column in columns), flush=True)
