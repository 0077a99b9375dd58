"""Batches padded to their longest record: exact where padding changes no record's gradient, refused elsewhere."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from sordino.errors import CoupledRecords, PrivacyError
from sordino.gradients import GradientCapture
from sordino.training.engine import PrivacyEngine
from sordino.training.fit import fit
from sordino.training.plan import Plan
from sordino.training.probing.padding import PaddedTensor, Padding, check_padding
from sordino.training.probing.probe_runner import ProbeTask

LENGTHS = (5, 9, 3, 12, 5, 7, 8, 4)


class Sentences(Dataset):
    def __init__(self, lengths=LENGTHS):
        generator = torch.Generator().manual_seed(4)
        self.rows = [torch.randint(1, 20, (length,), generator=generator) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return self.rows[place], place % 2


def collate(items):
    return pad_sequence([ids for ids, _ in items], batch_first=True), torch.tensor([label for _, label in items])


def collate_in_front(items):
    longest = max(len(ids) for ids, _ in items)
    rows = [F.pad(ids, (longest - len(ids), 0)) for ids, _ in items]
    return torch.stack(rows), torch.tensor([label for _, label in items])


class MaskedMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 6), nn.Linear(6, 2)

    def forward(self, ids):
        mask = (ids > 0).unsqueeze(-1)
        return self.head((self.table(ids) * mask).sum(1) / mask.sum(1).clamp(min=1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.body = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, ids):
        padding = ids == 0
        found = self.body(self.table(ids), src_key_padding_mask=padding)
        return self.head(found.masked_fill(padding[..., None], 0).sum(1))


class Largest(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 6), nn.Linear(6, 2)

    def forward(self, ids):
        return self.head(self.table(ids).masked_fill((ids == 0)[..., None], -1e9).amax(1))


class UnmaskedMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 6, padding_idx=0), nn.Linear(6, 2)

    def forward(self, ids):
        return self.head(self.table(ids).mean(1))


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(20, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, ids):
        return self.head(self.body(self.table(ids))[0][:, -1])


class LengthAsAFeature(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = MaskedMean()

    def forward(self, ids):
        return self.inner(ids) * (1 + 1e-3 * ids.shape[1])


class UnmaskedAttention(Attention):
    def forward(self, ids):
        return self.head(self.body(self.table(ids)).masked_fill((ids == 0)[..., None], 0).sum(1))


class FirstHalf(MaskedMean):
    def forward(self, ids):
        return super().forward(ids[:, : ids.shape[1] // 2])


class OfOneLength(MaskedMean):
    def forward(self, ids):
        return super().forward(ids) * (2 if ids.shape[1] == max(LENGTHS) else 1)


class OfSomeRecords(MaskedMean):
    def forward(self, ids):
        return super().forward(ids) * torch.where(ids[:, :1] == 7, ids.shape[1], 1)


def private(model, data, collate, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=len(data), collate_fn=collate),
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        **options,
    )


def train(model, optimizer, loader, loss=lambda model, ids, labels: F.cross_entropy(model(ids), labels)):
    steps = []
    for ids, labels in loader:
        loss(model, ids, labels).backward()
        optimizer.step()
        steps.append(1)
        yield len(steps)


def clipped_mean(model, data):
    """Every record alone, unpadded, by plain autograd."""
    wanted = [torch.zeros_like(p) for p in model.parameters()]
    for ids, label in data:
        model.zero_grad()
        F.cross_entropy(model(ids[None]), torch.tensor([label])).backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for total, gradient in zip(wanted, gradients, strict=True):
            total += gradient * min(1.0, 0.3 / float(norm)) / len(data)
    model.zero_grad()
    return wanted


INDEPENDENT = {"masked mean": MaskedMean, "masked attention": Attention, "largest of the valid": Largest}
DEPENDENT = {
    "mean over padding": UnmaskedMean,
    "state behind padding": LastState,
    "length as a feature": LengthAsAFeature,
    "attention without a mask": UnmaskedAttention,
    "half of the positions": FirstHalf,
    "a length that comes": OfOneLength,
    "a token that some records have": OfSomeRecords,
}


def without_dropout(model):
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    return model


@pytest.mark.parametrize("microbatch_size", [None, 3])
@pytest.mark.parametrize("collate_fn", [collate, collate_in_front])
@pytest.mark.parametrize("name", INDEPENDENT)
def test_where_padding_changes_no_gradient_every_record_has_its_own(name, collate_fn, microbatch_size):
    torch.manual_seed(0)
    data, model = Sentences(), without_dropout(INDEPENDENT[name]())
    wanted = clipped_mean(model, data)
    list(train(*private(model, data, collate_fn, microbatch_size=microbatch_size)))
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_with_dropout_and_in_fit_too(name):
    data = Sentences()
    list(train(*private(INDEPENDENT[name](), data, collate)))
    plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5, steps=4, expected_batch_size=4.0, delta=1e-3)

    def loss(model, ids, labels):
        return F.cross_entropy(model(ids), labels, reduction="none")

    assert fit(INDEPENDENT[name](), loss, data, plan, collate_fn=collate, progress=False).steps == 4


@pytest.mark.parametrize("name", DEPENDENT)
def test_where_padding_matters_batches_of_different_lengths_are_refused(name):
    model, optimizer, loader = private(DEPENDENT[name](), Sentences(), collate)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(CoupledRecords, match="public length"):
        list(train(model, optimizer, loader))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=1.0, steps=1, expected_batch_size=8.0, delta=1e-3)

    def loss(model, ids, labels):
        return F.cross_entropy(model(ids), labels, reduction="none")

    with pytest.raises(CoupledRecords, match="public length"):
        fit(DEPENDENT[name](), loss, Sentences(), plan, collate_fn=collate, progress=False)


@pytest.mark.parametrize("name", {**INDEPENDENT, **DEPENDENT})
def test_records_of_one_length_train_with_a_function_that_would_pad(name):
    list(train(*private({**INDEPENDENT, **DEPENDENT}[name](), Sentences((6,) * 8), collate)))


def test_where_padding_matters_a_later_batch_of_another_length_is_refused_when_it_comes():
    steps = train(*private(UnmaskedMean(), Sentences((6,) * 7 + (9,)), collate, microbatch_size=4))
    assert next(steps) == 1
    with pytest.raises(CoupledRecords, match="public length"):
        next(steps)


class LaterLength(MaskedMean):
    def forward(self, ids):
        return super().forward(ids) * (2 if ids.shape[1] == 9 else 1)


@pytest.mark.parametrize("criterion", [None, F.cross_entropy])
def test_a_length_that_comes_later_is_tried_then(criterion):
    data = Sentences((6, 7, 5, 7, 9, 8, 9, 5))
    steps = train(*private(LaterLength(), data, collate, microbatch_size=4, criterion=criterion))
    with pytest.raises(CoupledRecords, match="public length"):
        list(steps)


@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_lengths_are_tried_in_batches_no_larger_than_trainings(microbatch_size):
    sizes = []

    class Noting(MaskedMean):
        def forward(self, ids):
            sizes.append(len(ids))
            return super().forward(ids)

    list(train(*private(Noting(), Sentences(), collate, microbatch_size=microbatch_size)))
    assert max(sizes) == microbatch_size


def by_the_length(model, ids, labels):
    return F.cross_entropy(model(ids), labels) / ids.shape[1]


def by_all_positions(model, ids, labels):
    return F.cross_entropy(model(ids), labels, reduction="sum") / ids.numel()


def if_it_is_long(model, ids, labels):
    loss = F.cross_entropy(model(ids), labels)
    return 2 * loss if ids.shape[1] > 10 else loss


@pytest.mark.parametrize("loss", [by_the_length, by_all_positions, if_it_is_long])
def test_a_loop_can_not_use_the_padded_length(loss):
    model, optimizer, loader = private(MaskedMean(), Sentences(), collate)
    with pytest.raises(PrivacyError):
        list(train(model, optimizer, loader, loss))


def test_with_a_criterion_the_same_holds():
    list(train(*private(MaskedMean(), Sentences(), collate, criterion=F.cross_entropy)))
    parts = private(UnmaskedMean(), Sentences(), collate, criterion=F.cross_entropy)
    with pytest.raises(CoupledRecords, match="public length"):
        list(train(*parts))


def test_units_need_one_length():
    from sordino.training.record_source import UnitAssignment

    units = UnitAssignment(unit_ids=[0, 0, 1, 1, 2, 2, 3, 3], num_units=4)
    plan = Plan(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=1.0,
        steps=1,
        expected_batch_size=4.0,
        delta=1e-3,
        privacy_unit="user",
    )

    def loss(model, ids, labels):
        return F.cross_entropy(model(ids), labels, reduction="none")

    with pytest.raises(CoupledRecords, match="public length"):
        fit(MaskedMean(), loss, Sentences(), plan, collate_fn=collate, progress=False, units=units)


# --- random numbers ------------------------------------------------------------------------------------------------


class Chancy(MaskedMean):
    """The masked mean, times what a function makes of the ids and of chance."""

    def __init__(self, chance):
        super().__init__()
        self.chance = chance

    def forward(self, ids):
        return super().forward(ids) * (1 + 0.1 * self.chance(ids))


def weighted(values):
    """The mean over a record's own positions of something that has a number for each position."""
    return lambda ids: ((values(ids) * (ids > 0)).sum(1) / (ids > 0).sum(1).clamp(min=1))[:, None]


