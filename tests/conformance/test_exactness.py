"""Unusual uses of parameters are exact — each record's own gradient, clipped — or refused; never silently wrong."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from conformance_adapter import clipped_sum, distance, one_step
from oracles import clipped_sum as slow_clipped_sum
from oracles import per_record_gradients

C = 0.5


def data():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(8, 5, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def assert_exact(library, model, tensors, loss):
    expected = slow_clipped_sum(per_record_gradients(model, loss, tensors), C)
    got = clipped_sum(library, model, tensors, loss, max_grad_norm=C)
    assert distance(got, expected) <= 1e-5 * distance(expected, [torch.zeros_like(part) for part in expected])


def exact_or_refused(library, model, tensors, loss):
    try:
        assert_exact(library, model, tensors, loss)
    except library.refusals as refusal:
        return str(refusal)
    return ""


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(5, 5)

    def forward(self, x):
        return self.l(x) + 50 * F.linear(torch.tanh(x), self.l.weight)


def test_a_functional_second_use_of_a_weight_is_exact_or_named_in_the_refusal(library):
    torch.manual_seed(0)
    message = exact_or_refused(library, Functional(), data(), cross_entropy)
    assert not message or "l.weight" in message


def test_an_optimizer_that_holds_only_the_head_leaves_the_body_alone(library):
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), data()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    head = list(model[2].parameters())
    expected = slow_clipped_sum(per_record_gradients(model, cross_entropy, (x, y), head), C)
    body = copy.deepcopy(model[0].state_dict())
    private = library.make_private(model, TensorDataset(x, y), optimizer=optimizer, max_grad_norm=C)
    got = [len(x) * gradient for gradient in one_step(private, cross_entropy)]
    assert distance(got, expected) <= 1e-5, "only the head counts in the norm"
    assert all(torch.equal(model[0].state_dict()[name], value) for name, value in body.items())
    assert all(p.grad is None for p in model[0].parameters()), "no memory is kept for the body"
