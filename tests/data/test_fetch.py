"""Fetching, against a server on this machine's loopback address."""

import functools
import gzip
import hashlib
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sordino.data import describe_dataset, download_dataset, list_datasets, load_dataset
from sordino.data.catalog import CATALOG, RemoteFile, dataset_folder, fetch_file, find, matches, unavailable
from sordino.errors import InvalidArgument

CONTENT = bytes(range(256)) * 4000


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass

    def do_GET(self):
        if not self.path.endswith("cut.bin"):
            return super().do_GET()
        # Promises more than it sends, as a broken connection does.
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[:1000])
        return None


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    (root / "good.bin").write_bytes(CONTENT)
    (root / "wrong.bin").write_bytes(CONTENT[:-1] + b"!")
    (root / "good.gz").write_bytes(gzip.compress(CONTENT, 1))
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def direct_connection(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def remote(*urls, name="data.bin", unzipped=False):
    return RemoteFile(name=name, urls=urls, sha256=hashlib.sha256(CONTENT).hexdigest(), unzipped=unzipped)


def test_a_file_with_the_right_checksum_arrives(address, tmp_path):
    assert fetch_file(remote(address + "good.bin"), tmp_path / "new") == []
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["data.bin"]
    assert (tmp_path / "new" / "data.bin").read_bytes() == CONTENT


def test_the_checksum_of_a_gzipped_file_may_be_that_of_its_contents(address, tmp_path):
    file = remote(address + "good.gz", name="data-ubyte.gz", unzipped=True)
    assert fetch_file(file, tmp_path) == []
    assert matches(tmp_path / "data-ubyte.gz", file)
    (tmp_path / "data-ubyte").write_bytes(CONTENT)
    assert matches(tmp_path / "data-ubyte", file)


@pytest.mark.parametrize("served", ["wrong.bin", "cut.bin", "absent.bin"])
def test_a_failed_download_leaves_nothing_behind(address, tmp_path, served):
    problems = fetch_file(remote(address + served), tmp_path)
    assert len(problems) == 1
    assert problems[0].startswith("data.bin from 127.0.0.1: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("served", ["wrong.bin", "cut.bin", "absent.bin"])
def test_a_failed_download_keeps_the_file_that_was_there(address, tmp_path, served):
    (tmp_path / "data.bin").write_bytes(b"earlier")
    fetch_file(remote(address + served), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"data.bin": b"earlier"}


def test_the_next_address_is_tried_after_a_wrong_checksum(address, tmp_path):
    assert fetch_file(remote(address + "wrong.bin", address + "good.bin"), tmp_path) == []
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_only_web_addresses_are_fetched(tmp_path):
    (tmp_path / "local").write_bytes(CONTENT)
    problems = fetch_file(remote((tmp_path / "local").as_uri()), tmp_path / "cache")
    assert "http" in problems[0]
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_reported(address, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert len(fetch_file(remote(address + "good.bin"), tmp_path / "file" / "folder")) == 1


def test_the_offline_refusal_names_files_checksums_and_place():
    for item in CATALOG.values():
        said = str(unavailable(item, ["no network"]))
        assert str(dataset_folder(item.name)) in said
        assert "SORDINO_DATA" in said
        for file in item.files:
            assert file.name in said
            assert file.sha256 in said
            assert file.urls[0] in said


def test_every_checksum_has_the_form_of_one():
    for item in CATALOG.values():
        assert all(len(bytes.fromhex(file.sha256)) == 32 for file in item.files)
        assert all(file.urls for file in item.files)
        if item.files:
            assert item.layouts[0].files == tuple(file.name for file in item.files)


def test_adult_is_always_here():
    assert (download_dataset("adult") / "adult-train.csv.xz").is_file()
    assert list_datasets()[0].present
    assert describe_dataset("adult").schema == load_dataset("adult").schema


def test_an_unknown_name_is_refused():
    for ask in (download_dataset, describe_dataset):
        with pytest.raises(InvalidArgument, match="one of adult, mnist"):
            ask("mnits")


def test_the_declared_folder_comes_before_the_cache(tmp_path, monkeypatch):
    wanted = CATALOG["mnist"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SORDINO_DATA", raising=False)
    assert find(wanted) is None
    for folder in (dataset_folder("mnist"), tmp_path / "data" / "mnist"):
        folder.mkdir(parents=True)
        for name in wanted.layouts[0].files:
            (folder / name.removesuffix(".gz")).write_bytes(b"")
    found = find(wanted)
    assert found is not None
    assert found.origin == "cache"
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path / "data"))
    found = find(wanted)
    assert found is not None
    assert found.origin == "SORDINO_DATA"
    assert [path.parent.name for path in found.files] == ["mnist"] * 4
    assert download_dataset("mnist") == tmp_path / "data" / "mnist"
    (tmp_path / "data" / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    found = find(wanted)
    assert found is not None
    assert found.origin == "cache"


def test_a_lossy_copy_is_listed_under_its_own_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path))
    (tmp_path / "cifar10_jpeg.bin.xz").write_bytes(b"")
    assert describe_dataset("cifar10").info.title == "CIFAR-10 (JPEG)"
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"")
    assert describe_dataset("cifar10").info.title == "CIFAR-10"
    assert all(info.to_dict()["name"] == info.name for info in list_datasets())
    assert describe_dataset("cifar10").to_dict()["files"]
