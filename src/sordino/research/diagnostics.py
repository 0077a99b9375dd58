"""Diagnostics: what clipping and noise do to a model's training, measured on public records.

    measure_tangent_kernel      the neural tangent kernel and its clipped counterparts: symmetric? positive? does the
        loss fall?
    convergence         training with noise alone, clipping alone, both, neither
    subgroup_gaps       whom privacy costs most accuracy

Nothing here is private: give public records, or keep what you see to yourself.

Example:
    >>> from sordino.research import subgroup_gaps
    >>> sure, right = [[0.1, 0.9]] * 4, [1, 1, 0, 0]
    >>> [gap.gap for gap in subgroup_gaps(sure, sure, right, {"side": ["a", "a", "b", "b"]})]
    [0.0, 0.0]
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

from sordino import checks
from sordino.clipping import Clipping, FlatClipping, GlobalClipping
from sordino.errors import InvalidArgument
from sordino.gradients import GradientCapture
from sordino.mechanisms import standard_normal
from sordino.randomness import KeyedRNG
from sordino.training.probing.snapshots import evaluation_mode

# ----------------------------------------------------------------------------------------------------------------------
# Jacobians and tangent kernels of a model on a batch, layer by layer.
#
# Legend: N records, K outputs, D parameters. Under gradient flow of the mean loss over N records the outputs move by
# df/dt = −(1/N) H e, with H = J Jᵀ (NK × NK) and e = ∂ℓ/∂f.
# ----------------------------------------------------------------------------------------------------------------------


Floats = NDArray[np.float64]
RecordLoss = Callable[[Tensor, Tensor], Tensor]
"""(outputs (N, K), labels (N,)) ↦ losses (N,)."""


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each record, shape (N,)."""
    return F.cross_entropy(outputs, labels, reduction="none")


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernels:
    """A model at one point, seen from a batch.

    Args:
        layers: name of each layer with parameters.
        jacobians: ∂f/∂w of each layer, (N·K, D_layer), float64.
        slopes: e = ∂ℓ/∂f, (N·K,).
        records: N.
    """

    layers: tuple[str, ...]
    jacobians: tuple[Floats, ...]
    slopes: Floats
    records: int

    def gradients(self, layer: int) -> Floats:
        """Each record's gradient of one layer, (N, D_layer)."""
        weighted = self.jacobians[layer] * self.slopes[:, None]
        return weighted.reshape(self.records, -1, weighted.shape[1]).sum(axis=1)

    def squared_norms(self) -> Floats:
        """Squared gradient norm of each record in each layer, (layers, N)."""
        return np.stack([(self.gradients(k) ** 2).sum(axis=1) for k in range(len(self.layers))])

    def kernel(self, factors: Floats) -> Floats:
        """Σ over layers of H_r C_r, (NK, NK).

        Args:
            factors: the clip factor of each record in each layer, (layers, N).
        """
        outputs = len(self.slopes) // self.records
        return sum(
            ((J @ J.T) * np.repeat(row, outputs)[None, :] for J, row in zip(self.jacobians, factors, strict=True)),
            np.zeros((len(self.slopes),) * 2),
        )


