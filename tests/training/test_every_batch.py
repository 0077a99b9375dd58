"""Which batches are stepped, and how many parts a loop counts, must not follow from the records."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from oracles import clipped_sum, per_record_gradients, relative_error
from sordino.errors import NonPrivateStep, PrivacyError
from sordino.training.engine import PrivacyEngine
from sordino.training.loader import batch_bound, num_microbatches
from sordino.training.record_source import UnitAssignment


def records(count=32):
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(count, 5, generator=generator)
    features[-1, 0] = 1e9
    return TensorDataset(features, torch.randint(0, 3, (count,), generator=generator))


def private(count=32, *, engine=None, model=None, batch_size=16, **options):
    model = nn.Linear(5, 3) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = PrivacyEngine() if engine is None else engine
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(records(count), batch_size=batch_size), **settings
    )
    return engine, model, optimizer, loader


def step(model, optimizer, batch):
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


class Rejected(Exception):
    pass


def fails(batch):
    if float(torch.tensor(batch[0].detach().tolist()).abs().max()) > 1e6:
        raise Rejected


REASONS = {
    "len": lambda model, batch: len(batch[0]) < 17,
    "shape": lambda model, batch: batch[0].shape[0] < 17,
    "numel": lambda model, batch: batch[1].numel() < 17,
    "a forward, then len": lambda model, batch: model(batch[0]) is not None and len(batch[0]) < 17,
    "list": lambda model, batch: sum(label == 0 for label in batch[1].tolist()) < 6,
}


@pytest.mark.parametrize("end", ["continue", "break"])
@pytest.mark.parametrize("name", REASONS)
def test_a_batch_left_out_for_a_private_reason_is_refused(name, end):
    _, model, optimizer, loader = private()

    def train():
        for _ in range(40):
            for batch in loader:
                if REASONS[name](model, batch):
                    if end == "break":
                        break
                    continue
                step(model, optimizer, batch)

    with pytest.raises(PrivacyError):
        train()


def test_a_batch_left_out_by_an_exception_is_refused():
    _, model, optimizer, loader = private()

    def train():
        for _ in range(40):
            for batch in loader:
                try:
                    fails(batch)
                    step(model, optimizer, batch)
                except Rejected:
                    continue

    with pytest.raises(NonPrivateStep, match="left out"):
        train()


def test_batches_that_were_only_looked_at_may_not_be_followed_by_training():
    engine, model, optimizer, loader = private()
    sizes = [len(batch[0]) for batch in loader]
    assert engine.event().count == len(sizes) == 2
    assert len(list(loader)) == 2
    assert engine.event().count == 3, "the last batch came again"
    with pytest.raises(NonPrivateStep, match="left out"):
        step(model, optimizer, next(iter(loader)))
    engine.detach()
    again = private(engine=engine, model=model)
    for batch in again[3]:
        step(model, again[2], batch)
    assert engine.event().count == 3 + 2


def test_accumulation_by_hand_is_refused_and_names_microbatch_size():
    _, model, optimizer, loader = private()

    def train():
        for number, batch in enumerate(loader):
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            if number % 2:
                optimizer.step()

    with pytest.raises(NonPrivateStep, match="microbatch_size"):
        train()


def test_a_look_at_the_first_batch_costs_nothing_and_the_batch_comes_again():
    engine, model, optimizer, loader = private(batch_size=8)
    seen = [next(iter(loader)) for _ in range(2)]
    got = []
    for batch in loader:
        got.append(batch[1].tolist())
        step(model, optimizer, batch)
    assert [batch[1].tolist() for batch in seen] == [got[0]] * 2
    assert engine.event().count == len(got) == len(loader)


def test_a_loader_of_one_batch_may_be_unpacked():
    engine, model, optimizer, loader = private(batch_size=32, noise_multiplier=1.0)
    for _ in range(3):
        (batch,) = loader
        step(model, optimizer, batch)
    assert engine.event().count == 3


def test_what_a_look_wrote_into_a_batch_is_not_trained_on():
    _, _, _, loader = private(sample_rate=1.0, noise_multiplier=0.0)
    next(iter(loader))[0].fill_(7.0)
    for features, _ in loader:
        assert torch.equal(features.as_subclass(torch.Tensor), records().tensors[0])
        break


@pytest.mark.parametrize("microbatch_size", [None, 5])
def test_a_loop_that_was_interrupted_goes_on_with_the_same_batch_and_its_sum_is_exact(microbatch_size):
    engine, model, optimizer, loader = private(
        20, batch_size=20, noise_multiplier=0.0, max_grad_norm=0.5, microbatch_size=microbatch_size
    )
    whole = TensorDataset(*records(20).tensors)
    expected = clipped_sum(per_record_gradients(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), whole.tensors), 0.5)
    for number, batch in enumerate(loader):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if number == (0 if microbatch_size is None else 2):
            break
        loss.backward()
        optimizer.step()
    for batch in loader:
        step(model, optimizer, batch)
    for parameter, total in zip(model.parameters(), expected, strict=True):
        assert relative_error(parameter.grad * 20, total) < 1e-5
    assert engine.event() is not None
    assert loader.is_last_microbatch


def test_a_batch_is_given_again_a_few_times_only():
    _, model, _, loader = private()

    def forward():
        for _ in range(10):
            model(next(iter(loader))[0])

    with pytest.raises(NonPrivateStep, match="make_private again"):
        forward()


def test_parts_taken_one_by_one_are_one_batch_after_another():
    engine, model, optimizer, loader = private(32, microbatch_size=4)
    ends = []
    for _ in range(3 * num_microbatches(batch_bound(16.0, 32), 4)):
        step(model, optimizer, next(iter(loader)))
        ends.append(loader.is_last_microbatch)
    assert sum(ends) == engine.event().count == 3


def test_loops_that_end_by_a_public_count_go_on():
    engine, model, optimizer, loader = private(64, batch_size=8)
    for number, batch in enumerate(loader):
        step(model, optimizer, batch)
        if number == 2:
            break
    for batch in itertools.islice(loader, 3):
        step(model, optimizer, batch)
    for _, batch in zip(range(2), loader, strict=False):
        step(model, optimizer, batch)
    for number, batch in enumerate(loader):
        if number == 2:
            break
        step(model, optimizer, batch)
    for batch in loader:
        step(model, optimizer, batch)
    assert engine.event().count == 3 + 3 + 2 + 2 + 8


# --- parts --------------------------------------------------------------------------------------------------------


def parts(count, steps, *, before=None, **options):
    engine, model, optimizer, loader = private(count, **options)
    found, number = [], 0
    while len(found) < steps:
        for batch in loader:
            number += 1
            step(model, optimizer, batch)
            if loader.is_last_microbatch:
                found.append(number)
                number = 0
    return found, engine


@pytest.mark.parametrize(("rate", "size"), [(0.25, 3), (0.9, 1), (1.0, 8)])
def test_every_batch_has_as_many_parts_whatever_was_drawn(rate, size):
    public = {"sample_rate": rate, "expected_batch_size": 12.0, "microbatch_size": size}
    counts = {count for n in (15, 16, 17) for count in parts(n, 6, **public)[0]}
    assert len(counts) == 1


def test_a_loop_that_ends_after_so_many_parts_takes_as_many_steps_with_a_record_more():
    def charged(count):
        engine, model, optimizer, loader = private(
            count, sample_rate=1.0, expected_batch_size=16.0, microbatch_size=8, batch_size=16
        )
        for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), 72):
            step(model, optimizer, batch)
        return engine.event().count

    assert charged(64) == charged(65)


def test_parts_hold_no_more_than_was_asked_for_when_the_size_is_public():
    _, model, optimizer, loader = private(32, microbatch_size=4)
    for _ in range(20):
        for batch in loader:
            assert len(batch[0]) <= 4
            step(model, optimizer, batch)


def test_parts_of_units_are_counted_by_public_numbers_too():
    units = UnitAssignment(unit_ids=torch.arange(32) // 2, num_units=16)
    found, engine = parts(32, 6, units=units, microbatch_size=4)
    assert len(set(found)) == 1
    assert any("size of the dataset" in caveat for caveat in engine.guarantee(1e-5).caveats)


def test_a_batch_exceeds_its_bound_once_in_a_million():
    from scipy.stats import binom

    for mean, most in ((0.5, 10), (4.0, 40), (16.0, 64), (256.0, 60000), (4096.0, 8192), (40.0, 40)):
        assert binom.sf(batch_bound(mean, most), most, mean / most) <= 1e-6
    assert batch_bound(256.0) < 256 + 6 * 16
    assert batch_bound(64.0, 64) == 64
    assert num_microbatches(64, 8) == 8
    assert num_microbatches(65, 8) == 9
