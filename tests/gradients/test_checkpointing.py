"""Checkpointed blocks of any shape are exact: other inputs than tensors, several outputs, rows for the whole batch."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from oracles import per_record_gradients, relative_error, squared_norms, weighted_sums
from sordino.gradients import GradientCapture

RECORDS, STEPS, WIDTH = 4, 5, 6


class Block(nn.Module):
    """Attention with a bias by distance, which is made once and handed on, as in T5."""

    def __init__(self, *, first):
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if first:
            self.relative_attention_bias = nn.Embedding(2 * STEPS, 1)

    def forward(self, x, bias, scale, names):
        if bias is None:
            steps = torch.arange(x.shape[1])
            bias = self.relative_attention_bias(steps[:, None] - steps[None] + STEPS)[None, :, :, 0]
        weights = (self.query(x) @ x.transpose(1, 2) * scale + bias).softmax(2)
        return self.out(weights @ self.value(x)) + x, bias, None, {"names": names}


class Model(nn.Module):
    def __init__(self, *, reentrant, dropout=0.0):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(first=True), Block(first=False)])
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=dropout, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)
        self.place, self.head = nn.Embedding(STEPS, WIDTH), nn.Linear(WIDTH, 2)
        self.reentrant = reentrant

    def _run(self, block, *args):
        return block(*args) if self.reentrant is None else checkpoint(block, *args, use_reentrant=self.reentrant)

    def forward(self, x):
        hidden, bias = self.embed(x), None
        for block in self.blocks:
            hidden, bias, nothing, named = self._run(block, hidden, bias, 0.5, ("a", None))
            assert nothing is None
            assert named == {"names": ("a", None)}
        hidden = self._run(lambda h, _: self.attention(h, h, h)[0] + self.lstm(h)[0], hidden, None)
        places = torch.arange(STEPS)[None]
        hidden, row = self._run(lambda h, p: (h.tanh(), self.place(p)), hidden, places)
        return self.head(hidden + row).mean(1)


def batch():
    return torch.randn(RECORDS, STEPS, WIDTH, generator=torch.Generator().manual_seed(1))


def captured(model, x, *, seed=0):
    capture = GradientCapture(model)
    torch.manual_seed(seed)
    with capture.capturing(RECORDS):
        model(x).square().sum().backward()
    into = {}
    norms, weights = capture.squared_norms(), torch.linspace(0.1, 1, RECORDS, dtype=torch.float64)
    capture.add_weighted_sums(weights, into)
    capture.detach()
    assert torch.is_grad_enabled()
    return norms, [into[parameter] for parameter in model.parameters()], weights


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_with_other_inputs_and_several_outputs_are_exact(reentrant):
    torch.manual_seed(0)
    model, x = Model(reentrant=reentrant), batch()
    norms, sums, weights = captured(model, x)
    model.reentrant = None
    expected = per_record_gradients(model, lambda one, rows: one(*rows).square().sum(), (x,))
    assert relative_error(norms, squared_norms(expected)) < 1e-5
    for got, wanted in zip(sums, weighted_sums(expected, weights), strict=True):
        assert relative_error(got.double(), wanted, floor=1e-3) < 1e-4


@pytest.mark.parametrize("reentrant", [False, True])
def test_masks_are_those_of_the_same_step_without_checkpoints(reentrant):
    torch.manual_seed(0)
    model, x = Model(reentrant=reentrant, dropout=0.5), batch()
    norms, sums, _ = captured(model, x)
    model.reentrant = None
    plain_norms, plain_sums, _ = captured(model, x)
    assert relative_error(norms, plain_norms) < 1e-5
    for got, wanted in zip(sums, plain_sums, strict=True):
        assert relative_error(got.double(), wanted.double(), floor=1e-3) < 1e-4


def test_an_error_in_a_reentrant_block_leaves_gradients_as_they_were():
    model = nn.Linear(WIDTH, WIDTH)
    model.register_forward_hook(lambda *_: 1 / 0)
    capture = GradientCapture(model)
    with pytest.raises(ZeroDivisionError), capture.capturing(RECORDS):
        checkpoint(model, batch().requires_grad_(), use_reentrant=True)
    assert torch.is_grad_enabled()
    assert all(parameter.requires_grad for parameter in model.parameters())
