"""What can still be done to a private gradient, and optimizers that know how noisy it is.

All of it is post-processing: filters and optimizers read released gradients and public numbers, and cost no privacy.
Filters are attached to any torch optimizer and work in a loop of one's own as well as in `sordino.fit`.

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Self, cast, final, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = [
    "AdamBC",
    "DebiasedMomentum",
    "FilterHandle",
    "GradientFilter",
    "Kalman",
    "LowPass",
    "parameter_entries",
    "restore_parameters",
]


# ----------------------------------------------------------------------------------------------------------------------
# Adam for private gradients: the noise is taken out of the second moment.
# ----------------------------------------------------------------------------------------------------------------------


class AdamBC(Optimizer):
    """Adam with the variance of the privacy noise subtracted from its second moment.

        m_t = β₁ m_{t−1} + (1 − β₁) g_t,   v_t = β₂ v_{t−1} + (1 − β₂) g_t²,   Φ_t = β₂ Φ_{t−1} + (1 − β₂) s_t²
        x_t = x_{t−1} − η · m̂_t / √max(v̂_t − Φ̂_t, floor)                                                          (4)

    where hats divide by 1 − β^t and s_t is the noise's standard deviation in the gradient, z·Δ/B. In plain Adam
    E[v̂] = E[ḡ²] + s²: with strong noise all entries are divided by much the same number, s.

    When: some entries' gradients stand out of the noise. Where the noise hides them all, v̂ − Φ̂ is noise about 0 and the
    floor makes this scaled SGD.

    Guarantee: post-processing of the private gradients and of the plan's public noise; no further privacy is spent.

    Args:
        params: parameters, or groups of them.
        lr: η > 0.
        noise_stddev: s ≥ 0 in units of the gradient, `StepPlan.gradient_noise_stddev`; or a function of the step,
            from 0, for noise that changes.
        betas: (β₁, β₂), each in [0, 1).
        floor: > 0, in squared units of the gradient; it bounds an entry's step by η·|m̂|/√floor.
        weight_decay: ≥ 0, decoupled, in units of the learning rate.

    Raises:
        InvalidArgument: a value is out of its range.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = AdamBC([weight], lr=0.1, noise_stddev=0.6, floor=1e-8)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> round(float(weight.detach()), 4)
        -0.125

    References:
        Tang, Shpilevskiy, Lécuyer 2024, "DP-AdamBC: your DP-Adam is actually DP-SGD (unless you apply bias
        correction)", algorithm 1.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, object]],
        *,
        lr: float = 1e-3,
        noise_stddev: float | Callable[[int], float],
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        checks.positive(lr=lr)
        if not callable(noise_stddev):
            checks.non_negative(noise_stddev=noise_stddev)
        for beta in betas:
            checks.probability(one=False, betas=beta)
        checks.positive(floor=floor)
        checks.non_negative(weight_decay=weight_decay)
        self._noise_stddev = noise_stddev
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "floor": floor, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step by (4)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    def _move(self, parameter: Tensor, group: dict[str, object]) -> None:
        beta1, beta2 = cast("tuple[float, float]", group["betas"])
        rate, floor = cast("float", group["lr"]), cast("float", group["floor"])
        state = self.state[parameter]
        gradient = cast("Tensor", parameter.grad)
        if "step" not in state:
            held = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            state["step"] = torch.zeros((), dtype=torch.float64)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=held)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=held)
            state["noise_sq"] = torch.zeros((), dtype=torch.float64)
        number = int(state["step"].item())
        stddev = self._noise_stddev(number) if callable(self._noise_stddev) else self._noise_stddev
        gradient = gradient.to(state["exp_avg"].dtype)
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        noise = beta2 * float(state["noise_sq"]) + (1 - beta2) * checks.non_negative(noise_stddev=stddev) ** 2
        state["noise_sq"] = torch.tensor(noise, dtype=torch.float64)
        state["step"] += 1
        number += 1
        mean = state["exp_avg"] / (1 - beta1**number)
        square = (state["exp_avg_sq"] - noise) / (1 - beta2**number)
        parameter.mul_(1 - rate * cast("float", group["weight_decay"]))
        parameter.add_((mean / square.clamp_min(floor).sqrt()).to(parameter.dtype), alpha=-rate)


