"""Cases: what a loop of one's own may do between batches; every step has the records of its batch, each once."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
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

from sordino import accounting
from sordino.accounting import epsilon
from sordino.audit.conformance.framework import (
    Case,
    Checkpointed,
    ConformanceFailure,
    ConformanceLoss,
    EngineLibrary,
    Library,
    NotSupported,
    PrivateTraining,
    case,
    check_sums,
    distance,
    exact_sum,
    l2_norm,
    set_parameters,
    synthetic_integers,
    synthetic_normal,
)
from sordino.audit.conformance.gradient_cases import CROSS_ENTROPY
from sordino.events import Gaussian, PoissonSampled, SelfComposed

BATCHES: dict[str, Case] = {}
_C = 0.5


def _records() -> tuple[Tensor, Tensor]:
    return synthetic_normal(8, 5), synthetic_integers(3, 8)


def _private(
    library: Library, model: nn.Module, data: "Dataset[Any] | DataLoader[Any] | None" = None, **options: Any
) -> PrivateTraining:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    own = TensorDataset(*_records()) if data is None else data
    return library.make_private(
        model, own, optimizer=optimizer, **(cast("dict[str, Any]", {"max_grad_norm": _C}) | options)
    )


def _gradients(private: PrivateTraining) -> list[Tensor]:
    held = [p for group in private.optimizer.param_groups for p in group["params"] if p.requires_grad]
    return [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in held]


def _wanted(model: nn.Module, loss: ConformanceLoss) -> list[Tensor]:
    records = len(_records()[0])
    return [total / records for total in exact_sum(model, _records(), loss, max_grad_norm=_C)]


def _both(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(model(x), y), model(2 * x).square().sum(1).mean()


_TWO = ConformanceLoss(mean=lambda model, batch: sum(_both(model, *batch), torch.zeros(())))


def _two_backwards(name: str, *, second_first: bool) -> None:
    @case(BATCHES, f"two forward passes add up before clipping, {name}")
    def check(library: Library) -> None:
        model = set_parameters(nn.Linear(5, 3))
        wanted = _wanted(model, _TWO)
        private = _private(library, model)
        for x, y in private.loader:
            losses = _both(private.model, x, y)
            for loss in reversed(losses) if second_first else losses:
                loss.backward()
            private.optimizer.step()
        check_sums(_gradients(private), wanted)


_two_backwards("the first loss first", second_first=False)
_two_backwards("the second loss first", second_first=True)


def _of_one_output(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(out, y), out.square().sum(1).mean()


@case(BATCHES, "two losses of one forward pass add up before clipping")
def _retained(library: Library) -> None:
    model = set_parameters(nn.Linear(5, 3))
    both = ConformanceLoss(mean=lambda model, batch: sum(_of_one_output(model(batch[0]), batch[1]), torch.zeros(())))
    wanted = _wanted(model, both)
    private = _private(library, model)
    for x, y in private.loader:
        first, second = _of_one_output(private.model(x), y)
        first.backward(retain_graph=True)
        second.backward()
        private.optimizer.step()
    check_sums(_gradients(private), wanted)


@case(BATCHES, "a forward pass without a backward pass adds nothing")
def _forward_alone(library: Library) -> None:
    model = set_parameters(nn.Linear(5, 3))
    wanted = _wanted(model, CROSS_ENTROPY)
    private = _private(library, model)
    for x, y in private.loader:
        private.model(3 * x)
        F.cross_entropy(private.model(x), y).backward()
        private.optimizer.step()
    check_sums(_gradients(private), wanted)


def _layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    set_parameters(model)
    return model


def _step(private: PrivateTraining) -> list[Tensor]:
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
    check_sums(_step(private), wanted)


@case(BATCHES, "a layer frozen between steps no longer counts")
def _frozen(library: Library) -> None:
    model = _layers()
    private = _private(library, model)
    _step(private)
    model[0].requires_grad_(requires_grad=False)
    wanted = _wanted(model, CROSS_ENTROPY)
    check_sums(_step(private), wanted)


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
    set_parameters(model)
    private = _private(library, model)
    _step(private)
    model.early = True
    wanted = _wanted(model, CROSS_ENTROPY)
    check_sums(_step(private), wanted)


def _counter(library: Library, records: int, data: "DataLoader[Any] | None" = None, **options: Any) -> PrivateTraining:
    """Record i has gradient −eᵢ: the sum counts how often each record is in a step."""
    own = TensorDataset(torch.eye(records)) if data is None else data
    return _private(library, nn.Linear(records, 1, bias=False), own, max_grad_norm=10.0, **options)


def _count(private: PrivateTraining, batch: Tensor, size: int) -> Tensor | None:
    (-private.model(batch)).sum(1).mean().backward()
    private.optimizer.step()
    (weight,) = (p for group in private.optimizer.param_groups for p in group["params"])
    return None if weight.grad is None else (-weight.grad[0] * size).round()


@case(BATCHES, "a batch that is abandoned leaves nothing to the next step")
def _abandoned(library: Library) -> None:
    private = _counter(library, 8, microbatch_size=4)
    for (batch,) in private.loader:
        if _count(private, batch, 8) is not None:
            raise ConformanceFailure("a part of a batch is a step")
        break
    steps = [found for (batch,) in private.loader if (found := _count(private, batch, 8)) is not None]
    if len(steps) != 1 or not torch.equal(steps[0], torch.ones(8)):
        raise ConformanceFailure("the step after it does not hold every record once")


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
        raise ConformanceFailure("it is free")


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
                raise ConformanceFailure("a record counts twice")


@case(BATCHES, "refused: a batch is left out for its number of records", expects="refusal")
def _left_out(library: Library) -> None:
    private = _counter(library, 32, DataLoader(TensorDataset(torch.eye(32)), batch_size=16))
    for _ in range(20):
        for (batch,) in private.loader:
            if len(batch) < 17:
                continue
            _count(private, batch, 16)
    raise ConformanceFailure("the number of steps tells how many records there are")


@case(BATCHES, "N and N + 1 records have the same noise and divisor, bit for bit")
def _sizes(library: Library) -> None:
    gradients = []
    for records in (40, 41):
        loader = DataLoader(TensorDataset(torch.zeros(records, 3)), batch_size=8)
        options = {"noise_multiplier": 1.3, "expected_batch_size": 8, "sample_rate": 0.2, "seed": 11}
        private = _private(library, set_parameters(nn.Linear(3, 2)), loader, **options)
        for (x,) in private.loader:
            (0 * private.model(x)).sum(1).mean().backward()
            private.optimizer.step()
        gradients.append(_gradients(private))
        private.detach()
    if distance(*gradients) != 0 or l2_norm(gradients[0]) == 0:
        raise ConformanceFailure("the noise tells how many records there are")


@case(BATCHES, "twenty records at rate 1/20 make twenty steps, the empty ones of noise alone")
def _empty(library: Library) -> None:
    model = set_parameters(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(synthetic_normal(20, 3), synthetic_integers(2, 20)), batch_size=1)
    private = library.make_private(model, loader, optimizer=optimizer, noise_multiplier=1.0)
    steps = 0
    for x, y in private.loader:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        F.cross_entropy(private.model(x), y).backward()
        private.optimizer.step()
        steps += 1
        if distance(list(model.parameters()), before) == 0:
            raise ConformanceFailure("a step without noise")
    if steps != 20:
        raise ConformanceFailure(f"{steps} steps")


@case(BATCHES, "refused: a sampler whose distribution is not known", expects="refusal")
def _weighted(library: Library) -> None:
    data = TensorDataset(torch.eye(20))
    sampler = WeightedRandomSampler([20.0] + [1.0] * 19, 20)
    private = _counter(library, 20, DataLoader(data, batch_size=4, sampler=sampler), noise_multiplier=1.0)
    for _ in private.loader:
        pass
    raise ConformanceFailure("it is charged as if it were uniform")


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
            raise ConformanceFailure("records outside the subset are trained on")


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
        raise ConformanceFailure("the parameters follow from records past the noise")


for _name in ("learning_rate", "weight_decay", "momentum"):
    _set_from_batch(_name)


def _steps(private: PrivateTraining, count: int) -> None:
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
        raise NotSupported
    options = {"batch_size": 8, "noise_multiplier": 1.0}
    with TemporaryDirectory() as name:
        folder, data = Path(name), TensorDataset(synthetic_normal(32, 5), synthetic_integers(3, 32))
        private = library.begin(folder, nn.Linear(5, 3), data, **options)
        _steps(private, 2)
        library.save(private, folder)
        _steps(private, 5)
        del private  # the process ends
        again = library.begin(folder, nn.Linear(5, 3), data, **options)
        _steps(again, 1)
        step = PoissonSampled(sample_rate=0.25, event=Gaussian(noise_multiplier=1.0))
        least = epsilon(SelfComposed(event=step, count=8), 1e-5).lower
        charged = again.epsilon(1e-5)
        again.detach()
    if charged < least * (1 - 1e-6):
        raise ConformanceFailure("steps whose results were shown are forgotten")


@case(BATCHES, "a misspelt option is a TypeError")
def _misspelt(library: Library) -> None:
    try:
        library.make_private(nn.Linear(5, 3), TensorDataset(*_records()), max_gradnorm=1.0)
    except TypeError:
        return
    raise ConformanceFailure("it is ignored")


# ----------------------------------------------------------------------------------------------------------------------
# Cheap named checks of noise, batches and charges through a library's public surface.
#
# Each check trains a tiny model for a step or a few and looks at the gradient that the optimizer sees. Together they
# take seconds, and each way of being not private that is listed in docs/auditing.md fails the check that is named
# there.
# ----------------------------------------------------------------------------------------------------------------------


_ENGINE_CHECKS_C, _Z, _DELTA = 0.7, 1.5, 1e-5
_OPTIONS = {"batch_size": 8, "noise_multiplier": _Z}
RecordLosses = Callable[[nn.Module, Sequence[Tensor]], Tensor]


@dataclass(frozen=True, kw_only=True)
class CheckedEngine:
    """What the checks of the installed engine found.

    Args:
        passed: for each check by name whether it passed.
    """

    passed: Mapping[str, bool]

    @property
    def broken(self) -> set[str]:
        """Names of the checks that failed; empty for an engine that does what it says."""
        return {name for name, good in self.passed.items() if not good}


def check_engine(library: Library | None = None) -> CheckedEngine:
    """Run all checks, by default of this library's engine. A few seconds.

    The engine draws its noise and batches afresh, so that a sound engine fails a check about once in a million times.

    Args:
        library: what is checked.
    """
    checked = EngineLibrary() if library is None else library
    return CheckedEngine(passed={name: check.run(checked).passed for name, check in ENGINE_CHECKS.items()})


# ── what the checks train ───────────────────────────────────────────────────────────────────────────────────


def _linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(synthetic_normal(*parameter.shape) / math.sqrt(inputs))
    return layer


def _run(
    library: Library,
    model: nn.Module,
    tensors: Sequence[Tensor],
    loss: RecordLosses,
    *,
    steps: int,
    after: PrivateTraining | None = None,
    **options: object,
) -> tuple[list[list[Tensor]], PrivateTraining]:
    """The gradients, tensor by tensor, that the optimizer sees in each of `steps` steps, and the training."""
    data = TensorDataset(*tensors)
    wanted = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.0), "max_grad_norm": _ENGINE_CHECKS_C} | options
    make = library.make_private if after is None else partial(library.resume, after)
    private = cast("Callable[..., PrivateTraining]", make)(model, data, **wanted)
    seen: list[list[Tensor]] = []

    def see(*_: object) -> None:
        # Between the chunks of a batch there is no gradient yet.
        given = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if given:
            seen.append([gradient.detach().clone() for gradient in given])

    private.optimizer.register_step_post_hook(see)
    while len(seen) < steps:
        for batch in private.loader:
            loss(private.model, batch).backward()
            private.optimizer.step()
            private.optimizer.zero_grad()
    private.detach()
    return seen[:steps], private


def _flat(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients]).double()


def _silent(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return (0 * model(batch[0])).sum(1).mean()


def _squares(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().sum(1).mean()


ENGINE_CHECKS: dict[str, Case] = {}


def _engine_check(name: str) -> Callable[[Callable[[Library], bool]], Callable[[Library], None]]:
    """Decorator: put a check that says whether all is well among the engine's, under the sentence `name`."""

    def register(check: Callable[[Library], bool]) -> Callable[[Library], None]:
        @case(ENGINE_CHECKS, name)
        def run(library: Library) -> None:
            if not check(library):
                raise ConformanceFailure("it is not so")

        return run

    return register


