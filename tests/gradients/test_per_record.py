"""`per_record`: a module as a whole, exact where its own inputs and outputs have the records first."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sordino
from oracles import per_record_gradients, relative_error, squared_norms, weighted_sums
from sordino import per_record
from sordino.errors import PrivacyError, RecordCountMismatch, UnsupportedModule
from sordino.gradients import GradientCapture

RECORDS, TOKENS, WIDTH = 5, 4, 6


class Folding(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x.reshape(-1, WIDTH)).view_as(x)


class Routing(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        scores = self.gate(tokens).softmax(1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            chosen = (scores.argmax(1) == number).nonzero().flatten()
            mixed = mixed.index_add(0, chosen, expert(tokens[chosen]) * scores[chosen, number : number + 1])
        return mixed.view_as(x)


class Windows(nn.Module):
    """Windows of neighboring positions become rows, as in Swin."""

    def __init__(self):
        super().__init__()
        self.mixing, self.table = nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Parameter(torch.randn(TOKENS // 2, 2 * WIDTH))

    def forward(self, x):
        rows = x.reshape(-1, 2 * WIDTH)
        return (self.mixing(rows) + self.table.repeat(len(x), 1)).view_as(x)


class Tied(nn.Module):
    """One layer twice, and its weight once more by itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        rows = torch.tanh(self.layer(x.reshape(-1, WIDTH)))
        return F.linear(self.layer(rows), self.layer.weight).view_as(x)


KINDS = [Folding, Routing, Windows, Tied]


class Model(nn.Module):
    def __init__(self, kind, *, whole):
        super().__init__()
        inner = kind()
        self.before, self.inner, self.after = nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, 2)
        if whole:
            per_record(self.inner)

    def forward(self, x):
        return self.after(self.inner(self.before(x))).square().mean((1, 2))


def records():
    return torch.randn(RECORDS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def made(kind, *, whole):
    torch.manual_seed(1)
    return Model(kind, whole=whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_as_a_whole_is_exact(kind):
    model, x = made(kind, whole=True), records()
    wanted = per_record_gradients(model, lambda twin, one: twin(*one).sum(), (x,))
    capture = GradientCapture(model)
    with capture.capturing(RECORDS):
        model(x).sum().backward()
    assert relative_error(capture.squared_norms(), squared_norms(wanted)) <= 1e-5
    weights, sums = torch.linspace(0, 1, RECORDS).double(), {}
    capture.add_weighted_sums(weights, sums)
    for parameter, total in zip(model.parameters(), weighted_sums(wanted, weights), strict=True):
        assert relative_error(sums[parameter], total, floor=1e-3) <= 1e-5


@pytest.mark.parametrize("kind", [Folding, Routing, Windows])
def test_without_it_the_same_module_is_refused(kind):
    model = made(kind, whole=False)
    capture = GradientCapture(model)
    with pytest.raises(PrivacyError), capture.capturing(RECORDS):
        model(records()).sum().backward()


def test_the_module_comes_back_and_a_copy_is_not_marked():
    inner = Folding()
    assert per_record(inner) is inner
    assert sordino.per_record is per_record
    model = nn.Sequential(copy.deepcopy(inner))
    capture = GradientCapture(model)
    with pytest.raises(RecordCountMismatch), capture.capturing(RECORDS):
        model(records()).sum().backward()


def test_a_frozen_part_inside_gets_nothing():
    model = made(Routing, whole=True)
    model.inner.gate.requires_grad_(False)
    capture = GradientCapture(model)
    with capture.capturing(RECORDS):
        model(records()).sum().backward()
    sums = {}
    capture.add_weighted_sums(torch.ones(RECORDS), sums)
    assert not set(sums) & set(model.inner.gate.parameters())
    assert set(model.inner.experts.parameters()) <= set(sums)


class _Folded(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = per_record(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.inner(x.reshape(-1, WIDTH)).view_as(x).mean((1, 2))


class _Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return F.dropout(self.inner(x), 0.5)


class _Storing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.inner(x)


@pytest.mark.parametrize("build", [_Folded, lambda: per_record(_Random()), lambda: per_record(_Storing())])
def test_what_it_cannot_read_is_refused(build):
    model = build()
    capture = GradientCapture(model)
    with pytest.raises((RecordCountMismatch, UnsupportedModule)), capture.capturing(RECORDS):
        model(records()).sum().backward()
