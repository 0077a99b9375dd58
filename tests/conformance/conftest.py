import pytest

from conformance.adapter import Sordino


@pytest.fixture
def library():
    return Sordino()
