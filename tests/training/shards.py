"""One process of several that train a model of `fully_shard`, run by torch's launcher; alone, the same model unsharded.

It trains as each case of its first argument says, one after the other, and writes what it saw.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import CLIPPINGS, Stop, loss, nothing, plan_of, records
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from sordino import PrivacyEngine
from sordino.errors import SordinoError
from sordino.randomness import KeyedRNG
from sordino.training import PerformanceOptions
from sordino.training import sharded as sharding
from sordino.training.averaging import ExponentialWeightAverage
from sordino.training.fit import fit

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.005, momentum=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.05),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.05),
}


class Scaled(nn.Module):
    """A parameter that no rule reads, and a layer inside that is used twice."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.inner = nn.Linear(5, 5)

    def forward(self, x):
        return torch.tanh(self.inner(self.inner(x))) * self.gain


def wide():
    """Enough parameters to measure noise."""
    model = nn.Sequential(nn.Linear(4, 4001), nn.Linear(4001, 5, bias=False))
    for value in model.parameters():
        nn.init.zeros_(value)
    return model


def net():
    """Rows that no number of processes divides, and a layer with fewer rows than processes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), Scaled(), nn.LayerNorm(5), nn.Linear(5, 1), nn.Tanh(), nn.Linear(1, 2)
    )


def sharded(model, settings):
    how, options = settings.get("shard", "blocks"), {}
    if settings.get("bfloat16"):
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    if how == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if how == "columns":
        options["shard_placement_fn"] = lambda parameter: Shard(1) if parameter.shape == (5, 4) else Shard(0)
    if how == "hsdp":
        options["mesh"] = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    if how == "tensor":
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
        return model
    if how == "some":
        fully_shard(model[0])
        fully_shard(model[4])
    elif how in ("blocks", "parts"):
        for child in model:
            if any(True for _ in child.parameters()):
                fully_shard(child, **options)
    # Of "parts" the model itself is left as it is; its blocks are what is sharded, of "some" a few of them.
    return model if how in ("parts", "some") else fully_shard(model, **options)


def coupled(model, x, y):
    """Not one record by itself: refused, in the middle of a pass of a gathered model."""
    return loss(model, x - x.mean(0), y)


def own_loop(model, settings, folder):
    x, y = records(settings.get("records", 24))
    seeded = {"seed": settings["seed"], "reproducible": True} if "seed" in settings else {}
    engine = PrivacyEngine(**seeded, clipping_mode=settings.get("clipping_mode", "fast"))
    optimizer = OPTIMIZERS[settings.get("optimizer", "sgd")](model.parameters())
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=settings["engine"]),
        noise_multiplier=settings.get("noise", 0.0),
        max_grad_norm=0.3,
        microbatch_size=settings.get("microbatch_size"),
        clipping=CLIPPINGS[settings.get("clipping", "flat")],
    )
    file = folder / f"{settings.get('name')}.safetensors"
    if settings.get("load"):
        engine.load_checkpoint(path=file, module=model, optimizer=optimizer)
    for _ in range(settings.get("epochs", 3)):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        # An evaluation between epochs, as everyone does it.
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
    if settings.get("save"):
        engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    engine.detach()
    return {"epsilon": engine.get_epsilon(1e-5)}


def by_fit(model, settings, folder):
    x, y = records(settings.get("records", 24))
    seen = []

    def stop(done):
        seen.append(done)
        if settings.get("stop") == done:
            raise Stop

    given = {"on_step": stop}
    if "seed" in settings:
        given["rng"] = KeyedRNG(seed=settings["seed"], reproducible=True)
    if settings.get("run"):
        given |= {settings["run"]: folder / settings["name"], "checkpoint_every": settings.get("every")}
    if settings.get("average"):
        given["averaging"] = ExponentialWeightAverage(decay=0.5)
    result = fit(
        model,
        nothing if settings.get("wide") else coupled if settings.get("coupled") else loss,
        (x, y),
        plan_of(settings),
        optimizer=OPTIMIZERS[settings.get("optimizer", "sgd")],
        performance=PerformanceOptions(
            microbatch_size=settings.get("microbatch_size"),
            clipping_mode=settings.get("clipping_mode", "fast"),
            compile=settings.get("compile", False),
        ),
        progress=False,
        **given,
    )
    return {"epsilon": result.guarantee.epsilon, "steps": result.steps, "seen": seen}


def case(settings, folder, rank):
    """What one process saw of one training."""
    outcome = {"rank": rank}
    # Small exchanges, so that a layer's sum is gone when its second use comes.
    sharding._BUCKET = settings.get("bucket", 32 << 20)
    try:
        model = wide() if settings.get("wide") else net()
        model = sharded(model, settings) if dist.is_initialized() else model
        try:
            outcome |= own_loop(model, settings, folder) if settings.get("engine") else by_fit(model, settings, folder)
        except SordinoError as error:
            outcome |= {"error": type(error).__name__, "message": str(error)}
            if not settings.get("coupled"):
                return outcome
        outcome["weights"] = [whole(value).flatten().tolist() for value in model.parameters()]
        outcome["names"] = [name for name, _ in model.named_parameters()]
        # Training of the user's own goes on as if nothing had been: torch averages ordinary gradients again.
        model.zero_grad()
        nn.functional.cross_entropy(model(records()[0]).float(), records()[1]).backward()
        outcome["ordinary"] = [whole(value.grad).double().flatten().tolist() for value in model.parameters()]
        outcome["sharded"] = any(isinstance(value, DTensor) for value in model.parameters())
    except Stop:
        outcome["stopped"] = True
    return outcome


def whole(value):
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def main():
    cases, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    outcomes = [case(settings, folder, rank) for settings in cases]
    (folder / f"rank{rank}.json").write_text(json.dumps(outcomes))
    if dist.is_initialized():
        # Nobody leaves while another still exchanges: what a closing group does to the others is not what is tested.
        dist.barrier()
        time.sleep(0.5)
        os._exit(0)


if __name__ == "__main__":
    main()
