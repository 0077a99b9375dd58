"""What a core installation can do, what asks for an extra, and how much an import opens."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sordino.errors import SordinoError
from sordino.installation import cache_folder, is_installed, lazy_names, require

ROOT = Path(__file__).parents[1]
OPTIONAL = [
    *("accelerate", "dp_accounting", "flwr", "jaxtyping", "jinja2", "lightning", "matplotlib", "numba", "PIL"),
    *(
        "platformdirs",
        "psycopg",
        "pyarrow",
        "pydantic",
        "pytorch_lightning",
        "rich",
        "sklearn",
        "sqlalchemy",
        "transformers",
        "triton",
    ),
    *("typer", "yaml"),
]


def without(libraries):
    return f"""
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {libraries!r} else super().find_spec(name, path, target)
sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
from pathlib import Path
from sordino.errors import SordinoError
def message(use):
    try:
        use()
    except SordinoError as error:
        return str(error)
    raise AssertionError("nothing was missing")
"""


def run(code, tmp_path, libraries=OPTIONAL):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", without(libraries) + code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


CORE = """
import torch
import sordino, sordino.research, sordino.federated, sordino.audit, sordino.audit.attacks, sordino.mechanisms
import sordino.training.engine, sordino.training.compiled_step, sordino.training.sharded, sordino.transfer
import sordino.ledger, sordino.runs, sordino.data, sordino.verification, sordino.tuning, sordino.recipes
from sordino.gradients import KernelTimings
from sordino.recipes import logistic
KernelTimings()
def loss(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y, reduction="none")
records = torch.randn(40, 3), torch.randint(2, (40,))
plan = sordino.Plan.for_epsilon(
    target_epsilon=2.0, delta=1e-5, sample_rate=0.5, steps=2, max_grad_norm=1.0, expected_batch_size=20.0
)
with sordino.RunFolder.create(Path("run"), plan=plan.to_json()) as folder:
    result = sordino.fit(torch.nn.Linear(3, 2), loss, records, plan, diagnostics="private", run_folder=folder)
