"""What a private model trains on comes from the private loader, or was declared public."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sordino.errors import NonPrivateStep, PrivacyError
from sordino.training.engine import PrivacyEngine

FEATURES, LABELS = torch.randn(64, 5, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3


def private(model=None, data=None, **options):
    model = nn.Linear(5, 3) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    data = DataLoader(TensorDataset(FEATURES, LABELS) if data is None else data, batch_size=16, shuffle=True)
    wanted = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
    return engine, *engine.make_private(module=model, optimizer=optimizer, data_loader=data, **wanted)


BOTH = pytest.mark.parametrize("criterion", [None, nn.CrossEntropyLoss()], ids=["followed", "criterion"])

MADE_OF_THE_BATCH = {
    "itself": lambda x: x,
    "copied": lambda x: x.to(torch.float32, copy=True),
    "converted": lambda x: x.double().float(),
    "seen as another shape": lambda x: x.view(-1, 5, 1).squeeze(2),
    "scaled": lambda x: (x - 0.5) / 255,
    "noisy": lambda x: x + torch.randn(x.shape),
    "joined": lambda x: torch.cat([x[:, :2], x[:, 2:]], 1),
    "detached and cloned": lambda x: x.detach().clone().requires_grad_(),
}


@BOTH
@pytest.mark.parametrize("name", MADE_OF_THE_BATCH)
def test_what_torch_makes_of_a_batch_is_known_to_come_from_it(criterion, name):
    _, model, optimizer, loader = private(criterion=criterion)
    for features, labels in loader:
        F.cross_entropy(model(MADE_OF_THE_BATCH[name](features)), labels).backward()
        optimizer.step()


@BOTH
def test_records_taken_from_the_data_itself_are_refused(criterion):
    _, model, _, loader = private(criterion=criterion)
    before = model.weight.detach().clone()
    for features, _ in loader:
        chosen = torch.randperm(64)[: len(features)]
        with pytest.raises(NonPrivateStep, match="elsewhere"):
            model(FEATURES[chosen]).sum().backward()
        break
    assert torch.equal(model.weight, before)


@BOTH
def test_another_loaders_batches_beside_the_private_ones_are_refused(criterion):
    _, model, _, loader = private(criterion=criterion, poisson_sampling=False, neighboring_relation="replace_one")
    other = DataLoader(TensorDataset(FEATURES, LABELS), batch_size=16, shuffle=True)
    for (features, _), (others, _) in zip(loader, other, strict=True):
        model(features)
        with pytest.raises(NonPrivateStep, match="elsewhere"):
            model(others).sum().backward()
        break


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(5, 3)

    def forward(self, x, noise=0.0):
        return self.l(x + noise)


@BOTH
def test_noise_beside_a_batch_is_free(criterion):
    class First(Noisy):
        def forward(self, x):
            return super().forward(x, torch.randn(x.shape))

    _, model, optimizer, loader = private(First() if criterion else Noisy(), criterion=criterion)
    for features, labels in loader:
        inputs = (features,) if criterion else (features, torch.randn(features.shape))
        F.cross_entropy(model(*inputs), labels).backward()
        optimizer.step()


def test_public_records_beside_a_batch_are_declared():
    engine, model, optimizer, loader = private()
    for features, labels in loader:
        made_up = engine.mark_public(torch.rand(len(features), 5))
        (F.cross_entropy(model(features), labels) + model(made_up).square().sum(1).mean()).backward()
        optimizer.step()


class Texts(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"text": f"text number {index}", "label": index % 3}


class OfTexts(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(2, 3)

    def forward(self, texts):
        return self.l(torch.tensor([[len(text), 1.0] for text in texts]))


@BOTH
def test_texts_of_another_batch_are_refused(criterion):
    _, model, _, loader = private(OfTexts(), Texts(), criterion=criterion)
    for batch in loader:
        model(batch["text"]) if criterion is None else None
        with pytest.raises(NonPrivateStep, match="elsewhere"):
            model([f"text number {place}" for place in range(len(batch["text"]))]).sum().backward()
        break


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_copy_of_the_model_can_not_learn_from_private_batches(mode, steps):
    _, model, optimizer, loader = private()
    for step, (features, labels) in enumerate(loader):
        if step < steps:
            F.cross_entropy(model(features), labels).backward()
            optimizer.step()
            continue
        copied = getattr(copy.deepcopy(model), mode)()
        copied.zero_grad()
        with pytest.raises(PrivacyError):
            F.cross_entropy(copied(features), labels).backward()
        assert copied.weight.grad is None
        break


def test_a_copy_may_teach_and_may_learn_from_other_records():
    _, model, optimizer, loader = private()
    teacher = copy.deepcopy(model)
    for features, labels in loader:
        with torch.no_grad():
            target = teacher(features).softmax(1)
        loss = F.cross_entropy(model(features), labels) + F.cross_entropy(model(features), target)
        loss.backward()
        optimizer.step()
    teacher(torch.ones(2, 5)).sum().backward()
    assert teacher.weight.grad is not None
