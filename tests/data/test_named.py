"""The named sets: readers on hand-made files, and the real sets where they are present."""

import io
import json
import lzma
import tarfile

import numpy as np
import pytest
from PIL import Image

from sordino.data import hashed_features, list_datasets, load_dataset
from sordino.data.readers import read_cifar_binary, read_cifar_jpeg, read_imdb
from sordino.data.schema import fixed_order
from sordino.errors import DataUnavailable, InvalidArgument

PRESENT = {info.name: info.present for info in list_datasets()}


def needs(name):
    return pytest.mark.skipif(not PRESENT[name], reason=f"{name} is not on this machine: set SORDINO_DATA")


@pytest.mark.parametrize(
    ("name", "mean", "deviation"),
    [
        # The means and deviations that practitioners normalize these sets with.
        pytest.param("mnist", [0.1307], [0.3081], marks=needs("mnist")),
        pytest.param("fashion-mnist", [0.2860], [0.3530], marks=needs("fashion-mnist")),
        pytest.param(
            "cifar10",
            [0.4914, 0.4822, 0.4465],
            [0.2470, 0.2435, 0.2616],
            marks=[needs("cifar10"), pytest.mark.slow],
        ),
    ],
)
def test_a_named_image_set_has_its_published_shape_and_statistics(name, mean, deviation):
    info = {info.name: info for info in list_datasets()}[name]
    found = load_dataset(name)
    assert found.public
    for part, shape in ((found.train, info.train_shape), (found.test, info.test_shape)):
        assert part.features.shape == shape
        assert (part.features.min(), part.features.max()) == (0, 1)
        counts = np.bincount(part.labels, minlength=10)
        assert len(counts) == 10 == len(found.labels)
        if name != "mnist":
            assert counts.tolist() == [shape[0] // 10] * 10
    # The JPEG copy of CIFAR-10 is lossy: its statistics agree to two digits only.
    tolerance = 5e-3 if "JPEG" in found.name else 1e-4
    np.testing.assert_allclose(found.train.features.mean((0, 2, 3), dtype=np.float64), mean, atol=tolerance)
    np.testing.assert_allclose(found.train.features.std((0, 2, 3), dtype=np.float64), deviation, atol=tolerance)


@needs("mnist")
def test_mnist_has_its_published_class_counts():
    found = load_dataset("mnist")
    assert np.bincount(found.test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.mark.slow
@needs("imdb")
def test_imdb_is_balanced_and_its_features_say_something():
    found = load_dataset("imdb", keep_texts=True)
    assert found.train.features.shape == found.test.features.shape == (25000, 4096)
    for part in (found.train, found.test):
        assert np.bincount(part.labels).tolist() == [12500, 12500]
        assert part.texts is not None
        np.testing.assert_allclose(np.linalg.norm(part.features, axis=1), 1, rtol=1e-5)
    # The difference of the class means is a linear classifier: far better than chance, on the test reviews.
    center = found.train.features.mean(axis=0)
    direction = found.train.features[found.train.labels == 1].mean(axis=0) - center
    guess = (found.test.features - center) @ direction > 0
    assert (guess == found.test.labels).mean() > 0.75


def tar_gz(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def cifar_rows(rng, count):
    rows = rng.integers(0, 256, size=(count, 3073), dtype=np.uint8)
    rows[:, 0] %= 10
    return rows


def test_the_binary_archive_of_cifar_is_read(tmp_path):
    rng = np.random.default_rng(0)
    batches = {f"cifar-10-batches-bin/data_batch_{i}.bin": cifar_rows(rng, i) for i in range(1, 6)}
    batches["cifar-10-batches-bin/test_batch.bin"] = cifar_rows(rng, 2)
    path = tar_gz(tmp_path / "cifar-10-binary.tar.gz", {name: rows.tobytes() for name, rows in batches.items()})
    train, test = read_cifar_binary((path,))
    assert train.features.shape == (15, 3, 32, 32)
    assert test.features.shape == (2, 3, 32, 32)
    last = batches["cifar-10-batches-bin/data_batch_5.bin"][-1]
    assert train.labels[-1] == last[0]
    # The archive holds red, then green, then blue, each row by row.
    assert train.features[-1, 1, 2, 3] == np.float32(last[1 + 1024 + 2 * 32 + 3] / 255)


def test_a_damaged_archive_of_cifar_is_refused(tmp_path):
    path = tar_gz(tmp_path / "cifar-10-binary.tar.gz", {"cifar-10-batches-bin/test_batch.bin": b""})
    with pytest.raises(DataUnavailable, match="damaged"):
        read_cifar_binary((path,))
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataUnavailable, match="damaged"):
        read_cifar_binary((path,))


def test_the_jpeg_copy_of_cifar_is_read(tmp_path):
    colors = {3: (255, 0, 0), 7: (0, 0, 255)}
    records = b""
    for split, label in ((0, 3), (0, 7), (1, 3)):
        buffer = io.BytesIO()
        Image.new("RGB", (32, 32), colors[label]).save(buffer, format="JPEG", quality=95)
        records += bytes([split, label]) + len(buffer.getvalue()).to_bytes(2, "little") + buffer.getvalue()
    path = tmp_path / "cifar10_jpeg.bin.xz"
    path.write_bytes(lzma.compress(records))
    train, test = read_cifar_jpeg((path,))
    assert sorted(train.labels.tolist()) == [3, 7]
    for part in (train, test):
        for image, label in zip(part.features, part.labels.tolist(), strict=True):
            np.testing.assert_allclose(image.mean((1, 2)) * 255, colors[label], atol=3)
    path.write_bytes(lzma.compress(records[:-10]))
    with pytest.raises(DataUnavailable, match="damaged"):
        read_cifar_jpeg((path,))


def test_both_forms_of_imdb_give_the_same_records(tmp_path):
    reviews = [
        (split, label, f"{i}_{8 if label else 2}", f"{'good' if label else 'bad'} film number {i} é")
        for split in ("test", "train")
        for label in (1, 0)
        for i in range(4)
    ]
    members = {
        f"aclImdb/{split}/{'pos' if label else 'neg'}/{name}.txt": text.encode() for split, label, name, text in reviews
    }
    members |= {"aclImdb/train/unsup/0_0.txt": b"unlabeled", "aclImdb/README": b"about"}
    archive = tar_gz(tmp_path / "aclImdb_v1.tar.gz", members)
    lines = tmp_path / "imdb.jsonl.xz"
    rows = [json.dumps(dict(zip(("split", "label", "id", "text"), review, strict=True))) for review in reviews]
    lines.write_bytes(lzma.compress("\n".join(rows).encode()))
    for one, other in zip(read_imdb((archive,), keep_texts=True), read_imdb((lines,), keep_texts=True), strict=True):
        assert len(one) == 8
        assert one.texts == other.texts
        assert np.array_equal(one.features, other.features)
        assert np.array_equal(one.labels, other.labels)
        assert all(("good" in text) == bool(label) for text, label in zip(one.texts, one.labels, strict=True))


def test_a_damaged_imdb_file_is_refused(tmp_path):
    path = tmp_path / "imdb.jsonl.xz"
    path.write_bytes(lzma.compress(b'{"split": "train"}'))
    with pytest.raises(DataUnavailable, match="damaged"):
        read_imdb((path,))


def test_a_hashed_text_depends_on_its_words_alone():
    texts = ["A good, GOOD film; don't miss", "miss don't film good a", "something else", "", "?!"]
    features = hashed_features(texts, width=256)
    assert np.array_equal(features[0], features[1])
    assert not np.array_equal(features[0], features[2])
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), [1, 1, 1, 0, 0], rtol=1e-6)
    for i, text in enumerate(texts):
        assert np.array_equal(hashed_features([text], width=256)[0], features[i])


