"""What is declared public must not be the private file: by another path, name, compression, form or order."""

import bz2
import gzip
import json
import lzma
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from sordino.cli.app import app
from sordino.data import ArraySchema, CategoricalColumn, DatasetSplits, NumericColumn, Records, Schema, load_dataset
from sordino.errors import InvalidArgument

SCHEMA = Schema(
    columns=(NumericColumn(name="age", low=0, high=100), CategoricalColumn(name="job", categories=("clerk", "sales"))),
    target="income",
    labels=("low", "high"),
)
ROWS = [(20 + k % 60, ("clerk", "sales")[k % 2], ("low", "high")[k % 3 == 0]) for k in range(50)]
TEXT = "age,job,income\n" + "".join(f"{age},{job},{income}\n" for age, job, income in ROWS)


def same_file(folder, private):
    return private


def relative(folder, private):
    return folder / "x" / ".." / private.name


def symlink(folder, private):
    (folder / "link.csv").symlink_to(private)
    return folder / "link.csv"


def hard_link(folder, private):
    os.link(private, folder / "hard.csv")
    return folder / "hard.csv"


def written(name, content):
    def make(folder, private):
        (folder / name).write_bytes(content(private.read_bytes()))
        return folder / name

    return make


def parquet(folder, private):
    ages, jobs, incomes = zip(*ROWS, strict=True)
    pq.write_table(pa.table({"income": incomes, "age": ages, "job": jobs}), folder / "t.parquet")
    return folder / "t.parquet"


COPIES = {
    "the same path": same_file,
    "another way to it": relative,
    "a symbolic link": symlink,
    "a hard link": hard_link,
    "a copy": written("copy.csv", bytes),
    "gzip": written("copy.csv.gz", gzip.compress),
    "xz": written("copy.csv.xz", lzma.compress),
    "bzip2": written("copy.csv.bz2", bz2.compress),
    "other line ends": written("copy.csv", lambda raw: raw.replace(b"\n", b"\r\n")),
    "tabs": written("copy.tsv", lambda raw: raw.replace(b",", b"\t")),
    "no last line end": written("copy.csv", lambda raw: raw.rstrip()),
    "another order": written(
        "copy.csv", lambda raw: b"\n".join([raw.split(b"\n")[0], *sorted(raw.split(b"\n")[1:])[1:]])
    ),
    "Parquet": parquet,
}


@pytest.mark.parametrize("what", COPIES)
def test_the_private_file_is_no_public_file(tmp_path, what):
    (tmp_path / "x").mkdir()
    private = tmp_path / "private.csv"
    private.write_text(TEXT)
    copy = COPIES[what](tmp_path, private)
    with pytest.raises(InvalidArgument, match="test must be a file of other, public records"):
        load_dataset(private, schema=SCHEMA, test=copy)
    with pytest.raises(InvalidArgument, match="public_schema_from must be a file of other, public records"):
        load_dataset(private, target="income", public_schema_from=copy)


def test_a_compressed_private_file_is_known_in_the_open(tmp_path):
    (tmp_path / "private.csv.gz").write_bytes(gzip.compress(TEXT.encode()))
    (tmp_path / "open.csv").write_text(TEXT)
    with pytest.raises(InvalidArgument, match="test must be a file of other"):
        load_dataset(tmp_path / "private.csv.gz", schema=SCHEMA, test=tmp_path / "open.csv")


def test_other_records_of_the_same_number_and_labels_are_taken(tmp_path):
    (tmp_path / "private.csv").write_text(TEXT)
    (tmp_path / "test.csv").write_text(TEXT.replace("30,clerk", "31,clerk", 1))
    assert len(load_dataset(tmp_path / "private.csv", schema=SCHEMA, test=tmp_path / "test.csv").test) == 50
    found = load_dataset(tmp_path / "private.csv", target="income", public_schema_from=tmp_path / "test.csv")
    assert found.schema.origin == "public_sample"


def test_arrays_are_compared_too(tmp_path):
    x, y = np.arange(24.0).reshape(6, 4), np.array([0, 1, 0, 1, 1, 0])
    schema = ArraySchema(labels=("0", "1"), low=0, high=24)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    np.savez_compressed(tmp_path / "b.npz", features=x[::-1], labels=y[::-1].astype(float))
    np.savez(tmp_path / "c.npz", x=x + 1, y=y)
    with pytest.raises(InvalidArgument, match="test must be a file of other"):
        load_dataset(tmp_path / "a.npz", schema=schema, test=tmp_path / "b.npz")
    with pytest.raises(InvalidArgument, match="public_schema_from must be a file of other"):
        load_dataset(tmp_path / "a.npz", public_schema_from=tmp_path / "b.npz")
    assert len(load_dataset(tmp_path / "a.npz", schema=schema, test=tmp_path / "c.npz").test) == 6


def test_the_training_records_are_no_test_records():
    records = Records(features=np.zeros((2, 1), dtype=np.float32), labels=np.array([0, 1]))
    facts = {"name": "x", "train": records, "labels": ("a", "b"), "source": "", "license": "", "schema": None}
    with pytest.raises(InvalidArgument, match="private training records themselves"):
        DatasetSplits(test=records, public=False, **facts)
    assert DatasetSplits(test=records, public=True, **facts).test is records


@pytest.mark.parametrize(
    "command",
    [
        ["train", "private.csv", "--steps", "2", "--epsilon", "1", "--out", "run"],
        ["train", "private.csv", "--model", "objective", "--epsilon", "1", "--out", "run"],
        ["tune", "private.csv", "--epsilon", "1", "--out", "run"],
        ["compare", "private.csv", "--epsilon", "1"],
    ],
)
def test_no_command_measures_on_the_private_file(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private.csv").write_text(TEXT)
    (tmp_path / "copy.csv").write_text(TEXT)
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA.to_dict()))
    done = CliRunner().invoke(app, [*command, "--schema", "s.json", "--test", "copy.csv"])
    assert done.exit_code != 0
    assert isinstance(done.exception, InvalidArgument | SystemExit)
    assert "test must be a file of other, public records" in f"{done.exception}{done.output}"
    assert not (tmp_path / "run").exists()
