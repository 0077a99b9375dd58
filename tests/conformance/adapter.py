"""What the conformance cases need from a library, and how this library answers. Another library gets another class."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sordino import accounting
from sordino.errors import SordinoError
from sordino.events import Gaussian, PoissonSampled, SelfComposed
from sordino.training.engine import PrivacyEngine
from sordino.training.plan import Plan
from sordino.training.trainer import fit

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass
class Private:
    """A model made private: what the user's loop works with, and the engine."""

    model: nn.Module
    optimizer: Optimizer
    loader: Any
    engine: Any

    def epsilon(self, delta: float) -> float:
        return self.engine.get_epsilon(delta)


@dataclass(frozen=True)
class Sordino:
    """This library, with floating-point or with secure noise."""

    secure_noise: bool = False
    refusals: tuple[type[Exception], ...] = (SordinoError,)

    def make_private(
        self,
        model: nn.Module,
        data: Dataset | DataLoader,
        *,
        optimizer: Optimizer | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> Private:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
        size = len(data) if batch_size is None else batch_size  # type: ignore[arg-type]
        loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=size)
        engine = PrivacyEngine(seed=seed, reproducible=seed is not None, secure_mode=self.secure_noise)
        wanted = {"noise_multiplier": 0.0, "max_grad_norm": 1.0} | options
        return Private(*engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **wanted), engine)

    def make_private_with_epsilon(self, model: nn.Module, loader: DataLoader, **options: Any) -> Private:
        engine = PrivacyEngine()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Private(
            *engine.make_private_with_epsilon(module=model, optimizer=optimizer, data_loader=loader, **options), engine
        )

    def fit(self, model: nn.Module, tensors: Sequence[Tensor], loss: Callable[..., Tensor], **options: Any) -> None:
        """Train natively: ``loss(model, *batch)`` has one value per record."""
        wanted = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.5, "steps": 5, "delta": 1e-5}
        wanted["secure_noise"] = self.secure_noise
        plan = Plan(**(wanted | {"expected_batch_size": 0.5 * len(tensors[0])} | options))
        fit(model, loss, tensors, plan, progress=False)

    def resumed(self, interrupted: Private, model: nn.Module, data: Dataset, **options: Any) -> Private:
        """A new run that goes on from what an earlier one has charged."""
        private = self.make_private(model, data, **options)
        private.engine.load_state_dict(interrupted.engine.state_dict())
        return private

    def detach(self, private: Private) -> None:
        private.engine.detach()

    def epsilon_of(self, *, sample_rate: float, noise_multiplier: float, steps: int, delta: float) -> float:
        step = PoissonSampled(sample_rate=sample_rate, event=Gaussian(noise_multiplier=noise_multiplier))
        return accounting.epsilon(SelfComposed(event=step, count=steps), delta).upper


def one_step(private: Private, loss: Loss) -> list[Tensor]:
    """The gradients that the optimizer saw in one logical batch."""
    for batch in private.loader:
        private.optimizer.zero_grad()
        loss(private.model, batch).backward()
        private.optimizer.step()
        if all(p.grad is not None for p in held(private)):
            break
    return [p.grad.clone() for p in held(private) if p.grad is not None]


def held(private: Private) -> list[nn.Parameter]:
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
        library.detach(private)


def distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """ℓ2 norm of the difference of two lists of tensors."""
    return sum(float((a - b).detach().double().square().sum()) for a, b in zip(one, other, strict=True)) ** 0.5
