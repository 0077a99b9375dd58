"""The private loader: plain batches, charged before they are touched, drawn by the declared sampler."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from sordino.errors import (
    CoupledRecords,
    InvalidArgument,
    NonPrivateStep,
    PrivacyError,
    RecordCountMismatch,
    UnknownSampler,
)
from sordino.randomness import KeyedRNG
from sordino.sampling import PoissonSampling
from sordino.training.loader import PrivateLoader, dataset_size_of
from sordino.training.pytree import map_tensors, tensors_in
from sordino.training.record_source import check_no_repeated_units


class Log:
    """What the loader told the engine, in order."""

    def __init__(self):
        self.events, self.steps = [], 0

    def charge(self, begins_epoch):
        self.events.append(("charge", begins_epoch))
        self.steps += 1
        return self.steps - 1

    def hand_out(self, chunk, batch, rows):
        assert rows == (chunk.num_records or 2)
        self.events.append(("hand out", chunk.step, chunk.index, chunk.is_last, chunk.num_records))
        return batch


class Touching(Dataset):
    """Notes every record that is read."""

    def __init__(self, log, records=12):
        self.log, self.records = log, records

    def __len__(self):
        return self.records

    def __getitem__(self, index):
        self.log.events.append(("touch",))
        return torch.tensor([float(index)])


def private(dataset, log, *, sample_rate=0.5, steps=2, microbatch_size=None, seed=1, public_records=None, **options):
    return PrivateLoader(
        DataLoader(dataset, batch_size=4, **options),
        sampling=PoissonSampling(sample_rate=sample_rate),
        steps=steps,
        microbatch_size=microbatch_size,
        rng=KeyedRNG(seed=seed, reproducible=True),
        charge=log.charge,
        set_microbatch=log.hand_out,
        public_records=public_records,
    )


def test_a_batch_is_charged_before_any_of_its_records_is_read():
    log = Log()
    loader = private(Touching(log), log, microbatch_size=2)
    log.events.clear()  # building the loader reads the structure of one record
    list(loader)
    charged, steps = 0, []
    for event in log.events:
        charged += event[0] == "charge"
        if event[0] == "touch":
            steps.append(charged)
        if event[0] == "hand out":
            assert event[1] == charged - 1
    assert charged == 2
    assert set(steps) == {1, 2}
    assert [event[1] for event in log.events if event[0] == "charge"] == [True, False]


@pytest.mark.parametrize("workers", [0, 2])
def test_chunks_are_the_draws_of_the_sampler_with_and_without_workers(workers):
    log, records = Log(), 40
    loader = private(TensorDataset(torch.arange(records)), log, microbatch_size=3, num_workers=workers, steps=5)
    batches = [batch[0].tolist() for batch in loader]
    drawn = PoissonSampling(sample_rate=0.5).batches(
        dataset_size=records, first_step=0, steps=5, rng=KeyedRNG(seed=1, reproducible=True)
    )
    assert [place for batch in batches for place in batch] == np.concatenate(list(drawn)).tolist()
    assert max(map(len, batches)) == 3
    handed = [event[1:] for event in log.events if event[0] == "hand out"]
    assert [records for *_, records in handed] == list(map(len, batches))
    assert [step for step, _, is_last, _ in handed if is_last] == [0, 1, 2, 3, 4]


class Rows(TensorDataset):
    """The same rows, read one by one."""


@pytest.mark.parametrize("kind", [TensorDataset, Rows])
def test_tensors_are_collated_as_their_rows_would_be(kind):
    log = Log()
    features, flags = torch.arange(40.0).view(20, 2), torch.arange(20) % 2 == 0
    for batch in private(kind(features, flags), log, steps=4, microbatch_size=3):
        assert isinstance(batch, list)
        assert batch[0].shape[1:] == (2,)
        assert torch.equal(batch[1], batch[0][:, 0] % 4 == 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_after_a_break_draws_anew_and_numbers_its_steps_on(workers):
    log = Log()
    loader = private(TensorDataset(torch.arange(40)), log, num_workers=workers, steps=3)
    first = next(iter(loader))[0].tolist()
    second = [batch[0].tolist() for batch in loader]
    assert first not in second
    assert [event[1] for event in log.events if event[0] == "hand out"] == [0, 1, 2, 3]


def test_two_epochs_at_once_never_share_a_draw_or_a_step():
    log = Log()
    loader = private(TensorDataset(torch.arange(40)), log, steps=4)
    pairs = [(a[0].tolist(), b[0].tolist()) for a, b in zip(loader, loader, strict=True)]
    assert all(a != b for a, b in pairs)
    steps = [event[1] for event in log.events if event[0] == "hand out"]
    assert steps == sorted(set(steps))


def test_persistent_workers_keep_drawing():
    log = Log()
    loader = private(TensorDataset(torch.arange(40)), log, num_workers=1, persistent_workers=True)
    epochs = [[batch[0].tolist() for batch in loader] for _ in range(2)]
    assert epochs[0] != epochs[1]


class Failing(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index:
            raise OSError("unreadable")
        return torch.zeros(1)


def test_a_batch_that_can_not_be_read_was_charged_all_the_same():
    log = Log()
    loader = private(Failing(), log, sample_rate=1.0)
    with pytest.raises(OSError, match="unreadable"):
        list(loader)
    assert log.steps == 1


class Pair(NamedTuple):
    features: torch.Tensor
    label: torch.Tensor


def test_a_collate_function_that_couples_records_is_refused_when_the_loader_is_built():
    with pytest.raises(RecordCountMismatch):
        private(TensorDataset(torch.zeros(8, 3)), Log(), collate_fn=lambda _: torch.zeros(()))
    with pytest.raises(CoupledRecords):
        private(
            TensorDataset(torch.zeros(8, 3)),
            Log(),
            collate_fn=lambda records: torch.stack([r[0].sum() for r in records]).sum(),
        )


class Spied(TensorDataset):
    """Says which records are read."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


