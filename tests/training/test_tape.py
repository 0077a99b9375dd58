"""The loss of a drop-in loop, followed from batch to backward, and replayed."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sordino.errors import CoupledRecords, NonPrivateStep, PrivacyError, RecordCountMismatch, UnsupportedModule
from sordino.training.engine import PrivacyEngine
from sordino.training.loss_tracing.trace import OperationTrace
from sordino.training.loss_tracing.traced_tensor import TracedTensor, without_trace


def data():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(60, 5, generator=generator), torch.randint(0, 3, (60,), generator=generator))


def one_step(loss, *, model=None, records=None, batch_size=20, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data() if records is None else records, batch_size=batch_size),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )
    for batch in loader:
        loss(model, batch).backward()
        optimizer.step()


WEIGHT = torch.tensor([1.0, 2.0, 3.0])
ACCEPTED = {
    "cross entropy": lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    "module with smoothing": lambda m, b: nn.CrossEntropyLoss(label_smoothing=0.1)(m(b[0]), b[1]),
    "log softmax and gather": lambda m, b: -F.log_softmax(m(b[0]), 1)[torch.arange(len(b[1])), b[1]].mean(),
    "weights per record": lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=WEIGHT, reduction="none").mean(),
    "sum over size": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum") / b[0].size(0),
    "sum over shape": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum") / b[0].shape[0],
    "moved": lambda m, b: F.cross_entropy(m(b[0].to("cpu", copy=True)), b[1].clone().long()),
    "preprocessed": lambda m, b: F.cross_entropy(m((b[0].double() / 3 - 0.1).float()), b[1]),
    "one hot targets": lambda m, b: F.mse_loss(m(b[0]).softmax(1), F.one_hot(b[1], 3).float()),
    "two forwards": lambda m, b: F.cross_entropy(m(b[0]), b[1]) + F.mse_loss(m(2 * b[0]), m(b[0])),
    "dropout in the loop": lambda m, b: F.cross_entropy(F.dropout(m(b[0]), 0.3), b[1]),
    "in place": lambda m, b: F.cross_entropy(m(b[0]).mul_(2).add_(1), b[1]),
    "assigned": lambda m, b: F.cross_entropy(zeroed(m(b[0])), b[1]),
    "reshaped by size": lambda m, b: F.cross_entropy(m(b[0].reshape(b[0].size(0), 5)), b[1]),
    "metrics besides": lambda m, b: with_metrics(m, b),
    "mixed precision": lambda m, b: autocast_loss(m, b),
}


def zeroed(out):
    out = out.clone()
    out[:, 0] = 0
    return out


def with_metrics(model, batch):
    out = model(batch[0])
    correct = (out.argmax(1) == batch[1]).sum().item()
    assert f"{correct / len(batch[1]):.2f}"
    assert f"{out.detach().mean():.3f}"
    best = out.max(1)
    assert best.values.shape == best.indices.shape == batch[1].shape
    return F.cross_entropy(out, batch[1])


def autocast_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_mean_over_records_is_accepted_however_it_is_written(name):
    one_step(ACCEPTED[name])


def read(batch):
    return float((batch[1] > 0).sum().item()) + 0.5


REFUSED = {
    "class weights": lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=WEIGHT),
    "negative log likelihood with weights": lambda m, b: F.nll_loss(F.log_softmax(m(b[0]), 1), b[1], weight=WEIGHT),
    "a normalizer from the batch": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum") / (b[1] > 0).sum(),
    "the batch's own scale": lambda m, b: F.cross_entropy(m(b[0]) / m(b[0]).std(), b[1]),
    "hardest record": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none").max(),
    "median": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none").median(),
    "contrast": lambda m, b: F.cross_entropy(m(b[0]) @ m(b[0]).T, torch.arange(len(b[0]))),
    "broadcast": lambda m, b: (m(b[0])[:, :1] - b[1].float()).square().mean(),
    "sum": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"),
    "through numpy": lambda m, b: F.cross_entropy(m(b[0]), torch.from_numpy(b[1].numpy().copy())),
    "constant divisor": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum") / 20,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_couples_records_is_refused(name):
    with pytest.raises(CoupledRecords):
        one_step(REFUSED[name])


def test_a_number_read_from_the_batch_may_not_scale_the_loss():
    def scaled(model, batch):
        size = batch[0].square().sum().item()
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / size

    with pytest.raises(CoupledRecords):
        one_step(scaled, loss_reduction="sum")


def test_a_sum_is_accepted_when_declared():
    one_step(lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), loss_reduction="sum")


class Tape0(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_loss_that_can_not_be_followed_asks_for_the_criterion():
    def hidden(model, batch):
        return F.cross_entropy(Tape0.apply(without_trace(model(batch[0]))), without_trace(batch[1]))

    with pytest.raises(NonPrivateStep, match="criterion="):
        one_step(hidden)
    one_step(hidden, criterion=nn.CrossEntropyLoss())


def test_a_criterion_that_couples_records_is_refused_before_the_first_forward():
    with pytest.raises(CoupledRecords, match="class weights"):
        one_step(lambda m, b: m(b[0]).mean(), criterion=nn.CrossEntropyLoss(weight=WEIGHT))


class Checking(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(5, 3)

    def forward(self, x):
        if len(x) and float(x.detach().abs().max()) <= 1:
            raise ValueError("features must be standardized")
        return self.l(x)


def test_a_public_batch_stands_in_where_made_up_records_do_not_run():
    with pytest.raises(UnsupportedModule, match="public_batch") as refusal:
        one_step(ACCEPTED["cross entropy"], model=Checking())
    assert isinstance(refusal.value.__cause__, ValueError)
    public = torch.full((6, 5), 3.0) + torch.arange(6.0)[:, None], torch.arange(6) % 3
    one_step(ACCEPTED["cross entropy"], model=Checking(), public_batch=public)
    with pytest.raises(RecordCountMismatch, match="public_batch"):
        one_step(ACCEPTED["cross entropy"], model=Checking(), public_batch=tuple(part[:4] for part in public))
    with pytest.raises(CoupledRecords):
        one_step(REFUSED["contrast"], model=Checking(), public_batch=public)


class Spread(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(5, 2)

    def forward(self, x):
        mean, spread = self.l(x).unbind(1)
        return torch.distributions.Normal(mean, F.softplus(spread) + 0.1)


def likelihood(output, target):
    return -output.log_prob(target.float()).mean()


def test_a_module_that_returns_something_else_than_tensors_needs_its_criterion():
    with pytest.raises(PrivacyError):
        one_step(lambda m, b: likelihood(m(b[0]), b[1]), model=Spread())
    one_step(lambda m, b: likelihood(m(b[0]), b[1]), model=Spread(), criterion=likelihood)


class Loss(nn.Module):
    """Returns its own loss, in the manner of a model library."""

    def __init__(self, reduction):
        super().__init__()
        self.embed, self.head, self.reduction = nn.Embedding(9, 5), nn.Linear(5, 9), reduction

    def forward(self, ids, labels):
        scores = self.head(self.embed(ids))
        losses = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")
        valid = (labels > 0).float()
        reduced = {
            "records": losses.mean(1).mean(),
            "tokens": F.cross_entropy(scores.flatten(0, 1), labels.flatten()),
            "valid tokens": (losses * valid).sum() / valid.sum(),
        }
        return {"loss": reduced[self.reduction], "scores": scores}


class Sentences(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        ids = torch.arange(index, index + 6) % 9
        return {"ids": ids, "labels": (ids + 1) % 9}


def test_a_module_that_returns_its_own_loss_is_probed_as_a_whole():
    for reduction in ("records", "tokens"):
        one_step(lambda m, b: m(**b)["loss"], model=Loss(reduction), records=Sentences())
    with pytest.raises(CoupledRecords):
        one_step(lambda m, b: m(**b)["loss"], model=Loss("valid tokens"), records=Sentences())


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_the_first_batch_may_be_of_any_size(batch_size):
    records = TensorDataset(*(tensor[:12] for tensor in data().tensors))
    for _ in range(4):
        one_step(ACCEPTED["cross entropy"], records=records, batch_size=batch_size)


def test_a_refusal_leaves_the_model_as_it_was():
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CoupledRecords):
        one_step(REFUSED["class weights"], model=model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_loss_that_is_shown_and_its_gradient_are_those_of_the_real_batch():
    # The probe runs in the middle of the user's step and leaves no trace in it.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    reference = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    reference.load_state_dict(model.state_dict())
    x, y = data().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data(), batch_size=60),
        noise_multiplier=0.0,
        max_grad_norm=1e9,
    )
    for features, labels in loader:
        loss = F.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
    expected = F.cross_entropy(reference(x), y)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()))
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(parameter.grad, other.grad, atol=1e-6)


def test_a_tape_replays_its_calls_on_other_inputs():
    trace = OperationTrace(records=3, on_backward=lambda *_: None)
    (x,) = trace.inputs((torch.arange(3.0),))
    y = (x * 2).view(x.size(0), 1) + torch.ones(1)
    assert isinstance(y, TracedTensor)
    total = y.sum()
    assert float(total) == 9
    assert float(trace.replay(total.slot, [torch.tensor([1.0, 2.0])], records=2)) == 8


def test_a_batch_of_another_structure_can_not_be_replayed():
    trace = OperationTrace(records=3, on_backward=lambda *_: None)
    (x,) = trace.inputs((torch.arange(3.0),))
    with pytest.raises(PrivacyError, match="structure"):
        trace.replay(x.sum().slot, [], records=2)
