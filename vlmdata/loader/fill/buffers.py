"""Reused output buffers that worker processes can write to. A buffer is never reused too early.

New memory for every batch would cost a page fault per 4 KiB. A buffer returns to the pool when the last tensor that
views it is gone, so a consumer that keeps batches is safe and only makes the pool grow.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sys
import tempfile
import threading
import weakref
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.errors import ResourceError
from vlmdata.loader.fill.mapping import mapped, remove_pages

#: Buffer sizes are rounded up to a grain, so that packs of slightly different size share buffers. If the pool has a
#: limit, to a smaller one for small packs: what is charged is at most an eighth too much.
_LARGEST_GRAIN, _SMALLEST_GRAIN, _GRAINS = 4 << 20, 64 << 10, 8
#: Bytes after each buffer for its generation: a number that changes before the buffer is used for something new. A
#: reader in another process that finds the same one before and after a copy has a copy of one state.
GENERATION_BYTES = 8


@dataclass(frozen=True)
class BufferName:
    """The name by which a worker process finds a buffer of some bytes.

    After the buffer is closed, the path may refer to another one; ``inode`` tells.
    """

    path: str
    bytes: int
    inode: int


class _Buffer:
    """Anonymous shared memory with a name that other processes of this user can open while this process lives."""

    def __init__(self, size: int):
        self.name, self._file, self._sealed = _shared_file(size)
        self._generation = secrets.randbits(62)  # other than that of an earlier buffer in the same place
        try:
            self.memory = mapped(self._file, size, writable=True)  # so that there is one descriptor for each buffer
        except OSError:
            self.close()
            raise

    def renew(self) -> int:
        """Tells readers in other processes that the buffer will hold something new. Returns the new generation."""
        self._generation += 1
        os.pwrite(self._file, self._generation.to_bytes(GENERATION_BYTES, "little"), self.name.bytes)
        return self._generation

    def free(self) -> None:
        """Frees the memory, also where another process still maps it. Nobody may use the buffer any more."""
        self.renew()
        if self._sealed:
            remove_pages(self.memory)
        else:
            os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Gives up the name. The memory stays while it is in use."""
        os.close(self._file)
        if not self.name.path.startswith("/proc/"):
            os.unlink(self.name.path)


