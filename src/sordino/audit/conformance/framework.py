"""What the conformance cases ask of a library, and how this one answers by each of its paths."""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args, get_type_hints, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sordino.clipping import FlatClipping, GroupedClipping
from sordino.errors import SordinoError
from sordino.randomness import KeyedRNG
from sordino.training.engine import PrivacyEngine
from sordino.training.fit import fit
from sordino.training.plan import PerformanceOptions, Plan

_CHECKPOINT = "checkpoint.safetensors"
# The columns of some records.
Batch = Sequence[Tensor]


class NotSupported(Exception):
    """A case asks for what the library, or this path of it, doesn't have: no verdict."""


@dataclass(frozen=True, kw_only=True)
class ConformanceLoss:
    """A loss in the two forms that libraries take.

    Args:
        mean: model and batch ↦ the scalar of a usual loop.
        each: model and batch ↦ one value per record, whose mean it is; None where the scalar is no such mean.
    """

    mean: Callable[[nn.Module, Batch], Tensor]
    each: Callable[[nn.Module, Batch], Tensor] | None = None

    @staticmethod
    def of(each: Callable[[nn.Module, Batch], Tensor]) -> "ConformanceLoss":
        """From one value per record."""
        return ConformanceLoss(mean=lambda model, batch: each(model, batch).mean(), each=each)


class PrivateTraining(Protocol):
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
    ) -> PrivateTraining:
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

    def resume(
        self, interrupted: PrivateTraining, model: nn.Module, data: Dataset[Any], **options: object
    ) -> PrivateTraining:
        """A new run that goes on from what an earlier one has charged."""
        ...

    def clipped_sum(
        self, model: nn.Module, batch: Batch, loss: ConformanceLoss, *, max_grad_norm: float
    ) -> list[Tensor]:
        """The clipped sum of all records' gradients, without noise, for each parameter that requires grad."""
        ...


@runtime_checkable
class Checkpointed(Protocol):
    """A library that saves its state to files; cases about crashes ask it."""

    def begin(self, folder: Path, model: nn.Module, data: Dataset[Any], **options: object) -> PrivateTraining:
        """As `make_private`, with all files in `folder`: from the checkpoint that lies there, if there is one."""
        ...

    def save(self, private: PrivateTraining, folder: Path) -> None:
        """Write a checkpoint of what `begin` gave."""
        ...


