"""Predictions in training mode beside private batches: they take no part, leave nothing behind, and teach nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sordino.errors import CoupledRecords, NonPrivateStep, PrivacyError, UncapturedParameter
from sordino.training.engine import PrivacyEngine

GENERATOR = torch.Generator().manual_seed(5)
RECORDS = TensorDataset(torch.randn(32, 5, generator=GENERATOR), torch.randint(0, 3, (32,), generator=GENERATOR))
OTHERS = torch.randn(7, 5, generator=GENERATOR)


def network(kind="plain"):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.5 if kind == "dropout" else 0.0), nn.Linear(6, 3)]
    return nn.Sequential(*layers)


def private(model, way="captured", **options):
    alone = way == "one-by-one"
    engine = PrivacyEngine(reproducible=True, seed=1, **({"gradients": "one-by-one"} if alone else {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    wanted = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "criterion": nn.CrossEntropyLoss() if way == "criterion" else None,
        "microbatch_size": 3 if way == "microbatches" else None,
    }
    loader = DataLoader(RECORDS, batch_size=8)
    return engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **(wanted | options))


def train(way, predict_at, kind="plain"):
    """Parameters after an epoch in which the places of `predict_at` hold a prediction."""
    model, optimizer, loader = private(network(kind), way)

    def predict(place, features):
        if place in predict_at:
            for inputs in (OTHERS, features[:2], OTHERS.clone().requires_grad_()):
                assert model(inputs).detach().shape == (len(inputs), 3)

    for features, labels in loader:
        optimizer.zero_grad()
        # What the loop makes of the batch is of the batch: only copies of other records are predicted.
        predict("before the forward", OTHERS)
        loss = F.cross_entropy(model(features), labels)
        predict("before the backward", OTHERS)
        loss.backward()
        predict("before the step", OTHERS)
        optimizer.step()
        predict("between steps", features)
    predict("after the last step", features)
    assert model.training
    return [parameter.detach().clone() for parameter in model.parameters()]


WITHIN = ("before the forward", "before the backward", "before the step")
BETWEEN = ("between steps", "after the last step")


@pytest.mark.parametrize("way", ["captured", "criterion", "one-by-one", "microbatches"])
def test_predictions_change_nothing_of_the_training(way):
    for own, other in zip(train(way, {*WITHIN, *BETWEEN}), train(way, set()), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("way", ["captured", "criterion", "one-by-one"])
def test_predictions_with_dropout_between_steps_change_nothing_and_differ_from_one_another(way):
    for own, other in zip(train(way, {*BETWEEN}, "dropout"), train(way, set(), "dropout"), strict=True):
        assert torch.equal(own, other)
    model, _, _ = private(network("dropout"), way)
    assert not torch.equal(model(OTHERS), model(OTHERS))


def test_predictions_with_dropout_within_a_batch_are_allowed():
    train("captured", {*WITHIN}, "dropout")


def test_a_prediction_with_dropout_may_come_between_a_look_and_its_training():
    model, optimizer, loader = private(network("dropout"))
    features, labels = next(iter(loader))
    model(OTHERS)
    F.cross_entropy(model(features), labels).backward()
    optimizer.step()


# --- backward passes ------------------------------------------------------------------------------------------------


def no_batch(model, optimizer, loader):
    return OTHERS


def after_the_step(model, optimizer, loader):
    features, labels = next(iter(loader))
    F.cross_entropy(model(features), labels).backward()
    optimizer.step()
    return features


def earlier_batch(model, optimizer, loader):
    batches = iter(loader)
    features, _ = next(batches)
    next(batches)
    return features.to(torch.float32, copy=True)


def elsewhere(model, optimizer, loader):
    next(iter(loader))
    return OTHERS


def beside_a_forward(model, optimizer, loader):
    features, labels = next(iter(loader))
    F.cross_entropy(model(features), labels)
    return OTHERS


CASES = {
    no_batch: "next batch",
    after_the_step: "next batch",
    earlier_batch: "ahead",
    elsewhere: "elsewhere",
    beside_a_forward: "elsewhere",
}


@pytest.mark.parametrize("way", ["captured", "criterion", "one-by-one"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_backward_pass_through_a_prediction_is_refused_and_leaves_no_gradient(case, way):
    # A batch of one part, so that a step with one record at a time is one step too.
    sizes = {"expected_batch_size": 1.0, "sample_rate": 1 / 32} if way == "one-by-one" else {}
    model, optimizer, loader = private(network(), way, **sizes)
    inputs = case(model, optimizer, loader)
    before = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
    prediction = model(inputs)
    with pytest.raises(NonPrivateStep, match=CASES[case]) as refusal:
        (prediction * 2).sum().backward()
    assert "module.eval()" in str(refusal.value)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert (parameter.grad is None) if gradient is None else torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("way", ["captured", "criterion", "one-by-one"])
def test_a_prediction_as_a_part_of_the_loss_is_refused(way):
    model, _, loader = private(network(), way)
    features, labels = next(iter(loader))
    with pytest.raises(PrivacyError):
        (F.cross_entropy(model(features), labels) + model(OTHERS).square().mean()).backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_prediction_as_a_part_of_the_loss_is_told_as_what_it_is():
    """As for the critic that sees invented records beside real ones."""
    model, optimizer, loader = private(network())
    features, labels = next(iter(loader))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(features), labels) + F.cross_entropy(
        model(torch.rand_like(OTHERS)), torch.zeros(len(OTHERS)).long()
    )
    with pytest.raises(NonPrivateStep, match=r"tensors from elsewhere.*engine\.mark_public"):
        loss.backward()


def test_the_advice_holds():
    model, optimizer, loader = private(network())
    inputs = OTHERS.clone().requires_grad_()
    model.eval()
    assert torch.autograd.grad(model(inputs).sum(), inputs)[0].shape == inputs.shape
    model.train()
    for features, labels in loader:
        F.cross_entropy(model(features), labels).backward()
        optimizer.step()


def test_gradients_go_through_a_frozen_model_in_training_mode():
    critic, generator = nn.Linear(5, 1), nn.Linear(2, 5)
    _, descent, loader = private(critic)
    ascent = torch.optim.SGD(generator.parameters(), lr=0.1)
    for features, labels in loader:
        F.binary_cross_entropy_with_logits(critic(features).squeeze(1), (labels > 0).float()).backward()
        descent.step()
        before = generator.weight.detach().clone()
        critic.requires_grad_(False)
        critic(generator(torch.randn(4, 2))).mean().backward()
        ascent.step()
        critic.requires_grad_(True)
        assert not torch.equal(before, generator.weight)


# --- what a prediction leaves behind --------------------------------------------------------------------------------


class Collecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        # The private batches store nothing; other inputs do.
        if self.training and len(x) == len(OTHERS) and torch.equal(x, OTHERS):
            self.mean = self.mean + x.mean(0)
        return self.body(x - self.mean)


class CollectingInData(Collecting):
    def forward(self, x):
        if self.training and len(x) == len(OTHERS) and torch.equal(x, OTHERS):
            self.mean.data += x.mean(0)
        return self.body(x - self.mean)


@pytest.mark.parametrize("kind", [Collecting, CollectingInData])
def test_a_prediction_that_stores_what_it_saw_is_refused_and_put_back(kind):
    model, _, _ = private(kind())
    with pytest.raises(CoupledRecords, match="mean"):
        model(OTHERS)
    assert torch.equal(model.mean, torch.zeros(5))
    model.eval()
    model(OTHERS)


def test_a_prediction_on_an_earlier_batch_is_of_that_batch():
    model, optimizer, loader = private(network())
    batches = iter(loader)
    features, labels = next(batches)
    F.cross_entropy(model(features), labels).backward()
    optimizer.step()
    center = model(features).detach().mean(0)
    features, labels = next(batches)
    with pytest.raises(CoupledRecords, match="earlier batch"):
        F.cross_entropy(model(features) - center, labels).backward()


def test_a_prediction_on_public_records_may_teach():
    model, optimizer, loader = private(network())
    for features, labels in loader:
        center = model(OTHERS).detach().mean(0)
        F.cross_entropy(model(features) - center, labels).backward()
        optimizer.step()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", ["training", "a part in training"])
def test_what_a_prediction_draws_frees_no_rows_from_outside(grad, mode):
    """Weights by the place in the batch are refused, also where the module drew random numbers beside."""
    model, _, loader = private(network("dropout"))
    for features, labels in loader:
        model.train(mode == "training")
        model[2].train()
        with torch.set_grad_enabled(grad):
            model(OTHERS)
        model.train()
        losses = F.cross_entropy(model(features), labels, reduction="none")
        with pytest.raises(CoupledRecords):
            (losses * torch.linspace(0.5, 1, len(features))).mean().backward()
        break


# --- one record at a time -------------------------------------------------------------------------------------------


def evaluated(model):
    model.eval()
    made = model(OTHERS)
    model.train()
    return made


def past_the_model(model):
    return model[3](torch.tanh(model[0](OTHERS)))


def functional(model):
    return F.linear(OTHERS, model[0].weight)


@pytest.mark.parametrize("criterion", [None, nn.CrossEntropyLoss()])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("foreign", [evaluated, past_the_model, functional])
def test_with_one_record_at_a_time_nothing_else_joins_the_records_gradient(foreign, together, criterion):
    """Plain autograd takes what arrives at the parameters: another record's gradient would pass as that of this one."""
    model, _, loader = private(network(), "one-by-one", criterion=criterion)
    features, labels = next(iter(loader))
    own = F.cross_entropy(model(features), labels)
    other = 1000 * foreign(model).sum()
    with pytest.raises((UncapturedParameter, NonPrivateStep)):
        (own + other).backward() if together else other.backward()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("criterion", [None, nn.CrossEntropyLoss()])
def test_with_one_record_at_a_time_gradients_of_inputs_are_free_in_evaluation_mode(criterion):
    model, optimizer, loader = private(network(), "one-by-one", criterion=criterion)
    for features, labels in loader:
        loss = F.cross_entropy(model(features), labels)
        model.eval()
        inputs = OTHERS.clone().requires_grad_()
        assert torch.autograd.grad(model(inputs).sum(), inputs)[0].shape == inputs.shape
        model.train()
        loss.backward()
        optimizer.step()


def test_with_one_record_at_a_time_and_a_criterion_a_weighted_backward_pass_goes_on():
    model, optimizer, loader = private(
        network(), "one-by-one", criterion=lambda out, labels: F.cross_entropy(out, labels, reduction="none").mean()
    )
    twin = copy.deepcopy(network())
    for features, labels in loader:
        losses = F.cross_entropy(model(features), labels, reduction="none")
        losses.backward(torch.ones_like(losses) / len(losses))
        optimizer.step()
    assert not torch.equal(model[0].weight, twin[0].weight)
