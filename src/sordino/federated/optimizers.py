"""Optimizers of the server (floor 4, federated): what is done with the noisy mean costs no privacy.

Each is a function from the server's parameters to a torch optimizer; any other function of that kind will do.

References:
    McMahan et al. 2017 (FedAvg); Hsu, Qi, Brown 2019 (FedAvgM); Reddi et al. 2021, algorithm 2 (FedAdagrad, FedAdam,
    FedYogi).
"""

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = ["SERVER_OPTIMIZERS", "Yogi", "fed_adagrad", "fed_adam", "fed_avg", "fed_avgm", "fed_yogi"]

_MOMENTUM = 0.9
_SECOND = 0.99


def fed_avg(parameters: list[nn.Parameter], *, learning_rate: float = 1.0) -> Optimizer:
    """The model moves by `learning_rate` times the mean update."""
    return torch.optim.SGD(parameters, lr=checks.positive(learning_rate=learning_rate))


def fed_avgm(parameters: list[nn.Parameter], *, learning_rate: float = 1.0) -> Optimizer:
    """FedAvg with momentum 0.9."""
    return torch.optim.SGD(parameters, lr=checks.positive(learning_rate=learning_rate), momentum=_MOMENTUM)


def fed_adagrad(parameters: list[nn.Parameter], *, learning_rate: float = 0.1, adaptivity: float = 1e-3) -> Optimizer:
    """Adagrad on the mean update; `adaptivity` τ > 0 is added to the root of the second moment."""
    rate, floor = checks.positive(learning_rate=learning_rate), checks.positive(adaptivity=adaptivity)
    return torch.optim.Adagrad(parameters, lr=rate, eps=floor)


def fed_adam(parameters: list[nn.Parameter], *, learning_rate: float = 0.01, adaptivity: float = 1e-3) -> Optimizer:
    """Adam with β = (0.9, 0.99) on the mean update; `adaptivity` τ > 0 is added to the root of the second moment."""
    rate, floor = checks.positive(learning_rate=learning_rate), checks.positive(adaptivity=adaptivity)
    return torch.optim.Adam(parameters, lr=rate, betas=(_MOMENTUM, _SECOND), eps=floor)


def fed_yogi(parameters: list[nn.Parameter], *, learning_rate: float = 0.01, adaptivity: float = 1e-3) -> Optimizer:
    """Yogi on the mean update: a second moment that shrinks slowly."""
    return Yogi(parameters, learning_rate=learning_rate, adaptivity=adaptivity)


class Yogi(Optimizer):
    """m ← β₁m + (1 − β₁)g, v ← v − (1 − β₂)·sign(v − g²)·g², θ ← θ − η·m/(√v + τ), β = (0.9, 0.99).

    Args:
        parameters: what it steps.
        learning_rate: η > 0.
        adaptivity: τ > 0; v starts at τ².

    References:
        Reddi et al. 2021, algorithm 2 (FedYogi); Zaheer et al. 2018.
    """

    def __init__(
        self, parameters: list[nn.Parameter], *, learning_rate: float = 0.01, adaptivity: float = 1e-3
    ) -> None:
        rate, floor = checks.positive(learning_rate=learning_rate), checks.positive(adaptivity=adaptivity)
        super().__init__(parameters, {"lr": rate, "adaptivity": floor})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step on the gradients that lie in ``.grad``; there is no loss to evaluate anew.

        Raises:
            InvalidArgument: a closure is given.
        """
        if closure is not None:
            raise InvalidArgument("closure must be None: the server has no loss. Call step().")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group["lr"], group["adaptivity"])

    def _move(self, parameter: Tensor, gradient: Tensor, rate: float, floor: float) -> None:
        state = self.state[parameter]
        if not state:
            state["first"], state["second"] = torch.zeros_like(parameter), torch.full_like(parameter, floor**2)
        square = gradient.square()
        state["first"].lerp_(gradient, 1 - _MOMENTUM)
        state["second"].sub_((1 - _SECOND) * (state["second"] - square).sign() * square)
        parameter.sub_(rate * state["first"] / (state["second"].sqrt() + floor))


SERVER_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "fedadagrad": fed_adagrad,
    "fedadam": fed_adam,
    "fedavg": fed_avg,
    "fedavgm": fed_avgm,
    "fedyogi": fed_yogi,
}
"""The server's optimizers by their names in the literature, with their default settings."""
