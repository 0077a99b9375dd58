"""JL clipping: flat clipping by norms that are estimated from random projections.

`ProjectedClipping` is a clipping method like any other: ``Plan(clipping=ProjectedClipping(projections=50))`` trains by
`sordino.fit`. It states its own event, since estimated norms bound less than exact ones, and brings its own sums.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

from sordino import checks
from sordino.clipping import Clipping, FlatClipping
from sordino.errors import InvalidArgument, LossShapeError
from sordino.events import ProjectedGaussian
from sordino.gradients import Recorder
from sordino.mechanisms.tensor_noise import standard_normal
from sordino.randomness import KeyedRNG
from sordino.shapes import Float
from sordino.training.accumulators import LossAccumulator
from sordino.training.probing.snapshots import preserve_rng_state
from sordino.training.probing.torch_modes import PublicDivisor
from sordino.training.pytree import map_tensors

# ----------------------------------------------------------------------------------------------------------------------
# Clipping by norms that are estimated from random projections.
# ----------------------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class ProjectedClipping(Clipping):
    """Flat clipping, with each record's norm estimated by r projections: n̂² = (1/r) Σ_j ⟨g, v_j⟩², v_j ~ N(0, I).

    When: no layer rule fits the model and per-record gradients don't fit the memory. Exact norms from layer rules are
    nearly as fast here, and cost less privacy: see ``docs/optimizers.md``.

    Guarantee:
        Not that of the other methods. The record's true norm after clipping is up to C·√(r/χ²_r), a random multiple of
        C, so a step is ``ProjectedGaussian(noise_multiplier, projections)``, which costs more than a Gaussian; with
        few projections there is no useful guarantee at all. See ``docs/proofs/projected-norms.md``.

    Args:
        projections: r ≥ 1, jvps a step; 50 or more are advisable.

    Example:
        >>> ProjectedClipping(projections=50).describe()
        'flat clipping by norms estimated from 50 projections'

    References:
        Bu, Gopi, Kulkarni, Lee, Shen, Tantipongpipat 2021, "Fast and memory efficient differentially private-SGD via JL
        projections", algorithm 1.
    """

    projections: int
    kind: ClassVar[str] = "projected"
    exact_norms: ClassVar[bool] = False
    plain_sums: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checks.integer(1, projections=self.projections)

    def describe(self) -> str:
        """The method as it is written in a report."""
        return f"flat clipping by norms estimated from {self.projections} projections"

    def clip_factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """Those of flat clipping; the squared norms are estimates."""
        return FlatClipping().clip_factors(squared_norms, max_grad_norm=max_grad_norm)

    def step_event(self, noise_multiplier: float) -> ProjectedGaussian:
        """What a step costs with norms that are estimates."""
        return ProjectedGaussian(noise_multiplier=noise_multiplier, projections=self.projections)

    def make_accumulator(self, capture: object, rng: KeyedRNG) -> "ProjectedAccumulator":
        """Sums by (1) and (2) below.

        Raises:
            InvalidArgument: what is clipped are contributions that come in, not gradients of a loss.
        """
        if not isinstance(capture, Recorder):
            raise InvalidArgument(
                "clipping must look at the contributions that come in, got ProjectedClipping, which projects gradients "
                "of a loss. Use FlatClipping."
            )
        return ProjectedAccumulator(capture, rng)


# ----------------------------------------------------------------------------------------------------------------------
# DP-SGD with norms from random projections: r forward-mode products and one ordinary backward pass.
#
#     n̂_i² = (1/r) Σ_j ⟨g_i, v_j⟩²,   v_j ~ N(0, I),   ⟨g_i, v_j⟩ = d/dt ℓ_i(θ + t v_j)
#     (1)
#     Σ_i min(1, C/n̂_i) g_i  is the gradient of  Σ_i min(1, C/n̂_i) ℓ_i
#     (2)
#
# No per-record gradient is ever formed, and no layer rule is needed. What the estimates cost is in the event,
# `ProjectedGaussian`.
#
# References:
#     Bu, Gopi, Kulkarni, Lee, Shen, Tantipongpipat 2021, "Fast and memory efficient differentially private-SGD via JL
#     projections", algorithms 1 and 2.
# ----------------------------------------------------------------------------------------------------------------------


_Loss = Callable[..., Tensor]
_Batch = tuple[object, ...]


class ProjectedAccumulator(LossAccumulator):
    """Clipped sums of chunks by (1) and (2).

    Guarantee: with the step's noise, ``ProjectedGaussian(noise_multiplier, projections)`` under add-or-remove-one and
    zero-out. Directions are drawn afresh for every chunk, after the parameters were fixed. Forward-mode and backward
    passes use the same random masks; what they differ by in rounding is not bounded, so a record whose terms are huge
    and cancel may add more than its estimate says.

    Args:
        capture: names the parameters; nothing is recorded with it.
        rng: source of the directions.
    """

    def __init__(self, capture: Recorder, rng: KeyedRNG) -> None:
        super().__init__()
        self._capture, self._randomness = capture, rng

    def sums(self, loss: _Loss, batch: _Batch, *, records: int) -> dict[nn.Parameter, Tensor]:
        """The clipped sums of a chunk of at least one record; records that are not finite add nothing.

        Raises:
            LossShapeError: the loss is not one value per record.
        """
        now = self.step_plan
        squares = self.estimates(loss, batch, records=records)
        factors = now.clipping.clip_factors(squares, max_grad_norm=now.max_grad_norm)
        if not bool((factors > 0).all()):
            kept = (factors > 0).nonzero().flatten()
            return self.sums(loss, _rows(batch, kept, records), records=len(kept)) if len(kept) else {}
        # Stand-ins for the parameters, which refuse an ordinary backward pass.
        leaves = {name: p.detach().requires_grad_() for name, p in self._named().items()}
        losses = _checked(functional_call(_LossOf(self._capture.model, loss), leaves, batch), records)
        weighted = (losses * factors.to(losses.dtype)).sum()
        found = torch.autograd.grad(weighted, list(leaves.values()), allow_unused=True)
        sums = {p: value for p, value in zip(self._named().values(), found, strict=True) if value is not None}
        if all(bool(value.isfinite().all()) for value in sums.values()):
            return sums
        return self._one_by_one(loss, batch, records)

    def estimates(self, loss: _Loss, batch: _Batch, *, records: int) -> Float[Tensor, " B"]:
        """Estimates (1) of the squared norms, float64; without bias, and not finite where the gradient is not."""
        clipping = self.step_plan.clipping
        assert isinstance(clipping, ProjectedClipping)
        whole = _LossOf(self._capture.model, loss)
        held = {name: parameter.detach() for name, parameter in self._named().items()}
        stream = self._randomness.new_stream("projections")

        def losses(parameters: dict[str, Tensor]) -> Tensor:
            return _checked(functional_call(whole, parameters, batch), records)

        total = torch.zeros(records, dtype=torch.float64)
        for _ in range(clipping.projections):
            drawn = {
                name: standard_normal(value.numel(), stream, dtype=value.dtype).view(value.shape).to(value)
                for name, value in held.items()
            }
            # The first use of forward mode in a process loads old parts of torch that warn.
            with preserve_rng_state(), torch.no_grad(), warnings.catch_warnings(action="ignore"):
                _, slopes = jvp(losses, (held,), (drawn,))[:2]
            total = total.to(slopes.device) + slopes.detach().double().square()
        return total / clipping.projections

    def _named(self) -> dict[str, nn.Parameter]:
        return {f"model.{self._capture.names[parameter]}": parameter for parameter in self._capture.trainable()}

    def _one_by_one(self, loss: _Loss, batch: _Batch, records: int) -> dict[nn.Parameter, Tensor]:
        """Some record's backward pass overflowed: each on its own, those that are not finite left out."""
        if records == 1:
            return {}
        total: dict[nn.Parameter, Tensor] = {}
        for record in range(records):
            part = self.sums(loss, _rows(batch, torch.tensor([record]), records), records=1)
            for parameter, value in part.items():
                total[parameter] = total[parameter] + value if parameter in total else value
        return total


class _LossOf(nn.Module):
    """The loss as a module, so that the model's parameters can be replaced in it."""

    def __init__(self, model: nn.Module, loss: _Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, *batch: object) -> Tensor:
        with PublicDivisor():
            return self._loss(self.model, *batch)


def _checked(losses: object, records: int) -> Tensor:
    if not isinstance(losses, Tensor) or losses.shape != (records,):
        raise LossShapeError(
            "loss must be a tensor of shape (records,), one value per record, got another. "
            'Use reduction="none" and average over everything but the records.'
        )
    return losses


def _rows(batch: _Batch, index: Tensor, records: int) -> _Batch:
    def chosen(tensor: Tensor) -> Tensor:
        has_records = tensor.dim() > 0 and tensor.shape[0] == records
        return tensor.index_select(0, index.to(tensor.device)) if has_records else tensor

    found = map_tensors(chosen, batch)
    assert isinstance(found, tuple)
    return found
