"""The facts about every named dataset: shapes, labels, license, files, checksums, addresses."""

import gzip
import hashlib
import http.client
import os
import tempfile
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

from sordino.data.readers import FILES
from sordino.errors import DataUnavailable, InvalidArgument
from sordino.installation import cache_folder, is_installed

if TYPE_CHECKING:
    from rich.progress import Progress


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One file to fetch.

    Args:
        name: Its name in the cache.
        urls: Addresses that serve it, tried in order.
        sha256: SHA-256 in hexadecimal; of the contents after gunzip when `unzipped`, so that a copy that was
            compressed again is still recognized.
        unzipped: Whether the checksum is of the contents after gunzip.
    """

    name: str
    urls: tuple[str, ...]
    sha256: str
    unzipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way in which a set lies in a folder.

    Args:
        files: Names of the files, all in the set's own folder or, when `shared`, directly in the root as well.
        title: The name to show for data read from it.
        shared: Whether the file names identify the set without its own folder.
        lossy: Whether the records differ from the authors' own; then the title is the dataset's name.
    """

    files: tuple[str, ...]
    title: str
    shared: bool
    lossy: bool = False


@dataclass(frozen=True, kw_only=True)
class NamedDataset:
    """A named public dataset.

    Args:
        name: The name that `load` takes.
        task: What is predicted from what, in a few words.
        train_shape: Shape of the train features, records first.
        test_shape: Shape of the test features.
        labels: The label set.
        license: Terms of the records.
        source: Authors, year and home.
        layouts: The ways in which it may lie in a folder, the preferred first; the first is that of `files`.
        files: What to download; empty when embedded.
        packaged: Folder of the operating system's package, if there is one.
        note: What a user should know about the form of the records.
    """

    name: str
    task: str
    train_shape: tuple[int, ...]
    test_shape: tuple[int, ...]
    labels: tuple[str, ...]
    license: str
    source: str
    layouts: tuple[Layout, ...] = ()
    files: tuple[RemoteFile, ...] = ()
    packaged: Path | None = None
    note: str = ""


_IDX_NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def _idx_files(roots: tuple[str, ...], sha256: tuple[str, ...]) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(name=name, urls=tuple(root + name for root in roots), sha256=checksum, unzipped=True)
        for name, checksum in zip(_IDX_NAMES, sha256, strict=True)
    )


