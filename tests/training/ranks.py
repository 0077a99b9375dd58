"""One process of several: run by torch's launcher, it trains as its first argument says and writes what it saw."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from sordino import PrivacyEngine
from sordino.clipping import AdaClip, FlatClipping, GroupedClipping, QuantileClipping
from sordino.definitions import NeighboringRelation
from sordino.errors import SordinoError
from sordino.ledger import Ledger
from sordino.mechanisms.correlated import FixedEpochOrder, optimize_banded
from sordino.randomness import KeyedRNG
from sordino.training import AdaptiveBudget, CorrelatedNoise, PerformanceOptions, Plan
from sordino.training.fit import fit

CLIPPINGS = {
    "flat": FlatClipping(),
    "grouped": GroupedClipping(by="layer"),
    "quantile": QuantileClipping(quantile=0.5, count_noise=50.0),
    "adaclip": AdaClip(),
}


def records(count=24):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


def net():
    """Other weights in every process, as a careless script has them."""
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def budget_of(settings):
    """Noise that falls as gradients shrink; every process but the first would choose another."""
    rank = int(os.environ.get("RANK", "0"))

    def choose(step, released):
        norm = 1.0 if released.last_gradient_norm is None else released.last_gradient_norm
        return 2.0 + min(norm, 1.0) + rank

    return AdaptiveBudget(
        epsilon=settings["budget"], delta=1e-5, choose=choose, norm_budget_fraction=settings.get("norm_budget_fraction")
    )


def halting(halt, batches, folder):
    """A loss in whose call, within a step, one process says that it is there and waits to be killed."""

    def waits(model, x, y):
        if batches and batches[-1] == halt["after"] and int(os.environ["RANK"]) == halt["rank"]:
            (folder / "pid").write_text(str(os.getpid()))
            time.sleep(300)
        return loss(model, x, y)

    return waits


def nothing(model, x, y):
    return 0 * model(x).sum(1)


def plan_of(settings):
    values = {
        "noise_multiplier": 0.0,
        "max_grad_norm": 0.3,
        "sample_rate": 1.0,
        "steps": 3,
        "expected_batch_size": 24.0,
        "delta": 1e-5,
        **settings.get("plan", {}),
    }
    if "clipping" in settings:
        values["clipping"] = CLIPPINGS[settings["clipping"]]
    if settings.get("correlated"):
        values |= {
            "correlated_noise": CorrelatedNoise(
                strategy=optimize_banded(2, steps=values["steps"]),
                participation=FixedEpochOrder(steps_per_epoch=round(1 / values["sample_rate"])),
            ),
            "poisson_sampling": False,
            "neighboring_relation": NeighboringRelation.ADD_OR_REMOVE_ONE,
        }
    return Plan(**values)


class Stop(Exception):
    pass


def own_loop(model, settings, given):
    """Two epochs of a loop of the user's own; the whole dataset in each batch unless a rate is given."""
    x, y = records(settings.get("records", 24))
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data) if settings.get("sampler") else None
    loader = DataLoader(data, batch_size=settings["engine"], sampler=sampler)
    engine = PrivacyEngine(**given)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=settings.get("noise", 0.0),
        max_grad_norm=0.3,
        microbatch_size=settings.get("microbatch_size"),
        budget=budget_of(settings) if settings.get("budget") else None,
    )
    seen = []
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            seen.append(loader.is_last_microbatch)
    return {"epsilon": engine.get_epsilon(1e-5), "seen": sum(seen)}


def main():
    settings, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model = nn.Linear(200, 100, bias=False) if settings.get("wide") else net()
    if settings.get("wide"):
        nn.init.constant_(model.weight, float(rank))
    x, y = records(settings.get("records", 24) + settings.get("uneven", 0) * rank)
    if settings.get("wide"):
        x = torch.zeros(len(x), 200)
    start = {}
    batches = []

    def seen(done):
        batches.append(done)
        if settings.get("stop") == done:
            raise Stop

    given = {"performance": PerformanceOptions(microbatch_size=settings.get("microbatch_size")), "on_step": seen}
    if "seed" in settings:
        given["rng"] = KeyedRNG(seed=settings["seed"], reproducible=True)
    if settings.get("run"):
        given |= {settings["run"]: folder / "run", "checkpoint_every": settings.get("every")}
    if settings.get("epsilon"):
        given["ledger"] = Ledger(folder / "ledger.db").account("records")
    if settings.get("budget"):
        given["budget"] = budget_of(settings)
    outcome, halt = {"rank": rank}, settings.get("halt")
    wrapped = DistributedDataParallel(model) if settings.get("ddp") else model
    if settings.get("wide"):
        start["weight"] = torch.zeros(100, 200)
    try:
        if settings.get("engine"):
            seeded = {"seed": settings["seed"], "reproducible": True} if "seed" in settings else {}
            outcome |= own_loop(wrapped, settings, seeded)
            return
        result = fit(
            wrapped,
            nothing if settings.get("wide") else halting(halt, batches, folder) if halt else loss,
            (x, y),
            plan_of(settings),
            progress=False,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            **given,
        )
        outcome |= {"steps": result.steps, "epsilon": result.guarantee.epsilon, "seen": batches}
    except SordinoError as error:
        outcome |= {"error": type(error).__name__, "message": str(error)}
    except Stop:
        outcome["stopped"] = True
    finally:
        finish(outcome, model, folder)


def finish(outcome, model, folder):
    outcome["weights"] = [value.detach().flatten().tolist() for value in model.parameters()]
    (folder / f"rank{outcome['rank']}.json").write_text(json.dumps(outcome))
    if dist.is_initialized() and not outcome.get("message", "").startswith("all processes"):
        # Nobody leaves while another still exchanges: what a closing group does to the others is not what is tested.
        wanted = [folder / f"rank{rank}.json" for rank in range(dist.get_world_size())]
        while not all(file.exists() for file in wanted):
            time.sleep(0.05)
        time.sleep(0.5)
        os._exit(0)


if __name__ == "__main__":
    main()
