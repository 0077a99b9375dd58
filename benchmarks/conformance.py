"""Who keeps the bound: the conformance cases on this library and, where it is installed, on Opacus.

"right" is exact, within the bound, or as declared; "refused" is an error instead of a training; "wrong" says what came
out; "–" is what the library doesn't offer. The cases are those of `sordino audit conformance`.

Every case has a process of its own. Opacus is used as its documentation says: Poisson sampling, `BatchMemoryManager`
for parts of a batch, `noise_generator` and the loader's generator for chosen randomness, its own loss for ghost
clipping. A case that its default mode does not get right is tried in the others, and the best of them counts.

    ./run bench conformance
"""

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from steps.clock import machine
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sordino.audit import CASES, CaseResult, ConformanceLoss, EngineLibrary, Library, NotSupported

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs" / "comparison.md"
MODES = ("hooks", "functorch", "ew", "ghost")
_SECONDS = 300
_BEGIN, _END = "<!-- conformance: begin -->", "<!-- conformance: end -->"


class Batches:
    """Opacus' batches, with `zero_grad` before each, in parts of at most `size` records if that is set."""

    def __init__(self, loader: DataLoader, optimizer: Optimizer, size: int | None) -> None:
        self._loader, self._optimizer, self._size = loader, optimizer, size

    def __iter__(self) -> Iterator[Sequence[Tensor]]:
        from opacus.utils.batch_memory_manager import BatchMemoryManager

        options: dict[str, Any] = {"data_loader": self._loader, "optimizer": self._optimizer}
        parts = BatchMemoryManager(max_physical_batch_size=self._size, **options) if self._size else None
        with contextlib.nullcontext(self._loader) if parts is None else parts as loader:
            for batch in loader:
                self._optimizer.zero_grad()
                yield batch


class PrivateByOpacus:
    """A model, optimizer and loader as Opacus hands them back."""

    def __init__(
        self, parts: tuple[nn.Module, Optimizer, Iterable[Sequence[Tensor]]], engine: Any, size: int | None
    ) -> None:
        self.model, self.optimizer, loader = parts
        assert isinstance(loader, DataLoader)
        self.loader = Batches(loader, self.optimizer, size)
        self.engine = engine
        # Its optimizer has no hooks of its own; the one inside steps when a step is taken.
        inner: Any = self.optimizer
        self.optimizer.register_step_post_hook = inner.original_optimizer.register_step_post_hook
        if size is not None:
            self.optimizer.step = self._step_of_parts(self.optimizer.step)

    def _step_of_parts(self, step: Any) -> Any:
        """Between the parts of a batch no gradient is to be seen: Opacus leaves the ordinary one of the part there."""

        def of_parts(*args: Any) -> Any:
            result = step(*args)
            if getattr(self.optimizer, "_is_last_step_skipped", False):
                for group in self.optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
            return result

        return of_parts

    def epsilon(self, delta: float) -> float:
        # Before its first step Opacus' accountant raises.
        return self.engine.get_epsilon(delta) if len(self.engine.accountant) else 0.0

    def detach(self) -> None:
        """Take the hooks off again."""
        cleanup = getattr(self.model, "remove_hooks", None)
        if callable(cleanup):
            cleanup()


class OfModelAndBatch(nn.Module):
    """A case's loss in the form that ghost clipping takes: values per record, with a reduction."""

    def __init__(self, loss: ConformanceLoss) -> None:
        super().__init__()
        self.loss, self.reduction = loss, "mean"

    def forward(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        if self.loss.each is None:
            raise NotSupported
        return self.loss.each(model, batch)


class Opacus:
    """Opacus under a loop of one's own, with its defaults and Poisson sampling, in one of its modes."""

    # It refuses by many kinds of errors: whatever it raises is counted as a refusal.
    refusals: tuple[type[Exception], ...] = (Exception,)

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.name = f"Opacus, {mode}"

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

        if self.mode == "ghost" or {"expected_batch_size", "sample_rate"} & {
            name for name, value in options.items() if value is not None
        }:
            raise NotSupported
        size = options.pop("microbatch_size", None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        if not isinstance(data, DataLoader):
            data = DataLoader(data, batch_size=len(data) if batch_size is None else batch_size, generator=generator)
        wanted = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "noise_generator": generator} | options
        engine = PrivacyEngine()
        mode = {"grad_sample_mode": self.mode}
        parts = engine.make_private(module=model, optimizer=optimizer, data_loader=data, **wanted, **mode)
        return PrivateByOpacus(parts, engine, size)

    def resumed(self, interrupted: PrivateByOpacus, model: nn.Module, data: Dataset, **options: Any) -> PrivateByOpacus:
        """Its accountant's state, loaded by another engine."""
        private = self.make_private(model, data, **options)
        private.engine.accountant.load_state_dict(interrupted.engine.accountant.state_dict())
        return private

    def begin(self, folder: Path, model: nn.Module, data: Dataset, **options: Any) -> PrivateByOpacus:
        """Its checkpoint of module, accountant and noise."""
        private = self.make_private(model, data, **options)
        if (folder / "checkpoint.pt").exists():
            private.engine.load_checkpoint(path=folder / "checkpoint.pt", module=private.model)
        return private

    def save(self, private: PrivateByOpacus, folder: Path) -> None:
        private.engine.save_checkpoint(path=folder / "checkpoint.pt", module=private.model)

    def clipped_sum(
        self, model: nn.Module, batch: Sequence[Tensor], loss: ConformanceLoss, *, max_grad_norm: float
    ) -> list[Tensor]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.0)
        data = TensorDataset(*batch)
        if self.mode == "ghost":
            self._ghost_step(model, data, optimizer, loss, max_grad_norm)
        else:
            private = self.make_private(model, data, optimizer=optimizer, max_grad_norm=max_grad_norm)
            for records in private.loader:
                loss.mean(private.model, records).backward()
                private.optimizer.step()
        return [len(batch[0]) * (torch.zeros_like(p) if p.grad is None else p.grad) for p in trained]

    def _ghost_step(
        self, model: nn.Module, data: Dataset, optimizer: Optimizer, loss: ConformanceLoss, max_grad_norm: float
    ) -> None:
        """One step by the criterion that Opacus makes private."""
        from opacus import PrivacyEngine

        if loss.each is None:
            raise NotSupported
        made: Any = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=OfModelAndBatch(loss),
            data_loader=DataLoader(data, batch_size=len(data)),  # pyright: ignore[reportArgumentType]
            noise_multiplier=0.0,
            max_grad_norm=max_grad_norm,
            grad_sample_mode="ghost",
        )
        private, stepper, criterion, loader = made
        for records in loader:
            criterion(private, records).backward()
            stepper.step()