def test_building_the_loader_reads_the_structure_of_one_record_and_none_when_public_ones_are_given():
    data = Spied(torch.full((8, 3), 7.0))
    private(data, Log())
    assert data.read == [0]
    data = Spied(torch.full((8, 3), 7.0))
    private(data, Log(), public_records=[(torch.zeros(3),)] * 5)
    assert data.read == []


@pytest.mark.parametrize("workers", [0, 1])
def test_when_no_record_is_drawn_the_loop_gets_made_up_ones(workers):
    log = Log()
    data = Spied(torch.full((8, 3), 7.0))
    loader = private(data, log, sample_rate=1e-9, num_workers=workers, steps=2)
    for (features,) in loader:
        assert features.shape == (2, 3)
        assert float(features.max()) <= 1
        features += 7
    assert [event[-1] for event in log.events if event[0] == "hand out"] == [0, 0]


class Uneven(Dataset):
    """Its last record is longer than the others."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(3 + (index == 7))


def test_a_batch_of_another_shape_than_the_others_is_refused():
    loader = private(Uneven(), Log(), sample_rate=1.0, microbatch_size=1)
    with pytest.raises(CoupledRecords, match="public length"):
        list(loader)


def test_two_loops_over_persistent_workers_are_refused():
    loader = private(TensorDataset(torch.arange(40)), Log(), num_workers=1, persistent_workers=True, steps=3)
    one, other = iter(loader), iter(loader)
    next(one)
    next(other)
    with pytest.raises(NonPrivateStep, match="persistent_workers"):
        next(one)
    assert len(list(other)) == 2


def test_the_loader_says_which_batch_ends_a_step():
    loader = private(TensorDataset(torch.arange(9)), Log(), sample_rate=1.0, microbatch_size=4, steps=2)
    assert [loader.is_last_microbatch for _ in loader] == [False, False, True] * 2


def test_structures_are_mapped_and_listed_in_one_order():
    pair = torch.return_types.max((torch.zeros(2), torch.ones(2)))
    batch = {"a": [torch.tensor(1.0), (torch.tensor(2.0),)], "b": Pair(torch.tensor(3.0), torch.tensor(4.0)), "c": pair}
    assert [float(t.sum()) for t in tensors_in(batch)] == [1, 2, 3, 4, 0, 2]
    doubled = map_tensors(lambda tensor: tensor * 2, batch)
    assert [float(t.sum()) for t in tensors_in(doubled)] == [2, 4, 6, 8, 0, 4]
    assert float(doubled["c"].indices.sum()) == 4
    assert isinstance(doubled["b"], Pair)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Own(BatchSampler):
    """A batch sampler that might do anything."""


class Twice(DataLoader):
    def __iter__(self):
        yield from super().__iter__()
        yield from super().__iter__()


@pytest.mark.parametrize(
    "loader",
    [
        lambda data: DataLoader(Stream(), batch_size=1),
        lambda data: DataLoader(data, batch_size=None),
        lambda data: DataLoader(data, batch_sampler=[[0, 1], [1, 2]]),
        lambda data: DataLoader(data, batch_sampler=Own(SequentialSampler(data), 2, False)),
        lambda data: Twice(data, batch_size=2),
        lambda data: private(data, Log()),
        lambda data: [torch.zeros(2, 3)],
    ],
)
def test_a_loader_whose_draws_are_unknown_is_refused(loader):
    with pytest.raises(UnknownSampler) as refusal:
        dataset_size_of(loader(TensorDataset(torch.zeros(8, 3))))
    assert isinstance(refusal.value, PrivacyError)
    assert "sordino explain samplers" in str(refusal.value)


class Batches(BatchSampler):
    pass


class Chosen(SubsetRandomSampler):
    pass


@pytest.mark.parametrize(
    "sampler",
    [
        lambda data: SubsetRandomSampler(range(3)),
        lambda data: WeightedRandomSampler([1.0] * 4 + [0.0] * 4, 8),
        lambda data: RandomSampler(data, replacement=True),
        lambda data: RandomSampler(data, num_samples=4),
        lambda data: RandomSampler(range(4)),
        lambda data: SequentialSampler(range(4)),
        lambda data: BatchSampler(SequentialSampler(data), 2, False),
        lambda data: [0, 1, 2],
        lambda data: Chosen(range(8)),
        lambda data: DistributedSampler(range(4), num_replicas=2, rank=0),
    ],
)
def test_the_sampler_within_a_batch_sampler_is_the_one_that_counts(sampler):
    data = TensorDataset(torch.zeros(8, 3))
    with pytest.raises(UnknownSampler):
        dataset_size_of(DataLoader(data, batch_sampler=BatchSampler(sampler(data), 2, False)))
    with pytest.raises(UnknownSampler):
        dataset_size_of(DataLoader(data, batch_sampler=Batches(SequentialSampler(data), 2, False)))
    changed = DataLoader(data, batch_size=2)
    changed.batch_sampler.sampler = sampler(data)
    with pytest.raises(UnknownSampler):
        dataset_size_of(changed)


def test_a_batch_sampler_over_all_records_is_the_loader_s_own():
    data = TensorDataset(torch.zeros(8, 3))
    for sampler in (SequentialSampler(data), RandomSampler(data), DistributedSampler(data, num_replicas=2, rank=1)):
        found = dataset_size_of(DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False)))
        assert list(found) == list(range(8))


def test_the_advice_for_a_subset_within_a_batch_sampler_works():
    data = TensorDataset(torch.zeros(8, 3))
    inner = SubsetRandomSampler([1, 5, 2])
    with pytest.raises(UnknownSampler, match="as sampler=, with batch_size="):
        dataset_size_of(DataLoader(data, batch_sampler=BatchSampler(inner, 2, False)))
    assert list(dataset_size_of(DataLoader(data, sampler=inner, batch_size=2))) == [1, 2, 5]


class Many(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.zeros(3)


def test_a_record_at_two_places_of_a_data_set_is_refused():
    one, other = Many(), Many()
    halves = Subset(one, [0, 1]), Subset(one, [2, 3])
    for fine in (
        one,
        ConcatDataset([one, other]),
        Subset(one, [3, 0]),
        ConcatDataset(halves),
        Subset(ConcatDataset([one, other]), [0, 4, 7]),
    ):
        check_no_repeated_units(fine)
        assert len(private(fine, Log()).dataset) == len(fine)
    for twice in (
        ConcatDataset([one, one]),
        Subset(one, [0, 0]),
        Subset(one, [3, -1]),
        ConcatDataset([one, halves[0]]),
        Subset(Subset(one, [0, 1, 2]), [1, 1]),
        ConcatDataset([Subset(ConcatDataset([one, other]), [4, 5]), Subset(other, [1])]),
    ):
        with pytest.raises(InvalidArgument, match="each record once"):
            private(twice, Log())


def test_sequential_and_shuffled_loaders_cover_their_data_set():
    data = TensorDataset(torch.zeros(8, 3))
    for shuffle in (False, True):
        assert list(dataset_size_of(DataLoader(data, batch_size=3, shuffle=shuffle))) == list(range(8))


def test_the_user_sees_the_data_set_and_the_length_of_an_epoch():
    data = TensorDataset(torch.zeros(8, 3))
    loader = private(data, Log())
    assert loader.dataset is data
    assert len(loader) == 2
    assert loader.batch_size == 4
