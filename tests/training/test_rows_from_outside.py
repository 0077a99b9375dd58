"""Rows of records from outside the batch, and what a loop makes of the batch before a declared criterion."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from loops import ce, dropout, mlp, train
from sordino.errors import CoupledRecords, InvalidArgument, NonPrivateStep, PrivacyError
from sordino.training.engine import PrivacyEngine

GENERATOR = torch.Generator().manual_seed(9)
POOL, LABELS = torch.randn(64, 6, generator=GENERATOR), torch.randint(0, 3, (64,), generator=GENERATOR)


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def seeded(rows):
    """The same numbers every time; the generator is as it was."""
    before = torch.get_rng_state()
    torch.manual_seed(5)
    noise = torch.randn(rows, 6)
    torch.set_rng_state(before)
    return noise


def by_the_batch(x):
    return (x - x.mean(0)) / x.std(0)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    standardized = torch.jit.script(by_the_batch)


def weighted(weight):
    return lambda model, batch, state: (weight(batch) * losses(model, batch)).mean()


def moved(noise):
    return lambda model, batch, state: F.cross_entropy(model(batch[0] + noise(batch)), batch[1])


BY_PLACE = {
    "a ramp of weights": weighted(lambda b: torch.linspace(0, 1, len(b[0]))),
    "a ramp from numpy": weighted(lambda b: torch.from_numpy(np.linspace(0, 1, len(b[0]), dtype=np.float32))),
    "positions": weighted(lambda b: torch.arange(len(b[0])) / 10.0),
    "every second record": weighted(lambda b: torch.tensor([float(place % 2) for place in range(len(b[0]))])),
    "the first four records": weighted(lambda b: torch.arange(len(b[0])) < 4),
    "weights of a pool": weighted(lambda b: POOL[: len(b[0]), 0].sigmoid()),
    "noise of a pool": moved(lambda b: POOL[: len(b[0])]),
    "seeded noise": moved(lambda b: seeded(len(b[0]))),
    "other records": lambda m, b, s: ce(m, b) + F.mse_loss(m(b[0]), POOL[: len(b[0]), :3]),
    "labels by place": lambda m, b, s: F.cross_entropy(m(b[0]), torch.arange(len(b[0])) % 3),
    "labels of others": lambda m, b, s: F.cross_entropy(m(b[0]), LABELS[: len(b[0])]),
    "a compiled script": weighted(lambda b: standardized(b[0])[:, 0].sigmoid()),
}
BY_CHANCE_OR_ALIKE = {
    "ones": weighted(lambda b: torch.ones(len(b[0]))),
    "one number": lambda m, b, s: F.mse_loss(m(b[0])[:, 0], torch.full((len(b[0]),), 0.3)),
    "drawn noise": moved(lambda b: torch.randn(len(b[0]), 6)),
    "noise like the batch": moved(lambda b: torch.randn_like(b[0])),
    "drawn weights": weighted(lambda b: torch.rand(len(b[0]))),
    "drawn steps": weighted(lambda b: torch.randint(1, 10, (len(b[0]),)).float()),
    "weights of classes": weighted(lambda b: torch.tensor([1.0, 2.0, 3.0])[b[1]]),
    "places to look at": lambda m, b, s: -F.log_softmax(m(b[0]), 1)[torch.arange(len(b[1])), b[1]].mean(),
}
for size in range(4, 13):  # As large as some batch.
    BY_CHANCE_OR_ALIKE[f"a table of {size}"] = weighted(lambda b, size=size: torch.linspace(0.5, 1, size)[b[1]])


@pytest.mark.parametrize("model", [mlp, dropout])
@pytest.mark.parametrize("name", BY_PLACE)
def test_rows_that_follow_from_the_place_or_from_others_are_refused(name, model):
    with pytest.raises(PrivacyError):
        train(BY_PLACE[name], model)


@pytest.mark.parametrize("name", BY_CHANCE_OR_ALIKE)
def test_rows_that_are_alike_or_drawn_go_on(name):
    train(BY_CHANCE_OR_ALIKE[name], dropout)


def test_rows_are_looked_at_in_every_batch():
    def loop(model, batch, state):
        state["step"] = state.get("step", 0) + 1
        rows = len(batch[0])
        weight = torch.ones(rows) if state["step"] < 3 else torch.linspace(0, 1, rows)
        return (weight * losses(model, batch)).mean()

    with pytest.raises(CoupledRecords, match="elsewhere"):
        train(loop, mlp)


# --- public rows --------------------------------------------------------------------------------------------------


def critic(rows_of):
    model, engine = nn.Linear(4, 1), PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=16),
    )
    generator, loss = nn.Linear(2, 4), nn.BCEWithLogitsLoss()
    for (x,) in loader:
        real = model(x).squeeze(1)
        one = loss(real, torch.full((x.size(0),), 1.0))
        assert f"{real.mean().item():.2f}"
        fake = model(engine.mark_public(rows_of(generator, len(x)))).squeeze(1)
        (one + loss(fake, torch.full((x.size(0),), 0.0))).backward()
        optimizer.step()


def test_public_rows_that_are_drawn_take_part_also_after_a_metric():
    critic(lambda generator, rows: generator(torch.randn(rows, 2)).detach())


def test_public_rows_in_the_order_of_the_batch_are_refused():
    with pytest.raises(CoupledRecords, match="elsewhere"):
        critic(lambda generator, rows: POOL[:rows, :4])


# --- before a criterion -------------------------------------------------------------------------------------------


def hooked(x):
    return 0.7 * x + 0.3 * x.flip(0)


BEFORE = {
    "standardized": lambda x, s: (x - x.mean(0)) / x.std(0),
    "mixed up": lambda x, s: hooked(x),
    "largest value": lambda x, s: x / x.abs().max(),
    "numbers": lambda x, s: x - x.mean().item(),
    "shuffled": lambda x, s: x[torch.randperm(len(x))],
    "noise of a pool": lambda x, s: x + POOL[: len(x)],
    "in place": lambda x, s: x.sub_(x.mean(0)),
    "an earlier batch": lambda x, s: x - s.setdefault("mean", x.mean(0)),
    "through numpy": lambda x, s: x - torch.from_numpy(x.numpy().mean(0)),
}
UNTIL_LATER = ("standardized", "in place", "noise of a pool")


@pytest.mark.parametrize("name", BEFORE)
def test_what_a_loop_makes_of_the_batch_before_a_criterion_is_proved(name):
    def loop(model, batch, state):
        return F.cross_entropy(model(BEFORE[name](batch[0], state)), batch[1])

    with pytest.raises(PrivacyError):
        train(loop, mlp, criterion=F.cross_entropy)


# The loop divides by the deviation of a batch that may hold one record.
@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", UNTIL_LATER)
def test_it_is_proved_in_every_batch(name):
    def loop(model, batch, state):
        state["step"] = state.get("step", 0) + 1
        x = batch[0] if state["step"] < 5 else BEFORE[name](batch[0], state)
        return F.cross_entropy(model(x), batch[1])

    with pytest.raises(PrivacyError):
        train(loop, mlp, steps=6, criterion=F.cross_entropy, sample_rate=1 / 8, expected_batch_size=3.0)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda x: x,
        lambda x: 2 * x - 0.5,
        lambda x: x + torch.randn_like(x),
        lambda x: F.dropout(x, 0.2),
        lambda x: x.double().float().view(x.size(0), 6),
        lambda x: x / x.norm(dim=1, keepdim=True),
    ],
)
def test_preparations_by_record_go_on_with_a_criterion(prepare):
    train(lambda m, b, s: F.cross_entropy(m(prepare(b[0])), b[1]), mlp, criterion=F.cross_entropy)


# --- what is said -------------------------------------------------------------------------------------------------


class Outputs:
    def __init__(self, logits):
        self.logits = logits


class WithOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return Outputs(self.layer(x))


def test_a_criterion_that_wants_another_output_is_told_so_and_the_advice_works():
    def loop(model, batch, state):
        return F.cross_entropy(model(batch[0]).logits, batch[1])

    with pytest.raises(InvalidArgument, match=r"Outputs.*logits"):
        train(loop, WithOutputs, criterion=F.cross_entropy)
    train(loop, WithOutputs, criterion=lambda out, target: F.cross_entropy(out.logits, target))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.b(self.a(x).tanh())


def test_a_loop_that_calls_parts_past_the_forward_is_told_to_call_the_model():
    with pytest.raises(NonPrivateStep, match=r"model\(batch\)"):
        train(lambda m, b, s: F.cross_entropy(m.b(m.a(b[0]).tanh()), b[1]), Encoder)
    train(ce, Encoder)


# --- rows that the batch is written into ----------------------------------------------------------------------------


def target_of(write, make=torch.zeros):
    def loop(model, batch, state):
        target = make(len(batch[1]), 3)
        made = write(target, batch[1], state)
        return F.mse_loss(model(batch[0]), target if made is None else made)

    return loop


def put_by_index(target, labels, state):
    target[torch.arange(len(labels)), labels] = 1


def put_by_mask(target, labels, state):
    target[labels == 0] = torch.tensor([1.0, 0.5, 0.0])


def copied(target, labels, state):
    target.copy_(F.one_hot(labels, 3))


def added_twice(target, labels, state):
    target.scatter_(1, labels[:, None], 0.5)
    return target.add_(F.one_hot(labels, 3), alpha=0.5)


def read_before(target, labels, state):
    before = target + labels[:, None]
    target.scatter_(1, labels[:, None], 1.0)
    return before + target


def kept_and_emptied(_target, labels, state):
    kept = state.setdefault("kept", {}).setdefault(len(labels), torch.zeros(len(labels), 3))
    kept.zero_()
    kept[torch.arange(len(labels)), labels] = 1
    return kept


ROWS_WRITTEN = {
    "an index": target_of(put_by_index),
    "scatter_": target_of(lambda t, y, s: t.scatter_(1, y[:, None], 1.0)),
    "index_put_": target_of(lambda t, y, s: t.index_put_((torch.arange(len(y)), y), torch.tensor(1.0))),
    "copy_": target_of(copied),
    "a mask": target_of(put_by_mask),
    "other constants": target_of(put_by_index, lambda *shape: torch.full(shape, 0.1)),
    "two writes": target_of(added_twice),
    "a read before": target_of(read_before),
    "memory that is used again": target_of(kept_and_emptied),
    "drawn rows": target_of(put_by_index, torch.rand),
}


@pytest.mark.parametrize("name", ROWS_WRITTEN)
def test_equal_rows_that_the_batch_is_written_into_are_rows_of_records(name):
    train(ROWS_WRITTEN[name], mlp, steps=6)


def ramp(target):
    return torch.linspace(0, 1, target.numel()).view_as(target)


def ramp_after(target, labels, state):
    target[labels == 0] = 1.0
    target.add_(ramp(target))


def ramp_between(target, labels, state):
    target[labels == 0] = 1.0
    target.add_(ramp(target))
    target[labels == 1] = 0.5


def ramp_past_the_version(target, labels, state):
    target[labels == 0] = 1.0
    target.data.add_(ramp(target))


def ramp_by_numpy(target, labels, state):
    target[labels == 0] = 1.0
    target.numpy()[:] += ramp(target).numpy()


def ramp_through_a_view(target, labels, state):
    view = target[:, 0]
    target[labels == 0] = 1.0
    view.add_(torch.linspace(0, 1, len(view)))


def ramp_before(target, labels, state):
    target.add_(ramp(target))
    target[labels == 0] = 1.0


def shares(target, labels, state):
    target[torch.arange(len(labels)), labels] = 1
    return target / target.sum(0)


def others_written(target, labels, state):
    target.scatter_(1, labels.flip(0)[:, None], 1.0)


def mean_written(target, labels, state):
    target += F.one_hot(labels, 3).float().mean(0)
    return target


def kept_from_before(_target, labels, state):
    kept = state.setdefault("kept", torch.zeros(64, 3))
    kept[: len(labels)] += F.one_hot(labels, 3)
    return kept[: len(labels)].clone()


ROWS_SPOILED = [
    ramp_after,
    ramp_between,
    ramp_past_the_version,
    ramp_by_numpy,
    ramp_through_a_view,
    ramp_before,
    shares,
    others_written,
    mean_written,
    kept_from_before,
]


@pytest.mark.parametrize("write", ROWS_SPOILED)
def test_rows_that_something_else_is_written_into_as_well_are_refused(write):
    with pytest.raises(PrivacyError):
        train(target_of(write), mlp, steps=12)