# ── the checks ──────────────────────────────────────────────────────────────────────────────────────────────


@_engine_check("noise has the declared scale in every tensor")
def _noise_scale(library: Library) -> bool:
    """Every tensor's noise has standard deviation z·C/B, and none is left out."""
    model = nn.Sequential(_linear(100, 200), _linear(200, 100))
    (noises,), _ = _run(library, model, (torch.zeros(32, 100),), _silent, steps=1, **_OPTIONS)
    for noise in noises:
        ratio = float(noise.double().square().mean()) / (_Z * _ENGINE_CHECKS_C / 8) ** 2
        if abs(ratio - 1) > 5 * math.sqrt(2 / noise.numel()):
            return False
    return True


@_engine_check("noise is fresh in every step and coordinate")
def _fresh_noise(library: Library) -> bool:
    """No two steps and no two coordinates share their noise."""
    rows, _ = _run(library, _linear(100, 100), (torch.zeros(32, 100),), _silent, steps=3, **_OPTIONS)
    matrix = torch.stack([_flat(row) for row in rows]).numpy()
    if not matrix.any():
        return True  # no noise at all is what another check finds
    if not (np.ptp(matrix, axis=1) > 0).all() or len(np.unique(matrix)) < 0.99 * matrix.size:
        return False
    return bool(np.abs(np.corrcoef(matrix) - np.eye(3)).max() < 6 / math.sqrt(matrix.shape[1]))


