"""The page on correlated noise runs, its tables are what the code gives, and its proof says what it must."""

import re
from pathlib import Path

import pytest

from sordino.mechanisms.correlated import (
    BandedToeplitz,
    BinaryTree,
    IndependentNoise,
    mean_error,
    optimize_banded,
    optimize_buffered,
    optimize_dense,
    square_root_coefficients,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "correlated-noise.md").read_text()
PROOF = (ROOT / "docs" / "proofs" / "correlated-noise.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_of_the_page_runs(number):
    exec(compile(BLOCKS[number], "correlated-noise.md", "exec"), {})


def test_the_table_of_strategies_is_what_the_code_gives():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([\d.]+) \| ([\d.]+|–) \|$", PAGE, flags=re.MULTILINE)
    makes = {
        "`IndependentNoise`": lambda n: IndependentNoise(steps=n),
        "`optimize_banded(8, …)`": lambda n: optimize_banded(8, steps=n),
        "`optimize_banded(64, …)`": lambda n: optimize_banded(64, steps=n),
        "`BinaryTree`": lambda n: BinaryTree(steps=n),
        '`optimize_buffered(4, …, objective="mean")`': lambda n: optimize_buffered(4, steps=n, objective="mean"),
        "square root, all bands": lambda n: BandedToeplitz(coefficients=square_root_coefficients(n), steps=n),
        "`optimize_dense`": optimize_dense,
    }
    assert {name for name, *_ in rows} == set(makes)
    for name, *written in rows:
        for steps, value in zip((64, 1024), written, strict=True):
            if value != "–":
                assert f"{mean_error(makes[name](steps)):.2f}" == value, name


def test_the_proof_says_what_is_assumed_and_what_is_not_covered():
    assert "(proofs/correlated-noise.md)" in PAGE
    for part in ("**Statement.**", "**Why", "| assumption | where |", "**What is not covered.**", "**References.**"):
        assert part in PROOF
    named = re.findall(r"`(mechanisms/[a-z_/]+\.py)`", PROOF)
    assert named
    for name in named:
        assert (ROOT / "src" / "sordino" / name).is_file()
