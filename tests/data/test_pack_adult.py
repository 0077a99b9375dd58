import gzip
import lzma
import os
from pathlib import Path

import pytest

from sordino.data.pack_adult import pack
from sordino.data.readers import FILES
from sordino.errors import DataUnavailable

RAW = Path(os.environ.get("SORDINO_DATA", "")) / "adult"
ROW = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Peru, "
    "<=50K"
)


def test_rows_with_a_missing_value_and_the_survey_weight_are_left_out(tmp_path):
    (tmp_path / "adult.data").write_text(f"{ROW}\n{ROW.replace('State-gov', '?')}\n\n")
    (tmp_path / "adult.test.gz").write_bytes(gzip.compress(f"|1x3 Cross validator\n{ROW}.\n{ROW}.\n".encode()))
    assert pack(tmp_path, tmp_path) == {"adult-train.csv.xz": 1, "adult-test.csv.xz": 2}
    header, *rows = lzma.decompress((tmp_path / "adult-test.csv.xz").read_bytes()).decode().splitlines()
    assert header.split(",")[:3] == ["age", "workclass", "education"]
    assert (
        rows
        == ["39,State-gov,Bachelors,13,Never-married,Adm-clerical,Not-in-family,White,Male,2174,0,40,Peru,<=50K"] * 2
    )


def test_raw_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(DataUnavailable, match=r"adult\.data"):
        pack(tmp_path, tmp_path)


@pytest.mark.skipif(not RAW.is_dir(), reason="the raw Adult files are not on this machine: set SORDINO_DATA")
def test_the_embedded_files_are_those_of_the_raw_data(tmp_path):
    pack(RAW, tmp_path)
    for name in ("adult-train.csv.xz", "adult-test.csv.xz"):
        embedded, packed = ((folder / name).read_bytes() for folder in (FILES, tmp_path))
        assert lzma.decompress(embedded) == lzma.decompress(packed)
