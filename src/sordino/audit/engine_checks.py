"""Cheap named checks of noise, batches and bill through a library's public surface (room `audit`, floor 4).

Each check trains a tiny model for a step or a few and looks at the gradient that the optimizer sees. Together they take
seconds, and each way of being not private that is listed in docs/auditing.md fails the check that is named there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sordino import accounting
from sordino.audit.case import Case, Wrong
from sordino.audit.library import Engine, Library, Private
from sordino.audit.made_up import normal
from sordino.events import Gaussian, PoissonSampled, SelfComposed

__all__ = ["CheckedEngine", "ENGINE_CHECKS", "check_engine"]

_C, _Z, _DELTA = 0.7, 1.5, 1e-5
_OPTIONS = {"batch_size": 8, "noise_multiplier": _Z}
Loss = Callable[[nn.Module, Sequence[Tensor]], Tensor]


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
    checked = Engine() if library is None else library
    return CheckedEngine(passed={name: check.run(checked).passed for name, check in ENGINE_CHECKS.items()})


# ── what the checks train ───────────────────────────────────────────────────────────────────────────────────


def _linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(normal(*parameter.shape) / math.sqrt(inputs))
    return layer


def _gradients(
    library: Library,
    model: nn.Module,
    tensors: Sequence[Tensor],
    loss: Loss,
    *,
    steps: int,
    after: Private | None = None,
    **options: object,
) -> list[list[Tensor]]:
    """The gradients, tensor by tensor, that the optimizer sees in each of `steps` steps."""
    return _run(library, model, tensors, loss, steps=steps, after=after, **options)[0]


def _run(
    library: Library,
    model: nn.Module,
    tensors: Sequence[Tensor],
    loss: Loss,
    *,
    steps: int,
    after: Private | None = None,
    **options: object,
) -> tuple[list[list[Tensor]], Private]:
    data = TensorDataset(*tensors)
    wanted = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.0), "max_grad_norm": _C} | options
    make = library.make_private if after is None else partial(library.resumed, after)
    private = cast("Callable[..., Private]", make)(model, data, **wanted)
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


# ── the checks ──────────────────────────────────────────────────────────────────────────────────────────────


def _noise_scale(library: Library) -> bool:
    """Every tensor's noise has standard deviation z·C/B, and none is left out."""
    model = nn.Sequential(_linear(100, 200), _linear(200, 100))
    (noises,) = _gradients(library, model, (torch.zeros(32, 100),), _silent, steps=1, batch_size=8, noise_multiplier=_Z)
    for noise in noises:
        ratio = float(noise.double().square().mean()) / (_Z * _C / 8) ** 2
        if abs(ratio - 1) > 5 * math.sqrt(2 / noise.numel()):
            return False
    return True


def _fresh_noise(library: Library) -> bool:
    """No two steps and no two coordinates share their noise."""
    rows = _gradients(
        library, _linear(100, 100), (torch.zeros(32, 100),), _silent, steps=3, batch_size=8, noise_multiplier=_Z
    )
    matrix = torch.stack([_flat(row) for row in rows]).numpy()
    if not matrix.any():
        return True  # no noise at all is what another check finds
    if not (np.ptp(matrix, axis=1) > 0).all() or len(np.unique(matrix)) < 0.99 * matrix.size:
        return False
    return bool(np.abs(np.corrcoef(matrix) - np.eye(3)).max() < 6 / math.sqrt(matrix.shape[1]))


def _sensitivity(library: Library) -> bool:
    """A record more, however large, moves the sum over all layers by at most C."""
    features, targets = normal(12, 4), normal(12, 1)
    sums = []
    for factor in (1.0, 1000.0, 0.0):
        x, y = features.clone(), targets.clone()
        x[-1] *= factor
        y[-1] *= factor
        sums.append(_sum_of(library, x, y))
    without = _sum_of(library, features[:-1], targets[:-1])
    return all(float((one - without).norm()) <= _C * (1 + 1e-5) for one in sums)


def _sum_of(library: Library, x: Tensor, y: Tensor, *, microbatch_size: int | None = None) -> Tensor:
    model = nn.Sequential(_linear(4, 5), nn.Tanh(), _linear(5, 1))
    options = {"batch_size": len(x), "noise_multiplier": 0.0, "microbatch_size": microbatch_size}
    (gradients,) = _gradients(library, model, (x, y), _squares, steps=1, **options)
    return len(x) * _flat(gradients)


