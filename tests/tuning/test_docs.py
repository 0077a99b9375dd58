"""The page on tuning is true: its blocks run one after the other, its table holds, its proof says what it must."""

import re
from pathlib import Path

import pytest

import sordino.tuning as room
from sordino.accounting import epsilon
from sordino.events import Gaussian, PoissonSampled, SelfComposed
from sordino.tuning import RandomStopping

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "tuning.md").read_text(encoding="utf-8")


def test_the_blocks_of_the_page_run(capsys):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL):
        exec(compile(block, "tuning.md", "exec"), names)
    assert "differentially private" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", sorted(set(room.__all__) - {"Choice", "Integers", "Uniform", "TrialBudget", "RecommendedSettings"})
)
def test_every_public_name_is_on_the_page(name):
    # What only helps to write a space, and what is only returned, is told by docstrings.
    assert name in TEXT or name in {"TuningResult"}


def test_the_table_of_the_page_holds():
    sgd = SelfComposed(event=PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=1.0)), count=1000)
    told = re.findall(r"^\| (?:Gaussian, σ = 4|DP-SGD|the same).*", TEXT, flags=re.MULTILINE)
    rows = [[float(cell) for cell in line.split("|")[2:-1]] for line in told]
    laws = [RandomStopping(mean=mean, shape=shape) for mean in (10, 100) for shape in (0.0, 1.0)]
    asked = ((Gaussian(noise_multiplier=4.0), "auto"), (sgd, "auto"), (sgd, "rdp"))
    for row, (run, accountant) in zip(rows, asked, strict=True):
        found = [
            epsilon(event, 1e-5, accountant=accountant).upper for event in (run, *(law.event(run) for law in laws))
        ]
        assert row == pytest.approx(found, abs=6e-3)


def test_the_proof_says_what_is_assumed_and_what_is_not_covered():
    text = (DOCS / "proofs" / "tuning-profiles.md").read_text(encoding="utf-8")
    for part in ("**Statement.**", "**Why", "| assumption | where |", "**What is not covered.**", "**References.**"):
        assert part in text
