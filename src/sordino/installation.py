"""What is installed: names that are imported when first asked for, libraries of the extras, the cache folder."""

import ast
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from sordino.errors import SordinoError

__all__ = ["cache_folder", "is_installed", "lazy_names", "require"]


def is_installed(module: str) -> bool:
    """Whether a library can be imported; it is not imported for that."""
    try:
        return module in sys.modules or find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def require(extra: str, *modules: str, user: str) -> None:
    """Refuse to go on without the libraries of an extra.

    Args:
        extra: of sordino, which installs them.
        modules: names by which they are imported.
        user: what needs them, as the message names it.

    Raises:
        SordinoError: one of them is missing.

    Example:
        >>> require("ledger", "no_such_library", user="a ledger")
        Traceback (most recent call last):
        sordino.errors.SordinoError: a ledger must find no_such_library, got none. Install sordino[ledger].
    """
    for module in modules:
        if not is_installed(module):
            raise SordinoError(f"{user} must find {module}, got none. Install sordino[{extra}].")


def cache_folder() -> Path:
    """The user's folder for what can be made again: downloaded data, measured kernels. It need not exist."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "sordino"
    usual = ".cache" if sys.platform != "darwin" else "Library/Caches"
    return Path.home() / usual / "sordino"


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``, for the names it imports under ``if TYPE_CHECKING:``.

    The names are read from the package's source, so a type checker and the interpreter see one list.

    Args:
        package: its name, ``__name__`` there.

    Raises:
        ImportError: the package was installed without its source.

    Example:
        >>> find, _ = lazy_names("sordino")
        >>> find("Plan").__name__
        'Plan'
        >>> find("Plane")
        Traceback (most recent call last):
        AttributeError: module 'sordino' has no attribute 'Plane'
    """
    namespace = vars(sys.modules[package])
    homes = {
        alias.name: node.module or ""
        for guard in ast.parse(_source(package)).body
        if isinstance(guard, ast.If)
        for node in guard.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # What a package imports from itself is a module below it.
        home = homes[name]
        value = import_module(f"{package}.{name}") if home == package else getattr(import_module(home), name)
        namespace[name] = value
        return value

    def names() -> list[str]:
        return sorted({*namespace, *namespace["__all__"]})

    return find, names


def _source(package: str) -> str:
    spec = find_spec(package)
    source = getattr(spec.loader, "get_source", lambda _: None)(package) if spec is not None else None
    if source is None:
        raise ImportError(f"{package} must be installed with its source, got compiled files alone. Install the wheel.")
    return source
