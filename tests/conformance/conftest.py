import pytest

from conformance_adapter import Sordino

# What is clipped and added up is another code with secure noise; what is drawn and charged is the same.
_IN_BOTH_MODES = {"test_clipping_choices", "test_exactness", "test_sensitivity"}


def pytest_generate_tests(metafunc):
    if "library" in metafunc.fixturenames:
        both = metafunc.module.__name__.rpartition(".")[2] in _IN_BOTH_MODES
        metafunc.parametrize("library", ["floats", "secure"] if both else ["floats"], indirect=True)


@pytest.fixture
def library(request):
    return Sordino(secure_mode=request.param == "secure")
