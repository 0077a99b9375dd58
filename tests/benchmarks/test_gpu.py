"""The benchmark of a graphics card, without one: its dry run, and its parts with the processor in the card's place."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sordino.gradients import numerics

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    return gpu


@pytest.mark.slow
def test_a_step_without_values_looks_once_and_has_no_convolution_for_each_record(gpu):
    models = [model for model in gpu.MODELS if model.name.startswith("WRN")]
    for row in gpu.dry_run(models):
        assert row["private"]["looks"] == 1
        assert row["private"]["products"] < 4 * row["plain"]["products"]


@pytest.mark.parametrize(("records", "positions", "most"), [(32, 128, 90), (16, 512, 55)])
def test_a_private_step_starts_few_operations_more_than_a_plain_one(gpu, records, positions, most):
    """A block of BERT-base has six linear layers and two normalizations, each with a bias."""
    counts = []
    for layers in (1, 3):

        def build(layers=layers):
            return gpu.Transformer(tokens=1000, width=768, layers=layers, heads=12, length=512, outputs=2, causal=False)

        model = gpu.Model(name="BERT", build=build, records=records, shape=(positions,), classes=2, tokens=1000)
        (row,) = gpu.dry_run([model])
        counts.append({name: row[name]["operations"] for name in ("plain", "private")})
    plain, private = ((counts[1][name] - counts[0][name]) / 2 for name in ("plain", "private"))
    assert 0 < private - plain <= most


def test_layers_are_exact_in_every_precision_with_the_processor_in_the_place_of_a_card(gpu, monkeypatch):
    monkeypatch.setattr(numerics, "_HOST", "none")
    rows = gpu.exactness("cpu")
    assert {row["precision"] for row in rows} == set(gpu.PRECISIONS)
    assert [row for row in rows if not row["right"]] == []
    # A sum that is off is seen.
    monkeypatch.setattr(gpu.GradientCapture, "add_weighted_sums", _ten_percent_off(gpu.GradientCapture))
    assert not any(row["right"] for row in gpu.exactness("cpu"))


def _ten_percent_off(capture):
    right = capture.add_weighted_sums

    def add(self, weights, into, **options):
        right(self, 1.1 * weights, into, **options)

    return add


def test_the_noise_is_normal_and_another_spread_is_seen(gpu, monkeypatch):
    found = gpu.noise("cpu", 200_000)
    assert all(abs(found[name]) < 5 for name in ("mean", "variance", "fourth moment", "beyond 4"))
    right = gpu.device_noise.add_device_normal_

    def wider(tensor, key, *, first, stddev):
        right(tensor, key, first=first, stddev=1.05 * stddev)

    monkeypatch.setattr(gpu.device_noise, "add_device_normal_", wider)
    assert abs(gpu.noise("cpu", 200_000)["variance"]) > 20


def test_every_part_runs_with_the_processor_in_the_place_of_a_card(gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--results", str(tmp_path)])
    gpu.main()
    assert numerics._HOST == "cpu"
    kept = json.loads((tmp_path / "gpu-cpu.json").read_text())
    assert json.dumps(kept["table"][-1]) in capsys.readouterr().out
    assert all(row["right"] for row in kept["exactness"])
    assert kept["noise"]["kernel"] is None
    conformance = kept["conformance"]
    assert conformance["failed"] == {}
    assert 0 < conformance["right"] <= conformance["tried"] <= conformance["cases"]
    assert [row["model"] for row in kept["table"]] == [model.name for model in gpu.MODELS]
    for row in kept["table"]:
        assert row["private"]["ms"] / row["plain"]["ms"] == row["ratio"] > 0


def test_a_model_that_fails_is_named_and_the_others_are_measured(gpu, monkeypatch):
    def fails(case):
        if case.name.startswith("ViT"):
            raise RuntimeError("no memory left")
        return lambda: None

    monkeypatch.setattr(gpu, "private_step", fails)
    monkeypatch.setattr(gpu, "peers", dict)
    rows = gpu.table("cpu", float("inf"), gpu.models(tiny=True)[2:4])
    assert rows[0]["private"] == "RuntimeError: no memory left"
    assert "ratio" not in rows[0]
    assert rows[1]["private"]["ms"] > 0
    # Nothing is begun when time is over.
    (row,) = gpu.table("cpu", 0.0, gpu.models(tiny=True)[:1])
    assert row["plain"] == row["private"] == "no time left"


@pytest.mark.slow
def test_the_script_runs_dry_and_keeps_what_it_counted(tmp_path):
    subprocess.run(
        ["sh", str(ROOT / "benchmarks" / "gpu.sh"), "--dry-run", str(tmp_path)],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "src")},
        check=True,
        capture_output=True,
    )
    kept = json.loads((tmp_path / "gpu-dry-run.json").read_text())
    assert len(kept["steps without values"]) == 6
    assert all(row["private"]["looks"] == 1 for row in kept["steps without values"])
    assert kept["machine"]["gpu"] is None
