"""Numbers and places that a reader of the course's sources looks for: each by the command or page that answers."""

import json
import math
import re
import shlex
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sordino import accounting
from sordino.cli import app
from sordino.course import lessons
from sordino.events import EVENT_TYPES, ApproximateDP, Gaussian, PoissonSampled, SelfComposed
from sordino.mechanisms import ExponentialMechanism, LaplaceMechanism

ROOT = Path(__file__).parents[2]
COMMANDS = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")


def test_the_page_of_the_command_line_lists_every_kind_of_event_with_its_fields():
    listed = {}
    for kinds, names in re.findall(r"^\| ((?:`[a-z_]+`(?:, )?)+) \| ([^|]*) \|", COMMANDS, flags=re.MULTILINE):
        for kind in re.findall(r"`([a-z_]+)`", kinds):
            listed[kind] = set(re.findall(r"`([a-z_]+)`", names))
    wanted = {kind: {item.name for item in fields(event)} for kind, event in EVENT_TYPES.items()}
    assert {kind: listed.get(kind) for kind in wanted} == wanted


def test_the_page_states_what_its_own_command_prints():
    command = next(line for line in COMMANDS.splitlines() if "approximate_dp" in line and line.startswith("sordino"))
    result = CliRunner().invoke(app, [*shlex.split(command)[1:], "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["epsilon"] == pytest.approx(0.446, abs=5e-4)


def test_short_forms_of_sampled_composition_are_no_bounds_and_the_lesson_says_so():
    lesson = lessons()["mechanisms"].read_text(encoding="utf-8")
    answers = SelfComposed(
        event=PoissonSampled(sample_rate=0.01, event=ApproximateDP(epsilon=0.4, delta=1e-6)), count=1000
    )
    for shown, value in (
        ("0.3098", 0.01 * 0.4 * math.sqrt(1000 * math.log10(1e6))),
        ("0.1265", 0.01 * 0.4 * math.sqrt(1000)),
    ):
        assert shown in lesson
        assert value == pytest.approx(float(shown), abs=5e-5)
        assert accounting.delta(answers, value).lower > 2e-5


@pytest.mark.parametrize("size", [1, 100, 1000])
def test_laplace_noise_of_a_vector_grows_with_its_l1_sensitivity_and_gaussian_noise_does_not(size):
    gaussian = accounting.calibrate_noise_multiplier(
        lambda sigma: Gaussian(noise_multiplier=sigma), target_epsilon=1.0, delta=1e-5
    )
    assert gaussian == pytest.approx(3.73, abs=5e-3)
    mechanism = LaplaceMechanism(epsilon=1.0, l1_sensitivity=math.sqrt(size))
    stddev = np.std([mechanism.release(0.0) for _ in range(6000)])
    assert stddev == pytest.approx(math.sqrt(2 * size), rel=0.1)
    assert round(math.sqrt(2000), 1) == 44.7


@pytest.mark.parametrize(
    "page", ["README.md", "docs/index.md", "docs/quickstart.md", "docs/estimators.md", "docs/teaching.md"]
)
def test_the_discussion_of_education_and_income_is_found_from_the_first_pages(page):
    assert re.search(r"education\s+(and|→)\s+income", (ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize(("bits", "fewest"), [(4, 20), (8, 32), (16, 54), (40, 120)])
def test_private_learning_of_a_threshold_needs_the_logarithm_of_the_universe(bits, fewest):
    """Half of the records on each side of one threshold of 2^bits + 1, which is to be chosen in nine of ten cases."""
    mechanism = ExponentialMechanism(epsilon=1.0, sensitivity=1.0)
    chosen = {n: mechanism.probabilities([0, -n // 2], [1, 2.0**bits])[0] for n in (fewest - 2, fewest)}
    assert chosen[fewest - 2] < 0.9 <= chosen[fewest]
    assert fewest == 2 * math.ceil(2 * (bits * math.log(2) + math.log(9)))
    assert "2(ln |H| + ln 1/β)/(εα)" in lessons()["learning"].read_text(encoding="utf-8")
