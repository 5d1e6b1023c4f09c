"""Settings of the C library and of Pillow for a process that decodes many images. Without glibc, most do nothing."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from PIL import Image

#: Freed memory that a process may keep for its next image, and the largest piece that it keeps: 42 megapixels of three
#: bytes. The memory of larger images goes back to the system at once.
KEPT_BYTES = 128 << 20
#: The largest value that older versions of glibc take for a piece.
_OLD_KEPT_BYTES = 32 << 20
#: Of ``mallopt``, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Variables with which the user has chosen these settings.
_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_memory() -> None:
    """Lets this process keep the memory of one image for the next, up to :data:`KEPT_BYTES`.

    Otherwise, each image gets fresh pages from the system, which clears them, and gives them back. Pillow decodes
    images of up to :data:`KEPT_BYTES` into one piece, which is read uncopied; by default, of up to 16 MiB. Environment
    variables of glibc and Pillow for the same settings have priority.
    """
    library = _glibc()
    if library is not None and not any(name in os.environ for name in _CHOICES):
        library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        _ = library.mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES) or library.mallopt(_M_MMAP_THRESHOLD, _OLD_KEPT_BYTES)
    if "PILLOW_BLOCK_SIZE" not in os.environ:
        Image.core.set_block_size(KEPT_BYTES)  # type: ignore[attr-defined]


class _CapturedStderr:
    """Keeps back what libraries write to C's ``stderr``; Python's own, and the file beneath both, are not touched.

    C's ``stderr`` is global to the process, so it is back when the last of several threads has left the block.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: int | None = None

    @contextmanager
    def __call__(self) -> Iterator[Callable[[], bool]]:
        """Yields a function that tells whether anything was written, by this thread or another.

        Raises:
            RuntimeError: Without glibc.
        """
        capture = _capture()
        if capture is None:
            raise RuntimeError("the C library is not glibc")
        with self._lock:
            if self._users == 0:
                capture.library.rewind(capture.stream)
                self._before, capture.stderr.value = capture.stderr.value, capture.stream.value
            self._users += 1
            begin: int = capture.library.ftell(capture.stream)
        try:
            yield lambda: bool(capture.library.ftell(capture.stream) != begin)
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    capture.stderr.value = self._before


captured_stderr = _CapturedStderr()


@cache
def _glibc() -> ctypes.CDLL | None:
    """Returns this process's C library if it is glibc."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # of another system
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None


@dataclass(frozen=True, eq=False)
class _Capture:
    """A stream in memory, and glibc's variable ``stderr``, which programs may set."""

    library: ctypes.CDLL
    stream: ctypes.c_void_p
    stderr: ctypes.c_void_p
    place: ctypes.Array[ctypes.c_size_t]  # where the stream tells its address and size: lives as long


@cache
def _capture() -> _Capture | None:
    """Opens the stream; None without glibc."""
    library = _glibc()
    if library is None:
        return None
    place = (ctypes.c_size_t * 2)()
    address = ctypes.addressof(place)
    library.open_memstream.restype = ctypes.c_void_p
    library.open_memstream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.ftell.restype = ctypes.c_long
    made = library.open_memstream(address, address + ctypes.sizeof(ctypes.c_size_t))
    stderr = ctypes.c_void_p.in_dll(library, "stderr")
    return None if made is None else _Capture(library, ctypes.c_void_p(made), stderr, place)
