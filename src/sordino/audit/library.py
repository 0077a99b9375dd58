"""What the conformance cases ask of a library, and how this one answers by each of its paths (audit, floor 4)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast, get_args, get_type_hints, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sordino.clipping import FlatClipping, GroupedClipping
from sordino.errors import SordinoError
from sordino.training.engine import PrivacyEngine
from sordino.training.plan import Performance, Plan
from sordino.training.records.loader import PrivateLoader
from sordino.training.trainer import fit

__all__ = ["Batch", "Checkpointed", "Engine", "Fit", "InEngine", "Library", "Loss", "NotOffered", "Private", "paths"]

_CHECKPOINT = "checkpoint.safetensors"
# The columns of some records.
Batch = Sequence[Tensor]


class NotOffered(Exception):
    """A case asks for what the library, or this path of it, doesn't have: no verdict."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss in the two forms that libraries take.

    Args:
        mean: model and batch ↦ the scalar of a usual loop.
        each: model and batch ↦ one value per record, whose mean it is; None where the scalar is no such mean.
    """

    mean: Callable[[nn.Module, Batch], Tensor]
    each: Callable[[nn.Module, Batch], Tensor] | None = None

    @staticmethod
    def of(each: Callable[[nn.Module, Batch], Tensor]) -> "Loss":
        """From one value per record."""
        return Loss(mean=lambda model, batch: each(model, batch).mean(), each=each)


class Private(Protocol):
    """A model made private: what a loop works with, and what was spent."""

    model: nn.Module
    optimizer: Optimizer
    loader: Iterable[Batch]

    def epsilon(self, delta: float) -> float:
        """What was spent so far."""
        ...

    def detach(self) -> None:
        """Give model and optimizer back."""
        ...


class Library(Protocol):
    """A way to train privately. Write one class with these to run the cases on another library."""

    @property
    def name(self) -> str:
        """Of the library or path, for tables."""
        ...

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """The exceptions by which it refuses; any other is a crash."""
        ...

    def make_private(
        self,
        model: nn.Module,
        data: "Dataset[Any] | DataLoader[Any]",
        *,
        optimizer: Optimizer | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        **options: object,
    ) -> Private:
        """Prepare a loop of one's own.

        Args:
            model: to train.
            data: records, or a loader of them.
            optimizer: holds what is trained; by default SGD on all parameters.
            batch_size: expected size of a batch; by default all records.
            seed: chosen randomness, for comparisons bit by bit.
            options: `noise_multiplier` (0), `max_grad_norm` (1), `microbatch_size`, `expected_batch_size`,
                `sample_rate`, `poisson_sampling`, as in `PrivacyEngine.make_private`.

        Raises:
            NotOffered: there are no loops of one's own, or no such option.
        """
        ...

    def resumed(self, interrupted: Private, model: nn.Module, data: Dataset[Any], **options: object) -> Private:
        """A new run that goes on from what an earlier one has charged."""
        ...

    def clipped_sum(self, model: nn.Module, batch: Batch, loss: Loss, *, max_grad_norm: float) -> list[Tensor]:
        """The clipped sum of all records' gradients, without noise, for each parameter that requires grad."""
        ...


@runtime_checkable
class Checkpointed(Protocol):
    """A library that saves its state to files; cases about crashes ask it."""

    def begin(self, folder: Path, model: nn.Module, data: Dataset[Any], **options: object) -> Private:
        """As `make_private`, with all files in `folder`: from the checkpoint that lies there, if there is one."""
        ...

    def save(self, private: Private, folder: Path) -> None:
        """Write a checkpoint of what `begin` gave."""
        ...


@dataclass(kw_only=True)
class InEngine:
    """A model that an engine of this library made private."""

    model: nn.Module
    optimizer: Optimizer
    loader: Any
    engine: PrivacyEngine

    def epsilon(self, delta: float) -> float:
        """What was spent so far."""
        return self.engine.get_epsilon(delta)

    def detach(self) -> None:
        """Give model and optimizer back."""
        self.engine.detach()


