"""Cases: what a loop of one's own may do between batches; every step has the records of its batch, each once."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from sordino.accounting import epsilon
from sordino.audit.case import Case, Wrong, case
from sordino.audit.conformance.coupling import CROSS_ENTROPY
from sordino.audit.library import Checkpointed, Library, Loss, NotOffered, Private
from sordino.audit.made_up import determined, distance, exact_sum, length, normal, whole
from sordino.events import Gaussian, PoissonSampled, SelfComposed

__all__ = ["BATCHES"]

BATCHES: dict[str, Case] = {}
_C = 0.5
_TOLERANCE = 3e-5


def _records() -> tuple[Tensor, Tensor]:
    return normal(8, 5), whole(3, 8)


def _private(
    library: Library, model: nn.Module, data: "Dataset[Any] | DataLoader[Any] | None" = None, **options: Any
) -> Private:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    own = TensorDataset(*_records()) if data is None else data
    return library.make_private(
        model, own, optimizer=optimizer, **(cast("dict[str, Any]", {"max_grad_norm": _C}) | options)
    )


def _gradients(private: Private) -> list[Tensor]:
    held = [p for group in private.optimizer.param_groups for p in group["params"] if p.requires_grad]
    return [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in held]


def _must_be(got: list[Tensor], wanted: list[Tensor]) -> None:
    off = distance(got, wanted) / max(length(wanted), 1e-30)
    if not off <= _TOLERANCE:
        raise Wrong(f"the clipped sum is off by {100 * off:.2g} %")


def _wanted(model: nn.Module, loss: Loss) -> list[Tensor]:
    records = len(_records()[0])
    return [total / records for total in exact_sum(model, _records(), loss, max_grad_norm=_C)]


def _both(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(model(x), y), model(2 * x).square().sum(1).mean()


_TWO = Loss(mean=lambda model, batch: sum(_both(model, *batch), torch.zeros(())))


def _two_backwards(name: str, *, second_first: bool) -> None:
    @case(BATCHES, f"two forward passes add up before clipping, {name}")
    def check(library: Library) -> None:
        model = determined(nn.Linear(5, 3))
        wanted = _wanted(model, _TWO)
        private = _private(library, model)
        for x, y in private.loader:
            losses = _both(private.model, x, y)
            for loss in reversed(losses) if second_first else losses:
                loss.backward()
            private.optimizer.step()
        _must_be(_gradients(private), wanted)


_two_backwards("the first loss first", second_first=False)
_two_backwards("the second loss first", second_first=True)


@case(BATCHES, "two losses of one forward pass add up before clipping")
def _retained(library: Library) -> None:
    model = determined(nn.Linear(5, 3))

    def both(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + out.square().sum(1).mean()

    wanted = _wanted(model, Loss(mean=both))  # pyright: ignore[reportArgumentType]
    private = _private(library, model)
    for x, y in private.loader:
        out = private.model(x)
        F.cross_entropy(out, y).backward(retain_graph=True)
        out.square().sum(1).mean().backward()
        private.optimizer.step()
    _must_be(_gradients(private), wanted)


@case(BATCHES, "a forward pass without a backward pass adds nothing")
def _forward_alone(library: Library) -> None:
    model = determined(nn.Linear(5, 3))
    wanted = _wanted(model, CROSS_ENTROPY)
    private = _private(library, model)
    for x, y in private.loader:
        private.model(3 * x)
        F.cross_entropy(private.model(x), y).backward()
        private.optimizer.step()
    _must_be(_gradients(private), wanted)


def _layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    determined(model)
    return model


def _step(private: Private) -> list[Tensor]:
    private.optimizer.zero_grad()
    for x, y in private.loader:
        F.cross_entropy(private.model(x), y).backward()
        private.optimizer.step()
    return _gradients(private)


@case(BATCHES, "a layer unfrozen between steps is exact or refused", expects="either")
def _unfrozen(library: Library) -> None:
    model = _layers()
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = library.make_private(model, TensorDataset(*_records()), optimizer=optimizer, max_grad_norm=_C)
    _step(private)
    model[0].requires_grad_(requires_grad=True)
    wanted = _wanted(model, CROSS_ENTROPY)
    _must_be(_step(private), wanted)


@case(BATCHES, "a layer frozen between steps no longer counts")
def _frozen(library: Library) -> None:
    model = _layers()
    private = _private(library, model)
    _step(private)
    model[0].requires_grad_(requires_grad=False)
    wanted = _wanted(model, CROSS_ENTROPY)
    _must_be(_step(private), wanted)


class _EarlyExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.early = nn.Linear(5, 3), nn.Linear(3, 3), False

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        return out if self.early else self.second(torch.tanh(out))


@case(BATCHES, "a layer that is skipped in a step has nothing of the step before", expects="either")
def _skipped(library: Library) -> None:
    model = _EarlyExit()
    determined(model)
    private = _private(library, model)
    _step(private)
    model.early = True
    wanted = _wanted(model, CROSS_ENTROPY)
    _must_be(_step(private), wanted)


def _counter(library: Library, records: int, data: "DataLoader[Any] | None" = None, **options: Any) -> Private:
    """Record i has gradient −eᵢ: the sum counts how often each record is in a step."""
    own = TensorDataset(torch.eye(records)) if data is None else data
    return _private(library, nn.Linear(records, 1, bias=False), own, max_grad_norm=10.0, **options)


def _count(private: Private, batch: Tensor, size: int) -> Tensor | None:
    (-private.model(batch)).sum(1).mean().backward()
    private.optimizer.step()
    (weight,) = (p for group in private.optimizer.param_groups for p in group["params"])
    return None if weight.grad is None else (-weight.grad[0] * size).round()


@case(BATCHES, "a batch that is abandoned leaves nothing to the next step")
def _abandoned(library: Library) -> None:
    private = _counter(library, 8, microbatch_size=4)
    for (batch,) in private.loader:
        if _count(private, batch, 8) is not None:
            raise Wrong("a part of a batch is a step")
        break
    steps = [found for (batch,) in private.loader if (found := _count(private, batch, 8)) is not None]
    if len(steps) != 1 or not torch.equal(steps[0], torch.ones(8)):
        raise Wrong("the step after it does not hold every record once")


@case(BATCHES, "an abandoned batch is charged")
def _charged(library: Library) -> None:
    spent = []
    # A library may go on with the other half of the batch in the second loop; the third one needs another batch.
    for loops in (1, 3):
        private = _counter(library, 8, microbatch_size=4, noise_multiplier=1.0)
        for _ in range(loops):
            for (batch,) in private.loader:
                _count(private, batch, 8)
                break
        spent.append(private.epsilon(1e-5))
        private.detach()
    if not spent[1] > spent[0] > 0:
        raise Wrong("it is free")


@case(BATCHES, "no step holds a record twice after a loop is broken off")
def _once(library: Library) -> None:
    private = _counter(library, 30, DataLoader(TensorDataset(torch.eye(30)), batch_size=10), microbatch_size=3)
    for (batch,) in private.loader:
        _count(private, batch, 10)
        break
    for _ in range(3):
        for (batch,) in private.loader:
            counts = _count(private, batch, 10)
            if counts is not None and float(counts.max()) > 1:
                raise Wrong("a record counts twice")


@case(BATCHES, "refused: a batch is left out for its number of records", expects="refusal")
def _left_out(library: Library) -> None:
    private = _counter(library, 32, DataLoader(TensorDataset(torch.eye(32)), batch_size=16))
    for _ in range(20):
        for (batch,) in private.loader:
            if len(batch) < 17:
                continue
            _count(private, batch, 16)
    raise Wrong("the number of steps tells how many records there are")


@case(BATCHES, "N and N + 1 records have the same noise and divisor, bit for bit")
def _sizes(library: Library) -> None:
    gradients = []
    for records in (40, 41):
        loader = DataLoader(TensorDataset(torch.zeros(records, 3)), batch_size=8)
        options = {"noise_multiplier": 1.3, "expected_batch_size": 8, "sample_rate": 0.2, "seed": 11}
        private = _private(library, determined(nn.Linear(3, 2)), loader, **options)
        for (x,) in private.loader:
            (0 * private.model(x)).sum(1).mean().backward()
            private.optimizer.step()
        gradients.append(_gradients(private))
        private.detach()
    if distance(*gradients) != 0 or length(gradients[0]) == 0:
        raise Wrong("the noise tells how many records there are")


@case(BATCHES, "twenty records at rate 1/20 make twenty steps, the empty ones of noise alone")
def _empty(library: Library) -> None:
    model = determined(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(normal(20, 3), whole(2, 20)), batch_size=1)
    private = library.make_private(model, loader, optimizer=optimizer, noise_multiplier=1.0)
    steps = 0
    for x, y in private.loader:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        F.cross_entropy(private.model(x), y).backward()
        private.optimizer.step()
        steps += 1
        if distance(list(model.parameters()), before) == 0:
            raise Wrong("a step without noise")
    if steps != 20:
        raise Wrong(f"{steps} steps")


@case(BATCHES, "refused: a sampler whose law is not known", expects="refusal")
def _weighted(library: Library) -> None:
    data = TensorDataset(torch.eye(20))
    sampler = WeightedRandomSampler([20.0] + [1.0] * 19, 20)
    private = _counter(library, 20, DataLoader(data, batch_size=4, sampler=sampler), noise_multiplier=1.0)
    for _ in private.loader:
        pass
    raise Wrong("it is charged as if it were uniform")


def _of_subset(name: str, loader_of: Callable[[TensorDataset, SubsetRandomSampler], DataLoader[Any]]) -> None:
    @case(BATCHES, f"{name} over a subset of the records trains on these alone", expects="either")
    def check(library: Library) -> None:
        loader = loader_of(TensorDataset(torch.eye(40)), SubsetRandomSampler(range(10, 30)))
        private = _counter(library, 40, loader)
        counted = torch.zeros(40)
        for _ in range(10):
            for (batch,) in private.loader:
                counts = _count(private, batch, 5)
                counted += torch.zeros(40) if counts is None else counts
        if counted[:10].any() or counted[30:].any() or not counted.any():
            raise Wrong("records outside the subset are trained on")


_of_subset("sampler=", lambda data, chosen: DataLoader(data, batch_size=5, sampler=chosen))
_of_subset(
    "batch_sampler=", lambda data, chosen: DataLoader(data, batch_sampler=BatchSampler(chosen, 5, drop_last=False))
)


def _set_from_batch(name: str) -> None:
    @case(BATCHES, f"refused: the {name.replace('_', ' ')} is set from the batch", expects="refusal")
    def check(library: Library) -> None:
        private = _private(library, nn.Linear(5, 3))
        key = {"learning_rate": "lr"}.get(name, name)
        for _ in range(3):
            for x, y in private.loader:
                F.cross_entropy(private.model(x), y).backward()
                for group in private.optimizer.param_groups:
                    group[key] = 0.01 * float(x.abs().mean())
                private.optimizer.step()
                private.optimizer.zero_grad()
        raise Wrong("the parameters follow from records past the noise")


for _name in ("learning_rate", "weight_decay", "momentum"):
    _set_from_batch(_name)


def _steps(private: Private, count: int) -> None:
    taken = 0
    while taken < count:
        for x, y in private.loader:
            F.cross_entropy(private.model(x), y).backward()
            private.optimizer.step()
            private.optimizer.zero_grad()
            taken += 1
            if taken == count:
                break


@case(BATCHES, "steps after the last checkpoint stay charged when a run goes on after a crash")
def _crashed(library: Library) -> None:
    if not isinstance(library, Checkpointed):
        raise NotOffered
    options = {"batch_size": 8, "noise_multiplier": 1.0}
    with TemporaryDirectory() as name:
        folder, data = Path(name), TensorDataset(normal(32, 5), whole(3, 32))
        private = library.begin(folder, nn.Linear(5, 3), data, **options)
        _steps(private, 2)
        library.save(private, folder)
        _steps(private, 5)
        del private  # the process ends
        again = library.begin(folder, nn.Linear(5, 3), data, **options)
        _steps(again, 1)
        step = PoissonSampled(sample_rate=0.25, event=Gaussian(noise_multiplier=1.0))
        least = epsilon(SelfComposed(event=step, count=8), 1e-5).lower
        told = again.epsilon(1e-5)
        again.detach()
    if told < least * (1 - 1e-6):
        raise Wrong("steps whose results were shown are forgotten")


@case(BATCHES, "a misspelt option is a TypeError")
def _misspelt(library: Library) -> None:
    try:
        library.make_private(nn.Linear(5, 3), TensorDataset(*_records()), max_gradnorm=1.0)
    except TypeError:
        return
    raise Wrong("it is ignored")