def in_a_process(library: Library, case: str) -> CaseResult:
    """The case in a process of its own: a crash of the process, or no end, is a finding too."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=_send, args=(theirs, library, case))
    process.start()
    theirs.close()
    words = "crash: the process ended"
    try:
        if ours.poll(_SECONDS):
            return ours.recv()
        words = "no end"
        process.kill()
    except EOFError:
        pass
    finally:
        process.join()
    return CaseResult(case=case, verdict="wrong", passed=False, description=words)


def _send(end: Connection, library: Library, case: str) -> None:
    end.send(CASES[case].run(library))


def rank(found: CaseResult) -> int:
    """Better findings come first."""
    order = ["right", "refused", "not offered", "wrong"]
    return order.index(found.verdict) + (0 if found.passed else 10)


def by_opacus(case: str) -> tuple[str, CaseResult, dict[str, str]]:
    """The best mode's finding, that mode, and what each did that was tried."""
    tried: dict[str, CaseResult] = {}
    for mode in MODES:
        tried[mode] = in_a_process(Opacus(mode), case)
        if tried[mode].passed and tried[mode].verdict != "not offered":
            break
    offered = {mode: found for mode, found in tried.items() if found.verdict != "not offered"} or tried
    best = min(offered, key=lambda mode: rank(offered[mode]))
    return best, tried[best], {mode: words(found) for mode, found in tried.items()}


def words(found: CaseResult) -> str:
    if found.verdict == "not offered":
        return "–"
    said = f"{found.verdict}: {found.description}" if found.description else found.verdict
    # Refused, although it must work.
    return said if found.passed or found.verdict == "wrong" else f"{said} (it must work)"


def table_of(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: what was counted, and every case in which the two differ, or fail."""
    lines = []
    passed = {name: sum(row[name]["passed"] for row in found.values()) for name in ("sordino", "Opacus")}
    offered = sum(row["Opacus"]["found"] != "–" for row in found.values())
    lines += [
        *textwrap.wrap(
            f"Of {len(found)} cases this library passes {passed['sordino']}. Of the {offered} that Opacus offers it "
            f"passes {passed['Opacus'] - (len(found) - offered)}; every other one is below, with the mode that did "
            "best.",
            width=100,
        ),
        "",
        "| case | sordino | Opacus | mode |",
        "|---|---|---|---|",
    ]
    for case, row in found.items():
        if not (row["sordino"]["passed"] and row["Opacus"]["passed"]):
            lines.append(f"| {case} | {row['sordino']['found']} | {row['Opacus']['found']} | {row['Opacus']['mode']} |")
    return "\n".join(lines)


def write_docs(file: Path = DOCS) -> None:
    """Put the table of the kept results into the page."""
    kept = json.loads((RESULTS / "conformance.json").read_text())
    before, _, rest = file.read_text().partition(_BEGIN)
    file.write_text(f"{before}{_BEGIN}\n\n{table_of(kept['found'])}\n\n{_END}{rest.partition(_END)[2]}")


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Try every case, print the table, and write it to `results` and to the page that compares libraries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of the cases wanted; nothing is written then")
    only = parser.parse_args(arguments).only
    # Processes are forked: threads would not survive, and what is loaded now need not be loaded in each.
    torch.set_num_threads(1)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    has_opacus = importlib.util.find_spec("opacus") is not None
    for module in ("opacus", "opacus.utils.batch_memory_manager") if has_opacus else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    found: dict[str, dict[str, Any]] = {}
    table = Table("case", "sordino", *(["Opacus", "mode"] if has_opacus else []), title="Conformance")
    for case in CASES:
        if only not in case:
            continue
        own = in_a_process(EngineLibrary(), case)
        found[case] = {"sordino": {"found": words(own), "passed": own.passed}}
        if has_opacus:
            mode, best, tried = by_opacus(case)
            found[case]["Opacus"] = {"found": words(best), "passed": best.passed, "mode": mode, "tried": tried}
        table.add_row(case, words(own), *([words(best), mode] if has_opacus else []))
        print(len(found), case, file=sys.stderr)
    Console(width=180).print(table)
    if not only and has_opacus:
        (RESULTS / "conformance.json").write_text(
            json.dumps({**machine(), "found": found}, indent=2, ensure_ascii=False) + "\n"
        )
        write_docs()
    return found


if __name__ == "__main__":
    main()