@dataclass(kw_only=True)
class EngineTraining:
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
class EngineLibrary:
    """This library under a loop of one's own: `PrivacyEngine`.

    Args:
        secure_mode: with integer-grid noise.
        new: makes the engine; called with its options.
    """

    secure_mode: bool = False
    new: Callable[..., PrivacyEngine] = PrivacyEngine
    refusals: tuple[type[Exception], ...] = (SordinoError,)

    @property
    def name(self) -> str:
        """Of the path."""
        return "engine, secure noise" if self.secure_mode else "engine"

    def make_private(
        self,
        model: nn.Module,
        data: "Dataset[Any] | DataLoader[Any]",
        *,
        optimizer: Optimizer | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        **options: object,
    ) -> EngineTraining:
        """`PrivacyEngine.make_private`, without noise and with a clipping norm of 1 unless said otherwise."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
        if not isinstance(data, DataLoader):
            data = DataLoader(data, batch_size=len(cast("Any", data)) if batch_size is None else batch_size)
        engine = self.new(seed=seed, reproducible=seed is not None, secure_mode=self.secure_mode)
        wanted = cast("dict[str, Any]", {"noise_multiplier": 0.0, "max_grad_norm": 1.0} | options)
        parts = engine.make_private(module=model, optimizer=optimizer, data_loader=data, **wanted)
        return EngineTraining(model=parts[0], optimizer=parts[1], loader=parts[2], engine=engine)

    def resume(
        self, interrupted: PrivateTraining, model: nn.Module, data: Dataset[Any], **options: object
    ) -> EngineTraining:
        """The engine's state, loaded by another engine."""
        private = self.make_private(model, data, **cast("dict[str, Any]", options))
        private.engine.load_state_dict(cast("EngineTraining", interrupted).engine.state_dict())
        return private

    def begin(self, folder: Path, model: nn.Module, data: Dataset[Any], **options: object) -> EngineTraining:
        """An engine with a run folder, and its checkpoint."""
        made = replace(self, new=partial(self.new, run_folder=folder / "run"))
        private = made.make_private(model, data, **cast("dict[str, Any]", options))
        if (folder / _CHECKPOINT).exists():
            private.engine.load_checkpoint(path=folder / _CHECKPOINT, module=model, optimizer=private.optimizer)
        return private

    def save(self, private: PrivateTraining, folder: Path) -> None:
        """`PrivacyEngine.save_checkpoint`."""
        kept = cast("EngineTraining", private)
        kept.engine.save_checkpoint(path=folder / _CHECKPOINT, module=kept.model, optimizer=kept.optimizer)

    def clipped_sum(
        self, model: nn.Module, batch: Batch, loss: ConformanceLoss, *, max_grad_norm: float
    ) -> list[Tensor]:
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
class FitLibrary:
    """This library's custom loop: `fit`, with one loss per record.

    Args:
        performance: what changes speed and memory only.
        secure_mode: with integer-grid noise.
        label: of the path.
    """

    performance: PerformanceOptions | None = None
    secure_mode: bool = False
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
    ) -> PrivateTraining:
        """There is no loop of one's own."""
        raise NotSupported

    def resume(
        self,
        interrupted: PrivateTraining,  # noqa: ARG002
        model: nn.Module,  # noqa: ARG002
        data: Dataset[Any],  # noqa: ARG002
        **options: object,  # noqa: ARG002
    ) -> PrivateTraining:
        """There is no loop of one's own."""
        raise NotSupported

    def clipped_sum(
        self, model: nn.Module, batch: Batch, loss: ConformanceLoss, *, max_grad_norm: float
    ) -> list[Tensor]:
        """One step on all records, whose learning rate undoes the division by their number."""
        each = loss.each
        if each is None:
            raise NotSupported
        records = len(batch[0])
        # Memory is spared block by block for groups alone: one group of everything has the bound of flat clipping.
        in_blocks = self.performance is not None and self.performance.clipping_mode == "groupwise"
        plan = Plan(
            clipping=GroupedClipping(by=(("",),)) if in_blocks else FlatClipping(),
            noise_multiplier=0.0,
            max_grad_norm=max_grad_norm,
            sample_rate=1.0,
            steps=1,
            expected_batch_size=float(records),
            delta=1e-5,
            secure_mode=self.secure_mode,
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


def library_paths() -> dict[str, Library]:
    """Every path of this library by name: the loop of one's own, `fit`, and `fit` in each of its ways of computing."""
    memories = get_args(get_type_hints(PerformanceOptions)["clipping_mode"])
    ways: list[Library] = [
        EngineLibrary(),
        EngineLibrary(secure_mode=True),
        FitLibrary(),
        FitLibrary(secure_mode=True, label="fit, secure noise"),
        *(
            FitLibrary(performance=PerformanceOptions(clipping_mode=name), label=f"fit, {name}")
            for name in memories
            if name != "fast"
        ),
        FitLibrary(performance=PerformanceOptions(compile=True), label="fit, compiled"),
        FitLibrary(performance=PerformanceOptions(gradients="one-by-one"), label="fit, one by one"),
    ]
    return {way.name: way for way in ways}


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


# ----------------------------------------------------------------------------------------------------------------------
# A conformance case, and what a library does in one.
# ----------------------------------------------------------------------------------------------------------------------


Expects = Literal["right", "refusal", "either"]
Check = Callable[[Library], None]


class ConformanceFailure(Exception):
    """What a library did that no private training may do."""


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """What came of one case.

    Args:
        case: its name.
        verdict: "right", "refused", "wrong", or "not offered" where the library has no such thing.
        passed: whether that is as it should be; what isn't offered passes.
        description: what was wrong, or the kind of the refusal.
    """

    case: str
    verdict: Literal["right", "refused", "wrong", "not offered"]
    passed: bool
    description: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that a private library must get right.

    Args:
        name: a sentence that is true of a private library.
        expects: "right" when it must work; "refusal" when no number would be private, so that only a refusal, or a sum
            that stays within the bound all the same, passes; "either" when it may be refused or must be exact.
        check: raises `ConformanceFailure` where the library is wrong.
    """

    name: str
    expects: Expects
    check: Check

    def run(self, library: Library) -> CaseResult:
        """Try the case on `library`; no exception comes out."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.check(library)
        except NotSupported:
            return CaseResult(case=self.name, verdict="not offered", passed=True)
        except ConformanceFailure as wrong:
            return CaseResult(case=self.name, verdict="wrong", passed=False, description=str(wrong))
        except library.refusals as refusal:
            may = self.expects != "right"
            return CaseResult(case=self.name, verdict="refused", passed=may, description=type(refusal).__name__)
        except Exception as crash:
            words = f"crash: {type(crash).__name__}"
            return CaseResult(case=self.name, verdict="wrong", passed=False, description=words)
        return CaseResult(case=self.name, verdict="right", passed=True)


def case(into: dict[str, Case], name: str, *, expects: Expects = "right") -> Callable[[Check], Check]:
    """Decorator: put a check among the cases `into`, under the sentence `name`."""

    def register(check: Check) -> Check:
        into[name] = Case(name=name, expects=expects, check=check)
        return check

    return register


# ----------------------------------------------------------------------------------------------------------------------
# Synthetic records and models for the cases, the same every time, and the slow, obvious gradient.
# ----------------------------------------------------------------------------------------------------------------------


# Of rounding in single precision, and of the margin that a library may keep below its bound.
_TOLERANCE = 3e-5


def synthetic_normal(*shape: int) -> Tensor:
    """Numbers that look standard normal; equal shapes give equal numbers."""
    stream = KeyedRNG(seed=11, reproducible=True).stream("made-up", step=len(shape), tensor=math.prod(shape))
    uniform = stream.uniform(12 * math.prod(shape)).reshape(12, *shape)
    return torch.from_numpy(uniform.sum(0) - 6).float()


def synthetic_integers(values: int, *shape: int) -> Tensor:
    """Whole numbers from 0 to values − 1."""
    return (1000 * synthetic_normal(*shape).abs()).long() % values


def set_parameters(model: nn.Module) -> nn.Module:
    """The model with synthetic parameters, so that two of them are alike."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            inputs = parameter.shape[-1] if parameter.dim() > 1 else 4
            # Tensors of one shape must differ all the same.
            parameter.copy_(synthetic_normal(number + 1, *parameter.shape)[number] / math.sqrt(inputs))
    return model


def l2_norm(parts: Sequence[Tensor]) -> float:
    """ℓ2 norm of all entries together."""
    return math.sqrt(sum(float(part.detach().double().square().sum()) for part in parts))


def distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """ℓ2 norm of the difference."""
    return l2_norm([a.double() - b.double() for a, b in zip(one, other, strict=True)])


def exact_sum(
    model: nn.Module, batch: Sequence[Tensor], loss: ConformanceLoss, *, max_grad_norm: float
) -> list[Tensor]:
    """Every record's own gradient by plain autograd, one record at a time in double precision, clipped and added."""
    reference = copy.deepcopy(model).double()
    wanted = [parameter for parameter in reference.parameters() if parameter.requires_grad]
    sums = [torch.zeros_like(parameter) for parameter in wanted]
    for index in range(len(batch[0])):
        rows = [column[index : index + 1] for column in batch]
        record = [row.double() if row.is_floating_point() else row for row in rows]
        # The usual backward pass: reentrant checkpoints know no other.
        reference.zero_grad()
        loss.mean(reference, record).backward()
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in wanted]
        factor = min(1.0, max_grad_norm / max(l2_norm(gradient), 1e-300))
        for total, part in zip(sums, gradient, strict=True):
            total.add_(part, alpha=factor)
    return sums


