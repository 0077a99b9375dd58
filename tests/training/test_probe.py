"""The independence probe on the native path: one loss per record."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sordino.errors import (
    CoupledRecords,
    LossShapeError,
    PrivacyError,
    RecordCountMismatch,
    UncapturedParameter,
    UnsupportedModule,
)
from sordino.gradients import GradientCapture
from sordino.training.probing.probe import check_record_independence
from sordino.training.probing.probe_runner import ProbeOptions, ProbeTask
from sordino.training.probing.snapshots import DisableRandomness, SeededGenerators, preserve_rng_state


def batch(records=5):
    return torch.zeros(records, 4), torch.zeros(records, dtype=torch.long)


def probe(model, loss=None, records=None, **options):
    def run(made_up):
        if loss is not None:
            return loss(model, made_up)
        features, labels = made_up
        return F.cross_entropy(model(features), labels, reduction="none")

    capture = GradientCapture(model)
    try:
        records, options = batch() if records is None else records, ProbeOptions(**options)
        check_record_independence(ProbeTask(model=model, recorder=capture, records=records, run=run, options=options))
    finally:
        capture.detach()


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def test_an_ordinary_model_passes_and_nothing_of_it_changes():
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.LayerNorm(6), nn.Linear(6, 3))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model[1].eval()
    flags = [module.training for module in model.modules()]
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [parameter.clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    probe(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == flags
    assert all(parameter.grad is one for parameter, one in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(parameter, one) for parameter, one in zip(model.parameters(), values, strict=True))


def test_all_random_states_are_kept_and_can_be_started_anew():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with preserve_rng_state():
        draws = []
        for _ in range(2):
            SeededGenerators().start()
            draws.append((float(torch.rand(())), random.random(), np.random.rand()))
    assert draws[0] == draws[1]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2][1])


def test_without_chance_dropout_keeps_everything_and_permutations_stay_random():
    x = torch.ones(50)
    with DisableRandomness():
        assert torch.equal(F.dropout(x, 0.5), x)
        assert torch.equal(torch.rand(3), torch.full((3,), 0.5))
        assert torch.equal(torch.empty(4).normal_(2.0, 3.0), torch.full((4,), 2.0))
        assert torch.equal(torch.empty(4).uniform_(1.0, 3.0), torch.full((4,), 2.0))
        assert not torch.equal(torch.randperm(50), torch.arange(50))


def test_only_the_structure_of_the_batch_is_used():
    seen = []

    def loss(model, made_up):
        seen.append(made_up[0])
        return F.cross_entropy(model(made_up[0]), made_up[1], reduction="none")

    secret = torch.full((3, 4), 1234.5)
    probe(linear(), loss, (secret, torch.zeros(3, dtype=torch.long)))
    assert len(seen) > 3
    assert not any(bool((features == 1234.5).any()) for features in seen)


@pytest.mark.parametrize("records", [0, 1, 3, 9])
def test_a_structure_of_any_number_of_records_will_do(records):
    probe(linear(), None, batch(records))


class Wrapped(nn.Module):
    def __init__(self, function, **buffers):
        super().__init__()
        self.inner, self.function = nn.Linear(4, 3), function
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        return self.function(self, x)


COUPLED = {
    "mean": lambda m, x: m.inner(x - x.mean(0)),
    "tiny mean": lambda m, x: m.inner(x + 1e-7 * x.mean(0)),
    "sorted": lambda m, x: m.inner(x.sort(0).values),
    "rolled": lambda m, x: m.inner(x + x.roll(1, 0)),
    "shuffled": lambda m, x: m.inner(x + x[torch.rand(len(x)).argsort()]),
    "cumulative": lambda m, x: m.inner(x.cumsum(0)),
    "largest": lambda m, x: m.inner(x / x.abs().max()),
    "attention over records": lambda m, x: m.inner(torch.softmax(x @ x.T, 1) @ x),
    "position in the batch": lambda m, x: m.inner(x) * torch.arange(1, len(x) + 1)[:, None],
    "size of the batch": lambda m, x: m.inner(x) * len(x),
}


@pytest.mark.parametrize("name", COUPLED)
def test_every_way_to_couple_records_is_refused(name):
    torch.manual_seed(0)
    with pytest.raises(CoupledRecords):
        probe(Wrapped(COUPLED[name]))


INDEPENDENT = {
    "layer statistics": lambda m, x: m.inner((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)),
    "dropout": lambda m, x: m.inner(F.dropout(x, 0.5, True)),
    "noise of its own": lambda m, x: m.inner(x + 0.1 * torch.randn_like(x)),
    "depth by chance": lambda m, x: m.inner(x) * torch.floor(0.8 + torch.rand(len(x), 1)),
    "nothing": lambda m, x: m.inner(x),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_records_pass(name):
    torch.manual_seed(0)
    probe(Wrapped(INDEPENDENT[name]))


def test_attention_with_dropout_and_recurrent_dropout_pass():
    torch.manual_seed(0)

    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            q = x.view(len(x), 1, 2, 2)
            mixed = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)
            return self.inner(mixed.flatten(1))

    probe(Sequence())


def test_a_buffer_that_changes_is_named_and_put_back():
    def count(m, x):
        m.seen += len(x)
        return m.inner(x)

    model = Wrapped(count, seen=torch.zeros(()))
    with pytest.raises(PrivacyError, match="seen"):
        probe(model)
    assert float(model.seen) == 0


def test_a_buffer_that_is_replaced_is_named_and_put_back():
    def remember(m, x):
        m.last = x.mean(0)
        return m.inner(x)

    model = Wrapped(remember, last=torch.ones(4))
    with pytest.raises(PrivacyError, match="last"):
        probe(model)
    assert torch.equal(model.last, torch.ones(4))


def test_a_hidden_state_from_batch_to_batch_is_refused():
    def carry(m, x):
        out = m.inner(x + vars(m).get("state", 0.0))
        vars(m)["state"] = x.detach().mean()
        return out

    with pytest.raises(CoupledRecords):
        probe(Wrapped(carry))


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda m, b: F.cross_entropy(m(b[0]), b[1]), "()"),
        (lambda m, b: m(b[0])[:, :1], "(B, 1)"),
        (lambda m, b: m(b[0]), "(B, 3)"),
        (lambda m, b: (m(b[0])[:, :1] - b[1].float()) ** 2, "(B, B)"),
        (lambda m, b: m(b[0]).sum(1)[1:], "(7,)"),
    ],
)
def test_a_loss_that_is_not_one_value_per_record_is_refused_with_the_shape_expected(loss, got):
    with pytest.raises(LossShapeError) as refusal:
        probe(linear(), loss)
    assert "(B,)" in str(refusal.value)
    assert got in str(refusal.value)


def test_a_per_record_loss_that_looks_at_other_records_is_refused():
    def centered(model, made_up):
        losses = F.cross_entropy(model(made_up[0]), made_up[1], reduction="none")
        return losses - losses.detach().mean()

    with pytest.raises(CoupledRecords):
        probe(linear(), centered)


def test_a_penalty_on_parameters_is_refused_by_name():
    def penalized(model, made_up):
        losses = F.cross_entropy(model(made_up[0]), made_up[1], reduction="none")
        return losses + model.weight.square().sum()

    with pytest.raises(UncapturedParameter, match="weight"):
        probe(linear(), penalized)


@pytest.mark.parametrize(("declared", "made"), [("mean", "sum"), ("sum", "mean")])
def test_the_declared_reduction_is_compared_with_the_real_one(declared, made):
    def reduced(model, made_up):
        return F.cross_entropy(model(made_up[0]), made_up[1], reduction=made)

    with pytest.raises(CoupledRecords, match="loss_reduction"):
        probe(linear(), reduced, reduction=declared)
    probe(linear(), reduced, reduction=made)


def test_a_model_that_fails_on_an_empty_batch_is_accepted_since_none_is_given_to_it():
    def flatten(m, x):
        return m.inner(x.view(x.size(0), -1))

    probe(Wrapped(flatten))


def test_inputs_that_must_be_valid_ids_lengths_or_masks_find_a_pattern_that_runs():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 2)

        def forward(self, ids, lengths):
            assert bool((lengths > 0).all()), "a packed sequence has at least one element"
            mask = torch.arange(ids.size(1))[None] < lengths[:, None]
            return self.head((self.embed(ids) * mask[..., None]).sum(1) / lengths[:, None])

    torch.manual_seed(0)
    records = torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long)

    def loss(model, made_up):
        return F.cross_entropy(model(made_up[0], made_up[1]), made_up[2], reduction="none")

    probe(Recurrent(), loss, records)


def test_a_loss_that_never_runs_on_made_up_records_is_refused():
    def picky(model, made_up):
        raise RuntimeError("only real data")

    with pytest.raises(UnsupportedModule, match="RuntimeError: only real data") as refusal:
        probe(linear(), picky)
    assert isinstance(refusal.value.__cause__, RuntimeError)


def test_a_batch_without_records_first_is_refused():
    with pytest.raises(RecordCountMismatch):
        probe(linear(), None, (torch.tensor(1.0), torch.tensor(2)))


def test_double_and_bfloat16_models_pass():
    for dtype in (torch.float64, torch.bfloat16):
        torch.manual_seed(0)
        probe(nn.Linear(4, 3).to(dtype), None, (torch.zeros(2, 4, dtype=dtype), torch.zeros(2, dtype=torch.long)))
