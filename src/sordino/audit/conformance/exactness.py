"""Cases: unusual models are exact — each record's own gradient, clipped — or refused; never silently wrong."""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sordino.audit.case import Case, Expects, case
from sordino.audit.conformance.coupling import CROSS_ENTROPY
from sordino.audit.library import Batch, Library, Loss
from sordino.audit.made_up import must_be_exact, normal, whole

__all__ = ["EXACTNESS"]

EXACTNESS: dict[str, Case] = {}
_Padding = Literal["circular", "reflect"]


def _exact(
    name: str,
    build: Callable[[], nn.Module],
    batch: Batch | None = None,
    loss: Loss = CROSS_ENTROPY,
    *,
    expects: Expects = "right",
) -> None:
    """A case whose clipped sum must be the slow one; by default 8 records of 5 features in 3 classes."""
    records = (normal(8, 5), whole(3, 8)) if batch is None else batch

    @case(EXACTNESS, f"exact: {name}", expects=expects)
    def check(library: Library) -> None:
        must_be_exact(library, build, records, loss)


class _Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) + 50 * F.linear(torch.tanh(x), self.l.weight)


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(torch.tanh(self.l(x)))


class _Tied(nn.Module):
    def __init__(self, *, head_first: bool) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(6, 9, bias=False)
            self.embed = nn.Embedding(9, 6)
            self.embed.weight = self.head.weight
        else:
            self.embed = nn.Embedding(9, 6)
            self.head = nn.Linear(6, 9, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


class _Reading(nn.Module):
    """Reads another layer's matrix."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def _tied_to_a_module() -> nn.Module:
    first = nn.Linear(5, 5)
    return nn.Sequential(first, nn.Tanh(), _Reading(first))


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.scale, self.cls = nn.Linear(5, 5), nn.Parameter(torch.ones(5)), nn.Parameter(torch.zeros(1, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([self.cls.expand(len(x), -1, -1), self.l(x)[:, None]], dim=1)
        return (rows * self.scale).tanh().sum(1)


class _Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(9, 6), nn.Embedding(4, 6), nn.Linear(6, 9)

    def forward(self, ids: Tensor) -> Tensor:
        row = torch.arange(ids.shape[1])[None]
        return self.head(torch.tanh(self.words(ids) + self.places(row)))


class _Folded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        records, steps, _ = x.shape
        return self.l(x.reshape(records * steps, -1)).reshape(records, steps, -1).mean(1)


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        identity = F.relu(self.first(x), inplace=True)
        out = self.second(identity)
        out += identity
        return out


class _Checkpointed(_Twice):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.reentrant = nn.Linear(5, 5), reentrant

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(super().forward, self.first(x), use_reentrant=self.reentrant)
        assert isinstance(out, Tensor)
        return out


class _Last(nn.Module):
    """The output of a recurrent layer or an attention, at its last step."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner
        out, _ = inner(x, x, x) if isinstance(inner, nn.MultiheadAttention) else inner(x)
        return self.head(out[:, -1])


def _language(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none").mean(1)


def _pairs(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) - model(batch[1])).square().sum(1)


def _convolutions(padding: _Padding) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=2, padding_mode=padding, dilation=2, groups=2),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 3, 4, padding="same"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


_TEXT = (whole(9, 6, 4), whole(9, 2, 6, 4)[1])
_SERIES = (normal(6, 4, 5), whole(3, 6))
_exact("a layer called twice", _Twice)
_exact("a matrix used once more by a function", _Functional, expects="either")
_exact("a language model tied, table first", lambda: _Tied(head_first=False), _TEXT, Loss.of(_language))
_exact("a language model tied, head first", lambda: _Tied(head_first=True), _TEXT, Loss.of(_language))
_exact("a matrix tied to a module of one's own", _tied_to_a_module, expects="either")
_exact("a bare scale and a class token", _Scaled)
_exact("one row of position ids for all records", _Positions, _TEXT, Loss.of(_language))
_exact("two branches of a siamese model", lambda: nn.Linear(5, 2), (normal(6, 5), normal(2, 6, 5)[1]), Loss.of(_pairs))
_exact("time folded into the batch", _Folded, _SERIES, expects="either")
_exact("in-place activations and residual additions", _InPlace)
_exact("checkpointing", lambda: _Checkpointed(reentrant=False))
_exact("checkpointing, reentrant", lambda: _Checkpointed(reentrant=True), expects="either")
_exact("nn.LSTM", lambda: _Last(nn.LSTM(5, 4, batch_first=True), 4), _SERIES)
_exact("nn.GRU", lambda: _Last(nn.GRU(5, 4, batch_first=True), 4), _SERIES)
_exact(
    "nn.MultiheadAttention",
    lambda: _Last(nn.MultiheadAttention(4, 2, batch_first=True, kdim=4), 4),
    (
        normal(6, 4, 4),
        whole(3, 6),
    ),
)
for _padding in get_args(_Padding):
    _exact(
        f"convolutions with {_padding} padding, groups and dilation",
        lambda p=_padding: _convolutions(p),
        (
            normal(6, 2, 5, 5),
            whole(3, 6),
        ),
    )
_exact(
    "bags of embeddings with duplicate ids",
    lambda: nn.Sequential(nn.EmbeddingBag(9, 5, mode="mean", padding_idx=0), nn.RMSNorm(5), nn.Linear(5, 3)),
    (_TEXT[0], whole(3, 6)),
)
