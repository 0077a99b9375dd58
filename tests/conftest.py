"""Shapes and types in the signatures of gradients, clipping and mechanisms are checked by their own tests.

The checks cost more than the functions: whole trainings (integrations, recipes, the command line, ...) run without.
Property tests have no deadline: how long an example takes says how busy the machine is.
"""

from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import config, install_import_hook

install_import_hook(["sordino.gradients", "sordino.clipping", "sordino.mechanisms"], "typechecking.check")
settings.register_profile("sordino", deadline=None)
settings.load_profile("sordino")

_CHECKED = {"gradients", "clipping", "mechanisms", "sabotage"}
_NIGHTLY = Path(__file__).parent / "nightly.txt"


def nightly_tests():
    """The tests that only `./run test --slow` runs, besides those marked in their files: node ids from nightly.txt."""
    lines = (line.strip() for line in _NIGHTLY.read_text(encoding="utf-8").splitlines())
    return {line for line in lines if line and not line.startswith("#")}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    nightly = nightly_tests()
    if unstable := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(
            f"These tests are named by addresses, other ones in each process: give their parameters ids. {unstable}"
        )
    for item in items:
        name = f"tests/{Path(item.path).relative_to(_NIGHTLY.parent).as_posix()}::{item.name}"
        if name in nightly or name.partition("[")[0] in nightly:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def _start_without_shape_checks():
    config.update("jaxtyping_disable", True)


@pytest.fixture(autouse=True)
def _shape_checks_where_they_are_tested(request):
    folder = Path(request.path).relative_to(Path(__file__).parent).parts[0]
    config.update("jaxtyping_disable", folder not in _CHECKED)
    yield
    config.update("jaxtyping_disable", True)
