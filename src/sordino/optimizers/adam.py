"""Adam for private gradients (floor 1, optimizers): the noise is taken out of the second moment."""

from collections.abc import Callable, Iterable
from typing import cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from sordino import checks

__all__ = ["AdamBC"]


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
        noise_stddev: s ≥ 0 in units of the gradient, `StepPlan.gradient_noise`; or a function of the step's number,
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
