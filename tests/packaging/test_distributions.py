"""Wheel and sdist hold what they must, and work in clean environments, outside the repository."""

import json
import os
import re
import subprocess
import sys
import tarfile
import textwrap
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


def test_the_description_of_the_wheel_has_links_that_work_outside_the_repository(dist):
    with zipfile.ZipFile(wheel_of(dist)) as wheel:
        metadata = wheel.read(f"sordino-{__version__}.dist-info/METADATA").decode()
    assert "Description-Content-Type: text/markdown\n" in metadata
    description = metadata.partition("\n\n")[2]
    here = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    there = re.findall(r"\]\(([^)#]+)", description)
    assert len(here) == len(there) > 0
    for source, target in zip(here, there, strict=True):
        page = source.removeprefix("docs/").removesuffix(".md")
        pages, files = PROJECT["urls"]["Documentation"], f"{PROJECT['urls']['Source']}/blob/main/"
        assert target == (f"{pages}{page}/" if source.startswith("docs/") else f"{files}{source}")


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
with sordino.RunFolder.create("run", plan=plan.to_json()) as folder:
    result = sordino.fit(torch.nn.Linear(3, 2), loss, records, plan, run_folder=folder)
assert result.guarantee.epsilon <= 2.0
print(json.dumps([sordino.__version__, sordino.__file__, torch.__version__]))
"""

# One real use of every extra, with nothing but it installed.
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
        def run(*words):
            return subprocess.run(words, check=True, capture_output=True, text=True).stdout
        words = ["--sample-rate", "0.01", "--noise-multiplier", "4", "--steps", "100", "--delta", "1e-5", "--json"]
        assert "epsilon" in run("sordino", "account", *words)
        assert "GroupNorm" in run("sordino", "explain", "UnsupportedModule")
        lacking = subprocess.run(["sordino", "train", "adult", "--epsilon", "1"], capture_output=True, text=True)
        assert lacking.returncode and "Install sordino[" in lacking.stderr, lacking.stderr
    """,
    "estimators": """
        import numpy as np
        from sordino.estimators import LogisticRegression
        model = LogisticRegression(epsilon=1.0, delta=1e-5, data_norm=1.0, classes=(0, 1)).fit(np.eye(2), [0, 1])
        assert model.predict(np.eye(2)).shape == (2,)
    """,
    "federated": """
        from flwr.serverapp import GaussianPrivacyEvent, NeighboringRelation, PrivacyConfig, SamplingMethod
        from sordino.federated.flower import CertifiedAccountant
        config = PrivacyConfig(
            target_delta=1e-5,
            population_size=1000,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=SamplingMethod.POISSON,
        )
        accountant = CertifiedAccountant(config)
        accountant.compose(GaussianPrivacyEvent(noise_multiplier=1.1, sample_size=50, population_size=1000), 100)
        assert 1 < accountant.get_epsilon(1e-5) < 3
    """,
    "huggingface": "page('huggingface.md')\npage('accelerate.md')",
    "images": """
        import io, lzma, struct
        from pathlib import Path
        from PIL import Image
        from sordino.data.readers import read_cifar_jpeg
        buffer = io.BytesIO()
        Image.new("RGB", (32, 32), (200, 100, 50)).save(buffer, "JPEG")
        image = buffer.getvalue()
        records = b"".join(struct.pack("<BBH", split, 3, len(image)) + image for split in (0, 1))
        Path("x.xz").write_bytes(lzma.compress(records))
        train, test = read_cifar_jpeg((Path("x.xz"),))
        assert train.features.shape == (1, 3, 32, 32)
    """,
    "ledger": """
        from sordino.events import Gaussian
        from sordino.ledger import Ledger
        account = Ledger("privacy.db").declare("adult", epsilon=3.0, delta=1e-5)
        account.charge(Gaussian(noise_multiplier=10.0), note="a noisy sum")
        assert 0 < account.spent().epsilon < 3
    """,
    "lightning": "page('lightning.md')",
    "onnx": """
        import json, numpy as np, torch
        from sordino import RunFolder, load_model
        from sordino.data import DatasetSplits, NumericColumn, Records, Schema
        from sordino.recipes import TABULAR_METHODS
        from sordino.recipes.onnx_export import export_onnx
        from sordino.recipes.saved_model import describe_estimator
        from sordino.recipes.tabular import make_tabular_task
        schema = Schema(columns=(NumericColumn(name="a", low=0, high=1),), target="y", labels=("n", "p"))
        features = np.linspace(-1, 1, 100, dtype=np.float32)[:, None]
        records = Records(features, (features[:, 0] > 0).astype(np.int64))
        kinds = {"labels": schema.labels, "schema": schema, "public": False, "source": "", "license": ""}
        splits = DatasetSplits(name="made", train=records, test=None, **kinds)
        fitted = TABULAR_METHODS["objective"].fit(make_tabular_task(splits), epsilon=20.0, delta=1e-5)
        run = RunFolder.create("run", plan="{}")
        run.save_model({k: torch.from_numpy(np.array(v)) for k, v in fitted.estimator.learned_arrays().items()})
        run.close()
        run.write_model_description(describe_estimator(splits, fitted))
        assert "label" in export_onnx(load_model("run"), "model.onnx")
    """,
    "postgres": """
        import psycopg
        from sordino.errors import SordinoError
        from sordino.ledger import Account
        try:
            Account(url="postgresql+psycopg://nobody@127.0.0.1:1/none", name="a").remaining()
        except SordinoError as error:  # the driver is there, the server is not
            assert "Install" not in str(error), error
    """,
    "recipes": """
        import peft, types
        from sordino.recipes import RECIPES
        from sordino.recipes.text_recipes import MiniLMLayers, word_pieces
        assert RECIPES and MiniLMLayers((1,)).width == 384
        (ids,) = word_pieces()(types.SimpleNamespace(texts=["a small text"]))
        assert len(ids) == 3
    """,
    "report": """
        from sordino.report import write_report
        written = write_report(sordino.RunFolder.open("run"))
        assert "differential" in written.page.read_text()
        assert written.picture.read_bytes().startswith(b"\\x89PNG")
    """,
    "tables": """
        import pyarrow as pa, pyarrow.parquet as pq
        pq.write_table(pa.table({"a": [1.0, 2.0], "y": ["n", "p"]}), "t.parquet")
        from sordino import data
        schema = data.Schema(columns=(data.NumericColumn(name="a", low=0, high=3),), target="y", labels=("n", "p"))
        assert len(data.load_dataset("t.parquet", schema=schema).train) == 2
    """,
    "numba": "from sordino.mechanisms import compiled_noise; assert compiled_noise.equals_its_source()",
    "triton": "import triton, sordino.mechanisms.device_noise_kernel",
    "verify": """
        found = {item.name: item.status for item in sordino.verify("run").items}
        assert found["second accountant"] == "pass", found
    """,
}
# What a use needs beforehand: a run of the core, pages of the wheel.
TRAINS_FIRST = {"report", "verify"}
PAGES = f"""
import runpy, sys
def page(name):
    sys.argv = ["run_page", name]
    runpy.run_path({str(Path(__file__).with_name("run_page.py"))!r}, run_name="__main__")
"""


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


