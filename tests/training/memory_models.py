"""Small models of every kind that memory modes must get right, a batch for each, and one step on it."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sordino import PerformanceOptions, Plan
from sordino.clipping import FlatClipping
from sordino.randomness import KeyedRNG
from sordino.sampling import Microbatch
from sordino.training import PrivateStep

RECORDS = 5


class Tied(nn.Module):
    """A table that is the head's matrix too, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.middle(self.middle(self.embed(ids)).tanh())).mean(1)


class Scaled(nn.Module):
    """A module that reads a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(3)), nn.Linear(6, 3)

    def forward(self, x):
        return self.inner(x) * self.scale


class Checkpointed(nn.Module):
    """Its layers run again in the backward pass."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(6, 8), nn.Linear(8, 3), reentrant

    def forward(self, x):
        x = x.clone().requires_grad_(self.reentrant)
        return self.last(checkpoint(lambda x: self.first(x).tanh(), x, use_reentrant=self.reentrant))


class Dropping(nn.Module):
    """Checkpointed blocks that draw masks."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x):
        x = x.clone().requires_grad_(self.reentrant)
        for layer in (self.first, self.second):
            x = checkpoint(
                lambda x, layer=layer: F.dropout(layer(x), training=self.training).tanh(),
                x,
                use_reentrant=self.reentrant,
            )
        return self.last(x)

    def dropped(self, x):
        return F.dropout(x, training=self.training).tanh()


class Repeated(nn.Module):
    """One layer in two checkpointed blocks and outside of them."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.inner, self.last, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 3), reentrant

    def forward(self, x):
        x = x.clone().requires_grad_(self.reentrant)
        for _ in range(2):
            x = checkpoint(lambda x: self.inner(x).tanh(), x, use_reentrant=self.reentrant)
        return self.last(self.inner(x))


class Positions(nn.Module):
    """Matrices so small beside the number of positions that gradients of records are kept for their sum."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(48, 48), nn.Linear(48, 3)

    def forward(self, x):
        return self.last(self.first(x.repeat(1, 8 * 64).view(len(x), 64, 48)).tanh()).mean(1)


class Opaque(nn.Module):
    """A parameter in a function that no rule knows."""

    def __init__(self):
        super().__init__()
        self.steps, self.inner = nn.Parameter(torch.ones(40, 6)), nn.Linear(6, 3)

    def forward(self, x):
        return self.inner(torch.einsum("bi,ji->bij", x, self.steps.cumsum(0)).tanh().logsumexp(2))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.lstm(x.unflatten(1, (3, 2)))[0][:, -1])


MODELS = {
    "perceptron": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)
    ),
    "tied": Tied,
    "scaled": Scaled,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed by reentry": lambda: Checkpointed(reentrant=True),
    "dropping": lambda: Dropping(reentrant=False),
    "dropping, checkpointed by reentry": lambda: Dropping(reentrant=True),
    "repeated": lambda: Repeated(reentrant=False),
    "positions": Positions,
    "opaque": Opaque,
    "recurrent": Recurrent,
}


def batch_for(name):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randint(7, (RECORDS, 3), generator=generator)
        if name == "tied"
        else torch.randn(RECORDS, 6, generator=generator)
    )


def plan_of(clipping, **options):
    return Plan(
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        sample_rate=0.1,
        steps=1,
        expected_batch_size=1.0,
        delta=1e-5,
        clipping=clipping,
        **options,
    )


def gradients(model, x, *, memory, clipping=None, chunks=1):
    """What one step without noise leaves in ``.grad``, by the capture that `fit` makes for this mode."""
    capture = PerformanceOptions(clipping_mode=memory).recorder(model, model.parameters())
    plan = plan_of(FlatClipping() if clipping is None else clipping)
    step = PrivateStep(capture, plan, KeyedRNG(), clipping_mode=memory)
    for number, part in enumerate(x.chunk(chunks)):
        chunk = Microbatch(step=0, index=number, is_last=number == chunks - 1, indices=np.arange(len(part)))
        torch.manual_seed(number)
        with step.capturing(chunk):
            step.backward(model(part).square().flatten(1).sum(1))
        step.add(chunk)
    step.finish()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    capture.detach()
    return found
