"""What a verification says (floor 6)."""

from dataclasses import dataclass

__all__ = ["Item", "Verification", "failed", "not_checked", "passed"]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing that was looked at.

    Args:
        name: of the item, one or two words.
        status: "pass", "fail" or "not checked".
        detail: what was found, in a sentence.
    """

    name: str
    status: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Verification:
    """All items of one run.

    Args:
        items: in the order in which they were looked at.
        head: the end of the run's chain; "" when the chain is broken. Publish it to anchor the run.
    """

    items: tuple[Item, ...]
    head: str

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(item.status != "fail" for item in self.items)

    @property
    def complete(self) -> bool:
        """Whether nothing failed and everything was checked."""
        return all(item.status == "pass" for item in self.items)

    def item(self, name: str) -> Item:
        """The item called `name`."""
        return next(item for item in self.items if item.name == name)

    def to_dict(self) -> dict[str, object]:
        """The result as plain JSON types."""
        items = [{"name": item.name, "status": item.status, "detail": item.detail} for item in self.items]
        return {"passed": self.passed, "complete": self.complete, "head": self.head, "items": items}


def passed(name: str, detail: str) -> Item:
    """An item that holds."""
    return Item(name=name, status="pass", detail=detail)


def failed(name: str, detail: str) -> Item:
    """An item that doesn't hold."""
    return Item(name=name, status="fail", detail=detail)


def not_checked(name: str, detail: str) -> Item:
    """An item that can't be checked here."""
    return Item(name=name, status="not checked", detail=detail)
