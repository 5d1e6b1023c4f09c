"""Memory maps of files that keep no file descriptor. Python's own ``mmap`` keeps a copy of the descriptor in each."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache
from typing import Any

#: What ``mmap`` of the C library returns if it fails.
_FAILED = ctypes.c_void_p(-1).value


def mapped(file: int, size: int, *, writable: bool) -> ctypes.Array[ctypes.c_uint8]:
    """Maps the first bytes of a file, shared with other processes. The caller may close the file.

    The memory is unmapped when the returned buffer and all arrays of it are gone. Writing to it ends the process with
    SIGSEGV unless it is ``writable``.

    Raises:
        OSError: If the system refuses, such as without memory for it.
    """
    library = _c_library()
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = library.mmap(None, size, access, mmap.MAP_SHARED, file, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, library.munmap, address, size).atexit = False
    return memory


def remove_pages(memory: ctypes.Array[ctypes.c_uint8]) -> None:
    """Frees the pages of mapped memory, also where another process maps them. Does nothing if the system cannot."""
    if hasattr(mmap, "MADV_REMOVE"):
        _c_library().madvise(ctypes.addressof(memory), len(memory), mmap.MADV_REMOVE)


@cache
def _c_library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library
