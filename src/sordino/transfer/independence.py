"""An experiment on made-up records: a feature extractor must treat each record by itself (floor 1)."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from sordino.errors import CoupledRecords, UnsupportedModule

__all__ = ["refuse_batch_statistics", "width_of_independent_features"]

_RECORDS = 5
# Batches of one shape go through the same kernels row by row: nothing but rounding in the comparison may be left.
_TOLERANCE = 1e-5
_FLOATS = (math.nan, 1e4, -1e4)
_INTEGERS = (0, 1, 2)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def refuse_batch_statistics(module: nn.Module) -> None:
    """Refuse a module in evaluation mode that still holds a normalisation by the statistics of the batch.

    Raises:
        UnsupportedModule: it names the first such layer.
    """
    for name, part in module.named_modules():
        if isinstance(part, _BATCH_NORMS) and (part.training or part.running_mean is None):
            raise UnsupportedModule(
                f"{name or 'the model'} ({type(part).__name__}) must normalise by stored statistics, got one that uses "
                "those of the batch: a record's features would depend on its neighbours. Call eval(), and keep "
                "track_running_stats=True."
            )


def width_of_independent_features(run: Callable[..., Tensor], inputs: Sequence[Tensor]) -> int:
    """The number of features d of ``run(*inputs)`` of shape (records, d), after the experiment.

    Guarantee: only shapes and types of `inputs` are read. One of a few made-up records is replaced, made extreme, made
    NaN and moved to another place; the features of the others must stay as they are. The same batch must also give the
    same features again, so that nothing is drawn at random or remembered from other batches.

    Args:
        run: a batch, records first ↦ features.
        inputs: a batch of any number of records, even none.

    Raises:
        CoupledRecords: a record changes another one's features, or the run cannot be asked.
        UnsupportedModule: the output is not one row a record.
    """
    made_up, first = _workable(run, inputs)
    _compare(first, run(*made_up), "the same records have other features the second time")
    for changed in _changed(made_up):
        try:
            found = run(*changed)
        except Exception:  # noqa: S112
            continue  # Code that refuses such a value can't be asked in this way.
        _compare(first[1:], found[1:], "a record changes the features of another one")
    order = [*range(1, _RECORDS), 0]
    moved = run(*(part[order] for part in made_up))
    _compare(first[order], moved, "a record's features depend on its place in the batch")
    _compare(first, run(*made_up), "what came between changes a record's features")
    return first.shape[1]


def _workable(run: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Made-up records that the run accepts and answers with finite features, and those features."""
    failure: Exception | None = None
    for integer in ("mixed", "ones", "zeros"):
        made_up = tuple(_values(like, integer, place) for place, like in enumerate(inputs))
        try:
            found = run(*made_up)
        except UnsupportedModule:
            raise
        except Exception as error:
            failure = error
            continue
        if bool(found.isfinite().all()):
            return made_up, found
    raise CoupledRecords(
        "model must run on made-up records, floats in (0, 1) and integers 0 and 1, to show that records are "
        "independent, got a failure. Wrap it in a module that takes such records."
    ) from failure


def _values(like: Tensor, integer: str, place: int) -> Tensor:
    shape = (_RECORDS, *like.shape[1:])
    count = math.prod(shape)
    if like.dtype.is_floating_point:
        # An irrational step fills (0, 1) evenly and never repeats.
        steps = torch.arange(1, count + 1, dtype=torch.float64) * (math.sqrt(5) - 1) / 2 + place / 7
        return (steps % 1).reshape(shape).to(like.device, like.dtype)
    if integer != "mixed":
        return torch.full(shape, int(integer == "ones"), dtype=like.dtype, device=like.device)
    # Each record starts with a one, as a mask must; lengths and contents differ.
    values = (torch.arange(count).reshape(_RECORDS, -1) * 7 % 5 < 3).long()
    values[:, 0] = 1
    return values.reshape(shape).to(like.device, like.dtype)


def _changed(made_up: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The records with another first one: another made-up one, and whatever values it may hold."""
    yield tuple(torch.cat([part[-1:], part[1:]]) for part in made_up)
    for value in _FLOATS:
        yield tuple(_poisoned(part, value) if part.dtype.is_floating_point else part for part in made_up)
    for value in _INTEGERS:
        yield tuple(part if part.dtype.is_floating_point else _poisoned(part, value) for part in made_up)


def _poisoned(part: Tensor, value: float) -> Tensor:
    poisoned = part.clone()
    poisoned[0] = value
    return poisoned


def _compare(expected: Tensor, found: Tensor, fault: str) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    if found.shape != expected.shape or not bool(((found - expected).abs() <= _TOLERANCE * scale).all()):
        raise CoupledRecords(
            f"model must treat each record by itself, got one in which {fault}. Look for batch statistics, sums over "
            "dimension 0, dropout that eval() leaves on, and state that a forward pass changes."
        )
