"""`available` and `show`: what the named sets are and where they lie (floor 1)."""

from dataclasses import asdict, dataclass
from pathlib import Path

from sordino.data.adult import ADULT_SCHEMA, FILES
from sordino.data.catalogue import CATALOGUE, NamedSet, named_set
from sordino.data.places import cache_folder, find
from sordino.data.schema import Schema

__all__ = ["DataInfo", "Description", "available", "show"]


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """One line of ``sordino data list``.

    Args:
        name: The name that `load` takes.
        title: The name to show; differs when the copy on this machine is a lossy one.
        task: What is predicted from what.
        train_shape: Shape of the train features, records first.
        test_shape: Shape of the test features.
        classes: Number of labels.
        licence: Terms of the records.
        source: Authors, year and home.
        present: Whether the set is on this machine now.
        origin: ``embedded``, ``SORDINO_DATA``, ``cache`` or ``system package`` when present, else ``download``.
        location: The folder it is in, or the address it would come from.
    """

    name: str
    title: str
    task: str
    train_shape: tuple[int, ...]
    test_shape: tuple[int, ...]
    classes: int
    licence: str
    source: str
    present: bool
    origin: str
    location: str

    def to_dict(self) -> dict[str, object]:
        """The fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Description:
    """What ``sordino data show`` tells about one set.

    Args:
        info: The line of the list.
        labels: The label set.
        note: What a user should know about the form of the records.
        files: Name, SHA-256 and address of each file of the canonical form; empty when embedded.
        place: The folder in which files fetched by hand are found.
        schema: The declared schema of a table, else None.
    """

    info: DataInfo
    labels: tuple[str, ...]
    note: str
    files: tuple[tuple[str, str, str], ...]
    place: Path
    schema: Schema | None

    def to_dict(self) -> dict[str, object]:
        """The fields, for JSON."""
        return {
            **self.info.to_dict(),
            "labels": list(self.labels),
            "note": self.note,
            "files": [{"name": name, "sha256": sha256, "url": url} for name, sha256, url in self.files],
            "place": str(self.place),
            "schema": self.schema.to_dict() if self.schema else None,
        }


def available() -> list[DataInfo]:
    """Every named set, and whether it is on this machine now; reads no data and needs no network.

    Example:
        >>> [info.name for info in available()]
        ['adult', 'mnist', 'fashion-mnist', 'cifar10', 'imdb']
    """
    return [_info(item) for item in CATALOGUE.values()]


def show(name: str) -> Description:
    """All that is known about one named set.

    Raises:
        InvalidArgument: If no set has this name.
    """
    item = named_set(name)
    return Description(
        info=_info(item),
        labels=item.labels,
        note=item.note,
        files=tuple((file.name, file.sha256, file.urls[0]) for file in item.files),
        place=cache_folder(name) if item.files else FILES,
        schema=ADULT_SCHEMA if name == "adult" else None,
    )


def _info(item: NamedSet) -> DataInfo:
    found = find(item) if item.layouts else None
    if found is not None:
        origin, location = found.origin, str(found.files[0].parent)
    elif item.files:
        origin, location = "download", item.files[0].urls[0].rpartition("/")[0] + "/"
    else:
        origin, location = "embedded", str(FILES)
    layout = found.layout if found else item.layouts[0] if item.layouts else None
    return DataInfo(
        name=item.name,
        title=layout.title if layout else item.name.capitalize(),
        task=item.task,
        train_shape=item.train_shape,
        test_shape=item.test_shape,
        classes=len(item.labels),
        licence=item.licence,
        source=item.source,
        present=origin != "download",
        origin=origin,
        location=location,
    )