BY_THE_LENGTH = {
    "sum of noise": lambda ids: torch.randn(ids.shape).sum(1, keepdim=True),
    "mean of noise": lambda ids: torch.randn(ids.shape).mean(1, keepdim=True),
    "largest of noise": lambda ids: torch.rand(ids.shape).amax(1, keepdim=True),
    "last of noise": lambda ids: torch.randn_like(ids.float())[:, -1:],
    "variance of noise": lambda ids: torch.randn(ids.shape[::-1]).var(0)[:, None],
    "spread by the length": lambda ids: torch.randn(len(ids), 1) * ids.shape[1] ** 0.5,
    "a position out of all": lambda ids: torch.randint(0, ids.shape[1], (len(ids), 1)).float(),
    "a position of the batch, from Python": lambda ids: float(random.randrange(ids.shape[1])),
    "a position of the batch, from NumPy": lambda ids: float(np.random.randint(ids.shape[1])),
    "a probability of the length": lambda ids: (torch.rand(len(ids), 1) < 1 / ids.shape[1]).float(),
    "coins for the length": lambda ids: torch.bernoulli(torch.full((len(ids), 1), 1 / ids.shape[1])),
    "mean of dropped ones": lambda ids: F.dropout(torch.ones(ids.shape), 0.5).mean(1, keepdim=True),
    "dropped by the length": lambda ids: F.dropout(torch.ones(len(ids), 1), 1 / ids.shape[1]),
    "count of coins": lambda ids: torch.full(ids.shape, 0.5).bernoulli_(0.5).sum(1, keepdim=True),
    "weights over all positions": lambda ids: (torch.rand(ids.shape).softmax(1) * (ids > 0)).sum(1, keepdim=True),
    "choice of a position": lambda ids: torch.ones(ids.shape).multinomial(1).float(),
    "exponential": lambda ids: torch.empty(ids.shape).exponential_().amin(1, keepdim=True),
    "rank": lambda ids: torch.rand(ids.shape).argsort(1).argsort(1)[:, :1].float(),
    "order": lambda ids: torch.randperm(ids.shape[1])[:1].float(),
    "folded": lambda ids: F.dropout(torch.ones(ids.numel(), 1), 0.5).view(*ids.shape).mean(1, keepdim=True),
    "in long batches": lambda ids: F.dropout(torch.ones(len(ids), 1), 0.5) if ids.shape[1] > 12 else 0.0,
}
OF_ITS_POSITIONS = {
    "noise": weighted(lambda ids: torch.randn(ids.shape)),
    "uniform": weighted(lambda ids: torch.rand(ids.shape)),
    "coins": weighted(lambda ids: torch.full(ids.shape, 0.3).bernoulli()),
    "dropout": weighted(lambda ids: F.dropout(torch.ones(ids.shape), 0.5)),
    "folded dropout": weighted(lambda ids: F.dropout(torch.ones(ids.numel(), 3), 0.5).sum(1).view(ids.shape)),
    "positions first": weighted(lambda ids: F.dropout(torch.ones(ids.shape[::-1]), 0.5).t()),
    "positions first, folded": weighted(lambda ids: F.dropout(torch.ones(ids.numel()), 0.5).view(ids.shape[::-1]).t()),
    "gumbel": weighted(lambda ids: F.gumbel_softmax(torch.zeros(*ids.shape, 3))[..., 0]),
    "random words": weighted(lambda ids: torch.randint(5, ids.shape).float()),
    "largest of its own": lambda ids: torch.rand(ids.shape).masked_fill(ids == 0, 0).amax(1, keepdim=True),
    "choice of its own": lambda ids: ids.gather(1, (ids > 0).float().multinomial(1)).float(),
    "order of its own": lambda ids: ids.gather(1, torch.rand(ids.shape).masked_fill(ids == 0, 2).argsort(1)[:, :1]),
    "of the record": lambda ids: F.dropout(torch.ones(len(ids), 4), 0.5).sum(1, keepdim=True),
    "of the batch": lambda _: np.random.rand(),
    "before and behind": lambda ids: (
        weighted(lambda ids: F.dropout(torch.ones(ids.shape), 0.5))(ids) + torch.randn(len(ids), 1)
    ),
    "position by position": weighted(
        lambda ids: torch.stack([F.dropout(torch.ones(len(ids)), 0.5) for _ in range(ids.shape[1])], 1)
    ),
}