@_engine_check("one record moves the sum by at most the clipping norm")
def _sensitivity(library: Library) -> bool:
    """A record more, however large, moves the sum over all layers by at most C."""
    features, targets = synthetic_normal(12, 4), synthetic_normal(12, 1)
    sums = []
    for factor in (1.0, 1000.0, 0.0):
        x, y = features.clone(), targets.clone()
        x[-1] *= factor
        y[-1] *= factor
        sums.append(_sum_of(library, x, y))
    without = _sum_of(library, features[:-1], targets[:-1])
    return all(float((one - without).norm()) <= _ENGINE_CHECKS_C * (1 + 1e-5) for one in sums)


def _sum_of(library: Library, x: Tensor, y: Tensor, *, microbatch_size: int | None = None) -> Tensor:
    model = nn.Sequential(_linear(4, 5), nn.Tanh(), _linear(5, 1))
    options = {"batch_size": len(x), "noise_multiplier": 0.0, "microbatch_size": microbatch_size}
    (gradients,), _ = _run(library, model, (x, y), _squares, steps=1, **options)
    return len(x) * _flat(gradients)


@_engine_check("chunks have the sum of the whole batch")
def _chunks(library: Library) -> bool:
    """A logical batch in chunks has the sum of the whole: each record is in it once."""
    x, y = synthetic_normal(12, 4), synthetic_normal(12, 1)
    whole = _sum_of(library, x, y)
    parts = [_sum_of(library, x, y, microbatch_size=size) for size in (1, 5)]
    return all(float((part - whole).norm()) <= 1e-5 * float(whole.norm()) for part in parts)