def test_a_hashed_word_has_its_golden_place():
    # The CRC-32 of "film" is 0x8244BE22 (as in the trailer that gzip writes): low twelve bits 0xE22, top bit 1.
    row = hashed_features(["film"])[0]
    assert np.flatnonzero(row).tolist() == [0xE22]
    assert row[0xE22] == 1


def test_a_hashed_width_must_be_an_integer_above_one():
    with pytest.raises(InvalidArgument, match="width"):
        hashed_features(["film"], width=1)


def test_a_set_with_files_of_another_size_is_refused(tmp_path, monkeypatch):
    from sordino.data.catalog import CATALOG

    monkeypatch.setenv("SORDINO_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    for name in CATALOG["mnist"].layouts[0].files:
        rank = 3 if "idx3" in name else 1
        header = bytes([0, 0, 8, rank]) + b"\0\0\0\x01" * rank
        (tmp_path / "mnist" / name.removesuffix(".gz")).write_bytes(header + b"\x05")
    with pytest.raises(DataUnavailable, match="must have the shapes"):
        load_dataset("mnist")


def test_the_fixed_order_is_a_permutation_that_mixes():
    order = fixed_order(1000)
    assert sorted(order.tolist()) == list(range(1000))
    assert np.array_equal(order, fixed_order(1000))
    # Each half holds about half of the indices below 500.
    assert 200 < (order[:500] < 500).sum() < 300