def may_vary(model, *, in_front=False, loss=lambda made, labels, ids: F.cross_entropy(made, labels, reduction="none")):
    padding = Padding(tensors={0: PaddedTensor(dims=(1,), fill=0, in_front=in_front)})
    capture = GradientCapture(model)
    batch = torch.zeros(0, 7, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    try:
        task = ProbeTask(
            model=model, recorder=capture, records=batch, run=lambda batch: loss(model(batch[0]), batch[1], batch[0])
        )
        check_padding(padding, task)
    finally:
        capture.detach()
    return padding.may_vary


@pytest.mark.parametrize("name", BY_THE_LENGTH)
@pytest.mark.parametrize("in_front", [False, True])
def test_chance_that_follows_the_padded_length_is_refused(name, in_front):
    if name == "last of noise" and in_front:
        pytest.skip("the last position is the record's own")
    assert not may_vary(Chancy(BY_THE_LENGTH[name]), in_front=in_front)


@pytest.mark.parametrize("name", OF_ITS_POSITIONS)
@pytest.mark.parametrize("in_front", [False, True])
def test_chance_of_each_position_is_accepted(name, in_front):
    if name == "position by position" and in_front:
        pytest.skip("calls are counted from the first one")
    assert may_vary(Chancy(OF_ITS_POSITIONS[name]), in_front=in_front)


@pytest.mark.parametrize("name", ["sum of noise", "a position out of all", "mean of dropped ones"])
def test_chance_of_some_records_is_tried_too(name):
    assert not may_vary(Chancy(lambda ids: torch.where(ids[:, :1] == 7, BY_THE_LENGTH[name](ids), 0.0)))


@pytest.mark.parametrize("name", ["sum of noise", "mean of dropped ones"])
def test_chance_in_the_loss_is_tried_too(name):
    def loss(made, labels, ids):
        return F.cross_entropy(made, labels, reduction="none") * (1 + 0.1 * BY_THE_LENGTH[name](ids)[:, 0])

    assert not may_vary(MaskedMean(), loss=loss)


@pytest.mark.parametrize("function", [torch.rand, torch.randn])
def test_chance_by_the_length_ends_in_the_advice(function):
    model = Chancy(lambda ids: function(ids.shape).sum(1, keepdim=True))
    with pytest.raises(CoupledRecords, match="public length"):
        list(train(*private(model, Sentences(), collate)))
