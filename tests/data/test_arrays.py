import gzip
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sordino.data import ArraySchema, NumericColumn, Schema, load_dataset
from sordino.data.arrays import read_idx, to_images
from sordino.errors import InvalidArgument, MissingDeclaration

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx_bytes(array):
    code = CODES[array.dtype.str[1:]]
    return (
        struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape)
        + array.astype(array.dtype.newbyteorder(">")).tobytes()
    )


def test_a_hand_made_idx_file_is_read(tmp_path):
    # Written out byte by byte: two rows of three unsigned bytes.
    path = tmp_path / "a.idx"
    path.write_bytes(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 253, 254, 255]))
    assert read_idx(path).tolist() == [[1, 2, 3], [253, 254, 255]]
    # One row of two 32-bit integers, most significant byte first.
    path.write_bytes(bytes([0, 0, 0x0C, 1, 0, 0, 0, 2, 0, 0, 1, 0, 255, 255, 255, 255]))
    assert read_idx(path).tolist() == [256, -1]


arrays = st.sampled_from(list(CODES)).flatmap(
    lambda kind: hnp.arrays(kind, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
)


@given(array=arrays, zipped=st.booleans())
def test_every_idx_type_and_shape_is_read(tmp_path_factory, array, zipped):
    path = tmp_path_factory.getbasetemp() / "any.idx"
    path.write_bytes(gzip.compress(idx_bytes(array), 1, mtime=0) if zipped else idx_bytes(array))
    found = read_idx(path)
    assert found.dtype.isnative
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0\x08",
        b"\0\0\x08\x01\0\0\0\x05abc",
        b"\0\0\x08\x01\0\0\0\x02abc",
        b"\0\0\x07\x01\0\0\0\x01a",
        b"\0\0\x08\0a",
        b"\x01\0\x08\x01\0\0\0\x01a",
        b"\x1f\x8b\x08broken",
        gzip.compress(b"\0\0\x08\x01\0\0\0\x03abc", mtime=0)[:-9],
    ],
)
def test_a_damaged_idx_file_is_refused(tmp_path, content):
    path = tmp_path / "bad-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match="readable array file"):
        read_idx(path)


def test_a_missing_array_file_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="no such file"):
        read_idx(tmp_path / "none.idx")


def test_bytes_are_scaled_to_the_unit_interval():
    images = to_images(np.array([[[0, 255], [51, 102]]], dtype=np.uint8))
    assert images.shape == (1, 1, 2, 2)
    np.testing.assert_allclose(images.ravel(), [0, 1, 0.2, 0.4], rtol=1e-6)


def test_numbers_outside_the_declared_range_are_clipped_and_nan_is_the_middle():
    values = np.array([[-5.0, -1.0, 0.0, 3.0, 9.0, np.nan, np.inf, -np.inf]])
    np.testing.assert_allclose(to_images(values, low=-1, high=3)[0], [0, 0, 0.25, 1, 1, 0.5, 1, 0], rtol=1e-6)


def test_a_pair_of_idx_files_is_a_data_set(tmp_path):
    (tmp_path / "my-images-idx3-ubyte").write_bytes(idx_bytes(np.arange(12, dtype=np.uint8).reshape(3, 2, 2)))
    (tmp_path / "my-labels-idx1-ubyte").write_bytes(idx_bytes(np.array([1, 0, 9], dtype=np.uint8)))
    found = load_dataset(tmp_path / "my-images-idx3-ubyte", schema=ArraySchema(labels=("no", "yes")))
    assert found.train.features.shape == (2, 1, 2, 2)
    assert found.train.labels.tolist() == [1, 0]
    assert not found.public


def test_images_without_a_label_file_are_refused(tmp_path):
    (tmp_path / "my-images-idx3-ubyte").write_bytes(idx_bytes(np.zeros((1, 2, 2), dtype=np.uint8)))
    with pytest.raises(InvalidArgument, match="my-labels-idx1-ubyte"):
        load_dataset(tmp_path / "my-images-idx3-ubyte", schema=ArraySchema(labels=("no", "yes")))
    (tmp_path / "pictures.idx").write_bytes(idx_bytes(np.zeros((1, 2, 2), dtype=np.uint8)))
    with pytest.raises(MissingDeclaration, match="labels"):
        load_dataset(tmp_path / "pictures.idx", schema=ArraySchema(labels=("no", "yes")))


def saved(folder, **arrays):
    np.savez(folder / "a.npz", **arrays)
    return folder / "a.npz"


def test_an_npz_file_needs_a_declared_range_and_labels(tmp_path):
    path = saved(tmp_path, x=np.array([[0.0, 4.0], [np.nan, 8.0]]), y=np.array([0, 1]))
    with pytest.raises(MissingDeclaration, match="range of the numbers and the labels"):
        load_dataset(path)
    found = load_dataset(path, schema=ArraySchema(labels=("a", "b"), low=0, high=4))
    assert found.train.features.tolist() == [[0, 1], [0.5, 1]]
    (tmp_path / "s.json").write_text('{"array": {"low": 0, "high": 4}, "labels": ["a", "b"]}')
    assert load_dataset(path, schema=tmp_path / "s.json").train.features.tolist() == found.train.features.tolist()


def test_a_public_npz_sample_gives_range_and_labels(tmp_path):
    path = saved(tmp_path, x=np.array([[0.0, 4.0], [2.0, 8.0]]), y=np.array([0, 5]))
    np.savez(tmp_path / "sample.npz", features=np.array([[0.0, 4.0]]), labels=np.array([1]))
    found = load_dataset(path, public_schema_from=tmp_path / "sample.npz")
    assert found.train.features.tolist() == [[0, 1]]
    assert found.labels == ("0", "1")


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": np.zeros((2, 2))},
        {"y": np.zeros(2, dtype=int)},
        {"x": np.zeros((2, 2)), "images": np.zeros((2, 2)), "y": np.zeros(2, dtype=int)},
        {"x": np.zeros((2, 2)), "y": np.zeros(3, dtype=int)},
        {"x": np.zeros(2), "y": np.zeros(2, dtype=int)},
        {"x": np.zeros((2, 2)), "y": np.zeros(2, dtype=complex)},
        {"x": np.zeros((2, 2), dtype=complex), "y": np.zeros(2, dtype=int)},
        {"x": np.array([["a"], ["b"]], dtype=object), "y": np.zeros(2, dtype=int)},
    ],
)
def test_an_npz_file_of_another_form_is_refused(tmp_path, arrays):
    with pytest.raises(InvalidArgument, match=r"a\.npz"):
        load_dataset(saved(tmp_path, **arrays), schema=ArraySchema(labels=("a", "b")))


def test_the_kind_of_schema_must_fit_the_kind_of_file(tmp_path):
    table = Schema(columns=(NumericColumn(name="age", low=0, high=1),), target="y", labels=("a", "b"))
    with pytest.raises(InvalidArgument, match="array file"):
        load_dataset(saved(tmp_path, x=np.zeros((1, 1)), y=np.zeros(1, dtype=int)), schema=table)
    with pytest.raises(InvalidArgument, match="columns of a table"):
        load_dataset(tmp_path / "a.csv", schema=ArraySchema(labels=("a", "b")))


def test_a_single_array_is_no_npz_file(tmp_path):
    with (tmp_path / "a.npz").open("wb") as file:
        np.save(file, np.zeros((2, 2)))
    with pytest.raises(InvalidArgument, match="readable array file"):
        load_dataset(tmp_path / "a.npz", schema=ArraySchema(labels=("a", "b")))
