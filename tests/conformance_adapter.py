"""What our own tests of conformance ask beyond the cases of `sordino.audit.conformance`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sordino import accounting
from sordino.audit.conformance.framework import EngineLibrary, EngineTraining, PrivateTraining
from sordino.events import Gaussian, PoissonSampled, SelfComposed
from sordino.training.fit import fit
from sordino.training.plan import Plan

Loss = Callable[[nn.Module, Any], Tensor]


class Sordino(EngineLibrary):
    """This library, with floating-point or with secure noise."""

    def make_private_with_epsilon(self, model: nn.Module, loader: DataLoader, **options: Any) -> EngineTraining:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = self.new()
        parts = engine.make_private_with_epsilon(module=model, optimizer=optimizer, data_loader=loader, **options)
        return EngineTraining(model=parts[0], optimizer=parts[1], loader=parts[2], engine=engine)

    def fit(self, model: nn.Module, tensors: Sequence[Tensor], loss: Callable[..., Tensor], **options: Any) -> None:
        """Train natively: ``loss(model, *batch)`` has one value per record."""
        wanted = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.5, "steps": 5, "delta": 1e-5}
        wanted["secure_mode"] = self.secure_mode
        plan = Plan(**(wanted | {"expected_batch_size": 0.5 * len(tensors[0])} | options))
        fit(model, loss, tensors, plan, progress=False)

    def epsilon_of(self, *, sample_rate: float, noise_multiplier: float, steps: int, delta: float) -> float:
        step = PoissonSampled(sample_rate=sample_rate, event=Gaussian(noise_multiplier=noise_multiplier))
        return accounting.epsilon(SelfComposed(event=step, count=steps), delta).upper


def one_step(private: PrivateTraining, loss: Loss) -> list[Tensor]:
    """The gradients that the optimizer saw in one logical batch."""
    for batch in private.loader:
        private.optimizer.zero_grad()
        loss(private.model, batch).backward()
        private.optimizer.step()
        if all(p.grad is not None for p in held(private)):
            break
    return [p.grad.clone() for p in held(private) if p.grad is not None]


def held(private: PrivateTraining) -> list[nn.Parameter]:
    return [p for group in private.optimizer.param_groups for p in group["params"] if p.requires_grad]


def clipped_sum(
    library: Sordino, model: nn.Module, tensors: Sequence[Tensor], loss: Loss, *, max_grad_norm: float, **options: Any
) -> list[Tensor]:
    """The clipped sum that the library makes of all records: its gradient without noise, times their number."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    data = TensorDataset(*tensors)
    private = library.make_private(model, data, optimizer=optimizer, max_grad_norm=max_grad_norm, **options)
    try:
        return [len(data) * gradient for gradient in one_step(private, loss)]
    finally:
        private.detach()


def distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """ℓ2 norm of the difference of two lists of tensors."""
    return sum(float((a - b).detach().double().square().sum()) for a, b in zip(one, other, strict=True)) ** 0.5
