"""DP-SGD with norms from random projections (floor 3): r forward-mode products and one ordinary backward pass.

    n̂_i² = (1/r) Σ_j ⟨g_i, v_j⟩²,   v_j ~ N(0, I),   ⟨g_i, v_j⟩ = d/dt ℓ_i(θ + t v_j)                              (1)
    Σ_i min(1, C/n̂_i) g_i  is the gradient of  Σ_i min(1, C/n̂_i) ℓ_i                                               (2)

No per-record gradient is ever formed, and no layer rule is needed. What the estimates cost is in the event,
`ProjectedGaussian`.

References:
    Bu, Gopi, Kulkarni, Lee, Shen, Tantipongpipat 2021, "Fast and memory efficient differentially private-SGD via JL
    projections", algorithms 1 and 2.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, jvp

from sordino.clipping import ProjectedClipping
from sordino.errors import InvalidArgument, LossShapeError
from sordino.gradients import Recorder
from sordino.mechanisms import GaussianMechanism
from sordino.mechanisms.normal_draws import standard_normal
from sordino.randomness import Randomness
from sordino.training.probing.determinism import random_state_kept
from sordino.training.probing.losses import PublicDivisor
from sordino.training.step_plan import StepPlan
from sordino.training.structure import map_tensors

__all__ = ["ProjectedSums"]

_Loss = Callable[..., Tensor]
_Batch = tuple[object, ...]


class ProjectedSums:
    """Clipped sums of chunks by (1) and (2); stands where `Bounds` does.

    Guarantee: with the step's noise, ``ProjectedGaussian(noise_multiplier, projections)`` under add-or-remove-one and
    zero-out. Directions are drawn afresh for every chunk, after the parameters were fixed. Forward-mode and backward
    passes use the same random masks; what they differ by in rounding is not bounded, so a record whose terms are huge
    and cancel may add more than its estimate says.

    Args:
        capture: names the parameters; nothing is recorded with it.
        randomness: source of the directions.
    """

    def __init__(self, capture: Recorder, randomness: Randomness) -> None:
        self._capture, self._randomness = capture, randomness
        self._now: StepPlan | None = None

    def begin(self, now: StepPlan) -> None:
        """Take the values of a logical batch."""
        self._now = now

    def add(self, into: dict[nn.Parameter, Tensor], *, records: int) -> None:  # noqa: ARG002
        """Refused for a chunk with records: norms are not read from recordings."""
        if records:
            raise InvalidArgument(
                "clipping must be by exact norms in a loop of your own, got ProjectedClipping. Train with sordino.fit, "
                "or use FlatClipping."
            )

    def sums(self, loss: _Loss, batch: _Batch, *, records: int) -> dict[nn.Parameter, Tensor]:
        """The clipped sums of a chunk of at least one record; records that are not finite add nothing.

        Raises:
            LossShapeError: the loss is not one value per record.
        """
        assert self._now is not None
        squares = self.estimates(loss, batch, records=records)
        factors = self._now.clipping.factors(squares, max_grad_norm=self._now.max_grad_norm)
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
        assert self._now is not None
        assert isinstance(self._now.clipping, ProjectedClipping)
        count = self._now.clipping.projections
        whole = _LossOf(self._capture.model, loss)
        held = {name: parameter.detach() for name, parameter in self._named().items()}
        stream = self._randomness.fresh("projections")

        def losses(parameters: dict[str, Tensor]) -> Tensor:
            return _checked(functional_call(whole, parameters, batch), records)

        total = torch.zeros(records, dtype=torch.float64)
        for _ in range(count):
            drawn = {
                name: standard_normal(value.numel(), stream, dtype=value.dtype).view(value.shape).to(value)
                for name, value in held.items()
            }
            # The first use of forward mode in a process loads old parts of torch that warn.
            with random_state_kept(), torch.no_grad(), warnings.catch_warnings(action="ignore"):
                _, slopes = jvp(losses, (held,), (drawn,))[:2]
            total = total.to(slopes.device) + slopes.detach().double().square()
        return total / count

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

    def mechanism(self) -> tuple[GaussianMechanism, list[Tensor]]:
        """The noise for the clipped sum; nothing is released beside it."""
        assert self._now is not None
        return self._now.mechanism, []

    def held(self) -> list[Tensor]:
        """Sums that are kept here: none."""
        return []

    def learn(self, released: Sequence[Tensor]) -> None:
        """Nothing: the bound is the plan's."""

    def state_dict(self) -> dict[str, object]:
        """Nothing is carried from step to step."""
        return {"bounds": None}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Nothing is carried from step to step."""


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
