"""Who keeps the bound: the conformance cases on this library and, where it is installed, on Opacus.

"right" is exact, within the bound, or as declared; "refused" is an error instead of a training; "wrong" says what came
out; "–" is what the library doesn't offer. The cases are those of `sordino audit conformance`.

    ./run bench conformance
"""

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from steps.clock import machine
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sordino.audit import CASES, Engine, Finding, Library, Loss, NotOffered, check_library

RESULTS = Path(__file__).parent / "results"


class PrivateByOpacus:
    """A model, optimizer and loader as Opacus hands them back."""

    def __init__(self, parts: tuple[nn.Module, Optimizer, Iterable[Sequence[Tensor]]], engine: Any) -> None:
        self.model, self.optimizer, self.loader = parts
        self.engine = engine

    def epsilon(self, delta: float) -> float:
        return self.engine.get_epsilon(delta)

    def detach(self) -> None:
        """Take the hooks off again."""
        cleanup = getattr(self.model, "remove_hooks", None)
        if callable(cleanup):
            cleanup()


class Opacus:
    """Opacus under a loop of one's own, with its defaults and Poisson sampling."""

    name = "Opacus"
    # It refuses by many kinds of errors: whatever it raises is counted as a refusal.
    refusals: tuple[type[Exception], ...] = (Exception,)

    def make_private(
        self,
        model: nn.Module,
        data: Dataset | DataLoader,
        *,
        optimizer: Optimizer | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> PrivateByOpacus:
        from opacus import PrivacyEngine

        if seed is not None or {"microbatch_size", "expected_batch_size", "sample_rate"} & {
            name for name, value in options.items() if value is not None
        }:
            raise NotOffered
        options.pop("microbatch_size", None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
        if not isinstance(data, DataLoader):
            data = DataLoader(data, batch_size=len(data) if batch_size is None else batch_size)
        engine = PrivacyEngine()
        wanted = {"noise_multiplier": 0.0, "max_grad_norm": 1.0} | options
        parts = engine.make_private(module=model, optimizer=optimizer, data_loader=data, **wanted)
        return PrivateByOpacus(parts, engine)

    def resumed(self, interrupted: PrivateByOpacus, model: nn.Module, data: Dataset, **options: Any) -> PrivateByOpacus:
        """Its accountant's state, loaded by another engine."""
        private = self.make_private(model, data, **options)
        private.engine.accountant.load_state_dict(interrupted.engine.accountant.state_dict())
        return private

    def clipped_sum(
        self, model: nn.Module, batch: Sequence[Tensor], loss: Loss, *, max_grad_norm: float
    ) -> list[Tensor]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.0)
        data = TensorDataset(*batch)
        private = self.make_private(model, data, optimizer=optimizer, max_grad_norm=max_grad_norm)
        for records in private.loader:
            loss.mean(private.model, records).backward()
            private.optimizer.step()
        return [len(batch[0]) * (torch.zeros_like(p) if p.grad is None else p.grad) for p in trained]


def words(found: Finding) -> str:
    if found.verdict == "not offered":
        return "–"
    return found.verdict if found.verdict != "wrong" else f"wrong: {found.words}"


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, str]]:
    """Try every case, print the table, and write it to `results`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of the cases wanted; nothing is written then")
    only = parser.parse_args(arguments).only
    libraries: list[Callable[[], Library]] = [Engine]
    if importlib.util.find_spec("opacus") is not None:
        libraries.append(Opacus)
    found: dict[str, dict[str, str]] = {name: {} for name in CASES if only in name}
    for build in libraries:
        library = build()
        label = "sordino" if isinstance(library, Engine) else library.name
        for one in check_library(library, only=only):
            found[one.case][label] = words(one)
    table = Table("case", *next(iter(found.values()), {}), title="Conformance")
    for name, row in found.items():
        table.add_row(name, *row.values())
    Console(width=160).print(table)
    if not only:
        (RESULTS / "conformance.json").write_text(json.dumps({**machine(), "found": found}, indent=2) + "\n")
    return found


if __name__ == "__main__":
    main()
