"""What can still be done to a private gradient, and optimizers that know how noisy it is.

All of it is post-processing: filters and optimizers read released gradients and public numbers, and cost no privacy.
Filters are attached to any torch optimizer and work in a loop of one's own as well as in `sordino.fit`.

`sordino.research` has filters for which papers claim less noise (Kalman, low-pass, debiased momentum).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, Self, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = [
    "AdamBC",
    "FilterHandle",
    "GradientFilter",
    "parameter_entries",
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

    def before_step(self, parameter: Tensor, memory: dict[str, Tensor]) -> None:  # noqa: ARG002
        """Called with the filtered gradient in place, before the optimizer moves `parameter`; may move it."""
        return

    def after_step(self, parameter: Tensor, memory: dict[str, Tensor]) -> None:  # noqa: ARG002
        """Called after the optimizer moved `parameter`; may move it further."""
        return

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
        attached = [handle for hook in _hooks(optimizer) if (handle := _attached(hook)) is not None]
        if any(type(handle.rule) is type(rule) for handle in attached):
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
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            memory = dict(parameter_entries(optimizer, parameter, self.rule.name))
            parameter.grad = self.rule.filter_gradient(parameter.grad, memory).to(parameter.dtype)
            self.rule.before_step(parameter, memory)
            self._pending[parameter] = memory

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        # Only now: Adam and others take a state with any entry for one that they have begun.
        for parameter, memory in self._pending.items():
            self.rule.after_step(parameter, memory)
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
