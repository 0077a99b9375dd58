"""The table of clipped tangent kernels, measured (floor 4).

A published table says for each way of clipping whether the matrix that drives the outputs stays symmetric and positive.
"Positive" has two meanings there, which agree for symmetric matrices alone: vᵀMv ≥ 0 for every v (then the loss falls),
and eigenvalues with a real part ≥ 0 (then the linear dynamics are stable). Both are measured, with the loss's
slope predicted from the kernel and found by moving the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from sordino import checks
from sordino.clipping import FlatClipping, GlobalClipping
from sordino.clipping.clipping import Clipping
from sordino.diagnostics.kernels import Kernels, RecordLoss, cross_entropy, kernels
from sordino.errors import InvalidArgument

__all__ = ["KernelRow", "PUBLISHED", "TangentKernel", "tangent_kernel"]

Floats = NDArray[np.float64]

PUBLISHED: Mapping[str, tuple[bool, bool, bool]] = {
    "none": (True, True, True),
    "flat": (False, False, True),
    "layer-wise": (False, False, False),
    "global flat": (True, True, True),
    "global layer-wise": (True, True, True),
    "large threshold": (True, True, True),
}
"""Symmetric, positive as a form, positive eigenvalues: what Bu, Wang, Long state for each way of clipping."""

_TOLERANCE = 1e-8
_STEP = 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelRow:
    """One way of clipping at this point.

    Args:
        name: of the way.
        matrix: M with df/dt = −(1/N) M e, (NK, NK).
        asymmetry: largest |M − Mᵀ| over the largest |M|.
        smallest_form: smallest eigenvalue of (M + Mᵀ)/2, over the largest |eigenvalue|.
        smallest_eigenvalue: smallest real part of M's own eigenvalues, over the largest absolute value.
        smallest_on_kept: as `smallest_form`, of the block of records that are not dropped; 0 if all are.
        predicted: dL/dt of the mean loss, −eᵀMe/N².
        measured: the same, from losses at weights moved along the clipped gradient.
        kept: share of records with a factor above 0 in every layer.
    """

    name: str
    matrix: Floats
    asymmetry: float
    smallest_form: float
    smallest_eigenvalue: float
    smallest_on_kept: float
    predicted: float
    measured: float
    kept: float

    @property
    def symmetric(self) -> bool:
        """Up to rounding."""
        return self.asymmetry <= _TOLERANCE

    @property
    def positive_form(self) -> bool:
        """vᵀMv ≥ 0 for every v, up to rounding: then the loss falls whatever the slopes are."""
        return self.smallest_form >= -_TOLERANCE

    @property
    def positive_eigenvalues(self) -> bool:
        """Real parts ≥ 0, up to rounding."""
        return self.smallest_eigenvalue >= -_TOLERANCE

    @property
    def refutes(self) -> tuple[str, ...]:
        """Properties that the published table promises and that don't hold here. (A "no" there means: not always.)"""
        names = ("symmetric", "positive form", "positive eigenvalues")
        found = (self.symmetric, self.positive_form, self.positive_eigenvalues)
        return tuple(n for n, said, is_so in zip(names, PUBLISHED[self.name], found, strict=True) if said and not is_so)


@dataclass(frozen=True, kw_only=True, eq=False)
class TangentKernel:
    """The table.

    Args:
        rows: one for each way of clipping.
        max_grad_norm: the clipping norm.
        layers: layers with parameters.
        records: records in the batch.
    """

    rows: tuple[KernelRow, ...]
    max_grad_norm: float
    layers: tuple[str, ...]
    records: int

    def row(self, name: str) -> KernelRow:
        """The row of one way of clipping."""
        checks.one_of([row.name for row in self.rows], name=name)
        return next(row for row in self.rows if row.name == name)


