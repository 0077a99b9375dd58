"""A simplified Kalman filter of the gradient (floor 1, optimizers): predicted from the last step, then corrected."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from sordino import checks
from sordino.optimizers.filters import Attached, GradientFilter, entries_of

__all__ = ["Kalman", "settle"]

_ORIGIN = "settled"


@final
@dataclass(frozen=True, kw_only=True)
class Kalman(GradientFilter):
    """A constant-gain Kalman filter whose prediction follows the curvature along the last step.

        predicted  ĝ_{t|t−1} = ĝ_{t−1} + H d_{t−1},  d_{t−1} = x_t − x_{t−1}
        corrected  ĝ_t = (1 − κ) ĝ_{t|t−1} + κ g̃_t                                                              (3)

    The product H d is a difference of gradients, [∇f(x_t + γd) − ∇f(x_t)] / γ. With γ = (1 − κ)/κ both gradients at x_t
    cancel, and (3) becomes ĝ_t = (1 − κ) ĝ_{t−1} + κ g̃(x_t + γ d_{t−1}): one gradient a step, taken ahead of where the
    model is. Between steps the parameters therefore stand at x_t + γ d_{t−1}; call `settle` to put them at x_t, before
    an evaluation or at the end.

    Guarantee: post-processing of the private gradients; no further privacy is spent. Gradients are clipped and noised
    at the place where the parameters stand, which earlier releases determine.

    Args:
        gain: κ in (0, 1]; 1 is no filter.
        look_ahead: γ ≥ 0; None is (1 − κ)/κ. 0 keeps the parameters at x_t, and the filter is an exponential mean.

    References:
        Zhang et al. 2025, "DiSK: differentially private optimizer with simplified Kalman filter for noise reduction",
        algorithm 2.

    Example:
        >>> filter, memory = Kalman(gain=0.5, look_ahead=0.0), {}
        >>> [round(float(filter.filtered(torch.tensor([value]), memory)), 4) for value in (4.0, 0.0)]
        [4.0, 2.0]
    """

    gain: float = 0.7
    look_ahead: float | None = None
    name: ClassVar[str] = "kalman"

    def __post_init__(self) -> None:
        checks.probability(zero=False, gain=self.gain)
        if self.look_ahead is not None:
            checks.non_negative(look_ahead=self.look_ahead)

    @property
    def distance(self) -> float:
        """γ."""
        return (1 - self.gain) / self.gain if self.look_ahead is None else self.look_ahead

    def filtered(self, gradient: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """ĝ_t of (3); the first gradient is its own estimate."""
        working = gradient.to(torch.float64 if gradient.dtype == torch.float64 else torch.float32)
        memory["estimate"] = (
            working.clone() if "estimate" not in memory else memory["estimate"].lerp(working, self.gain)
        )
        return memory["estimate"]

    def attach(self, optimizer: Optimizer) -> Attached:
        """As for every filter; the parameters are moved ahead after each step."""
        return _LookingAhead(self, optimizer, self.distance)


class _LookingAhead(Attached):
    """Parameters stand at x_t + γ d_{t−1} between steps; the optimizer steps from x_t."""

    def __init__(self, rule: GradientFilter, optimizer: Optimizer, distance: float) -> None:
        super().__init__(rule, optimizer)
        self._distance = distance
        self._start: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        super()._before(optimizer, _args, _kwargs)
        self._start = {}
        for parameter, memory in self._pending.items():
            origin = memory.pop(_ORIGIN, None)
            if origin is not None:
                parameter.copy_(origin)
            self._start[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        for parameter, start in self._start.items():
            if self._distance and parameter in self._pending:
                self._pending[parameter][_ORIGIN] = parameter.detach().clone()
                parameter.add_(parameter - start, alpha=self._distance)
        self._start = {}
        super()._after(optimizer, _args, _kwargs)


@torch.no_grad()
def settle(optimizer: Optimizer) -> None:
    """Put the parameters where the last step of a `Kalman` filter ended; without one, or twice, nothing happens.

    Training goes on from there; the next gradient is then taken at x_t itself.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            memory = entries_of(optimizer, parameter, Kalman.name)
            if _ORIGIN in memory:
                parameter.copy_(memory.pop(_ORIGIN))
