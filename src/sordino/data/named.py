"""`load_named`: one named set, from wherever it lies, fetched if need be (floor 1)."""

from sordino.data.adult import load_adult
from sordino.data.catalogue import NamedSet, named_set
from sordino.data.fetch import get
from sordino.data.images import read_cifar_binary, read_cifar_jpeg, read_mnist
from sordino.data.places import Found, find
from sordino.data.records import DataSet, Records
from sordino.data.text import read_imdb
from sordino.errors import DataUnavailable

__all__ = ["load_named"]


def load_named(name: str, *, keep_texts: bool = False) -> DataSet:
    """Load one named set; one that is not on this machine is fetched into the cache first.

    Args:
        name: A name from the catalogue.
        keep_texts: Keep the raw texts, for a set that has texts.

    Raises:
        DataUnavailable: If the set is not here and can't be fetched, or its files are damaged.
    """
    if name == "adult":
        return load_adult()
    wanted = named_set(name)
    found = find(wanted)
    if found is None:
        get(name)
        found = find(wanted)
    if found is None:
        raise DataUnavailable(
            f"the data set {name!r} must be on this machine, got none. Run `sordino data get {name}`."
        )
    train, test = _read(found, keep_texts=keep_texts)
    _require_shapes(wanted, found, train, test)
    return DataSet(
        # A lossy copy goes by its own name in every table.
        name=found.layout.title if found.layout.lossy else name,
        train=train,
        test=test,
        labels=wanted.labels,
        public=True,
        source=f"{wanted.source} ({found.origin}: {', '.join(path.name for path in found.files)})",
        licence=wanted.licence,
        schema=None,
    )


def _read(found: Found, *, keep_texts: bool) -> tuple[Records, Records]:
    first = found.layout.files[0]
    if first == "cifar-10-binary.tar.gz":
        return read_cifar_binary(found.files)
    if first == "cifar10_jpeg.bin.xz":
        return read_cifar_jpeg(found.files)
    if found.layout.title == "IMDB":
        return read_imdb(found.files, keep_texts=keep_texts)
    return read_mnist(found.files)


def _require_shapes(wanted: NamedSet, found: Found, train: Records, test: Records) -> None:
    shapes = (train.features.shape, test.features.shape)
    if shapes != (wanted.train_shape, wanted.test_shape):
        raise DataUnavailable(
            f"the data set {wanted.name!r} must have the shapes {wanted.train_shape} and {wanted.test_shape}, got "
            f"{shapes[0]} and {shapes[1]} from {found.files[0].parent}. Replace the files, or run "
            f"`sordino data get {wanted.name}`."
        )
