"""Conformance: cases on which private training libraries are known to be wrong, for any library.

    CASES          every case by its sentence
    check_library  run them on a library
    Library        what a library must offer: three methods

Example:
    >>> from sordino.audit import EngineLibrary
    >>> found = check_library(EngineLibrary(), only="a layer called twice")
    >>> [(one.case, one.verdict) for one in found]
    [('exact: a layer called twice', 'right')]
"""

from collections.abc import Iterator

from sordino.audit.conformance.engine_cases import BATCHES, ENGINE_CHECKS
from sordino.audit.conformance.framework import Case, CaseResult, Library
from sordino.audit.conformance.gradient_cases import COUPLING, EXACTNESS, SENSITIVITY

__all__ = ["CASES", "Case", "CaseResult", "check_library"]

CASES: dict[str, Case] = {**ENGINE_CHECKS, **SENSITIVITY, **EXACTNESS, **COUPLING, **BATCHES}


def check_library(library: Library, *, only: str = "") -> Iterator[CaseResult]:
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