def installed(extras, core, dist, folder):
    """An environment with extras of the wheel; the core installation lies below, so that torch is unpacked once."""
    interpreter, environment = clean_environment(folder / "venv")
    below = next((core[2] / "venv/lib").glob("python*/site-packages"))
    (next((folder / "venv/lib").glob("python*/site-packages")) / "core.pth").write_text(f"{below}\n")
    install = ["-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", wheel_of(dist)]
    python(interpreter, environment, folder, *install)
    wheel = f"sordino[{extras}] @ {wheel_of(dist).as_uri()}"
    python(interpreter, environment, folder, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
    return interpreter, environment


@pytest.mark.slow
@pytest.mark.parametrize("extra", sorted(SMOKE))
def test_an_extra_brings_what_it_needs(extra, core, dist, tmp_path):
    interpreter, environment = installed(extra, core, dist, tmp_path)
    first = CORE if extra in TRAINS_FIRST else ""
    python(interpreter, environment, tmp_path, "-c", first + PAGES + textwrap.dedent(SMOKE[extra]))


WITH_CODE = sorted(
    path.name
    for path in (ROOT / "docs").glob("*.md")
    if re.search(r"^```python$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
)
# Pages whose commands are meant to be typed one after the other; elsewhere they name runs of the reader's.
WITH_COMMANDS = {"command-line.md", "ledger.md", "quickstart.md", "recipes.md"}


@pytest.fixture(scope="module")
def complete(core, dist, tmp_path_factory):
    """An environment with the extras that pages use, and nothing of the repository."""
    return installed("all,huggingface,images,lightning,onnx,verify", core, dist, tmp_path_factory.mktemp("complete"))


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({*WITH_CODE, *WITH_COMMANDS}))
def test_a_page_of_the_wheel_runs_from_top_to_bottom(page, complete, tmp_path):
    interpreter, environment = complete
    commands = ["--commands"] if page in WITH_COMMANDS else []
    python(interpreter, environment, tmp_path, Path(__file__).with_name("run_page.py"), page, *commands)
