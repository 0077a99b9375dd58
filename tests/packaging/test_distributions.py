"""Wheel and sdist hold what they must, and work in clean environments, outside the repository."""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from sordino import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOR_THE_REPOSITORY = {"bench", "docs", "test"}


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True, capture_output=True
    )
    return folder


def wheel_of(dist):
    return dist / f"sordino-{__version__}-py3-none-any.whl"


def test_the_wheel_has_code_data_and_pages_and_nothing_else(dist):
    with zipfile.ZipFile(wheel_of(dist)) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(f"sordino-{__version__}.dist-info/METADATA").decode()
    package = ROOT / "src/sordino"
    source = {f"sordino/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")}
    assert source <= names
    for name in ("py.typed", "data/files/adult-train.csv.xz", "docs/limitations.md", "report/templates/page.css"):
        assert f"sordino/{name}" in names
    assert {f"sordino/docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= names
    assert {name.split("/")[0] for name in names} == {"sordino", f"sordino-{__version__}.dist-info"}
    assert not [name for name in names if "/test" in name or name.endswith((".pyc", ".png"))]
    assert f"Version: {__version__}\n" in metadata
    assert "Requires-Dist: torch<3,>=2.11\n" in metadata
    licenses = {name.rpartition("/")[2] for name in names if "/licenses/" in name}
    assert licenses == {"LICENSE", "DATA_LICENSES.md"}


def test_the_sdist_makes_the_same_wheel(dist, tmp_path):
    with tarfile.open(dist / f"sordino-{__version__}.tar.gz") as sdist:
        sdist.extractall(tmp_path, filter="data")
    root = tmp_path / f"sordino-{__version__}"
    for name in ("tests/conftest.py", "docs/index.md", "tutorials", "run", "constraints.txt", "CHANGELOG.md"):
        assert (root / name).exists(), name
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "again"],
        cwd=root, check=True, capture_output=True,
    )  # fmt: skip
    with zipfile.ZipFile(wheel_of(dist)) as one, zipfile.ZipFile(wheel_of(tmp_path / "again")) as other:
        assert {name: one.read(name) for name in one.namelist()} == {
            name: other.read(name) for name in other.namelist()
        }


CORE = """
import json, torch, sordino
def loss(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y, reduction="none")
records = torch.randn(40, 3), torch.randint(2, (40,))
plan = sordino.Plan.for_epsilon(
    target_epsilon=2.0, delta=1e-5, sample_rate=0.5, steps=2, max_grad_norm=1.0, expected_batch_size=20.0
)
result = sordino.fit(torch.nn.Linear(3, 2), loss, records, plan)
assert result.guarantee.epsilon <= 2.0
print(json.dumps([sordino.__version__, sordino.__file__, torch.__version__]))
"""

SMOKE = {
    "all": """
        import subprocess
        def run(*words):
            return subprocess.run(words, check=True, capture_output=True, text=True).stdout
        print(run("sordino", "demo", "--out", "run"))
        run("sordino", "verify", "run")
        run("sordino", "report", "run", "--format", "md", "--out", "report.md")
        assert "GroupNorm" in run("sordino", "explain", "UnsupportedModule")
    """,
    "cli": """
        import subprocess
        words = ["sordino", "account", "--sample-rate", "0.01", "--noise-multiplier", "4", "--steps", "100",
                 "--delta", "1e-5", "--json"]
        assert "epsilon" in subprocess.run(words, check=True, capture_output=True, text=True).stdout
    """,
    "estimators": """
        import numpy as np
        from sordino.estimators import LogisticRegression
        LogisticRegression(epsilon=1.0, delta=1e-5, data_norm=1.0, classes=(0, 1)).fit(np.eye(2), [0, 1])
    """,
    "federated": "import sordino.federated.flower",
    "images": """
        from PIL import Image
        from sordino.data import list_datasets
        assert list_datasets()
    """,
    "ledger": """
        from sordino.ledger import Ledger
        assert Ledger
    """,
    "lightning": "import sordino.integrations.lightning",
    "onnx": "import onnx, onnxruntime, sordino.recipes",
    "postgres": "import psycopg, sordino.ledger",
    "recipes": """
        from sordino.recipes import RECIPES
        assert RECIPES
    """,
    "report": """
        from sordino.report import build_report, write_report
        assert build_report and write_report
    """,
    "tables": """
        import pyarrow as pa, pyarrow.parquet as pq
        pq.write_table(pa.table({"a": [1.0, 2.0], "y": ["n", "p"]}), "t.parquet")
        from sordino import data
        schema = data.Schema(columns=(data.NumericColumn(name="a", low=0, high=3),), target="y", labels=("n", "p"))
        assert data.load_dataset("t.parquet", schema=schema)
    """,
    "triton": "import triton, sordino.mechanisms.device_noise_kernel",
    "verify": "import dp_accounting, sordino.verification",
}


def test_every_extra_for_users_is_tried():
    assert set(SMOKE) == set(PROJECT["optional-dependencies"]) - FOR_THE_REPOSITORY


def clean_environment(folder):
    """An environment with pip alone, and the environment variables to use it by."""
    venv.create(folder, with_pip=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SORDINO", "VIRTUAL"))}
    return folder / "bin/python", {**kept, "PATH": f"{folder / 'bin'}{os.pathsep}/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


def python(interpreter, environment, folder, *arguments):
    done = subprocess.run(
        [interpreter, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def core(dist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("core")
    interpreter, environment = clean_environment(folder / "venv")
    # The pinned torch comes first: an open range could bring another build.
    python(interpreter, environment, folder, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", "torch")
    python(
        interpreter, environment, folder, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel_of(dist)
    )
    return interpreter, environment, folder


@pytest.mark.slow
def test_a_core_installation_trains(core):
    interpreter, environment, folder = core
    version, file, torch = json.loads(python(interpreter, environment, folder, "-c", CORE).splitlines()[-1])
    assert version == __version__
    assert Path(file).is_relative_to(folder)
    assert torch.startswith((ROOT / "constraints.txt").read_text().strip().removeprefix("torch=="))
    installed = json.loads(python(interpreter, environment, folder, "-m", "pip", "list", "--format", "json"))
    assert not {"rich", "typer", "scikit-learn", "matplotlib", "pydantic"} & {entry["name"] for entry in installed}
    python(interpreter, environment, folder, "-m", "pip", "check")


@pytest.mark.slow
@pytest.mark.parametrize("extra", sorted(SMOKE))
def test_an_extra_brings_what_it_needs(extra, core, dist, tmp_path):
    interpreter, environment = clean_environment(tmp_path / "venv")
    # The core installation lies below it, so that torch is not unpacked for each of them.
    below = next((core[2] / "venv/lib").glob("python*/site-packages"))
    (next((tmp_path / "venv/lib").glob("python*/site-packages")) / "core.pth").write_text(f"{below}\n")
    wheel = f"sordino[{extra}] @ {wheel_of(dist).as_uri()}"
    install = ["-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", wheel_of(dist)]
    python(interpreter, environment, tmp_path, *install)
    python(interpreter, environment, tmp_path, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
    code = "\n".join(line.removeprefix("        ") for line in SMOKE[extra].splitlines())
    python(interpreter, environment, tmp_path, "-c", code)
