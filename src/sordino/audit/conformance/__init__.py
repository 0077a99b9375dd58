"""Conformance: cases on which private training libraries are known to be wrong, for any library (audit, floor 4).

    CASES          every case by its sentence
    check_library  run them on a library
    Library        what a library must offer: three methods

Example:
    >>> from sordino.audit import Engine
    >>> found = check_library(Engine(), only="a layer called twice")
    >>> [(one.case, one.verdict) for one in found]
    [('exact: a layer called twice', 'right')]
"""

from collections.abc import Iterator

from sordino.audit.case import Case, Finding
from sordino.audit.conformance.batches import BATCHES
from sordino.audit.conformance.coupling import COUPLING
from sordino.audit.conformance.exactness import EXACTNESS
from sordino.audit.conformance.sensitivity import SENSITIVITY
from sordino.audit.engine_checks import ENGINE_CHECKS
from sordino.audit.library import Library

__all__ = ["CASES", "Case", "Finding", "check_library"]

CASES: dict[str, Case] = {**ENGINE_CHECKS, **SENSITIVITY, **EXACTNESS, **COUPLING, **BATCHES}


def check_library(library: Library, *, only: str = "") -> Iterator[Finding]:
    """Run the cases on a library, one after another.

    Args:
        library: the path that is tried.
        only: a part of the names of the cases wanted; by default all of them.

    Yields:
        What came of each.
    """
    for name, one in CASES.items():
        if only in name:
            yield one.run(library)