_ADULT = NamedDataset(
    name="adult",
    task="yearly income above $50,000 from 13 census answers",
    train_shape=(30162, 104),
    test_shape=(15060, 104),
    labels=("<=50K", ">50K"),
    license="CC BY 4.0",
    source="Becker and Kohavi (1996), UCI Machine Learning Repository, doi:10.24432/C5XW20",
    note="Embedded in the package. Rows with a missing value and the survey weight are left out.",
)
_MNIST = NamedDataset(
    name="mnist",
    task="handwritten digit from a 28×28 gray image",
    train_shape=(60000, 1, 28, 28),
    test_shape=(10000, 1, 28, 28),
    labels=tuple("0123456789"),
    license="CC BY-SA 3.0",
    source="LeCun, Cortes and Burges (1998), The MNIST database of handwritten digits",
    layouts=(Layout(files=_IDX_NAMES, title="MNIST", shared=False),),
    files=_idx_files(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
)
_FASHION = NamedDataset(
    name="fashion-mnist",
    task="kind of garment from a 28×28 gray image",
    train_shape=(60000, 1, 28, 28),
    test_shape=(10000, 1, 28, 28),
    labels=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    license="MIT",
    source="Xiao, Rasul and Vollgraf (2017), Zalando Research, arXiv:1708.07747",
    layouts=(Layout(files=_IDX_NAMES, title="Fashion-MNIST", shared=False),),
    files=_idx_files(
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
    packaged=Path("/usr/share/datasets/fashion-mnist"),
    note="On Debian and Ubuntu also: apt install dataset-fashion-mnist.",
)
_CIFAR10 = NamedDataset(
    name="cifar10",
    task="kind of object from a 32×32 color image",
    train_shape=(50000, 3, 32, 32),
    test_shape=(10000, 3, 32, 32),
    labels=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    license="free to use with citation",
    source="Krizhevsky (2009), Learning multiple layers of features from tiny images, University of Toronto",
    layouts=(
        Layout(files=("cifar-10-binary.tar.gz",), title="CIFAR-10", shared=True),
        Layout(files=("cifar10_jpeg.bin.xz",), title="CIFAR-10 (JPEG)", shared=True, lossy=True),
    ),
    files=(
        RemoteFile(
            name="cifar-10-binary.tar.gz",
            urls=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
    ),
    note="A lossy copy (cifar10_jpeg.bin.xz) is read as well and then named CIFAR-10 (JPEG); it needs pillow.",
)
_IMDB = NamedDataset(
    name="imdb",
    task="sentiment of a film review",
    train_shape=(25000, 4096),
    test_shape=(25000, 4096),
    labels=("negative", "positive"),
    license="academic use, with citation",
    source="Maas, Daly, Pham, Huang, Ng and Potts (2011), ACL, Stanford University",
    layouts=(
        Layout(files=("aclImdb_v1.tar.gz",), title="IMDB", shared=True),
        Layout(files=("imdb.jsonl.xz",), title="IMDB", shared=True),
    ),
    files=(
        RemoteFile(
            name="aclImdb_v1.tar.gz",
            urls=("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",),
            sha256="c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
        ),
    ),
    note="Features are 4096 hashed words; each review is scaled to length 1.",
)

CATALOG: dict[str, NamedDataset] = {item.name: item for item in (_ADULT, _MNIST, _FASHION, _CIFAR10, _IMDB)}


def get_named_dataset(name: str) -> NamedDataset:
    """The facts about one named set.

    Raises:
        InvalidArgument: If no set has this name.
    """
    if name not in CATALOG:
        raise InvalidArgument(f"name must be one of {', '.join(CATALOG)}, got {name!r}. Run `sordino data list`.")
    return CATALOG[name]


# ----------------------------------------------------------------------------------------------------------------------
# Where a named set may lie on this machine.
#
# In order: the folder named by the environment variable ``SORDINO_DATA``, the user's cache, the folder of the operating
# system's package.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Found:
    """A set that is on this machine: its files in the layout's order, and in whose folder."""

    layout: Layout
    files: tuple[Path, ...]
    origin: str


def dataset_folder(name: str) -> Path:
    """The folder of one set in the user's cache; it need not exist."""
    return cache_folder() / "data" / name


def find(wanted: NamedDataset, *, layouts: tuple[Layout, ...] | None = None) -> Found | None:
    """The first complete copy of a set on this machine, or None.

    Args:
        wanted: The set.
        layouts: The layouts to accept; all of the set's when None.
    """
    for origin, folder, shared_root in _folders(wanted):
        for layout in wanted.layouts if layouts is None else layouts:
            for root in (folder, shared_root) if layout.shared and shared_root else (folder,):
                files = tuple(existing(root / name) for name in layout.files)
                if all(file is not None for file in files):
                    return Found(layout=layout, files=tuple(file for file in files if file), origin=origin)
    return None


def _folders(wanted: NamedDataset) -> list[tuple[str, Path, Path | None]]:
    folders: list[tuple[str, Path, Path | None]] = []
    declared = os.environ.get("SORDINO_DATA")
    if declared:
        root = Path(declared).expanduser()
        folders.append(("SORDINO_DATA", root / wanted.name, root))
    folders.append(("cache", dataset_folder(wanted.name), None))
    if wanted.packaged is not None:
        folders.append(("system package", wanted.packaged, None))
    return folders


def existing(path: Path) -> Path | None:
    """The file itself, or the unpacked form of a gzipped IDX file, if either is there."""
    for candidate in (path, path.with_suffix("")) if path.name.endswith("-ubyte.gz") else (path,):
        if candidate.is_file():
            return candidate
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Fetching a named set into the cache: checksum first, then an atomic rename.
#
# A file appears under its name only when its checksum was right, so that an interrupted or tampered download can never
# be taken for data.
# ----------------------------------------------------------------------------------------------------------------------


_CHUNK = 1 << 18
_TIMEOUT_S = 30.0


def download_dataset(name: str) -> Path:
    """The folder that holds a named set in its canonical form, downloaded into the user's cache if need be.

    Args:
        name: A name from `available`.

    Returns:
        The folder with the set's files.

    Raises:
        InvalidArgument: If no set has this name.
        DataUnavailable: If it can't be fetched; the message names the files, their checksums and where to place them.
    """
    wanted = get_named_dataset(name)
    if not wanted.files:
        return FILES
    found = find(wanted, layouts=wanted.layouts[:1])
    if found is not None and found.origin != "cache":
        return found.files[0].parent
    folder = dataset_folder(name)
    missing = [file for file in wanted.files if not matches(existing(folder / file.name), file)]
    problems = _fetch_all(missing, folder) if missing else []
    if problems:
        raise unavailable(wanted, problems)
    return folder


def unavailable(wanted: NamedDataset, problems: list[str]) -> DataUnavailable:
    """The refusal that tells which files to place where."""
    files = "; ".join(
        f"{file.name} (SHA-256{' of the unzipped contents' if file.unzipped else ''} {file.sha256}) from {file.urls[0]}"
        for file in wanted.files
    )
    reasons = f" ({'; '.join(problems)})" if problems else ""
    return DataUnavailable(
        f"the dataset {wanted.name!r} must be on this machine, and fetching it failed{reasons}. "
        f"Place these files in {dataset_folder(wanted.name)}, or in a folder {wanted.name}/ under the one that the "
        f"environment variable SORDINO_DATA names: {files}. {wanted.note}".rstrip()
    )


def _fetch_all(files: list[RemoteFile], folder: Path) -> list[str]:
    """Download the files, with a line of progress where rich is installed."""
    if not is_installed("rich"):
        return next((problems for file in files if (problems := fetch_file(file, folder))), [])
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    # On standard error: standard output may be a program's input.
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for file in files:
            problems = fetch_file(file, folder, progress=progress)
            if problems:
                return problems
    return []


def fetch_file(file: RemoteFile, folder: Path, *, progress: "Progress | None" = None) -> list[str]:
    """Download one file into `folder`; the file is there only if its checksum is right.

    Args:
        file: What to fetch.
        folder: Where to; made if need be.
        progress: A bar to advance, if any.

    Returns:
        Empty on success; otherwise one line for each address that failed.
    """
    problems = []
    for url in file.urls:
        host = urlsplit(url).hostname
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".part", dir=folder)
        except OSError as problem:
            return [f"{folder}: {problem.strerror}"]
        try:
            with os.fdopen(handle, "wb") as out:
                _download(url, out, file.name, progress)
            if matches(Path(part), file):
                os.replace(part, folder / file.name)
                return []
            problems.append(f"{file.name} from {host}: wrong checksum, discarded")
        except (OSError, http.client.HTTPException) as problem:
            problems.append(f"{file.name} from {host}: {problem}")
        finally:
            Path(part).unlink(missing_ok=True)
    return problems


def _download(url: str, out: IO[bytes], name: str, progress: "Progress | None") -> None:
    if urlsplit(url).scheme not in ("http", "https"):
        raise OSError("only http and https addresses are fetched")
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:  # noqa: S310 - the scheme was checked above
        length = reply.headers.get("Content-Length", "")
        task = progress.add_task(name, total=int(length) if length.isdigit() else None) if progress else None
        while chunk := reply.read(_CHUNK):
            out.write(chunk)
            if progress is not None and task is not None:
                progress.advance(task, len(chunk))
    out.flush()
    os.fsync(out.fileno())


def matches(path: Path | None, file: RemoteFile) -> bool:
    """Whether a file is there with the right checksum; an unpacked one counts where the checksum is of the contents."""
    if path is None:
        return False
    zipped = file.unzipped and path.name.endswith((".gz", ".part"))
    digest = hashlib.sha256()
    try:
        with gzip.open(path, "rb") if zipped else path.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    except (OSError, EOFError, zlib.error):
        return False
    return digest.hexdigest() == file.sha256