def tangent_kernel(
    model: nn.Module,
    features: Tensor,
    labels: Tensor,
    *,
    max_grad_norm: float,
    loss: RecordLoss = cross_entropy,
) -> TangentKernel:
    """The tangent kernel of a model on a batch and its clipped counterparts.

    Guarantee: none; of public records only.

    Args:
        model: features ↦ outputs, each record alone.
        features: a small batch of public records: the kernel has N · K rows.
        labels: (N,).
        max_grad_norm: clipping norm R > 0; layers share it evenly, each has R/√layers.
        loss: of each record; cross entropy by default.

    Returns:
        Rows for no clipping, flat, layer-wise, global flat, global layer-wise, and global with a threshold that drops
        nobody.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.linspace(-2, 2, 15).reshape(5, 3), torch.tensor([0, 1, 0, 1, 1])
        >>> table = tangent_kernel(nn.Linear(3, 2), x, y, max_grad_norm=0.5)
        >>> table.row("none").symmetric, table.row("flat").symmetric, table.row("flat").positive_eigenvalues
        (True, False, True)

    References:
        Bu, Wang, Long 2023, "On the convergence and calibration of deep learning with differential privacy", table 2.
    """
    checks.positive(max_grad_norm=max_grad_norm)
    seen = kernels(model, features, labels, loss=loss)
    if not np.isfinite(seen.slopes).all() or not all(np.isfinite(J).all() for J in seen.jacobians):
        raise InvalidArgument("outputs and losses must be finite on the batch, got others. Check the model's weights.")
    rows = []
    for name, factors in _factors(seen, max_grad_norm).items():
        measured = _slope(model, features, labels, loss, seen, factors)
        rows.append(_row(name, seen, factors, measured))
    return TangentKernel(rows=tuple(rows), max_grad_norm=max_grad_norm, layers=seen.layers, records=seen.records)


def _factors(seen: Kernels, bound: float) -> dict[str, Floats]:
    """Clip factors (layers, N) of each way."""
    squares = seen.squared_norms()
    layers, whole = len(squares), squares.sum(axis=0)
    # With this threshold the largest gradient just counts.
    beyond = GlobalClipping(threshold=max(1.0, 1.001 * float(np.sqrt(whole.max())) / bound))

    def flat(method: Clipping) -> Floats:
        return np.tile(method.factors(torch.from_numpy(whole), max_grad_norm=bound).numpy(), (layers, 1))

    def apart(method: Clipping) -> Floats:
        share = bound / layers**0.5
        return np.stack([method.factors(torch.from_numpy(row), max_grad_norm=share).numpy() for row in squares])

    return {
        "none": np.ones_like(squares),
        "flat": flat(FlatClipping()),
        "layer-wise": apart(FlatClipping()),
        "global flat": flat(GlobalClipping()),
        "global layer-wise": apart(GlobalClipping()),
        "large threshold": flat(beyond),
    }


def _row(name: str, seen: Kernels, factors: Floats, measured: float) -> KernelRow:
    matrix = seen.kernel(factors)
    outputs = len(seen.slopes) // seen.records
    kept = (factors > 0).all(axis=0)
    block = np.repeat(kept, outputs)
    largest = float(np.abs(matrix).max())
    eigenvalues = np.linalg.eigvals(matrix)
    return KernelRow(
        name=name,
        matrix=matrix,
        asymmetry=float(np.abs(matrix - matrix.T).max()) / largest if largest > 0 else 0.0,
        smallest_form=_smallest_form(matrix),
        smallest_eigenvalue=_relative(eigenvalues.real.min(), np.abs(eigenvalues).max()),
        smallest_on_kept=_smallest_form(matrix[np.ix_(block, block)]),
        predicted=-float(seen.slopes @ matrix @ seen.slopes) / seen.records**2,
        measured=measured,
        kept=float(kept.mean()),
    )


def _smallest_form(matrix: Floats) -> float:
    if not matrix.size:
        return 0.0
    values = np.linalg.eigvalsh((matrix + matrix.T) / 2)
    return _relative(values.min(), np.abs(values).max())


def _relative(smallest: float, largest: float) -> float:
    return float(smallest / largest) if largest > 0 else 0.0


def _slope(
    model: nn.Module, features: Tensor, labels: Tensor, loss: RecordLoss, seen: Kernels, factors: Floats
) -> float:
    """dL/dt by central differences along the clipped mean gradient, without the kernel."""
    state = {name: value.detach().double() for name, value in model.state_dict().items() if value.is_floating_point()}
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    moves: dict[str, Tensor] = {}
    for place, layer in enumerate(seen.layers):
        move = torch.from_numpy((seen.gradients(place) * factors[place][:, None]).mean(axis=0))
        names = [name for name in trained if name.rpartition(".")[0] == layer]
        parts = move.split([state[name].numel() for name in names])
        moves |= {
            name: part.reshape(state[name].shape).to(state[name]) for name, part in zip(names, parts, strict=True)
        }
    length = float(torch.stack([(move**2).sum() for move in moves.values()]).sum().sqrt())
    if length == 0:
        return 0.0
    x = features.double() if features.is_floating_point() else features
    step = _STEP / length
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            ends = [
                loss(
                    functional_call(model, state | {n: state[n] - s * m for n, m in moves.items()}, (x,)), labels
                ).mean()
                for s in (step, -step)
            ]
    finally:
        for module, mode in modes:
            module.training = mode
    return float(ends[0] - ends[1]) / (2 * step)
