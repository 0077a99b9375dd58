"""Small models of every kind that memory modes must get right, and a batch for each."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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
