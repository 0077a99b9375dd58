"""Names of a package that are imported when they are first asked for: an import of sordino takes no torch."""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module

__all__ = ["lazy_names"]


def lazy_names(
    package: str, homes: Mapping[str, str], *, modules: Iterable[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``.

    Args:
        package: its name, ``__name__`` there.
        homes: each name, and the module below the package that defines it.
        modules: modules below the package that are names themselves.

    Example:
        >>> find, _ = lazy_names("sordino", {"Plan": "training.plan"})
        >>> find("Plan").__name__
        'Plan'
        >>> find("Plane")
        Traceback (most recent call last):
        AttributeError: module 'sordino' has no attribute 'Plane'
    """
    namespace, modules = vars(sys.modules[package]), frozenset(modules)

    def find(name: str) -> object:
        if name in homes:
            value = getattr(import_module(f"{package}.{homes[name]}"), name)
        elif name in modules:
            value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = value
        return value

    def names() -> list[str]:
        return sorted({*namespace, *namespace["__all__"]})

    return find, names
