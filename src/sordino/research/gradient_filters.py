"""Filters of private gradients along the steps: Kalman, linear low-pass, debiased momentum.

Each is a `sordino.optimizers.GradientFilter`, attached to any torch optimizer; all are post-processing.

Example:
    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> handle = DebiasedMomentum(momentum=0.9).attach(optimizer)
    >>> weight.grad = torch.ones(1)
    >>> optimizer.step()
    >>> round(float(weight.detach()), 6)
    -1.0
"""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.optimizers import GradientFilter, parameter_entries

# ----------------------------------------------------------------------------------------------------------------------
# A simplified Kalman filter of the gradient: predicted from the last step, then corrected.
# ----------------------------------------------------------------------------------------------------------------------


_ORIGIN, _START = "settled", "start"


@final
@dataclass(frozen=True, kw_only=True)
class Kalman(GradientFilter):
    """A constant-gain Kalman filter whose prediction follows the curvature along the last step.

        predicted  ĝ_{t|t−1} = ĝ_{t−1} + H d_{t−1},  d_{t−1} = x_t − x_{t−1}
        corrected  ĝ_t = (1 − κ) ĝ_{t|t−1} + κ g̃_t                                                              (3)

    The product H d is a difference of gradients, [∇f(x_t + γd) − ∇f(x_t)] / γ. With γ = (1 − κ)/κ both gradients at x_t
    cancel, and (3) becomes ĝ_t = (1 − κ) ĝ_{t−1} + κ g̃(x_t + γ d_{t−1}): one gradient a step, taken ahead of where the
    model is. Between steps the parameters therefore stand at x_t + γ d_{t−1}; call `restore_parameters` to put them at
    x_t, before an evaluation or at the end.

    Guarantee: post-processing of the private gradients; no further privacy is spent. Gradients are clipped and noised
    at the position of the parameters, which earlier releases determine.

    Args:
        gain: κ in (0, 1]; 1 is no filter.
        look_ahead: γ ≥ 0; None is (1 − κ)/κ. 0 keeps the parameters at x_t, and the filter is an exponential mean.

    References:
        Zhang et al. 2025, "DiSK: differentially private optimizer with simplified Kalman filter for noise reduction",
        algorithm 2.

    Example:
        >>> filter, memory = Kalman(gain=0.5, look_ahead=0.0), {}
        >>> [round(float(filter.filter_gradient(torch.tensor([value]), memory)), 4) for value in (4.0, 0.0)]
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

    def filter_gradient(self, gradient: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """ĝ_t of (3); the first gradient is its own estimate."""
        working = gradient.to(torch.float64 if gradient.dtype == torch.float64 else torch.float32)
        memory["estimate"] = (
            working.clone() if "estimate" not in memory else memory["estimate"].lerp(working, self.gain)
        )
        return memory["estimate"]

    def before_step(self, parameter: Tensor, memory: dict[str, Tensor]) -> None:
        """Back to x_t, from where the optimizer steps."""
        origin = memory.pop(_ORIGIN, None)
        if origin is not None:
            parameter.copy_(origin)
        if self.distance:
            memory[_START] = parameter.detach().clone()

    def after_step(self, parameter: Tensor, memory: dict[str, Tensor]) -> None:
        """Ahead to x_{t+1} + γ d_t."""
        start = memory.pop(_START, None)
        if start is not None:
            memory[_ORIGIN] = parameter.detach().clone()
            parameter.add_(parameter - start, alpha=self.distance)


@torch.no_grad()
def restore_parameters(optimizer: Optimizer) -> None:
    """Put the parameters where the last step of a `Kalman` filter ended; without one, or twice, nothing happens.

    Training goes on from there; the next gradient is then taken at x_t itself.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            memory = parameter_entries(optimizer, parameter, Kalman.name)
            if _ORIGIN in memory:
                parameter.copy_(memory.pop(_ORIGIN))


