"""Other libraries write under the working directory when they are given no other."""

import pytest


@pytest.fixture(autouse=True)
def _own_working_directory(tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))
