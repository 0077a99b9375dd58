"""Models, records and a training run for tests of what a loop may do."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sordino.training.engine import PrivacyEngine

STEPS = 3


def records(kind="classes"):
    generator = torch.Generator().manual_seed(3)
    features, labels = torch.randn(24, 6, generator=generator), torch.randint(0, 3, (24,), generator=generator)
    targets = {
        "classes": labels,
        "numbers": features[:, :3].clone(),
        "bits": (features[:, :3] > 0).float(),
        "tokens": torch.randint(0, 9, (24, 6), generator=generator),
        "images": labels,
    }[kind]
    inputs = {"tokens": targets, "images": torch.randn(24, 1, 8, 8, generator=generator)}.get(kind, features)
    return TensorDataset(inputs, targets)


def train(loop, model, kind="classes", *, steps=STEPS, **options):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(records(kind), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )
    state = {}
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = loop(model, batch, state)
        if loss is not None:
            loss.backward()
        optimizer.step()
        if number + 1 == steps:
            break
    engine.detach()
    return model


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def cnn():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(9, 8), nn.Embedding(6, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(8, 9)

    def forward(self, ids):
        places = torch.arange(ids.size(1)).expand(ids.size(0), -1)
        return self.head(self.body(self.embed(ids) + self.place(places)))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(9, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 9)

    def forward(self, ids):
        return self.head(self.body(self.embed(ids))[0])


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": nn.CrossEntropyLoss()(logits.view(-1, 3), labels.view(-1)), "logits": logits}


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, 1)
        return self.decode(mean + torch.randn_like(spread) * (0.5 * spread).exp()), mean, spread


def ce(model, batch, state=None):
    return F.cross_entropy(model(batch[0]), batch[1])


def tokens(model, batch, state):
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none").mean(1).mean()
