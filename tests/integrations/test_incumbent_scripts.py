"""Shapes of real trainings that were written for Opacus: by the import line alone, by the named change, or refused."""

import math
import re
from pathlib import Path

import pytest
import torch

from integrations.incumbent_scripts import SCRIPTS, table
from sordino import PrivacyEngine
from sordino.errors import SordinoError

PAGE = (Path(__file__).parents[2] / "docs" / "migrating-from-opacus.md").read_text(encoding="utf-8")

# What other libraries warn of is theirs.
warnings_are_theirs = pytest.mark.filterwarnings("ignore")
RUNS = [script for script in SCRIPTS if script.words is None]
OTHERS = [script for script in SCRIPTS if script.words is not None]


def name_of(script):
    return script.run.__name__


def finished(script, *changed):
    torch.manual_seed(0)
    if name_of(script) == "lora":
        pytest.importorskip("peft")
    if name_of(script) in {"lora", "bert_last_layer", "gpt2_blocks"}:
        pytest.importorskip("transformers")
    engine = script.run(PrivacyEngine, *changed)
    epsilon = engine.get_epsilon(1e-5)
    assert 0 < epsilon < math.inf
    return epsilon


@pytest.mark.slow
@warnings_are_theirs
@pytest.mark.parametrize("script", RUNS, ids=name_of)
def test_it_runs_by_the_import_line_alone(script):
    finished(script)


@pytest.mark.slow
@warnings_are_theirs
@pytest.mark.parametrize("script", OTHERS, ids=name_of)
def test_the_message_names_the_change_and_the_change_makes_it_run(script):
    with pytest.raises(SordinoError, match=re.escape(script.words)):
        finished(script, False)
    finished(script, True)


@pytest.mark.slow
@warnings_are_theirs
@pytest.mark.parametrize("script", RUNS, ids=name_of)
def test_epsilon_is_that_of_opacus(script):
    """To the width of its own bounds, where the script still runs there."""
    opacus = pytest.importorskip("opacus", reason="opacus is not installed")
    ours = finished(script)
    torch.manual_seed(0)
    try:
        theirs = script.run(opacus.PrivacyEngine).get_epsilon(1e-5)
    except Exception as failure:
        pytest.skip(f"does not run there: {type(failure).__name__}")
    assert ours <= theirs * 1.0001
    assert ours == pytest.approx(theirs, rel=0.02)


def test_most_of_them_need_the_import_line_only():
    refused = [script for script in OTHERS if script.unsound]
    assert len(SCRIPTS) >= 45
    assert len(RUNS) >= 30
    assert len({name_of(script) for script in SCRIPTS}) == len(SCRIPTS)
    page = " ".join(PAGE.split())
    assert f"lists {len(SCRIPTS)} training scripts" in page
    assert f"{len(RUNS)} need only the import line, {len(OTHERS) - len(refused)} raise an error that says what" in page
    assert f"and {len(refused)} raise an error because the ε that Opacus prints" in page


def test_the_page_shows_them_as_they_are():
    assert table() in PAGE