@dataclass(frozen=True, kw_only=True)
class Engine:
    """This library under a loop of one's own: `PrivacyEngine`.

    Args:
        secure_noise: with integer-grid noise.
        new: makes the engine; called with its options.
    """

    secure_noise: bool = False
    new: Callable[..., PrivacyEngine] = PrivacyEngine
    refusals: tuple[type[Exception], ...] = (SordinoError,)

    @property
    def name(self) -> str:
        """Of the path."""
        return "engine, secure noise" if self.secure_noise else "engine"

    def make_private(
        self,
        model: nn.Module,
        data: "Dataset[Any] | DataLoader[Any]",
        *,
        optimizer: Optimizer | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        **options: object,
    ) -> InEngine:
        """`PrivacyEngine.make_private`, without noise and with a clipping norm of 1 unless said otherwise."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
        if not isinstance(data, DataLoader):
            data = DataLoader(data, batch_size=len(cast("Any", data)) if batch_size is None else batch_size)
        engine = self.new(seed=seed, reproducible=seed is not None, secure_mode=self.secure_noise)
        wanted = cast("dict[str, Any]", {"noise_multiplier": 0.0, "max_grad_norm": 1.0} | options)
        return _in_engine(engine.make_private(module=model, optimizer=optimizer, data_loader=data, **wanted), engine)

    def resumed(self, interrupted: Private, model: nn.Module, data: Dataset[Any], **options: object) -> InEngine:
        """The engine's state, loaded by another engine."""
        private = self.make_private(model, data, **cast("dict[str, Any]", options))
        private.engine.load_state_dict(cast("InEngine", interrupted).engine.state_dict())
        return private

    def begin(self, folder: Path, model: nn.Module, data: Dataset[Any], **options: object) -> InEngine:
        """An engine with a run folder, and its checkpoint."""
        made = replace(self, new=partial(self.new, run_folder=folder / "run"))
        private = made.make_private(model, data, **cast("dict[str, Any]", options))
        if (folder / _CHECKPOINT).exists():
            private.engine.load_checkpoint(path=folder / _CHECKPOINT, module=model, optimizer=private.optimizer)
        return private

    def save(self, private: Private, folder: Path) -> None:
        """`PrivacyEngine.save_checkpoint`."""
        kept = cast("InEngine", private)
        kept.engine.save_checkpoint(path=folder / _CHECKPOINT, module=kept.model, optimizer=kept.optimizer)

    def clipped_sum(self, model: nn.Module, batch: Batch, loss: Loss, *, max_grad_norm: float) -> list[Tensor]:
        """One step of a loop over all records."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.0)
        private = self.make_private(model, TensorDataset(*batch), optimizer=optimizer, max_grad_norm=max_grad_norm)
        try:
            for records in private.loader:
                loss.mean(model, records).backward()
                private.optimizer.step()
            return [len(batch[0]) * _gradient(parameter) for parameter in trained]
        finally:
            private.detach()


@dataclass(frozen=True, kw_only=True)
class Fit:
    """This library's own loop: `fit`, with one loss per record.

    Args:
        performance: what changes speed and memory only.
        secure_noise: with integer-grid noise.
        label: of the path.
    """

    performance: Performance | None = None
    secure_noise: bool = False
    label: str = "fit"
    refusals: tuple[type[Exception], ...] = (SordinoError,)

    @property
    def name(self) -> str:
        """Of the path."""
        return self.label

    def make_private(
        self,
        model: nn.Module,  # noqa: ARG002
        data: "Dataset[Any] | DataLoader[Any]",  # noqa: ARG002
        *,
        optimizer: Optimizer | None = None,  # noqa: ARG002
        batch_size: int | None = None,  # noqa: ARG002
        seed: int | None = None,  # noqa: ARG002
        **options: object,  # noqa: ARG002
    ) -> Private:
        """There is no loop of one's own."""
        raise NotOffered

    def resumed(self, interrupted: Private, model: nn.Module, data: Dataset[Any], **options: object) -> Private:  # noqa: ARG002
        """There is no loop of one's own."""
        raise NotOffered

    def clipped_sum(self, model: nn.Module, batch: Batch, loss: Loss, *, max_grad_norm: float) -> list[Tensor]:
        """One step on all records, whose learning rate undoes the division by their number."""
        each = loss.each
        if each is None:
            raise NotOffered
        records = len(batch[0])
        # Memory is spared block by block for groups alone: one group of everything has the bound of flat clipping.
        in_blocks = self.performance is not None and self.performance.memory == "block"
        plan = Plan(
            clipping=GroupedClipping(by=(("",),)) if in_blocks else FlatClipping(),
            noise_multiplier=0.0,
            max_grad_norm=max_grad_norm,
            sample_rate=1.0,
            steps=1,
            expected_batch_size=float(records),
            delta=1e-5,
            secure_noise=self.secure_noise,
        )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        seen: list[Tensor] = []
        optimizer = torch.optim.SGD(trained, lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: seen.extend(_gradient(parameter).clone() for parameter in trained))
        fit(
            model,
            lambda one, *columns: each(one, columns),
            tuple(batch),
            plan,
            optimizer=optimizer,
            progress=False,
            performance=self.performance,
        )
        return [records * gradient for gradient in seen[: len(trained)]]


def paths() -> dict[str, Library]:
    """Every path of this library by name: the loop of one's own, `fit`, and `fit` in each of its ways of computing."""
    memories = get_args(get_type_hints(Performance)["memory"])
    ways: list[Library] = [
        Engine(),
        Engine(secure_noise=True),
        Fit(),
        Fit(secure_noise=True, label="fit, secure noise"),
        *(
            Fit(performance=Performance(memory=name), label=f"fit, {name} memory")
            for name in memories
            if name != "fast"
        ),
        Fit(performance=Performance(compile=True), label="fit, compiled"),
        Fit(performance=Performance(gradients="one-by-one"), label="fit, one by one"),
    ]
    return {way.name: way for way in ways}


def _in_engine(parts: tuple[nn.Module, Optimizer, PrivateLoader], engine: PrivacyEngine) -> InEngine:
    return InEngine(model=parts[0], optimizer=parts[1], loader=parts[2], engine=engine)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