def compute_kernels(model: nn.Module, features: Tensor, labels: Tensor, *, loss: RecordLoss = cross_entropy) -> Kernels:
    """Jacobians and slopes in double precision, at the model's weights.

    Guarantee: none; of public records only.

    Args:
        model: features (N, …) ↦ outputs (N, K), each record alone; used in evaluation mode, left unchanged.
        features: (N, …); N · K · parameters numbers must fit into memory.
        labels: (N,).
        loss: of each record.
    """
    if len(features) != len(labels) or not len(labels):
        raise InvalidArgument("features and labels must have one row a record and at least one, got others.")
    point = {name: value.detach().double() for name, value in model.state_dict().items() if value.is_floating_point()}
    trained = {name: point.pop(name) for name, value in model.named_parameters() if value.requires_grad}
    x = features.double() if features.is_floating_point() else features

    def outputs(weights: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, {**point, **weights}, (one.unsqueeze(0),)).squeeze(0)

    with evaluation_mode(model), torch.no_grad():
        jacobian = vmap(jacrev(outputs), in_dims=(None, 0))(trained, x)
        values = vmap(outputs, in_dims=(None, 0))(trained, x)
    values = values.detach().requires_grad_()
    (slopes,) = torch.autograd.grad(loss(values, labels).sum(), values)
    layers = tuple(dict.fromkeys(name.rpartition(".")[0] for name in trained))
    rows = values.numel()
    parts = {
        layer: [jacobian[name].reshape(rows, -1) for name in trained if name.rpartition(".")[0] == layer]
        for layer in layers
    }
    return Kernels(
        layers=layers,
        jacobians=tuple(torch.cat(parts[layer], dim=1).cpu().numpy() for layer in layers),
        slopes=slopes.reshape(-1).cpu().numpy(),
        records=len(labels),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Noise alone, clipping alone, both, neither: which of the two slows a training down.
# ----------------------------------------------------------------------------------------------------------------------


_ARMS = {"neither": (False, False), "noise alone": (False, True), "clipping alone": (True, False), "both": (True, True)}


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """Mean loss on the records over the steps, from the same start.

    Args:
        losses: for neither, noise alone, clipping alone and both: the loss before each step and after the last.
        steps: number of steps.
        max_grad_norm: clipping norm.
        noise_multiplier: standard deviation of the noise on the sum over it.
    """

    losses: dict[str, tuple[float, ...]]
    steps: int
    max_grad_norm: float
    noise_multiplier: float


def measure_convergence(
    model: nn.Module,
    features: Tensor,
    labels: Tensor,
    *,
    steps: int,
    learning_rate: float,
    max_grad_norm: float,
    noise_multiplier: float,
    loss: RecordLoss = cross_entropy,
    clipping: Clipping | None = None,
    rng: KeyedRNG | None = None,
) -> Convergence:
    """Full-batch gradient descent four times from the model's weights; the model itself is left unchanged.

    Guarantee: none. Noise without clipping has no guarantee, however much it is: one record can move the sum by any
    amount. It is here for comparison, on public records.

    Args:
        model: features ↦ outputs, each record alone.
        features: public records.
        labels: one a record.
        steps: ≥ 1.
        learning_rate: > 0.
        max_grad_norm: clipping norm C > 0.
        noise_multiplier: σ ≥ 0; noise on the sum has standard deviation σC with clipping and without.
        loss: of each record.
        clipping: flat by default.
        rng: of the noise; both noisy arms get the same noise.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.linspace(-1, 1, 60).reshape(20, 3)
        >>> found = measure_convergence(nn.Linear(3, 2), x, (x[:, 0] > 0).long(), steps=5, learning_rate=1.0,
        ...                     max_grad_norm=0.1, noise_multiplier=0.0)
        >>> found.losses["neither"][-1] < found.losses["clipping alone"][-1] < found.losses["both"][0]
        True

    References:
        Bu, Wang, Long 2023, section 3: in continuous time noise has no part in whether training converges.
    """
    checks.integer(1, steps=steps)
    checks.positive(learning_rate=learning_rate)
    checks.positive(max_grad_norm=max_grad_norm)
    checks.non_negative(noise_multiplier=noise_multiplier)
    method, source = clipping or FlatClipping(), rng or KeyedRNG()

    def descend(model: nn.Module, *, clips: bool, stddev: float) -> tuple[float, ...]:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        capture, losses = GradientCapture(model), []
        for step in range(steps):
            sums = {parameter: torch.zeros_like(parameter) for parameter in parameters}
            with capture.capturing(records=len(labels)):
                own = loss(model(features), labels)
                own.sum().backward()
            losses.append(own.detach().mean().item())
            squares = capture.squared_norm_bounds()
            factors = method.clip_factors(squares, max_grad_norm=max_grad_norm) if clips else torch.ones_like(squares)
            capture.add_weighted_sums(factors, sums)
            capture.discard()
            for index, parameter in enumerate(parameters):
                stream = source.stream("convergence", step=step, tensor=index)
                noise = standard_normal(parameter.numel(), stream).reshape(parameter.shape)
                with torch.no_grad():
                    parameter -= learning_rate * (sums[parameter] + stddev * noise.to(parameter)) / len(labels)
        capture.detach()
        with torch.no_grad():
            losses.append(loss(model(features), labels).mean().item())
        return tuple(losses)

    found = {
        name: descend(deepcopy(model), clips=clips, stddev=noise_multiplier * max_grad_norm if is_noisy else 0.0)
        for name, (clips, is_noisy) in _ARMS.items()
    }
    return Convergence(losses=found, steps=steps, max_grad_norm=max_grad_norm, noise_multiplier=noise_multiplier)


# ----------------------------------------------------------------------------------------------------------------------
# The table of clipped tangent kernels, measured.
#
# A published table says for each way of clipping whether the matrix that drives the outputs stays symmetric and
# positive. "Positive" has two meanings there, which agree for symmetric matrices alone: vᵀMv ≥ 0 for every v (then the
# loss falls), and eigenvalues with a real part ≥ 0 (then the linear dynamics are stable). Both are measured, with the
# loss's slope predicted from the kernel and found by moving the weights.
# ----------------------------------------------------------------------------------------------------------------------


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


def measure_tangent_kernel(
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
        no record.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.linspace(-2, 2, 15).reshape(5, 3), torch.tensor([0, 1, 0, 1, 1])
        >>> table = measure_tangent_kernel(nn.Linear(3, 2), x, y, max_grad_norm=0.5)
        >>> table.row("none").symmetric, table.row("flat").symmetric, table.row("flat").positive_eigenvalues
        (True, False, True)

    References:
        Bu, Wang, Long 2023, "On the convergence and calibration of deep learning with differential privacy", table 2.
    """
    checks.positive(max_grad_norm=max_grad_norm)
    seen = compute_kernels(model, features, labels, loss=loss)
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
        return np.tile(method.clip_factors(torch.from_numpy(whole), max_grad_norm=bound).numpy(), (layers, 1))

    def apart(method: Clipping) -> Floats:
        share = bound / layers**0.5
        return np.stack([method.clip_factors(torch.from_numpy(row), max_grad_norm=share).numpy() for row in squares])

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
    for index, layer in enumerate(seen.layers):
        move = torch.from_numpy((seen.gradients(index) * factors[index][:, None]).mean(axis=0))
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
    with evaluation_mode(model), torch.no_grad():
        ahead, behind = (
            loss(functional_call(model, state | {n: state[n] - s * m for n, m in moves.items()}, (x,)), labels).mean()
            for s in (step, -step)
        )
    return float(ahead - behind) / (2 * step)


# ----------------------------------------------------------------------------------------------------------------------
# The cost of privacy by subgroup: accuracy of the private model against a non-private baseline.
# ----------------------------------------------------------------------------------------------------------------------


_Z95 = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class SubgroupGap:
    """One group's accuracies.

    Args:
        column: what the records are grouped by.
        value: the group.
        records: records in it.
        private: accuracy of the private model, in [0, 1].
        plain: accuracy of the baseline.
        gap: private − plain: negative where privacy costs accuracy.
        lower: end of the gap's 95 % interval, for this group alone.
        upper: the other end.
    """

    column: str
    value: str
    records: int
    private: float
    plain: float
    gap: float
    lower: float
    upper: float


def subgroup_gaps(
    private: ArrayLike, plain: ArrayLike, labels: ArrayLike, groups: Mapping[str, Sequence[str]]
) -> tuple[SubgroupGap, ...]:
    """The cost of privacy for each group of public records, the dearest first within a column.

    Both models are measured on the same records, so the interval is that of a paired difference, narrower than
    two intervals side by side.

    Guarantee: none beyond the models'; measure on public records.

    Args:
        private: the private model's probabilities, (records, classes).
        plain: the baseline's.
        labels: (records,), indices of classes.
        groups: for each column the value of every record.

    References:
        Bagdasaryan, Poursaeed, Shmatikov 2019, "Differential privacy has disparate impact on model accuracy"; Agresti,
        Min 2005, section 2, for the interval.
    """
    right = np.asarray(labels)
    one, two = (_correct(chances, right) for chances in (private, plain))
    found = []
    for column, values in groups.items():
        names = np.asarray([str(value) for value in values])
        if names.shape != right.shape:
            raise InvalidArgument(
                f"groups must have one value a record, got {len(names)} for {len(right)} records in {column!r}."
            )
        gaps = [
            _gap(column, value, one[names == value], two[names == value]) for value in dict.fromkeys(names.tolist())
        ]
        found += sorted(gaps, key=lambda part: part.gap)
    return tuple(found)


def _correct(chances: ArrayLike, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    values = np.asarray(chances, dtype=np.float64)
    if values.ndim != 2 or values.shape[:1] != labels.shape:
        raise InvalidArgument(
            f"probabilities must have shape (records, classes), got {values.shape} for {len(labels)} records."
        )
    return values.argmax(axis=1) == labels


def _gap(column: str, value: str, private: NDArray[np.bool_], plain: NDArray[np.bool_]) -> SubgroupGap:
    count = len(private)
    lost, won = int((plain & ~private).sum()), int((private & ~plain).sum())
    # Half a record more in each of the four cells keeps the interval honest where hardly anything differs.
    n, b, c = count + 2, lost + 0.5, won + 0.5
    center, half = (c - b) / n, _Z95 * math.sqrt((b + c) - (c - b) ** 2 / n) / n
    return SubgroupGap(
        column=column,
        value=value,
        records=count,
        private=float(private.mean()),
        plain=float(plain.mean()),
        gap=(won - lost) / count,
        lower=max(-1.0, center - half),
        upper=min(1.0, center + half),
    )
