"""The models of the tables, each with one batch of made-up records."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.recipes.models import cnn
from steps.images import ResNet18, WideResNet
from steps.text import BagOfWords, Recurrent, bert_mini, gpt2, with_adapters

__all__ = ["Case", "cases"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model with one batch.

    Args:
        name: the row's name.
        build: makes the model.
        batch: inputs and targets.
        goal: the most that a private step should cost, in plain steps; with a compiled step `compiled_goal`.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: tuple[Tensor, Tensor]
    goal: float
    compiled_goal: float | None = None

    @property
    def records(self) -> int:
        return len(self.batch[0])

    def on(self, device: str) -> "Case":
        """The same case with model and batch on `device`."""
        inputs, targets = self.batch
        build = self.build
        return replace(self, build=lambda: build().to(device), batch=(inputs.to(device), targets.to(device)))

    def losses(self, model: nn.Module) -> Tensor:
        """One loss per record."""
        return self.losses_of(model(self.batch[0]), self.batch[1])

    def losses_of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.dim() == 1:
            return F.cross_entropy(outputs, targets, reduction="none")
        return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


def cases() -> list[Case]:
    """The models, from the smallest to the largest step."""
    generator = torch.Generator().manual_seed(0)

    def features(records: int, *shape: int) -> tuple[Tensor, Tensor]:
        return torch.rand(records, *shape, generator=generator), torch.randint(10, (records,), generator=generator)

    def texts(records: int, length: int, tokens: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(tokens, (records, length), generator=generator)
        return ids, torch.randint(2, (records,), generator=generator)

    following = torch.randint(8192, (2, 257), generator=generator)
    return [
        Case(
            name="logistic 784-10, B 512",
            build=lambda: nn.Linear(784, 10),
            batch=features(512, 784),
            goal=1.45,
            compiled_goal=1.15,
        ),
        Case(
            name="MLP 60-1000-10, B 512",
            build=lambda: nn.Sequential(nn.Linear(60, 1000), nn.ReLU(), nn.Linear(1000, 10)),
            batch=features(512, 60),
            goal=1.45,
            compiled_goal=1.15,
        ),
        Case(name="CNN 28x28, B 256", build=lambda: cnn((1, 28, 28), 10), batch=features(256, 1, 28, 28), goal=1.35),
        Case(name="WRN-16-4 32x32, B 16", build=WideResNet, batch=features(16, 3, 32, 32), goal=1.25),
        Case(name="ResNet-18 32x32, B 16", build=ResNet18, batch=features(16, 3, 32, 32), goal=1.25),
        Case(name="BERT-mini T 128, B 16", build=bert_mini, batch=texts(16, 128, 30522), goal=1.2),
        Case(
            name="BERT-mini LoRA 8, B 16",
            build=lambda: with_adapters(bert_mini()),
            batch=texts(16, 128, 30522),
            goal=1.03,
        ),
        Case(
            name="GPT-2 2 layers T 256, B 2",
            build=gpt2,
            batch=(following[:, :-1].contiguous(), following[:, 1:].contiguous()),
            goal=1.2,
        ),
        Case(name="embedding 50000x256 T 128, B 32", build=BagOfWords, batch=texts(32, 128, 50_000), goal=1.8),
        Case(name="LSTM 128 T 64, B 64", build=Recurrent, batch=texts(64, 64, 10_000), goal=1.65),
    ]