# ----------------------------------------------------------------------------------------------------------------------
# Linear low-pass filters of the gradient: slow signal passes, fast noise doesn't.
# ----------------------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class LowPass(GradientFilter):
    """A recursive linear filter along the steps, each gradient entry on its own.

        m_t = Σ_{k≥0} b_k g_{t−k} − Σ_{k≥1} a_k m_{t−k},     ĝ_t = m_t / c_t                                    (1)

    where c_t is what the same filter makes of a gradient that is 1 at all steps, so that a constant gradient passes
    unchanged from the first step on.

    Guarantee: post-processing of the private gradients; no further privacy is spent.

    Args:
        feedforward: b_0, b_1, …; their sum is not 0.
        feedback: a_1, a_2, …, of a stable filter: all roots of 1 + Σ a_k z^{−k} lie inside the unit circle. Both
            together are usually such that a constant passes unchanged in the long run, Σ b = 1 + Σ a.

    Raises:
        InvalidArgument: the filter is unstable, holds no coefficient, or blocks constants.

    Example:
        >>> filter = LowPass(feedforward=(0.1,), feedback=(-0.9,))
        >>> memory = {}
        >>> [round(float(filter.filter_gradient(torch.tensor([value]), memory)), 4) for value in (1.0, 1.0, 0.0)]
        [1.0, 1.0, 0.631]

    References:
        Zhang et al. 2024, "DOPPLER: differentially private optimizers with low-pass filter for privacy noise
        reduction", algorithm 1.
    """

    feedforward: tuple[float, ...] = (0.1,)
    feedback: tuple[float, ...] = (-0.9,)
    name: ClassVar[str] = "low_pass"

    def __post_init__(self) -> None:
        forward, back = tuple(map(float, self.feedforward)), tuple(map(float, self.feedback))
        object.__setattr__(self, "feedforward", forward)
        object.__setattr__(self, "feedback", back)
        if not forward or not all(math.isfinite(value) for value in (*forward, *back)):
            raise InvalidArgument("feedforward must hold finite numbers, at least one, got others. Give (0.1,).")
        if forward[0] == 0 or math.fsum(forward) == 0:
            raise InvalidArgument(
                "feedforward must let a constant pass from the first step on, got a sum or start of 0."
            )
        if _largest_root(back) >= 1:
            raise InvalidArgument(
                "feedback must make a stable filter: the roots of 1 + Σ a_k z^-k inside the unit circle, got one that "
                "isn't. For first order give (-0.9,)."
            )

    def filter_gradient(self, gradient: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """ĝ_t of (1)."""
        working = gradient.to(torch.float64 if gradient.dtype == torch.float64 else torch.float32)
        output = self.feedforward[0] * working
        gain = torch.tensor(self.feedforward[0], dtype=torch.float64)
        for back, weight in enumerate(self.feedforward[1:], start=1):
            # A constant signal is 1 from step 0 on, and was 0 before.
            if f"input {back}" in memory:
                output = output + weight * memory[f"input {back}"]
                gain = gain + weight
        for back, weight in enumerate(self.feedback, start=1):
            if f"output {back}" in memory:
                output = output - weight * memory[f"output {back}"]
                gain = gain - weight * memory[f"gain {back}"].double()
        self._shift(memory, "input", working.clone(), len(self.feedforward) - 1)
        self._shift(memory, "output", output.clone(), len(self.feedback))
        self._shift(memory, "gain", gain, len(self.feedback))
        return output / gain.item()

    @staticmethod
    def _shift(memory: dict[str, Tensor], kind: str, newest: Tensor, kept: int) -> None:
        for back in range(kept, 1, -1):
            if f"{kind} {back - 1}" in memory:
                memory[f"{kind} {back}"] = memory[f"{kind} {back - 1}"]
        if kept:
            memory[f"{kind} 1"] = newest


@final
@dataclass(frozen=True, kw_only=True)
class DebiasedMomentum(GradientFilter):
    """The exponential mean of the gradients, without the pull towards 0 of its start.

        v_{t+1} = β v_t + (1 − β) g_t,     v̂_{t+1} = v_{t+1} / (1 − β^{t+1})                                   (2)

    With `sordino.research.momentum_influence` the noise of a run can be planned for it.

    Guarantee: post-processing of the private gradients; no further privacy is spent.

    Args:
        momentum: β in [0, 1).

    References:
        Hong, Wang, Zhou 2022, "Dynamic privacy budget allocation improves data efficiency of differentially private
        gradient descent", section 3.3.

    Example:
        >>> filter, memory = DebiasedMomentum(momentum=0.5), {}
        >>> [round(float(filter.filter_gradient(torch.tensor([value]), memory)), 4) for value in (3.0, 0.0)]
        [3.0, 1.0]
    """

    momentum: float = 0.9
    name: ClassVar[str] = "debiased_momentum"

    def __post_init__(self) -> None:
        checks.probability(one=False, momentum=self.momentum)

    def filter_gradient(self, gradient: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """v̂ of (2)."""
        working = gradient.to(torch.float64 if gradient.dtype == torch.float64 else torch.float32)
        mean = memory.get("mean", torch.zeros_like(working)).lerp(working, 1 - self.momentum)
        left = memory.get("left", torch.ones((), dtype=torch.float64)).double() * self.momentum
        memory.update(mean=mean, left=left)
        return mean / (1 - left.item())


def _largest_root(feedback: tuple[float, ...]) -> float:
    """The largest modulus of the eigenvalues of the companion matrix of z^n + a_1 z^{n−1} + …"""
    order = len(feedback)
    if not order:
        return 0.0
    companion = torch.zeros(order, order, dtype=torch.float64)
    companion[0] = -torch.tensor(feedback, dtype=torch.float64)
    companion[range(1, order), range(order - 1)] = 1.0
    return float(torch.linalg.eigvals(companion).abs().max())
