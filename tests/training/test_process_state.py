"""Importing sordino and training with it leave the process as it was."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import sordino
from sordino.training import PerformanceOptions
from sordino.training.plan import Plan

COMPARED = """
import gc, os, signal, sys, threading, warnings
import torch
import torch._dynamo
import scipy.optimize, scipy.special, sklearn.base  # which set filters of warnings
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

def state():
    return {
        "signal": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()),
        "modes": (torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()),
        "generators": torch.get_rng_state().tolist(),
        "optimizer hooks": [
            dict(hooks) for hooks in (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
        ],
        "module hooks": [dict(getattr(modules, name)) for name in vars(modules) if name.startswith("_global_") and
                         name.endswith("hooks")],
        "dynamo": torch._dynamo.config.get_config_copy(),
        "garbage": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(gc.callbacks)),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "finders": list(sys.meta_path),
        "hooks": (sys.excepthook, sys.gettrace(), sys.getprofile(), threading.excepthook, sys.getrecursionlimit()),
        "folder": os.getcwd(),
        "tensor": {name: id(value) for name, value in vars(torch.Tensor).items()},
        "functional": {name: id(value) for name, value in vars(torch.nn.functional).items() if callable(value)},
    }

def loss(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y, reduction="none")

model, records = torch.nn.Linear(3, 2), (torch.randn(40, 3), torch.randint(2, (40,)))
other = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*records), batch_size=20)
before = state()

def compare(what):
    now = state()
    assert {name for name in before if before[name] != now[name]} == set(), what

import sordino, sordino.training.engine, sordino.training.fit, sordino.accounting, sordino.audit, sordino.estimators
compare("import")
plan = sordino.Plan(
    noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5, steps=2, expected_batch_size=20.0, delta=1e-5
)
sordino.fit(model, loss, records, plan, progress=False)
compare("fit")
engine = sordino.PrivacyEngine()
module, optimizer, private = engine.make_private(
    module=other, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
)
for x, y in private:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(module(x), y).backward()
    optimizer.step()
engine.detach()
compare("engine")
"""


def test_import_fit_and_engine_leave_the_process_as_it_was():
    done = subprocess.run([sys.executable, "-c", COMPARED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def fitted(**performance):
    plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5, steps=1, expected_batch_size=4.0, delta=1e-5)
    records = torch.randn(8, 3), torch.randint(2, (8,))

    def loss(model, x, y):
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    # So many weights that their noise is drawn on several threads.
    model = nn.Sequential(nn.Linear(3, 1000), nn.Linear(1000, 700), nn.Linear(700, 2))
    sordino.fit(model, loss, records, plan, progress=False, performance=PerformanceOptions(**performance))


class Library:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(name)


@pytest.mark.parametrize("asked", [False, True])
def test_allocator_and_idle_threads_are_touched_only_when_that_is_asked_for(asked, monkeypatch):
    library = Library()
    monkeypatch.setattr("sordino.training.plan._glibc", lambda: library)
    monkeypatch.setattr("sordino.mechanisms.tensor_noise._openmp", lambda: library)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fitted(tune_process=asked)
    finally:
        torch.set_num_threads(threads)
    assert set(library.calls) == ({"mallopt", "malloc_trim", "omp_pause_resource_all"} if asked else set())


HOOKS = """
import torch, torch.optim.optimizer as torch_optimizer
from torch import nn
import sordino

hooks = torch_optimizer._global_optimizer_pre_hooks
counts = [len(hooks)]

def engine_for(model):
    engine = sordino.PrivacyEngine()
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader([torch.zeros(2)] * 4, batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    return engine

first, second = engine_for(nn.Linear(2, 1)), engine_for(nn.Linear(2, 1))
counts.append(len(hooks))
first.detach()
counts.append(len(hooks))
second.detach()
counts.append(len(hooks))
print(counts)
"""


def test_the_hook_on_all_optimizers_is_there_only_while_a_model_is_private():
    """In a process of its own: models that other tests left private keep the hook."""
    done = subprocess.run([sys.executable, "-c", HOOKS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[0, 1, 1, 0]"
