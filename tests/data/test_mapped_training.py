"""Training on data beyond memory: ten million records cost what ten thousand do, and streams are refused."""

import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from sordino import Plan, PrivacyEngine, fit
from sordino.data import MappedArrays, NumericColumn, Schema, mapped_table
from sordino.errors import InvalidArgument, UnknownSampler

EXPECTED = 40
STATUS = Path("/proc/self/status")


class Computed(Dataset[tuple[torch.Tensor, int]]):
    """Records that follow from their numbers."""

    def __init__(self, records):
        self.records, self.asked = records, 0

    def __len__(self):
        return self.records

    def __getitem__(self, index):
        self.asked += 1
        return torch.tensor([index % 7 / 7.0, index % 5 / 5.0]), index % 2


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def fitted(data, *, noise=1.0, steps=6, **changes):
    plan = Plan(
        **{
            "noise_multiplier": noise,
            "max_grad_norm": 1.0,
            "sample_rate": EXPECTED / len(data),
            "steps": steps,
            "expected_batch_size": float(EXPECTED),
            "delta": 1e-5,
            **changes,
        }
    )
    peaks = []

    class Noting(torch.optim.SGD):
        """What follows the last step, the accounting of the run, is not of the data."""

        def step(self, closure=None):
            peaks.append(tracemalloc.get_traced_memory()[1])
            return super().step(closure)

    fit(nn.Linear(2, 2), loss, data, plan, optimizer=lambda p: Noting(p, lr=0.1), progress=False)
    return peaks[-1]


def looped(data, *, workers=0):
    model = nn.Linear(2, 2)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=EXPECTED, shuffle=True, num_workers=workers),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for (x, y), _ in zip(loader, range(6), strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return tracemalloc.get_traced_memory()[1]


def peak(train, records, **settings):
    data = Computed(records)
    tracemalloc.start()
    try:
        return train(data, **settings), data.asked
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("train", [fitted, looped])
def test_ten_million_records_take_the_memory_of_ten_thousand(train):
    peak(train, 10_000)
    few, many = peak(train, 10_000), peak(train, 10_000_000)
    # One byte a record would be ten megabytes.
    assert many[0] - few[0] < 3_000_000
    assert many[1] < 6 * 2 * EXPECTED


def test_a_list_of_all_records_would_be_seen():
    """Shuffled epochs list the records: the measure above sees it."""
    shuffled = {"poisson_sampling": False, "neighboring_relation": "replace_one"}
    peak(fitted, 10_000, **shuffled)
    few = peak(fitted, 10_000, **shuffled)[0]
    many = peak(fitted, 1_000_000, sample_rate=1 / 25_000, **shuffled)[0]
    assert many - few > 3_000_000


@pytest.mark.skipif(not STATUS.is_file(), reason="resident memory is read from Linux's /proc")
def test_pages_of_a_file_are_let_go(tmp_path):
    """20 000 rows anywhere in 1.3 GB: their neighborhoods would be some hundred megabytes."""
    rows = 20_000_000
    np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(rows, 16)).flush()
    records = MappedArrays(tmp_path / "x.npy")
    places = np.random.default_rng(0).integers(0, rows, (80, 250))

    def resident():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssFile"))
        return int(line.split()[1]) / 1024

    before, most = resident(), 0.0
    for some in places:
        records.__getitems__(some.tolist())
        most = max(most, resident() - before)
    assert most < 60


def test_parquet_is_encoded_in_constant_memory(tmp_path):
    """Four times the rows, the same memory, in Python and in Arrow; both hold a few row groups."""
    schema = Schema(columns=(NumericColumn(name="age", low=0, high=100),), target="ill", labels=("no", "yes"))
    peaks = []
    usual = pa.default_memory_pool()
    for groups in (8, 32):
        path = tmp_path / f"{groups}.parquet"
        ages = pa.array(np.arange(groups * 20_000) % 100, pa.float64())
        labels = pa.array(["no", "yes"] * (groups * 10_000))
        pq.write_table(pa.table({"age": ages, "ill": labels}), path, row_group_size=20_000)
        pool = pa.proxy_memory_pool(usual)
        pa.set_memory_pool(pool)
        tracemalloc.start()
        try:
            records = mapped_table(path, schema=schema, folder=tmp_path / str(groups), rows=20_000)
            peaks.append((tracemalloc.get_traced_memory()[1], pool.max_memory()))
        finally:
            tracemalloc.stop()
            pa.set_memory_pool(usual)
        assert len(records) == groups * 20_000
        assert int(records[groups * 20_000 - 1][1]) == 1
    assert peaks[1][0] < 1.3 * peaks[0][0] + 1_000_000
    assert 0 < peaks[1][1] < 1.3 * peaks[0][1] + 1_000_000


class Stream(IterableDataset):
    """A stream, with a length or without."""

    def __iter__(self):
        raise AssertionError("a record was read")


class LongStream(Stream):
    def __len__(self):
        return 1000


@pytest.mark.parametrize("stream", [Stream, LongStream])
def test_a_stream_is_refused_before_it_is_read_and_the_way_out_is_named(stream):
    plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, steps=2, expected_batch_size=10.0, delta=1e-5)
    with pytest.raises(InvalidArgument, match="mapped_table"):
        fit(nn.Linear(2, 2), loss, stream(), plan, progress=False)
    model = nn.Linear(2, 2)
    with pytest.raises(UnknownSampler, match="mapped_table"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(stream(), batch_size=10),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
