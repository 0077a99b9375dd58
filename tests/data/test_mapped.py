"""Records on disk: the same as in memory, read one by one, and never all at once."""

import gzip
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from sordino.data import CategoricalColumn, MappedArrays, NumericColumn, Schema, load_dataset, mapped_table
from sordino.data.tables import iterate_declared
from sordino.errors import InvalidArgument

SCHEMA = Schema(
    columns=(NumericColumn(name="age", low=0, high=100), CategoricalColumn(name="town", categories=("A", "B", "C"))),
    target="ill",
    labels=("no", "yes"),
)


def table(rows=1000):
    numbers = np.random.default_rng(0)
    ages = [str(value) if value < 95 else "unknown" for value in numbers.integers(0, 100, rows)]
    towns = numbers.choice(["A", "B", "C", "elsewhere"], rows)
    labels = numbers.choice(["no", "yes", "?"], rows, p=[0.5, 0.4, 0.1])
    return ages, towns.tolist(), labels.tolist()


def written(folder: Path, kind: str) -> Path:
    ages, towns, labels = table()
    path = folder / f"people{kind}"
    if kind == ".parquet":
        numbers = [float(age) if age != "unknown" else None for age in ages]
        pq.write_table(pa.table({"ill": labels, "town": towns, "age": numbers}), path, row_group_size=70)
        return path
    text = "age,town,ill\n" + "\n".join(map(",".join, zip(ages, towns, labels, strict=True))) + "\n1,2\n"
    opener = gzip.open if kind.endswith(".gz") else open
    with opener(path, "wt") as file:
        file.write(text)
    return path


@pytest.mark.parametrize("kind", [".csv", ".csv.gz", ".parquet"])
@pytest.mark.parametrize("rows", [7, 1 << 16])
def test_a_table_on_disk_holds_what_it_holds_in_memory(tmp_path, kind, rows):
    path = written(tmp_path, kind)
    whole = load_dataset(path, schema=SCHEMA).train
    mapped = mapped_table(path, schema=SCHEMA, folder=tmp_path / "mapped", rows=rows)
    assert len(mapped) == len(whole)
    features, labels = zip(*mapped.__getitems__(range(len(mapped))), strict=True)
    assert np.array_equal(np.stack(features), whole.features)
    assert np.array_equal(np.array(labels), whole.labels)
    assert sorted(file.name for file in (tmp_path / "mapped").iterdir()) == ["features.npy", "labels.npy"]
    assert np.load(tmp_path / "mapped" / "features.npy").dtype == np.float32


def test_records_come_in_the_order_asked_for_and_a_loader_takes_them(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(12.0).reshape(6, 2))
    np.save(tmp_path / "y.npy", np.arange(6))
    records = MappedArrays(tmp_path / "x.npy", tmp_path / "y.npy")
    assert [int(label) for _, label in records.__getitems__([4, 0, 4, 2])] == [4, 0, 4, 2]
    assert records[5][0].tolist() == [10.0, 11.0]
    x, y = next(iter(DataLoader(records, batch_size=6)))
    assert x.shape == (6, 2)
    assert torch.equal(y, torch.arange(6))
    again = pickle.loads(pickle.dumps(records))
    assert len(pickle.dumps(records)) < 1000
    assert again[3][1] == 3


def test_memory_does_not_grow_with_the_data(tmp_path):
    rows = 2_000_000
    mapped = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(rows, 20))
    mapped[rows - 1] = 7.0
    del mapped
    tracemalloc.start()
    records = MappedArrays(tmp_path / "x.npy")
    found = records.__getitems__([*range(0, rows, 10_000), rows - 1])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found[-1][0][0] == 7.0
    assert peak < 1_000_000, "160 MB on disk, 200 records in memory"


@pytest.mark.parametrize("content", [b"", b"not an array", None])
def test_what_is_no_array_is_refused(tmp_path, content):
    path = tmp_path / "x.npy"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgument, match="records first"):
        MappedArrays(path)


def test_pickled_objects_are_never_loaded(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidArgument, match="Python objects"):
        MappedArrays(tmp_path / "x.npy")


def test_arrays_of_different_lengths_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((3, 2)))
    np.save(tmp_path / "y.npy", np.zeros(4))
    with pytest.raises(InvalidArgument, match="one length"):
        MappedArrays(tmp_path / "x.npy", tmp_path / "y.npy")


def test_a_table_that_breaks_off_leaves_no_records_behind(tmp_path, monkeypatch):
    seen = []

    def broken(*args, **kwargs):
        for part in iterate_declared(*args, **kwargs):
            yield part
            seen.append([file.stat().st_size for file in (tmp_path / "mapped").iterdir()])
            raise InvalidArgument("column must be readable, got a broken page. Repair the file.")

    monkeypatch.setattr("sordino.data.arrays.iterate_declared", broken)
    with pytest.raises(InvalidArgument, match="broken page"):
        mapped_table(written(tmp_path, ".csv"), schema=SCHEMA, folder=tmp_path / "mapped", rows=100)
    assert len(seen) == 1
    assert len(seen[0]) == 2
    assert list((tmp_path / "mapped").iterdir()) == []
