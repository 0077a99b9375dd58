"""`sordino audit`: the target is a run or data, the report gets the result, exit codes tell."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sordino.cli import app
from sordino.commands.replay_cases import ReplayCase
from sordino.mechanisms import LaplaceMechanism, TensorGaussianMechanism
from sordino.randomness import KeyedRNG


def run(*arguments):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The options that name a small file with its schema."""
    folder, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name in ("small.csv", "sample.csv"):
        rows = [f"{x:.3f},{y:.3f},{'yes' if x > y else 'no'}" for x, y in generator.uniform(size=(200, 2))]
        (folder / name).write_text("\n".join(["x,y,above", *rows]) + "\n")
    return str(folder / "small.csv"), "--target", "above", "--public-schema-from", str(folder / "sample.csv")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, table):
    folder = tmp_path_factory.mktemp("runs") / "first"
    options = ["--epsilon", "4", "--delta", "1e-4", "--steps", "5", "--out", str(folder)]
    result = CliRunner().invoke(app, ["train", *table, *options])
    assert result.exit_code == 0, result.stderr
    return folder


def test_a_run_is_audited_by_its_own_plan_and_its_report_says_so(trained, table):
    file, *options = table
    result = run(trained, "--data", file, *options, "--count", "300", "--json")
    assert result.exit_code in {0, 1}, result.stderr  # a sound claim is rejected once in twenty times
    found = json.loads(result.stdout)
    assert found["claimed_epsilon"] <= 4.0
    assert found["bound"]["canaries"] == 300
    assert all(check["passed"] for check in found["checks"])
    (entry,) = json.loads((trained / "audit.json").read_text())
    assert entry["epsilon_lower"] == found["bound"]["epsilon"]
    assert (trained / "audit.png").read_bytes().startswith(b"\x89PNG")
    assert "one run, trade-off curve" in (trained / "report.html").read_text(encoding="utf-8")


def test_half_the_noise_ends_with_exit_code_1(monkeypatch, table):
    add_noise = TensorGaussianMechanism.add_noise_

    def half(self, tensors, **named):
        weaker = TensorGaussianMechanism(
            noise_multiplier=0.5 * self.noise_multiplier, l2_sensitivity=self.l2_sensitivity
        )
        add_noise(weaker, tensors, **named)

    monkeypatch.setattr(TensorGaussianMechanism, "add_noise_", half)
    result = run(*table, "--epsilon", "4", "--delta", "1e-4", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["passed"]
    assert [check["passed"] for check in found["checks"]].count(False) == 1


def test_canaries_whose_scores_tell_of_private_records_are_refused(table):
    assert run(*table, "--epsilon", "4", "--delta", "1e-4", "--canaries", "mislabeled").exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("adult",),
        ("adult", "--epsilon", "4", "--confidence", "1"),
        ("adult", "--epsilon", "4", "--canaries", "none"),
        ("adult", "--epsilon", "4", "--plot", "picture.doc"),
        ("replay", "nowhere.at.all:CASE"),
        ("replay", "json:loads"),
    ],
)
def test_a_wrong_use_ends_with_exit_code_2(arguments):
    assert run(*arguments).exit_code == 2


def test_a_run_has_its_own_epsilon(trained):
    assert run(trained, "--epsilon", "2").exit_code == 2


def _laplace(table):
    key = KeyedRNG(seed=1, reproducible=True)
    return LaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0, rng=key).release(float(len(table[0])))


def _leaky(table):
    return _laplace(table), float(table[0].max(initial=0.0))


DATA = (np.zeros((3, 1)), np.zeros(3))
NEIGHBOURS = ((np.ones((4, 1)), np.zeros(4)),)
HONEST = ReplayCase(name="honest", pipeline=_laplace, data=DATA, neighbors=NEIGHBOURS)
LEAKY = ReplayCase(name="leaky", pipeline=_leaky, data=DATA, neighbors=NEIGHBOURS)


@pytest.mark.parametrize(("name", "code"), [("HONEST", 0), ("LEAKY", 1)])
def test_a_case_of_ones_own_is_replayed(name, code, monkeypatch):
    import sys
    import types

    module = types.ModuleType("own_cases")
    module.HONEST, module.LEAKY = HONEST, LEAKY
    monkeypatch.setitem(sys.modules, "own_cases", module)
    result = run("replay", f"own_cases:{name}", "--json")
    assert result.exit_code == code
    (path,) = json.loads(result.stdout)["paths"].values()
    assert path["releases"] == 1
    assert bool(path["violations"]) == bool(code)


def test_cases_of_the_installed_library_are_tried_by_name():
    result = run("conformance", "--json", "--only", "divisor", "--path", "engine", "--path", "fit")
    assert result.exit_code == 0
    checks = json.loads(result.stdout)["checks"]
    assert {path: {one["verdict"] for one in row.values()} for path, row in checks.items()} == {
        "engine": {"right"},
        "fit": {"not offered"},
    }


def test_a_library_of_ones_own_is_tried_and_a_failure_is_exit_code_1(monkeypatch):
    import sys
    import types

    from sordino.audit import FitLibrary

    class Unclipped(FitLibrary):
        def clipped_sum(self, model, batch, loss, *, max_grad_norm):
            return [1e6 * len(batch[0]) * torch.ones_like(parameter) for parameter in model.parameters()]

    module = types.ModuleType("own_library")
    module.LIBRARY = Unclipped(label="mine")
    monkeypatch.setitem(sys.modules, "own_library", module)
    result = run("conformance", "--only", "a large record", "--path", "own_library:LIBRARY", "--json")
    assert result.exit_code == 1
    assert not json.loads(result.stdout)["passed"]
    assert run("conformance", "--path", "own_library:NOTHING").exit_code == 2
    assert run("conformance", "--only", "no such case").exit_code == 2
