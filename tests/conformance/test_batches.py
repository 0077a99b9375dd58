"""Logical batches: drawn once, charged once, no record twice, empty ones included."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from conformance_adapter import distance, held, one_step
from sordino.accounting import epsilon
from sordino.definitions import NeighboringRelation
from sordino.events import Gaussian, PoissonSampled, SelfComposed

DELTA = 1e-5


def one_hot(records):
    """Record i has gradient −eᵢ: the clipped sum counts how often each record is in a step."""
    return TensorDataset(torch.eye(records))


def counting(private, batch, records):
    """Run one chunk; the counts of the step when it is complete."""
    features = batch[0]
    (-private.model(features)).sum(1).mean().backward()
    private.optimizer.step()
    (weight,) = held(private)
    return None if weight.grad is None else (-weight.grad[0] * records).round()


def counter(library, records, **options):
    model = nn.Linear(records, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return library.make_private(model, optimizer=optimizer, max_grad_norm=10.0, **options)


def test_loops_that_break_off_after_a_part_go_on_with_its_batch_and_each_batch_is_on_the_ledger(library):
    private = counter(library, 8, data=one_hot(8), microbatch_size=4, noise_multiplier=1.0)
    # Two parts a batch.
    for _ in range(3):
        for batch in private.loader:
            counting(private, batch, 8)
            break
    expected = epsilon(SelfComposed(event=Gaussian(noise_multiplier=1.0), count=2), DELTA).upper
    assert private.epsilon(DELTA) == pytest.approx(expected)


def test_with_workers_and_a_break_no_step_holds_a_record_twice(library):
    records = 30
    loader = DataLoader(one_hot(records), batch_size=10, num_workers=2)
    private = counter(library, records, data=loader, microbatch_size=3)
    for batch in private.loader:
        counting(private, batch, 10)
        break
    steps = [c for _ in range(3) for b in private.loader if (c := counting(private, b, 10)) is not None]
    assert len(steps) == 9
    assert max(float(counts.max()) for counts in steps) == 1
    assert len({float(counts.sum()) for counts in steps}) > 1, "batch sizes are random"


def test_a_batch_without_a_step_is_charged_and_left_out(library):
    private = counter(library, 8, data=DataLoader(one_hot(8), batch_size=4), noise_multiplier=1.0)
    for _ in private.loader:
        pass
    step = PoissonSampled(sample_rate=0.5, event=Gaussian(noise_multiplier=1.0))
    assert private.epsilon(DELTA) == pytest.approx(epsilon(SelfComposed(event=step, count=2), DELTA).upper)


def test_without_poisson_sampling_nothing_is_gained_from_sampling(library):
    options = {"poisson_sampling": False, "neighboring_relation": "replace_one", "noise_multiplier": 2.0}
    private = counter(library, 8, data=DataLoader(one_hot(8), batch_size=2), **options)
    for _ in range(3):
        steps = [counting(private, batch, 2) for batch in private.loader]
        assert len(steps) == 4
    expected = epsilon(
        SelfComposed(event=Gaussian(noise_multiplier=2.0), count=3),
        DELTA,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    ).upper
    assert private.epsilon(DELTA) == pytest.approx(expected)


def test_disjoint_batches_hold_every_record_once_an_epoch(library):
    options = {"poisson_sampling": False, "neighboring_relation": "replace_special"}
    private = counter(library, 8, data=DataLoader(one_hot(8), batch_size=2), **options)
    totals = sum(counting(private, batch, 2) for batch in private.loader)
    assert torch.equal(totals, torch.ones(8))


def test_without_poisson_sampling_adding_and_removing_is_refused(library):
    with pytest.raises(library.refusals, match="replace_one"):
        counter(library, 8, data=DataLoader(one_hot(8), batch_size=2), poisson_sampling=False)


def test_a_subset_sampler_is_sampled_inside_its_subset(library):
    data = one_hot(50)
    loader = DataLoader(data, batch_size=5, sampler=SubsetRandomSampler(range(10, 30)))
    private = counter(library, 50, data=loader, seed=1)
    assert len(private.loader) == 4
    totals = sum(counting(private, batch, 5) for _ in range(10) for batch in private.loader)
    assert float(totals[:10].sum()) == float(totals[30:].sum()) == 0
    assert float(totals[10:30].min()) > 0


@pytest.mark.parametrize(
    "sampler",
    [
        lambda data: WeightedRandomSampler([1.0] * len(data), len(data)),
        lambda data: torch.utils.data.RandomSampler(data, replacement=True),
        lambda data: torch.utils.data.RandomSampler(data, num_samples=3),
        lambda data: SubsetRandomSampler([1, 1, 2]),
        lambda data: list(range(len(data))),
    ],
)
def test_a_sampler_with_another_event_is_refused(library, sampler):
    data = one_hot(20)
    with pytest.raises(library.refusals):
        counter(library, 20, data=DataLoader(data, batch_size=4, sampler=sampler(data)))


def test_drop_last_with_fewer_than_two_batches_is_full_batches(library):
    private = counter(library, 10, data=DataLoader(one_hot(10), batch_size=6, drop_last=True), noise_multiplier=1.0)
    for batch in private.loader:
        counting(private, batch, 10)
    assert private.epsilon(DELTA) == pytest.approx(epsilon(Gaussian(noise_multiplier=1.0), DELTA).upper)


class Pair(NamedTuple):
    features: torch.Tensor
    label: int


class Records(Dataset):
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 20

    def __getitem__(self, index):
        features, label = torch.full((3,), float(index)), index % 2
        return {
            "tuple": (features, label),
            "dict": {"features": features, "label": label, "name": f"record {index}"},
            "named tuple": Pair(features, label),
        }[self.kind]


@pytest.mark.parametrize("kind", ["tuple", "dict", "named tuple"])
def test_twenty_records_at_rate_one_twentieth_run_as_many_steps_as_declared(library, kind):
    model = nn.Linear(3, 2)
    loader = DataLoader(Records(kind), batch_size=1)
    # With this seed the very first batch is the empty one: synthetic records stand for it.
    private = library.make_private(model, loader, noise_multiplier=1.0, seed=4)
    sizes, before = [], model.weight.detach().clone()
    for batch in private.loader:
        features, labels = (batch["features"], batch["label"]) if kind == "dict" else batch
        assert features.shape[1:] == (3,)
        sizes.append(len(labels))
        F.cross_entropy(model(features), labels).backward()
        private.optimizer.step()
        assert not torch.equal(model.weight, before), "an empty batch is noise only, and still a step"
        before = model.weight.detach().clone()
    assert min(sizes) > 0
    assert len(sizes) == 20
    step = PoissonSampled(sample_rate=0.05, event=Gaussian(noise_multiplier=1.0))
    assert private.epsilon(DELTA) == pytest.approx(epsilon(SelfComposed(event=step, count=20), DELTA).upper)


class Unflattening(nn.Module):
    """Does not run on a batch of no records."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 3)

    def forward(self, x):
        return self.l(x.view(x.size(0), -1))