def _counts(library: Library, records: int, batch_size: int, steps: int) -> list[float]:
    """How many records there were in each step, from gradients of −1 each, clipped to C."""
    model = _linear(1, 1, bias=False)
    seen, _ = _run(
        library,
        model,
        (torch.ones(records, 1),),
        lambda one, batch: -one(batch[0]).sum(1).mean(),
        steps=steps,
        batch_size=batch_size,
        noise_multiplier=0.0,
    )
    return [-batch_size * float(_flat(gradients)[0]) / _ENGINE_CHECKS_C for gradients in seen]


@_engine_check("the divisor is public")
def _public_divisor(library: Library) -> bool:
    """The sum is divided by the declared batch size: sums of equal gradients are whole multiples of one record's."""
    counts = _counts(library, 40, 10, 8)
    return all(abs(count - round(count)) < 1e-3 for count in counts) and len({round(count) for count in counts}) > 1


@_engine_check("batches are drawn by Poisson sampling")
def _poisson(library: Library) -> bool:
    """Batch sizes have mean nq and variance nq(1 − q)."""
    records, batch_size, steps = 100, 25, 200
    counts = np.array(_counts(library, records, batch_size, steps))
    variance = batch_size * (1 - batch_size / records)
    mean_is_right = abs(counts.mean() - batch_size) < 5 * math.sqrt(variance / steps)
    return bool(mean_is_right and abs(counts.var() / variance - 1) < 5 * math.sqrt(2 / steps))


