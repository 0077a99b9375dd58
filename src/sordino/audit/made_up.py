"""Made-up records and models for the cases, the same every time, and the slow, obvious gradient (audit, floor 4)."""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sordino.audit.case import Wrong
from sordino.audit.library import Library, Loss
from sordino.randomness import Randomness

__all__ = ["determined", "distance", "exact_sum", "length", "must_be_exact", "must_stay_within", "normal", "whole"]

# Of rounding in single precision, and of the margin that a library may keep below its bound.
_TOLERANCE = 3e-5


def normal(*shape: int) -> Tensor:
    """Numbers that look standard normal; equal shapes give equal numbers."""
    stream = Randomness(seed=11, reproducible=True).stream("made-up", step=len(shape), tensor=math.prod(shape))
    uniform = stream.uniform(12 * math.prod(shape)).reshape(12, *shape)
    return torch.from_numpy(uniform.sum(0) - 6).float()


def whole(values: int, *shape: int) -> Tensor:
    """Whole numbers from 0 to values − 1."""
    return (1000 * normal(*shape).abs()).long() % values


def determined(model: nn.Module) -> nn.Module:
    """The model with made-up parameters, so that two of them are alike."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            inputs = parameter.shape[-1] if parameter.dim() > 1 else 4
            # Tensors of one shape must differ all the same.
            parameter.copy_(normal(number + 1, *parameter.shape)[number] / math.sqrt(inputs))
    return model


def length(parts: Sequence[Tensor]) -> float:
    """ℓ2 norm of all entries together."""
    return math.sqrt(sum(float(part.detach().double().square().sum()) for part in parts))


def distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """ℓ2 norm of the difference."""
    return length([a.double() - b.double() for a, b in zip(one, other, strict=True)])


def exact_sum(model: nn.Module, batch: Sequence[Tensor], loss: Loss, *, max_grad_norm: float) -> list[Tensor]:
    """Every record's own gradient by plain autograd, one record at a time in double precision, clipped and added."""
    twin = copy.deepcopy(model).double()
    wanted = [parameter for parameter in twin.parameters() if parameter.requires_grad]
    sums = [torch.zeros_like(parameter) for parameter in wanted]
    for place in range(len(batch[0])):
        rows = [column[place : place + 1] for column in batch]
        record = [row.double() if row.is_floating_point() else row for row in rows]
        # The usual backward pass: reentrant checkpoints know no other.
        twin.zero_grad()
        loss.mean(twin, record).backward()
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in wanted]
        factor = min(1.0, max_grad_norm / max(length(gradient), 1e-300))
        for total, part in zip(sums, gradient, strict=True):
            total.add_(part, alpha=factor)
    return sums


def must_be_exact(
    library: Library, build: Callable[[], nn.Module], batch: Sequence[Tensor], loss: Loss, *, max_grad_norm: float = 0.5
) -> None:
    """The library's clipped sum is the slow one."""
    model = determined(build())
    wanted = exact_sum(model, batch, loss, max_grad_norm=max_grad_norm)
    got = library.clipped_sum(model, batch, loss, max_grad_norm=max_grad_norm)
    off = distance(got, wanted) / max(length(wanted), 1e-30)
    if not off <= _TOLERANCE:
        raise Wrong(f"the clipped sum is off by {100 * off:.2g} %")


def must_stay_within(
    library: Library,
    build: Callable[[], nn.Module],
    batch: Sequence[Tensor],
    other: Sequence[Tensor],
    loss: Loss,
    *,
    max_grad_norm: float = 0.7,
    norms: int = 1,
) -> None:
    """The clipped sums of two data sets that differ in one record differ by at most `norms` clipping norms."""
    one, two = (
        library.clipped_sum(determined(build()), data, loss, max_grad_norm=max_grad_norm) for data in (batch, other)
    )
    moved = distance(one, two) / max_grad_norm
    if not moved <= norms * (1 + 1e-4):
        raise Wrong(f"one record moves the sum by {moved:.3g} C, allowed are {norms} C")