assert result.guarantee.epsilon <= 2.0
assert sordino.verify(Path("run")).passed
model = torch.nn.Linear(3, 2)
engine = sordino.PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*records), batch_size=20),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
for x, y in loader:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
assert 0 < engine.get_epsilon(1e-5) < 20
"""


def test_a_core_installation_trains_accounts_and_verifies(tmp_path):
    done = run(CORE, tmp_path)
    assert "private" in done.stderr  # the warning and the numbers of diagnostics, without rich


MISSING = {
    "cli": ("import sordino.cli", "rich"),
    "cli by main": ("import sordino.__main__", "rich"),
    "estimators": ("import sordino.estimators", "sklearn"),
    "estimators by name": ("import sordino; sordino.estimators", "sklearn"),
    "estimators of recipes": ("import sordino.recipes.tabular", "sklearn"),
    "estimators of a search": ("from sordino.tuning import PrivateRandomSearch", "sklearn"),
    "estimators of a description": ("import sordino; sordino.describe", "sklearn"),
    "estimators of synthetic tables": ("from sordino.synthesis import TableSynthesizer", "sklearn"),
    "estimators of an attack": (
        "from sordino.audit.attacks import quantile_scores; "
        "quantile_scores([[0.0]], [0.0], population_features=[[0.0]] * 99, population_confidences=[0.0] * 99)",
        "sklearn",
    ),
    "ledger": ("from sordino.ledger import Ledger; Ledger('x.db')", "sqlalchemy"),
    "ledger account": (
        "from sordino.ledger import Account; Account(url='sqlite:///x.db', name='a').remaining()",
        "sqlalchemy",
    ),
    "report": ("import sordino.report", "jinja2"),
    "report of a picture": (
        "from sordino.audit.attacks import plot_roc; plot_roc(None, Path('x.png'))",
        "matplotlib",
    ),
    "estimators of an encoder": ("from sordino.data import SchemaEncoder", "sklearn"),
    "huggingface": ("import sordino.integrations.huggingface", "transformers"),
    "huggingface by accelerate": ("import sordino.integrations.accelerate", "accelerate"),
    "federated": ("import sordino.federated.flower", "Flower"),
    "lightning": ("import sordino.integrations.lightning", "lightning"),
    "images": (
        "from sordino.data.readers import read_cifar_jpeg; read_cifar_jpeg((Path('x'),))",
        "pillow",
    ),
    "verify": (
        "from sordino.events import Gaussian; from sordino.verification.verifier import dp_accounting_epsilon; "
        "dp_accounting_epsilon(Gaussian(noise_multiplier=1.0), 1e-5, neighboring_relation=None, compositions=1)",
        "dp_accounting",
    ),
    "verify by events": (
        "from sordino.events import Gaussian; from sordino.accounting import to_dp_event; "
        "to_dp_event(Gaussian(noise_multiplier=1.0))",
        "dp_accounting",
    ),
    "numba": ("import sordino.mechanisms.compiled_noise", "numba"),
    "triton": ("import sordino.mechanisms.device_noise_kernel", "triton"),
    "tables": ("from sordino.data import load_dataset; load_dataset('adult')", "pyarrow"),
    "tables of a file": (
        "from sordino.data.tables import read_header; Path('x.csv').write_text('a,b\\n1,2\\n'); "
        "read_header(Path('x.csv'))",
        "pyarrow",
    ),
}
# What stands on another extra: that one is there.
MISSING_BESIDE = {
    "onnx": ("from sordino.recipes.onnx_export import export_onnx; export_onnx(None, 'x.onnx')", "onnxruntime"),
    "postgres": (
        "from sordino.ledger import Account; Account(url='postgresql+psycopg://localhost:9/x', name='a').remaining()",
        "psycopg",
    ),
    "recipes": (
        "from sordino.recipes.transfer_recipes import packaged_weights_folder; "
        "packaged_weights_folder(('tokenizers',), recipe='minilm')",
        "tokenizers",
    ),
}


@pytest.mark.parametrize(
    ("cases", "libraries"),
    [(MISSING, OPTIONAL), (MISSING_BESIDE, ["onnx", "onnxruntime", "psycopg", "tokenizers"])],
    ids=["nothing else", "the rest"],
)
def test_what_needs_an_extra_says_which(cases, libraries, tmp_path):
    # One process for all: each use is a function, and what it raises names library and extra.
    code = "".join(
        f"\ndef use():\n    {use}\nwords = message(use)\n"
        f"assert '{library}' in words and 'Install sordino[{case.split()[0]}].' in words, ({case!r}, words)\n"
        for case, (use, library) in cases.items()
    )
    run(code, tmp_path, libraries)


def test_the_message_of_every_extra_for_users_is_tried():
    tried = {case.split()[0] for case in MISSING | MISSING_BESIDE}
    assert tried == set(extras()) - {"all", "bench", "docs", "test"}
    table = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
    assert [name for name in tried if f"`{name}`" not in table] == []


def extras():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_core_needs_five_libraries_and_what_run_sets_up_holds_all():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [item.partition(">")[0] for item in project["dependencies"]]
    assert names == ["cryptography", "numpy", "safetensors", "scipy", "torch"]
    script = (ROOT / "run").read_text()
    for line in script.splitlines():
        if line.strip().startswith("setup "):
            extra = line.split()[1]
            assert extra == "all" or extras()[extra][0].startswith("sordino[all"), line


def test_a_missing_library_is_named_with_its_extra_and_a_present_one_is_not_loaded(tmp_path):
    with pytest.raises(SordinoError, match=r"a ledger must find no_such_library, got none. Install sordino\[ledger\]."):
        require("ledger", "json", "no_such_library", user="a ledger")
    assert not is_installed("no_such_library.below")
    code = (
        "import sys; from sordino.installation import is_installed; assert is_installed('colorsys'); "
        "assert 'colorsys' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_cache_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "sordino"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Path.home() in cache_folder().parents


@pytest.mark.parametrize(
    "package",
    [
        *("sordino", "sordino.accounting", "sordino.audit", "sordino.data", "sordino.estimators", "sordino.mechanisms"),
        *("sordino.recipes", "sordino.report", "sordino.training", "sordino.tuning"),
    ],
)
def test_lazy_names_are_those_that_the_package_lists(package):
    module = __import__(package, fromlist=["*"])
    find, names = lazy_names(package)
    for name in module.__all__:
        if not name.startswith("__"):
            assert find(name) is getattr(module, name)
    assert set(module.__all__) <= set(names())
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        find("nothing")


@pytest.mark.parametrize(("module", "most"), [("sordino.training.step", 60), ("sordino.training.engine", 100)])
def test_an_import_opens_few_modules(module, most):
    code = f"import sys, {module}; print(sum(name.partition('.')[0] == 'sordino' for name in sys.modules))"
    opened = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert 0 < opened <= most


@pytest.mark.parametrize(
    "words",
    ["account --sample-rate 0.01 --noise-multiplier 4 --steps 10 --delta 1e-5", "explain samplers", "runs list"],
)
def test_the_command_line_alone_needs_no_other_extra(words, tmp_path):
    # typer brings rich and pydantic along.
    with_cli = without([library for library in OPTIONAL if library not in ("rich", "typer", "pydantic")])
    code = f"sys.argv = 'sordino {words}'.split()\nfrom sordino.cli import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", with_cli + code], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