@_engine_check("a broken record adds nothing and stops nothing")
def _broken_record(library: Library) -> bool:
    """A record that is no number adds nothing, and the step is taken with its noise all the same."""
    x, y = synthetic_normal(12, 4), synthetic_normal(12, 1)
    taken = []
    for last in (0.0, math.nan, math.inf):
        features = x.clone()
        features[-1] = last
        # A record whose gradient is 0 stands for one that adds nothing.
        targets = y.clone()
        model = _linear(4, 1, bias=False)
        targets[-1] = 0.0
        (gradients,), _ = _run(
            library, model, (features, targets), _squares, steps=1, batch_size=12, noise_multiplier=_Z, seed=5
        )
        taken.append(_flat(gradients))
    return all(torch.equal(taken[0], other) for other in taken[1:])


@_engine_check("a resumed run draws new noise")
def _new_noise_on_resume(library: Library) -> bool:
    """Two runs that go on from the same state draw other noise than each other, and than the run before."""
    noises: list[Tensor] = []
    first: PrivateTraining | None = None
    for _ in range(3):
        (gradients,), private = _run(
            library, _linear(10, 10), (torch.zeros(32, 10),), _silent, steps=1, after=first, **_OPTIONS
        )
        first = private if first is None else first
        noises.append(_flat(gradients))
    if not any(noise.any() for noise in noises):
        return True  # no noise at all is what another check finds
    return all(not bool((noises[i] == noises[j]).any()) for i in range(3) for j in range(i))


@_engine_check("every step is charged")
def _every_step_charged(library: Library) -> bool:
    """Every step is charged, by the sampler's rate and the noise of the plan, through a resume too."""
    steps, last = 0, None
    for _ in range(2):
        _, last = _run(library, _linear(2, 2), (torch.zeros(32, 2),), _silent, steps=4, after=last, **_OPTIONS)
        steps += 4
        step = PoissonSampled(sample_rate=0.25, event=Gaussian(noise_multiplier=_Z))
        least = accounting.epsilon(SelfComposed(event=step, count=steps), _DELTA).lower
        if last.epsilon(_DELTA) < least * (1 - 1e-9):
            return False
    return True
