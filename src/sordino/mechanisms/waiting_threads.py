"""Threads of torch's that wait for work give their processors free (floor 1).

After an operation on several threads those of OpenMP go on asking for work for some milliseconds, each on a processor.
Other threads that begin to work then share these with them: the noise of ten million numbers takes a third longer.

References:
    OpenMP API 5.0, omp_pause_resource_all.
"""

import ctypes
import sys
from functools import cache
from pathlib import Path

import torch

__all__ = ["release_processors"]

_SOFT = 1


def release_processors() -> None:
    """End the threads that wait for torch's next operation, which starts them again.

    Only the calling thread's are ended. Where torch has no OpenMP of its own, nothing happens.
    """
    library = _openmp()
    if library is not None:
        library.omp_pause_resource_all(_SOFT)


@cache
def _openmp() -> ctypes.CDLL | None:
    """The library that torch came with, and has loaded."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")) if sys.platform == "linux" else []
    loaded = Path("/proc/self/maps").read_text() if found else ""
    names = [name for name in found if str(name) in loaded]
    if not names:
        return None
    library = ctypes.CDLL(str(names[0]))
    return library if hasattr(library, "omp_pause_resource_all") else None