# ----------------------------------------------------------------------------------------------------------------------
# Filters between the private gradient and any torch optimizer.
# ----------------------------------------------------------------------------------------------------------------------


class GradientFilter(ABC):
    """What is done to each gradient before the optimizer sees it.

    Guarantee: post-processing. A filter reads the gradients in ``.grad`` and what it remembers of earlier ones; when
    those are private, nothing further is spent.
    """

    name: ClassVar[str]

    @abstractmethod
    def filter_gradient(self, gradient: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """The gradient to step with; `memory` is the parameter's own, empty before the first step, and is updated."""

    def attach(self, optimizer: Optimizer) -> "FilterHandle":
        """Filter every gradient that `optimizer` steps with, from now on.

        The memory lies in the optimizer's state, so checkpoints hold it. In a loop with `PrivacyEngine`, attach after
        ``make_private``: the filter must see the gradient that already has its noise.

        Raises:
            InvalidArgument: a filter of this kind is attached already.
        """
        return FilterHandle(self, optimizer)


class FilterHandle:
    """A filter on one optimizer.

    Args:
        rule: what is done.
        optimizer: stays as it is; two hooks are registered.
    """

    def __init__(self, rule: GradientFilter, optimizer: Optimizer) -> None:
        hooks = _hooks(optimizer)
        if any(_attached(hook) is not None and type(_rule_of(hook)) is type(rule) for hook in hooks):
            raise InvalidArgument(
                f"optimizer must have one {type(rule).__name__} at most, got one with it. Call remove() on the first."
            )
        self.rule = rule
        self._pending: dict[Tensor, dict[str, Tensor]] = {}
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Leave later gradients alone."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        self._check_order(optimizer)
        self._pending = {}
        for parameter in _stepped(optimizer):
            memory = dict(parameter_entries(optimizer, parameter, self.rule.name))
            assert parameter.grad is not None
            parameter.grad = self.rule.filter_gradient(parameter.grad, memory).to(parameter.dtype)
            self._pending[parameter] = memory

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        # Only now: Adam and others take a state with any entry for one that they have begun.
        for parameter, memory in self._pending.items():
            optimizer.state[parameter][self.rule.name] = memory
        self._pending = {}

    def _check_order(self, optimizer: Optimizer) -> None:
        """What runs after a filter must not write the gradient: the engine's hook comes first."""
        mine = False
        for hook in _hooks(optimizer):
            mine = mine or _attached(hook) is self
            if mine and _attached(hook) is None and not getattr(hook, "only_looks", False):
                raise InvalidArgument(
                    f"{type(self.rule).__name__} must be attached after make_private and other hooks of the optimizer, "
                    "got one that was attached before. Call attach later."
                )


def parameter_entries(optimizer: Optimizer, parameter: Tensor, name: str) -> dict[str, Tensor]:
    """What the filter `name` remembers of a parameter."""
    return cast("dict[str, Tensor]", optimizer.state[parameter].get(name, {}) if parameter in optimizer.state else {})


def _hooks(optimizer: Optimizer) -> list[object]:
    return list(cast("dict[int, object]", vars(optimizer)["_optimizer_step_pre_hooks"]).values())


def _attached(hook: object) -> FilterHandle | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, FilterHandle) else None


def _rule_of(hook: object) -> GradientFilter | None:
    owner = _attached(hook)
    return None if owner is None else owner.rule


def _stepped(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


# ----------------------------------------------------------------------------------------------------------------------
# A simplified Kalman filter of the gradient: predicted from the last step, then corrected.
# ----------------------------------------------------------------------------------------------------------------------


_ORIGIN = "settled"


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
    at the place where the parameters stand, which earlier releases determine.

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

    def attach(self, optimizer: Optimizer) -> FilterHandle:
        """As for every filter; the parameters are moved ahead after each step."""
        return _LookingAhead(self, optimizer, self.distance)


class _LookingAhead(FilterHandle):
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

    With `sordino.schedules.momentum_influence` the noise of a run can be planned for it.

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