def test_a_model_that_does_not_take_an_empty_batch_trains_and_empty_batches_add_nothing_but_noise(library):
    model = Unflattening()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = TensorDataset(torch.full((20, 2, 2), 5.0), torch.ones(20).long())
    private = library.make_private(model, DataLoader(data, batch_size=1), optimizer=optimizer, seed=4)
    drawn, empty = 0, 0
    for _ in range(3):
        for features, labels in private.loader:
            F.cross_entropy(model(features), labels).backward()
            private.optimizer.step()
            real = bool((features == 5).all())
            assert all(bool(p.grad.any()) == real for p in held(private)), "synthetic records count for nothing"
            drawn, empty = drawn + real, empty + (not real)
    assert drawn > 5
    assert empty > 5


def test_fewer_records_than_one_batch_are_one_full_batch_also_with_drop_last(library):
    private = counter(library, 5, data=DataLoader(one_hot(5), batch_size=6, drop_last=True))
    assert len(private.loader) == 1
    (counts,) = [counting(private, batch, 5) for batch in private.loader]
    assert torch.equal(counts, torch.ones(5))


def test_a_loss_that_fails_on_a_batch_of_one_record_is_refused_and_the_remedy_named(library):
    data = TensorDataset(torch.ones(20, 3), torch.ones(20))
    private = library.make_private(nn.Linear(3, 1), DataLoader(data, batch_size=10), seed=1)

    def loss(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(), batch[1])

    with pytest.raises(library.refusals, match="squeeze"):
        one_step(private, loss)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_record_that_is_not_finite_contributes_zero(library, value):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)

    def gradients(x, y):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        private = library.make_private(model, TensorDataset(x, y), optimizer=optimizer, expected_batch_size=8)
        for features, targets in private.loader:
            F.mse_loss(model(features), targets).backward()
            private.optimizer.step()
        private.detach()
        return [p.grad.clone() for p in model.parameters()]

    without = gradients(x[1:], y[1:])
    x[0, 2] = value
    assert distance(gradients(x, y), without) <= 1e-6
