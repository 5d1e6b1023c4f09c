"""Memory for packs, with a fixed limit."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vlmdata.errors import ResourceError, UsageError
from vlmdata.loader.fill.buffers import BufferPool, Lease

_SECONDS_BETWEEN_LOOKS = 0.02


class BusyError(Exception):
    """The server has no room or time for a query now. Another server, or this one later, can answer."""


class PackMemory:
    """Buffers for packs. All of them together never exceed a limit. Thread-safe.

    Args:
        limit: Bytes.
        make_room: Gives up memory that is not needed, such as cached packs; returns False if there is none.
    """

    def __init__(self, limit: int, make_room: Callable[[], bool]):
        self.limit = limit
        self._make_room = make_room
        self._pool = BufferPool(limit)
        self._lock = threading.RLock()  # garbage collection may run a finalizer inside the critical section
        self._in_use = 0
        self._closed = False

    @property
    def bytes_in_use(self) -> int:
        """Bytes of buffers in use."""
        return self._in_use

    @property
    def total_bytes(self) -> int:
        """Bytes of all buffers, in use and free."""
        return self._pool.total_bytes

    def inodes(self) -> frozenset[int]:
        """Returns the inodes of the buffers that exist."""
        return self._pool.inodes()

    def acquire(self, size: int, deadline: float, make_room: Callable[[], bool] | None = None) -> Lease:
        """Returns a buffer. Waits for memory if necessary.

        Args:
            size: Bytes.
            deadline: When to give up, in seconds of ``time.monotonic``.
            make_room: Used instead of the general one.

        Raises:
            UsageError: If the buffer alone exceeds the limit.
            BusyError: If no memory becomes free in time, or the server ends.
        """
        if BufferPool.rounded(size) > self.limit:
            raise UsageError(
                f"a batch of {size} bytes is more than the {self.limit} bytes of the server's --memory that are for "
                "packs; use a smaller capacity, or give the server more memory"
            )
        while True:
            if self._closed:
                raise BusyError("the server is stopping")
            try:
                lease = self._pool.acquire(size)
            except ResourceError:
                if (make_room or self._make_room)():
                    continue
                if time.monotonic() >= deadline:
                    raise BusyError(f"{self._in_use} of {self.limit} bytes of memory are in use") from None
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                continue
            with self._lock:
                self._in_use += lease.name.bytes
            return lease

    def array(self, lease: Lease) -> npt.NDArray[np.uint8]:
        """Takes the buffer; its memory returns when the array and all its views are gone."""
        array = lease.array()
        weakref.finalize(array, self._returned, lease.name.bytes).atexit = False
        return array

    def release(self, lease: Lease) -> None:
        """Returns a buffer unused."""
        lease.release()
        self._returned(lease.name.bytes)

    def close(self) -> None:
        """Releases all buffers, also for clients that still map them; those in use when their use ends."""
        self._closed = True
        self._pool.close(free=True)

    def _returned(self, size: int) -> None:
        with self._lock:
            self._in_use -= size
