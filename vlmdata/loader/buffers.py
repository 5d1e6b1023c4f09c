"""Reused output buffers that worker processes can write to and that are never reused too early.

Fresh memory for every batch would cost a page fault per 4 KiB. A buffer returns to the pool when the last tensor that
looks into it is gone, so a consumer that keeps batches is safe and only makes the pool grow.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.errors import ResourceError

#: Buffer sizes are rounded up to this, so that packs of slightly different size share buffers.
_GRAIN = 4 * 1024 * 1024


@dataclass(frozen=True)
class BufferName:
    """How a worker process finds a buffer.

    Attributes:
        path: Leads to the shared memory.
        bytes: Its size.
        inode: Its identity: once the buffer is closed, the path may lead to another one.
    """

    path: str
    bytes: int
    inode: int


class _Buffer:
    """Anonymous shared memory with a name that other processes of this user can open while this process lives."""

    def __init__(self, size: int):
        self.name, self._file = _shared_file(size)
        try:
            self.memory = mmap.mmap(self._file, size)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Gives up the name; the memory stays as long as it is looked into."""
        os.close(self._file)
        if not self.name.path.startswith("/proc/"):
            os.unlink(self.name.path)


def _shared_file(size: int) -> tuple[BufferName, int]:
    if hasattr(os, "memfd_create"):
        # Nothing to clean up after a crash: the memory goes with the last process that maps it.
        file = os.memfd_create("vlmdata-batch", os.MFD_CLOEXEC)
        path = f"/proc/{os.getpid()}/fd/{file}"
    else:
        file, path = tempfile.mkstemp(prefix="vlmdata-batch-")
    os.ftruncate(file, size)
    return BufferName(path, size, os.fstat(file).st_ino), file


class BufferPool:
    """Buffers in use and free ones. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[_Buffer] = []
        # Re-entrant: a finalizer may run, by garbage collection, inside our own critical section.
        self._lock = threading.RLock()
        self._all: list[_Buffer] = []
        self._closed = False

    def acquire(self, size: int) -> Lease:
        """A buffer of at least ``size`` bytes: the smallest free one, or a new one.

        Raises:
            ResourceError: If there is no memory for it, or too many files are open.
        """
        with self._lock:
            assert not self._closed
            fitting = [buffer for buffer in self._free if buffer.name.bytes >= size]
            if fitting:
                buffer = min(fitting, key=lambda each: each.name.bytes)
                self._free.remove(buffer)
            else:
                buffer = self._another(max(-(-size // _GRAIN), 1) * _GRAIN)
            return Lease(self, buffer)

    def _another(self, size: int) -> _Buffer:
        try:
            buffer = _Buffer(size)
        except OSError as error:
            raise ResourceError(
                f"{len(self._all)} batches of this loader are in memory, and there is no room for another of {size} "
                f"bytes: {error}. Keep clones of batches instead, or fewer of them; or raise the limit (`ulimit -n`)."
            ) from error
        self._all.append(buffer)
        return buffer

    @property
    def total_bytes(self) -> int:
        """Bytes of all buffers."""
        with self._lock:
            return sum(buffer.name.bytes for buffer in self._all)

    def _release(self, buffer: _Buffer) -> None:
        with self._lock:
            if not self._closed:
                self._free.append(buffer)

    def close(self) -> None:
        """Lets go of all buffers; memory that tensors still look into stays until they are gone."""
        with self._lock:
            self._closed = True
            for buffer in self._all:
                buffer.close()
            self._all.clear()
            self._free.clear()


class Lease:
    """A buffer in use: filled through :meth:`memory`, then taken by :meth:`array` or given back by :meth:`release`.

    Args:
        pool: Where the buffer belongs.
        buffer: The buffer.
    """

    def __init__(self, pool: BufferPool, buffer: _Buffer):
        self._pool, self._buffer = pool, buffer
        self._over = False
        self.name = buffer.name

    def memory(self) -> npt.NDArray[np.uint8]:
        """The buffer as uint8, to be filled; does not prolong the lease."""
        return np.frombuffer(self._buffer.memory, dtype=np.uint8)

    def array(self) -> npt.NDArray[np.uint8]:
        """The buffer as uint8. The lease ends when this array and all views of it are gone."""
        array = self.memory()
        self._end()
        # Views refer to this very array, so its end is the end of the last of them.
        weakref.finalize(array, self._pool._release, self._buffer).atexit = False
        return array

    def release(self) -> None:
        """Gives the buffer back unused."""
        self._end()
        self._pool._release(self._buffer)

    def _end(self) -> None:
        # A second array would give the buffer back while the first is still in use.
        assert not self._over
        self._over = True


class BufferMaps:
    """Buffers as a worker process sees them, mapped once each."""

    def __init__(self) -> None:
        self._maps: dict[BufferName, npt.NDArray[np.uint8]] = {}

    def array(self, name: BufferName) -> npt.NDArray[np.uint8]:
        """The named buffer as uint8."""
        if name not in self._maps:
            file = os.open(name.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(file).st_ino != name.inode:
                    raise ResourceError(f"{name.path}: the loader that this batch was made for is closed")
                self._maps[name] = np.frombuffer(mmap.mmap(file, name.bytes), dtype=np.uint8)
            finally:
                os.close(file)
        return self._maps[name]
