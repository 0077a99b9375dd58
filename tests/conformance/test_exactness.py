"""Unusual uses of parameters are exact — each record's own gradient, clipped — or refused; never silently wrong."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from conformance.adapter import clipped_sum, distance, held, one_step
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


class Tied(nn.Module):
    def __init__(self, head_first):
        super().__init__()
        if head_first:
            self.head = nn.Linear(6, 9, bias=False)
            self.embed = nn.Embedding(9, 6)
            self.embed.weight = self.head.weight
        else:
            self.embed = nn.Embedding(9, 6)
            self.head = nn.Linear(6, 9, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


@pytest.mark.parametrize("head_first", [False, True])
def test_a_tied_language_model_is_exact_in_both_orders(library, head_first):
    torch.manual_seed(0)
    ids, targets = torch.randint(0, 9, (6, 4)), torch.randint(0, 9, (6, 4))

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none").mean(1).mean()

    assert_exact(library, Tied(head_first), (ids, targets), loss)


class Scaled(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, x):
        return x @ self.weight.T


def test_a_linear_layer_tied_to_a_custom_module_is_exact_or_refused(library):
    torch.manual_seed(0)
    first = nn.Linear(5, 5)
    exact_or_refused(library, nn.Sequential(first, nn.Tanh(), Scaled(first)), data(), cross_entropy)


@pytest.mark.parametrize("order", ["first", "second"])
def test_two_forwards_and_backwards_in_either_order_add_up_before_clipping(library, order):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    x, y = data()
    private = library.make_private(model, TensorDataset(x, y), max_grad_norm=C)
    expected = slow_clipped_sum(
        per_record_gradients(model, lambda m, b: cross_entropy(m, b) + m(2 * b[0]).square().sum(), (x, y)), C
    )
    for features, labels in private.loader:
        one = F.cross_entropy(model(features), labels)
        two = model(2 * features).square().sum(1).mean()
        for loss in (one, two) if order == "first" else (two, one):
            loss.backward()
        private.optimizer.step()
    got = [len(x) * p.grad for p in held(private)]
    assert distance(got, expected) <= 1e-5


def test_a_forward_without_a_backward_adds_nothing(library):
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(5, 3), data()
    expected = slow_clipped_sum(per_record_gradients(model, cross_entropy, (x, y)), C)

    def loss(model, batch):
        model(3 * batch[0])
        return cross_entropy(model, batch)

    assert distance(clipped_sum(library, model, (x, y), loss, max_grad_norm=C), expected) <= 1e-5


def test_two_losses_with_retain_graph_add_up_before_clipping(library):
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(5, 3), data()

    def both(model, batch):
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + out.square().mean()

    expected = slow_clipped_sum(per_record_gradients(model, both, (x, y)), C)
    private = library.make_private(model, TensorDataset(x, y), max_grad_norm=C)
    for features, labels in private.loader:
        out = model(features)
        F.cross_entropy(out, labels).backward(retain_graph=True)
        out.square().mean().backward()
        private.optimizer.step()
    assert distance([len(x) * p.grad for p in held(private)], expected) <= 1e-5


def test_siamese_branches_add_up_before_clipping(library):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(3)
    pair = torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)

    def loss(model, batch):
        return (model(batch[0]) - model(batch[1])).square().sum(1).mean()

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    assert_exact(library, model, pair, loss)


class Folded(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(5, 3)

    def forward(self, x):
        records, steps, _ = x.shape
        return self.l(x.reshape(records * steps, -1)).reshape(records, steps, -1).mean(1)


def test_a_model_that_folds_time_into_the_batch_is_exact_or_refused(library):
    torch.manual_seed(0)
    x = torch.randn(6, 4, 5)
    exact_or_refused(library, Folded(), (x, torch.randint(0, 3, (6,))), cross_entropy)


def test_a_layer_unfrozen_after_set_up_is_exact_or_refused(library):
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), data()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = library.make_private(model, TensorDataset(x, y), optimizer=optimizer, max_grad_norm=C)
    one_step(private, cross_entropy)
    assert model[0].weight.grad is None
    model[0].requires_grad_(True)
    expected = slow_clipped_sum(per_record_gradients(model, cross_entropy, (x, y)), C)
    try:
        got = [len(x) * gradient for gradient in one_step(private, cross_entropy)]
    except library.refusals:
        return
    assert distance(got, expected) <= 1e-5


def test_a_layer_frozen_between_steps_no_longer_counts_or_moves(library):
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), data()
    private = library.make_private(model, TensorDataset(x, y), max_grad_norm=C)
    one_step(private, cross_entropy)
    model[0].requires_grad_(False)
    private.optimizer.zero_grad()
    before = model[0].weight.clone()
    expected = slow_clipped_sum(per_record_gradients(model, cross_entropy, (x, y)), C)
    got = [len(x) * gradient for gradient in one_step(private, cross_entropy)]
    assert distance(got, expected) <= 1e-5
    assert torch.equal(model[0].weight, before)


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


class EarlyExit(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 3)
        self.early = False

    def forward(self, x):
        out = self.first(x)
        return out if self.early else self.second(torch.tanh(out))


def test_a_layer_that_is_skipped_in_step_two_has_nothing_of_step_one(library):
    torch.manual_seed(0)
    model, (x, y) = EarlyExit(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = library.make_private(model, TensorDataset(x, y), optimizer=optimizer, max_grad_norm=C)
    one_step(private, cross_entropy)
    assert model.second.weight.grad.abs().max() > 0
    model.early = True
    one_step(private, cross_entropy)
    assert model.second.weight.grad is None or model.second.weight.grad.abs().max() == 0
