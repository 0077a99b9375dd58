"""Memory that was freed stays with the process while it trains (floor 3).

A training step frees and asks for the same large arrays again and again. The C library gives the top of its heap back
to the system each time, and the system hands out fresh pages, cleared and mapped one by one: on virtual machines that
can take a fifth of a private step, which needs more such arrays than a plain one.

References:
    mallopt(3), M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_MMAP_MAX; malloc_trim(3).
"""

import ctypes
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

__all__ = ["kept_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
# From this size on arrays are mapped one by one outside: the largest size that the library allows.
_MAPPED_ARRAYS = 1 << 25
_MOST_MAPPED = 65536
_NEVER = 2**31 - 1

_lock = threading.Lock()
_inside = 0


@contextmanager
def kept_memory() -> Iterator[None]:
    """A block in which freed memory is kept for the next array; it goes back to the system at the end.

    `fit` does this by itself unless memory is to be spared. Around a training loop of one's own it saves as much.
    Without Linux and glibc it does nothing.

    Example:
        >>> with kept_memory():
        ...     squares = [step**2 for step in range(3)]
    """
    global _inside  # noqa: PLW0603 (the heap is the process's)
    library = _glibc()
    if library is None:
        yield
        return
    with _lock:
        _inside += 1
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_ARRAYS)
        # Even the largest arrays come from the heap: what is mapped for one alone goes back with it.
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                # What the library's own rule arrives at once such arrays were freed.
                library.mallopt(_M_MMAP_MAX, _MOST_MAPPED)
                library.mallopt(_M_TRIM_THRESHOLD, 2 * _MAPPED_ARRAYS)
                library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