def _shared_file(size: int) -> tuple[BufferName, int, bool]:
    """Returns name and descriptor of new shared memory, and whether it is sealed: its size can never change."""
    sealed = False
    if hasattr(os, "memfd_create"):
        # A crash leaves nothing to clean up: the memory is freed with the last process that maps it.
        file = os.memfd_create("vlmdata-batch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        path = f"/proc/{os.getpid()}/fd/{file}"
        os.ftruncate(file, size + GENERATION_BYTES)
        with suppress(OSError):
            # Shrinking would kill readers that map it.
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            sealed = True
    else:
        file, path = tempfile.mkstemp(prefix="vlmdata-batch-")
        os.ftruncate(file, size + GENERATION_BYTES)
    return BufferName(path, size, os.fstat(file).st_ino), file, sealed


class BufferPool:
    """Buffers in use and free ones, of at most ``limit`` bytes together. Thread-safe.

    Each has a file descriptor. With a limit, buffers take at most ``files`` of them, and one that holds twice the bytes
    asked for is not taken: it would be charged whole.
    """

    def __init__(self, limit: int | None = None, files: int | None = None) -> None:
        self._limit, self._files = limit, files
        self._free: list[_Buffer] = []
        # Re-entrant, because garbage collection may run a finalizer inside this critical section.
        self._lock = threading.RLock()
        self._all: list[_Buffer] = []
        self._closed = self._frees = False

    def acquire(self, size: int) -> LeasedBuffer:
        """Returns the smallest free buffer of at least ``size`` bytes, else a new one, or raises a ResourceError."""
        with self._lock:
            assert not self._closed
            largest = 2 * self.rounded(size) if self._limit is not None else sys.maxsize
            fitting = [buffer for buffer in self._free if size <= buffer.name.bytes <= largest]
            if fitting:
                buffer = min(fitting, key=lambda each: each.name.bytes)
                self._free.remove(buffer)
            else:
                buffer = self._another(self.rounded(size))
            return LeasedBuffer(self, buffer)

    def rounded(self, size: int) -> int:
        """Returns the bytes of a new buffer for ``size`` bytes."""
        grain = _LARGEST_GRAIN
        if self._limit is not None:
            grain = min(max((1 << size.bit_length()) // (2 * _GRAINS), _SMALLEST_GRAIN), grain)
        return max(-(-size // grain), 1) * grain

    def _another(self, size: int) -> _Buffer:
        if self._limit is not None:
            while self._free and not self._has_room(size):
                self._drop_free()
            if not self._has_room(size):
                raise ResourceError(
                    f"{self.total_bytes} of {self._limit} bytes for batches are in use, in {len(self._all)} buffers"
                )
        try:
            buffer = _Buffer(size)
        except OSError as error:
            if self._free:  # their memory or descriptors may be what lacks
                self._drop_free()
                return self._another(size)
            raise ResourceError(
                f"{len(self._all)} batches of this loader are in memory, with no space for another of {size} "
                f"bytes: {error}. Keep clones of batches instead, or fewer of them; or raise the limit (`ulimit -n`)."
            ) from error
        self._all.append(buffer)
        return buffer

    def _has_room(self, size: int) -> bool:
        fits = self._limit is None or self.total_bytes + size <= self._limit
        return fits and (self._files is None or len(self._all) < self._files)

    def _drop_free(self) -> None:
        unused = self._free.pop()
        self._all.remove(unused)
        unused.free()
        unused.close()

    @property
    def total_bytes(self) -> int:
        """Bytes of all buffers."""
        with self._lock:
            return sum(buffer.name.bytes for buffer in self._all)

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the buffers that are not free."""
        with self._lock:
            return self.total_bytes - sum(buffer.name.bytes for buffer in self._free)

    def inodes(self) -> frozenset[int]:
        """Returns the inodes of all buffers."""
        with self._lock:
            return frozenset(buffer.name.inode for buffer in self._all)

    def _release(self, buffer: _Buffer) -> None:
        with self._lock:
            if not self._closed:
                self._free.append(buffer)
            elif self._frees:
                buffer.free()
                buffer.close()

    def close(self, free: bool = False) -> None:
        """Releases all buffers.

        With ``free``, memory that other processes still map is freed as soon as this one has no array of it.
        """
        with self._lock:
            self._closed, self._frees = True, free
            for buffer in self._free if free else self._all:
                if free:
                    buffer.free()
                buffer.close()
            self._all.clear()
            self._free.clear()


class LeasedBuffer:
    """A buffer in use: filled through :meth:`memory`, then taken by :meth:`array` or returned by :meth:`release`."""

    def __init__(self, pool: BufferPool, buffer: _Buffer):
        self._pool, self._buffer = pool, buffer
        self._over = False
        self.name = buffer.name

    def renew(self) -> int:
        """Tells readers in other processes that the buffer will hold something new. Returns the new generation."""
        return self._buffer.renew()

    def memory(self) -> npt.NDArray[np.uint8]:
        """Returns the buffer as uint8 for filling. Does not extend the lease."""
        return np.frombuffer(self._buffer.memory, dtype=np.uint8)

    def array(self) -> npt.NDArray[np.uint8]:
        """Returns the buffer as uint8. The lease ends when this array and all its views are gone."""
        array = self.memory()
        self._end()
        # Views refer to this array, so its end is the end of the last view.
        weakref.finalize(array, self._pool._release, self._buffer).atexit = False
        return array

    def release(self) -> None:
        """Returns the buffer unused."""
        self._end()
        self._pool._release(self._buffer)

    def _end(self) -> None:
        # A second array would return the buffer while the first is still in use.
        assert not self._over
        self._over = True


class BufferMaps:
    """Buffers in a worker process, each mapped once."""

    def __init__(self) -> None:
        self._maps: dict[BufferName, npt.NDArray[np.uint8]] = {}

    def keep_only(self, inodes: Collection[int]) -> None:
        """Unmaps all other buffers, which frees the memory of those that are closed."""
        for name in [each for each in self._maps if each.inode not in inodes]:
            del self._maps[name]

    def array(self, name: BufferName) -> npt.NDArray[np.uint8]:
        """Returns the named buffer as uint8."""
        if name not in self._maps:
            file = os.open(name.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(file).st_ino != name.inode:
                    raise ResourceError(f"{name.path}: the loader of this batch is closed")
                self._maps[name] = np.frombuffer(mapped(file, name.bytes, writable=True), dtype=np.uint8)
            finally:
                os.close(file)
        return self._maps[name]
