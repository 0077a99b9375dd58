import subprocess
import sys

import pytest

import sordino


def test_importing_sordino_imports_neither_torch_nor_numpy():
    code = "import sys, sordino; assert not {'torch', 'numpy', 'scipy'} & set(sys.modules), sordino"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", sordino.__all__)
def test_every_public_name_can_be_reached_and_is_listed(name):
    assert getattr(sordino, name) is not None
    assert name in dir(sordino)


def test_public_names_are_sorted_few_and_unique():
    assert list(sordino.__all__) == sorted(set(sordino.__all__))
    assert len(sordino.__all__) <= 30


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'privacy_engine'"):
        sordino.privacy_engine  # noqa: B018