def must_be_exact(
    library: Library,
    build: Callable[[], nn.Module],
    batch: Sequence[Tensor],
    loss: ConformanceLoss,
    *,
    max_grad_norm: float = 0.5,
) -> None:
    """The library's clipped sum is the slow one."""
    model = set_parameters(build())
    wanted = exact_sum(model, batch, loss, max_grad_norm=max_grad_norm)
    check_sums(library.clipped_sum(model, batch, loss, max_grad_norm=max_grad_norm), wanted)


def check_sums(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """A clipped sum is the slow one, up to rounding and the margin below the bound."""
    off = distance(got, wanted) / max(l2_norm(wanted), 1e-30)
    if not off <= _TOLERANCE:
        raise ConformanceFailure(f"the clipped sum is off by {100 * off:.2g} %")


def must_stay_within(
    library: Library,
    build: Callable[[], nn.Module],
    batch: Sequence[Tensor],
    other: Sequence[Tensor],
    loss: ConformanceLoss,
    *,
    max_grad_norm: float = 0.7,
    norms: int = 1,
) -> None:
    """The clipped sums of two datasets that differ in one record differ by at most `norms` clipping norms."""
    one, two = (
        library.clipped_sum(set_parameters(build()), data, loss, max_grad_norm=max_grad_norm) for data in (batch, other)
    )
    moved = distance(one, two) / max_grad_norm
    if not moved <= norms * (1 + 1e-4):
        raise ConformanceFailure(f"one record moves the sum by {moved:.3g} C, allowed are {norms} C")