def _chunks(library: Library) -> bool:
    """A logical batch in chunks has the sum of the whole: each record is in it once."""
    x, y = normal(12, 4), normal(12, 1)
    whole = _sum_of(library, x, y)
    parts = [_sum_of(library, x, y, microbatch_size=size) for size in (1, 5)]
    return all(float((part - whole).norm()) <= 1e-5 * float(whole.norm()) for part in parts)


def _counts(library: Library, records: int, batch_size: int, steps: int) -> list[float]:
    """How many records there were in each step, from gradients of −1 each, clipped to C."""
    model = _linear(1, 1, bias=False)
    seen = _gradients(
        library,
        model,
        (torch.ones(records, 1),),
        lambda one, batch: -one(batch[0]).sum(1).mean(),
        steps=steps,
        batch_size=batch_size,
        noise_multiplier=0.0,
    )
    return [-batch_size * float(_flat(gradients)[0]) / _C for gradients in seen]


def _public_divisor(library: Library) -> bool:
    """The sum is divided by the declared batch size: sums of equal gradients are whole multiples of one record's."""
    counts = _counts(library, 40, 10, 8)
    return all(abs(count - round(count)) < 1e-3 for count in counts) and len({round(count) for count in counts}) > 1


def _poisson(library: Library) -> bool:
    """Batch sizes have mean nq and variance nq(1 − q)."""
    records, batch_size, steps = 100, 25, 200
    counts = np.array(_counts(library, records, batch_size, steps))
    variance = batch_size * (1 - batch_size / records)
    mean_is_right = abs(counts.mean() - batch_size) < 5 * math.sqrt(variance / steps)
    return bool(mean_is_right and abs(counts.var() / variance - 1) < 5 * math.sqrt(2 / steps))


def _broken_record(library: Library) -> bool:
    """A record that is no number adds nothing, and the step is taken with its noise all the same."""
    x, y = normal(12, 4), normal(12, 1)
    taken = []
    for last in (0.0, math.nan, math.inf):
        features = x.clone()
        features[-1] = last
        # A record whose gradient is 0 stands for one that adds nothing.
        targets = y.clone()
        model = _linear(4, 1, bias=False)
        targets[-1] = 0.0
        (gradients,) = _gradients(
            library, model, (features, targets), _squares, steps=1, batch_size=12, noise_multiplier=_Z, seed=5
        )
        taken.append(_flat(gradients))
    return all(torch.equal(taken[0], other) for other in taken[1:])


def _new_noise_on_resume(library: Library) -> bool:
    """Two runs that go on from the same state draw other noise than each other, and than the run before."""
    noises: list[Tensor] = []
    first: Private | None = None
    for _ in range(3):
        (gradients,), private = _run(
            library, _linear(10, 10), (torch.zeros(32, 10),), _silent, steps=1, after=first, **_OPTIONS
        )
        first = private if first is None else first
        noises.append(_flat(gradients))
    if not any(noise.any() for noise in noises):
        return True  # no noise at all is what another check finds
    return all(not bool((noises[i] == noises[j]).any()) for i in range(3) for j in range(i))


def _charged(library: Library) -> bool:
    """Every step is on the bill, by the sampler's rate and the noise of the plan, through a resume too."""
    steps, last = 0, None
    for _ in range(2):
        _, last = _run(library, _linear(2, 2), (torch.zeros(32, 2),), _silent, steps=4, after=last, **_OPTIONS)
        steps += 4
        step = PoissonSampled(sample_rate=0.25, event=Gaussian(noise_multiplier=_Z))
        least = accounting.epsilon(SelfComposed(event=step, count=steps), _DELTA).lower
        if last.epsilon(_DELTA) < least * (1 - 1e-9):
            return False
    return True


def _checked(name: str, check: Callable[[Library], bool]) -> Case:
    def run(library: Library) -> None:
        if not check(library):
            raise Wrong("it is not so")

    return Case(name=name, expects="right", check=run)


_CHECKS: dict[str, Callable[[Library], bool]] = {
    "noise has the declared scale in every tensor": _noise_scale,
    "noise is fresh in every step and coordinate": _fresh_noise,
    "one record moves the sum by at most the clipping norm": _sensitivity,
    "chunks have the sum of the whole batch": _chunks,
    "the divisor is public": _public_divisor,
    "batches are drawn by Poisson sampling": _poisson,
    "a broken record adds nothing and stops nothing": _broken_record,
    "a resumed run draws new noise": _new_noise_on_resume,
    "every step is charged": _charged,
}

ENGINE_CHECKS: dict[str, Case] = {name: _checked(name, check) for name, check in _CHECKS.items()}
