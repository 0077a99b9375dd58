"""Ways to take a training step: without privacy, with this library, and with what else there is.

Every private way clips each record to norm 1 and adds Gaussian noise to every trained parameter. This library's noise
comes from its cryptographic generator; the others' from torch's.
"""

import importlib.util
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

from sordino.clipping import FlatClipping, GroupedClipping
from sordino.gradients import GradientCapture
from sordino.randomness import KeyedRNG
from sordino.sampling import Microbatch
from sordino.training import PerformanceOptions, Plan, PrivateStep
from sordino.training.accumulators import ClippedSumAccumulator
from sordino.training.compiled_step import CompiledStep
from sordino.training.plan import ClippingMode
from steps.cases import Case

__all__ = ["Step", "compiled_step", "peers", "plain_step", "private_step"]

Step = Callable[[], None]


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)


def plain_step(case: Case) -> Step:
    """A step of the usual loop. As in the private ones, no gradients are left behind it."""
    model = case.build().train()
    optimizer = optimizer_of(model)

    def step() -> None:
        case.losses(model).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plan_for(case: Case, noise_multiplier: float = 1.0, *, memory: ClippingMode = "fast") -> Plan:
    return Plan(
        clipping=GroupedClipping() if memory == "groupwise" else FlatClipping(),
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
        sample_rate=0.01,
        steps=1,
        expected_batch_size=float(case.records),
        delta=1e-5,
    )


def private_step(
    case: Case, *, noise_multiplier: float = 1.0, memory: ClippingMode = "fast", autotune: bool = False
) -> Step:
    """What `fit` does for one logical batch after it was drawn; "groupwise" clips every layer apart."""
    model = case.build().train()
    optimizer = optimizer_of(model)
    capture = PerformanceOptions(clipping_mode=memory, autotune=autotune).recorder(model, model.parameters())
    plan = plan_for(case, noise_multiplier, memory=memory)
    private = PrivateStep(capture, plan, KeyedRNG(), clipping_mode=memory)
    number = 0

    def step() -> None:
        nonlocal number
        chunk = Microbatch(step=number, index=0, is_last=True, indices=np.arange(case.records))
        with private.capturing(chunk):
            private.backward(case.losses(model))
        private.add(chunk)
        private.finish()
        optimizer.step()
        optimizer.zero_grad()
        number += 1

    return step


def compiled_step(case: Case) -> Step:
    """The same with the graphs of ``PerformanceOptions(compile=True)``."""
    model = case.build().train()
    optimizer = optimizer_of(model)
    capture, plan, number = GradientCapture(model), plan_for(case), 0
    compiled = CompiledStep(capture, plan, lambda model, x, y: case.losses_of(model(x), y))
    private = PrivateStep(capture, plan, KeyedRNG())

    def step() -> None:
        nonlocal number
        chunk = Microbatch(step=number, index=0, is_last=True, indices=np.arange(case.records))
        private.begin(chunk)
        assert isinstance(private.bounds, ClippedSumAccumulator)
        # The first batch is left to the ordinary way, where its records are checked.
        sums = compiled.sums(private.bounds, case.batch) or compiled.sums(private.bounds, case.batch)
        assert sums is not None
        private.add_sums(chunk, sums)
        private.finish()
        optimizer.step()
        optimizer.zero_grad()
        number += 1

    return step


def peers() -> dict[str, Callable[[Case], Step]]:
    """The other ways that are installed here, by name."""
    ways: dict[str, Callable[[Case], Step]] = {"vmap": _vmap_step}
    if importlib.util.find_spec("opacus") is not None:
        for mode in ("hooks", "ghost", "functorch", "ew"):
            ways[f"Opacus {mode}"] = lambda case, mode=mode: _opacus_step(case, mode)
    return ways


def _vmap_step(case: Case) -> Step:
    """Per-record gradients by ``vmap(grad)``, clipped and added up."""
    model = case.build().train()
    optimizer = optimizer_of(model)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output = functional_call(model, {**values, **frozen}, (x[None],))
        return case.losses_of(output, y[None])[0]

    per_record = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")

    def step() -> None:
        gradients = per_record({name: value.detach() for name, value in trained.items()}, *case.batch)
        norms = torch.stack([value.flatten(1).norm(dim=1) for value in gradients.values()]).norm(dim=0)
        factors = (1 / (norms + 1e-6)).clamp(max=1)
        for name, value in trained.items():
            total = torch.einsum("b,b...->...", factors, gradients[name])
            value.grad = total.add_(torch.randn_like(total)).div_(case.records)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _opacus_step(case: Case, mode: str) -> Step:
    """Opacus' engine in one of its modes, with its own LSTM where there is one; one fixed batch a step."""
    from opacus import PrivacyEngine
    from opacus.validators import ModuleValidator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ModuleValidator.fix(case.build().train())
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer_of(model),
            criterion=nn.CrossEntropyLoss(reduction="mean"),
            data_loader=DataLoader(TensorDataset(*case.batch), batch_size=case.records),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
    model, optimizer = made[0], made[1]
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
    inputs, targets = case.batch

    def step() -> None:
        optimizer.zero_grad()
        outputs = model(inputs)
        if targets.dim() == 1:
            loss = criterion(outputs, targets)
        elif mode == "ghost":
            loss = criterion(outputs.flatten(0, 1), targets.flatten(), shape=targets.shape)
        else:
            loss = criterion(outputs.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()

    return step
