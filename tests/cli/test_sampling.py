"""`train --sampling` and `plan --sampling`: a sampler is planned, charged, written down and verified as its event."""

import json
import shlex

import numpy as np
import pytest
from typer.testing import CliRunner

from sordino import accounting, verification
from sordino.cli import app
from sordino.commands.planning import subsampled_gaussian
from sordino.runs import RunFolder
from sordino.sampling import SAMPLERS
from sordino.training import Plan

REPLACE = "--neighboring-relation replace_one"
LINES = {
    "poisson": "",
    "without_replacement": REPLACE,
    "with_replacement": "--neighboring-relation replace_special",
    "balls_in_bins": "",
    "shuffled": REPLACE,
}
# Two samplers take seconds to calibrate for.
HEAVY = ("with_replacement", "balls_in_bins")
EACH = [pytest.param(name, marks=pytest.mark.slow) if name in HEAVY else name for name in SAMPLERS]
KINDS = {
    "without_replacement": "sampled_without_replacement",
    "with_replacement": "sampled_with_replacement",
    "balls_in_bins": "random_allocation",
    "poisson": "poisson_sampled",
}


def invoke(line):
    return CliRunner().invoke(app, shlex.split(line))


def printed(line):
    result = invoke(f"{line} --json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    rows = [f"{age},{'yes' if age > 50 else 'no'}" for age in draw.integers(0, 100, 403)]
    (tmp_path / "people.csv").write_text("\n".join(["age,ill", *rows]))
    columns = [{"name": "age", "type": "numeric", "low": 0, "high": 100}]
    (tmp_path / "s.json").write_text(json.dumps({"target": "ill", "labels": ["no", "yes"], "columns": columns}))
    return tmp_path


@pytest.mark.parametrize("name", EACH)
def test_a_run_is_drawn_charged_and_verified_as_its_sampler(place, name):
    line = f"train people.csv --schema s.json --epsilon 2 --steps 8 --batch-size 101 --sampling {name} {LINES[name]}"
    dry = printed(f"{line} --dry-run")
    done = printed(f"{line} --out run")
    plan = Plan.from_json((place / "run" / "plan.json").read_text())
    run = RunFolder.open("run")
    assert done["epsilon"] <= 2
    assert dry["cost"]["epsilon"] <= 2
    spent = accounting.epsilon(run.event(), plan.delta, neighboring_relation=plan.neighboring_relation)
    assert 0 < spent.upper <= 2
    assert verification.verify("run").passed
    assert f"{name}" == (plan.sampling or ("poisson" if plan.poisson_sampling else "shuffled"))
    if name in KINDS:
        assert KINDS[name] in json.dumps(dry["cost"]["event"])
    if name in ("without_replacement", "with_replacement"):
        assert plan.dataset_size == 403
        assert plan.step_plan(0).expected_batch_size == 101
    elif name != "poisson":
        assert plan.sampler.steps_per_epoch == 4
        assert plan.step_plan(0).expected_batch_size == 403 / 4


@pytest.mark.parametrize("name", ["without_replacement", "with_replacement", "shuffled"])
@pytest.mark.parametrize(
    "line",
    [
        "train people.csv --schema s.json --epsilon 1 --batch-size 100",
        "plan --epsilon 1 --delta 1e-5 --dataset-size 403 --batch-size 100 --steps 8",
    ],
)
def test_a_sampler_that_needs_neighbors_of_one_size_is_refused_for_others(place, name, line):
    result = invoke(f"{line} --sampling {name}")
    assert result.exit_code == 2
    assert "--neighboring-relation replace_one" in result.stderr
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train people.csv --schema s.json --epsilon 1 --sampling random", "sampling must be"),
        (
            "train people.csv --schema s.json --epsilon 1 --model objective --sampling poisson",
            "sampling must be left out",
        ),
        ("train people.csv --schema s.json --resume run --sampling poisson", "settings must be left out"),
        ("plan --epsilon 1 --delta 1e-5 --sample-rate 0.1 --steps 8 --sampling random", "sampling must be"),
        (
            f"plan --epsilon 1 --delta 1e-5 --sample-rate 0.1 --steps 8 --sampling without_replacement {REPLACE}",
            "dataset_size must be the number of records",
        ),
        (
            "plan --epsilon 3 --delta 1e-5 --noise-multiplier 2 --steps 8 --sampling balls_in_bins",
            "sampling must be poisson where a sample rate is to be found",
        ),
        (
            "plan --recommend --epsilon 1 --delta 1e-5 --dataset-size 6000 --parameters 10 --sampling balls_in_bins",
            "sampling must be poisson in tables",
        ),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(place, line, says):
    result = invoke(line)
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.parametrize("name", EACH)
def test_a_plan_keeps_the_target_by_the_event_of_its_sampler(name):
    options = LINES[name]
    found = printed(
        f"plan --epsilon 1 --delta 1e-5 --dataset-size 400 --batch-size 100 --steps 6 --sampling {name} {options}"
    )
    sampled = {"sample_rate": 0.25, "steps": 6, "sampling": name, "dataset_size": 400}
    event = subsampled_gaussian(noise_multiplier=found["noise_multiplier"], **sampled)
    less = subsampled_gaussian(noise_multiplier=0.98 * found["noise_multiplier"], **sampled)
    relation = found["neighboring_relation"]
    assert accounting.epsilon(event, 1e-5, neighboring_relation=relation).upper <= 1
    assert accounting.epsilon(less, 1e-5, neighboring_relation=relation).upper > 1
    charges = {"balls_in_bins": 2, "shuffled": 2}.get(name, 6)  # epochs of four batches, begun
    assert event.count == charges
