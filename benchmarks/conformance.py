"""Who keeps the bound: hard models through one step of each library, without noise, and what came of it.

Each case trains one step on records that could be clipped wrongly. "right" means that the model was refused, or that
the sum moved by no more than the clipping norm; everything else is said. Opacus takes part where it is installed.

    ./run bench conformance
"""

import importlib.util
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from steps.clock import machine
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sordino import Plan, fit

RESULTS = Path(__file__).parent / "results"
C = 1.0
Train = Callable[[nn.Module, Tensor], None]


class Tied(nn.Module):
    """One matrix in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Twice(nn.Module):
    """One layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Functional(Twice):
    """A layer's matrix used once more by a function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.layer(x)), self.layer.weight)


class Scaled(Twice):
    """A bare parameter of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class Centred(Twice):
    """Every record minus the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return hidden - hidden.mean(0)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied matrices": Tied,
    "a layer called twice": Twice,
    "a matrix used by a function": Functional,
    "a bare parameter": Scaled,
    "minus the mean of the batch": Centred,
    "batch normalisation": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)),
}


def sordino_step(model: nn.Module, x: Tensor) -> None:
    plan = Plan(
        noise_multiplier=0.0, max_grad_norm=C, sample_rate=1.0, steps=1, expected_batch_size=float(len(x)), delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=float(len(x)))
    fit(model, lambda m, x: 100 * m(x).square().sum(1), (x,), plan, optimizer=optimizer, progress=False)


def opacus_step(model: nn.Module, x: Tensor) -> None:
    from opacus import PrivacyEngine

    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=float(len(x))),
        data_loader=DataLoader(TensorDataset(x), batch_size=len(x)),
        noise_multiplier=0.0,
        max_grad_norm=C,
        poisson_sampling=False,
    )
    for (batch,) in loader:
        (100 * model(batch).square().sum(1)).mean().backward()
        optimizer.step()


def moved(train: Train, build: Callable[[], nn.Module], x: Tensor) -> Tensor:
    """How the clipped sum over the records of `x` moved the parameters."""
    torch.manual_seed(0)
    model = build().train()
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    train(model, x)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) - before


def verdict(train: Train, build: Callable[[], nn.Module]) -> str:
    """What one record changes of the sum, against the bound."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 6, generator=generator)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            change = float((moved(train, build, x) - moved(train, build, x[1:])).norm())
    except Exception as error:
        return f"right: refused ({type(error).__name__})"
    return "right: within the bound" if change <= C * (1 + 1e-4) else f"wrong: {change:.2f} C"


def main() -> dict[str, dict[str, str]]:
    """Try every model, print the table, and write it to `results`."""
    ways: dict[str, Train] = {"sordino": sordino_step}
    if importlib.util.find_spec("opacus") is not None:
        ways["Opacus"] = opacus_step
    found = {name: {way: verdict(train, build) for way, train in ways.items()} for name, build in MODELS.items()}
    table = Table(title="One record's largest part in the clipped sum")
    for heading in ("model", *ways):
        table.add_column(heading)
    for name, row in found.items():
        table.add_row(name, *row.values())
    Console(width=100).print(table)
    facts = machine()
    (RESULTS / "conformance.json").write_text(json.dumps({**facts, "found": found}, indent=2) + "\n")
    return found


if __name__ == "__main__":
    main()
