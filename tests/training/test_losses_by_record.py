"""`engine.backward(losses)`: one loss per record, checked like the scalar of ``loss.backward()`` and worth the same."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from loops import mlp, records
from oracles import clipped_sum, per_record_gradients, relative_error
from sordino.errors import CoupledRecords, LossShapeError, NonPrivateStep, PrivacyError
from sordino.training.engine import PrivacyEngine

WEIGHT = torch.tensor([1.0, 2.0, 3.0])


def private(model=None, *, batch_size=8, noise_multiplier=1.0, data=None, **options):
    torch.manual_seed(0)
    model, engine = mlp() if model is None else model, PrivacyEngine(**options.pop("engine", {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(records() if data is None else data, batch_size=batch_size),
        noise_multiplier=noise_multiplier,
        max_grad_norm=options.pop("max_grad_norm", 1.0),
        **options,
    )
    return engine, model, optimizer, loader


def losses_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(loss, model=None, **options):
    engine, model, optimizer, loader = private(model, **options)
    for batch in loader:
        optimizer.zero_grad()
        engine.backward(loss(model, batch))
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("reduction", "microbatch_size", "mode"), [("mean", None, "fast"), ("sum", 5, "fast"), ("mean", 5, "two_pass")]
)
def test_the_private_gradient_is_the_clipped_sum_of_the_records_gradients(reduction, microbatch_size, mode):
    data = records()
    engine, model, optimizer, loader = private(
        batch_size=24,
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        loss_reduction=reduction,
        microbatch_size=microbatch_size,
        engine={"clipping_mode": mode},
    )
    expected = clipped_sum(per_record_gradients(model, lambda m, b: losses_of(m, b).sum(), data.tensors), 0.3)
    for batch in loader:
        engine.backward(losses_of(model, batch))
        optimizer.step()
        if loader.is_last_microbatch:
            break
    for parameter, total in zip(model.parameters(), expected, strict=True):
        assert relative_error(parameter.grad * 24, total) < 1e-5


ACCEPTED = {
    "class weights": lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=WEIGHT, reduction="none"),
    "own mean over columns": lambda m, b: F.mse_loss(m(b[0]), F.one_hot(b[1], 3).float(), reduction="none").mean(1),
    "two forwards": lambda m, b: losses_of(m, b) + (m(2 * b[0]) - m(b[0])).square().sum(1),
    "dropout": lambda m, b: F.cross_entropy(F.dropout(m(b[0]), 0.3), b[1], reduction="none"),
}
COUPLED = {
    "divided by the batch's size": lambda m, b: losses_of(m, b) / len(b[0]),
    "standardized": lambda m, b: (losses_of(m, b) - losses_of(m, b).mean()) / (losses_of(m, b).std() + 1e-6),
    "shuffled": lambda m, b: losses_of(m, b).flip(0) * b[0][:, 0],
    "outliers left out": lambda m, b: losses_of(m, b) * (losses_of(m, b) < 2 * losses_of(m, b).mean()),
    "scaled by a number read": lambda m, b: losses_of(m, b) * b[0].abs().max().item(),
    "weights by place": lambda m, b: losses_of(m, b) * torch.linspace(0, 1, len(b[0])),
}
SHAPES = {
    "a scalar": lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    "a column": lambda m, b: losses_of(m, b)[:, None],
    "one for each class": lambda m, b: m(b[0]).square().mean(0),
    "chosen records": lambda m, b: losses_of(m, b)[b[1] > 0],
    "a mean of one entry": lambda m, b: losses_of(m, b).mean()[None],
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_independent_losses_are_accepted_however_they_are_written(name):
    train(ACCEPTED[name])


@pytest.mark.parametrize("name", COUPLED)
def test_losses_that_couple_records_are_refused(name):
    with pytest.raises(CoupledRecords):
        train(COUPLED[name])


@pytest.mark.parametrize("name", SHAPES)
def test_anything_but_one_loss_per_record_is_refused(name):
    with pytest.raises(PrivacyError) as refusal:
        train(SHAPES[name])
    assert isinstance(refusal.value, LossShapeError | CoupledRecords)


def test_a_sum_that_was_accepted_as_a_scalar_is_not_one_loss_per_record():
    engine, model, optimizer, loader = private(loss_reduction="sum")
    batches = iter(loader)
    losses_of(model, next(batches)).sum()[None].backward()
    optimizer.step()
    batch = next(batches)
    with pytest.raises(LossShapeError):
        engine.backward(losses_of(model, batch).sum()[None])


def test_losses_of_an_earlier_batch_or_of_another_model_are_refused():
    engine, model, optimizer, loader = private()
    batches = iter(loader)
    old = losses_of(model, next(batches))
    engine.backward(old)
    optimizer.step()
    next(batches)
    with pytest.raises(NonPrivateStep):
        engine.backward(old)
    with pytest.raises(NonPrivateStep):
        PrivacyEngine().backward(torch.zeros(3, requires_grad=True))


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.square().sum(1)

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones(len(gradient), 3) * gradient.sum()


def test_losses_that_could_not_be_followed_are_refused():
    def hidden(model, batch):
        return Hidden.apply(model(batch[0]))

    with pytest.raises(PrivacyError):
        train(hidden)
    with pytest.raises(PrivacyError):
        train(hidden, criterion=nn.CrossEntropyLoss())


def test_each_of_several_models_gets_its_own_losses():
    engine, first, one, loader = private()
    second = nn.Linear(6, 3)
    other = torch.optim.SGD(second.parameters(), lr=0.1)
    _, _, others = engine.make_private(
        module=second,
        optimizer=other,
        data_loader=DataLoader(records(), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for batch, beside in zip(loader, others, strict=True):
        engine.backward(losses_of(first, batch))
        engine.backward(losses_of(second, beside))
        one.step()
        other.step()


@pytest.mark.parametrize("again", [False, True])
def test_two_backward_passes_on_one_batch_add_up_before_clipping(again):
    data = records()
    engine, model, optimizer, loader = private(batch_size=24, noise_multiplier=0.0, max_grad_norm=0.3)
    expected = clipped_sum(
        per_record_gradients(model, lambda m, b: (losses_of(m, b) + m(b[0]).square().sum(1)).sum(), data.tensors), 0.3
    )
    for batch in loader:
        out = model(batch[0])
        engine.backward(F.cross_entropy(out, batch[1], reduction="none"), retain_graph=again)
        engine.backward((out if again else model(batch[0])).square().sum(1))
        optimizer.step()
    for parameter, total in zip(model.parameters(), expected, strict=True):
        assert relative_error(parameter.grad * 24, total) < 1e-5
