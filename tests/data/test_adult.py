"""Adult is embedded, so these run everywhere."""

import sys
from subprocess import run

import numpy as np
import pytest

import sordino.data as data
from sordino.data.schema import CategoricalColumn


@pytest.fixture(scope="module")
def adult():
    return data.load_dataset("adult")


def test_adult_has_the_published_sizes(adult):
    assert (len(adult.train), len(adult.test)) == (30162, 15060)
    assert adult.train.features.shape == (30162, adult.schema.width())
    assert adult.train.features.dtype == np.float32
    assert adult.train.labels.dtype == np.int64


def test_adult_has_the_published_share_of_large_incomes(adult):
    # adult.names: 24.78 % of the rows without unknowns over both files; 24.89 % (7508) of the 30162 train rows.
    assert int(adult.train.labels.sum()) == 7508
    both = np.concatenate([adult.train.labels, adult.test.labels])
    assert round(100 * both.mean(), 2) == 24.78


def test_every_adult_value_is_in_the_declared_codebook(adult):
    start = 0
    for column in adult.schema.columns:
        block = np.concatenate([part.features[:, start : start + column.width] for part in (adult.train, adult.test)])
        start += column.width
        if isinstance(column, CategoricalColumn):
            assert np.array_equal(block.sum(axis=1), np.ones(len(block)))
    assert start == adult.schema.width() == len(adult.schema.feature_names)


def test_adult_numbers_use_their_declared_range(adult):
    age = adult.train.features[:, adult.schema.feature_names.index("age")]
    assert (age.min(), age.max()) == (-1.0, 1.0)
    assert np.abs(adult.train.features).max() == 1.0


def test_adult_names_its_license_and_is_public(adult):
    assert adult.public
    assert adult.license == "CC BY 4.0"
    assert "Becker and Kohavi" in adult.source


def test_the_first_embedded_record_is_the_first_of_the_raw_file(adult):
    names = adult.schema.feature_names
    row = dict(zip(names, adult.train.features[0].tolist(), strict=True))
    assert row["workclass=State-gov"] == row["education=Bachelors"] == row["sex=Male"] == 1.0
    assert row["age"] == pytest.approx((39 - 53.5) / 36.5, rel=1e-6)
    assert row["capital-gain"] == pytest.approx(2174 / 10000 - 1, rel=1e-6)


def test_records_become_tensors_that_share_memory(adult):
    features, labels = adult.train.tensors()
    assert tuple(features.shape) == adult.train.features.shape
    assert features.data_ptr() == adult.train.features.ctypes.data
    assert labels.data_ptr() == adult.train.labels.ctypes.data


def test_importing_the_data_room_imports_neither_torch_nor_pyarrow():
    code = "import sys, sordino.data; sys.exit(bool({'torch', 'pyarrow', 'rich'} & set(sys.modules)))"
    assert run([sys.executable, "-c", code], check=False).returncode == 0
