"""The house rules that a linter doesn't know: names, laziness, doctests, clean text."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import is_typeddict

import pytest

import sordino
from sordino.errors import SordinoError

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "sordino"
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = sorted(
    {"sordino", *(info.name for info in pkgutil.walk_packages(sordino.__path__, "sordino."))} - {"sordino.__main__"}
)


def identity(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", FILES, ids=identity)
def test_names_say_what_a_thing_is(path):
    words = re.findall(r"[A-Z][a-z]+|[a-z]+", path.stem)
    classes = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    assert not {"utils", "util", "helpers", "misc", "common"} & {word.lower() for word in words}
    assert not [name for name in classes if re.search(r"Manager|Helper|Util", name)]


@pytest.mark.parametrize("path", FILES, ids=identity)
def test_every_file_says_what_lives_in_it(path):
    assert ast.get_docstring(ast.parse(path.read_text())), "a module starts with a docstring"


def imported(name):
    """The module; one whose optional library is not installed says so, and is left out."""
    try:
        return importlib.import_module(name)
    except SordinoError as error:
        if "Install" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("name", MODULES)
def test_public_names_exist_and_are_sorted(name):
    module = imported(name)
    public = getattr(module, "__all__", None)
    if public is not None:
        assert list(public) == sorted(set(public))
        for item in public:
            assert hasattr(module, item)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    result = doctest.testmod(imported(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_the_package_offers_at_most_thirty_names():
    assert 0 < len(sordino.__all__) <= 30


@pytest.mark.parametrize(
    "statement",
    [
        "import sordino",
        "import sordino.accounting",
        "import sordino.cli",
        "import sordino.data",
        "import sordino.mechanisms",
    ],
)
def test_light_imports_leave_torch_alone(statement):
    code = f"{statement}; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_module_draws_randomness_elsewhere():
    # Noise and sampling come from sordino.randomness alone, synthetic records from fixed generators.
    forbidden = re.compile(
        r"torch\.(randn|rand|normal|bernoulli|randperm|poisson)\b|np\.random|numpy\.random|\brandom\.(random|gauss)"
    )
    allowed = {
        "audit/conformance/gradient_cases.py",  # two cases of models that draw
        "gradients/capture.py",
        "recipes/network_recipes.py",  # which crop is taken; torch's generator, so that the probe can hold it
        "training/generators.py",  # puts secret states in place of the global generators'
        "training/probing/snapshots.py",
        "training/probing/probe_runner.py",  # random projections of gradients of synthetic records
        "training/probing/synthetic.py",
        "training/collation.py",
    }
    found = {identity(path) for path in FILES if forbidden.search(path.read_text())}
    assert found <= allowed


def test_no_path_of_a_machine_and_no_unfinished_mark_is_in_the_tree():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    text_files = [ROOT / name for name in listed if Path(name).suffix in {".py", ".md", ".toml", ".cff", ".yml", ""}]
    forbidden = re.compile(r"(^|[^a-z.])/(work|farm|root)/" + "|TODO" + "|FIX" + "ME")
    found = []
    for path in text_files:
        if path == Path(__file__) or not path.is_file():
            continue
        text = path.read_text(errors="ignore")
        if forbidden.search(text):
            found.append(path.name)
    assert not found


def documented(text):
    """Names under `Args:` of a docstring."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", f"{inspect.cleandoc(text)}\n", re.MULTILINE)
    names = re.findall(r"^    \*{0,2}(\w[\w, *]*):", section[1], re.MULTILINE) if section else []
    return {name.strip(" *") for line in names for name in re.split(", | and ", line)}


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_name_the_parameters_that_exist(name):
    module = imported(name)
    own = [item for item in vars(module).values() if getattr(item, "__module__", None) == name]
    own += [method for item in own if isinstance(item, type) for method in vars(item).values()]
    for item in own:
        if (inspect.isfunction(item) or isinstance(item, type)) and (names := documented(item.__doc__ or "")):
            fields = set(getattr(item, "__annotations__", ()))
            taken = fields if is_typeddict(item) else fields | set(inspect.signature(item).parameters)
            assert names <= taken, (item.__qualname__, names - taken)


def test_advice_names_methods_that_engines_have():
    pages = [*FILES, *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    for path in pages:
        for name in re.findall(r"\bengine\.([a-z_]+)\(", path.read_text()):
            assert hasattr(sordino.PrivacyEngine, name), (path.name, name)


def test_the_nightly_list_names_tests_that_exist():
    listed = [line for line in (ROOT / "tests" / "nightly.txt").read_text().splitlines() if line and line[0] != "#"]
    assert len(listed) == len(set(listed))
    for line in listed:
        path, function = line.partition("[")[0].split("::")
        assert re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.M), line
