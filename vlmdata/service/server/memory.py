"""Memory for packs, with a fixed limit."""

from __future__ import annotations

import time
from collections.abc import Callable

from vlmdata.errors import ResourceError, UsageError
from vlmdata.loader.fill.buffers import BufferPool, LeasedBuffer

_SECONDS_BETWEEN_LOOKS = 0.02


class BusyError(Exception):
    """The server has no room or time for a query now. Another server, or this one later, can answer."""


class PackMemory:
    """Buffers for packs, of at most ``limit`` bytes together. Thread-safe.

    ``make_room`` gives up memory that is not needed, such as cached packs; it returns False if there is none.
    """

    def __init__(self, limit: int, make_room: Callable[[], bool]):
        self.limit = limit
        self.pool = BufferPool(limit)
        self._make_room = make_room
        self._closed = False

    def acquire(self, size: int, deadline: float, make_room: Callable[[], bool] | None = None) -> LeasedBuffer:
        """Returns a buffer. Waits for memory until ``deadline``, in seconds of ``time.monotonic``, if necessary.

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
                return self.pool.acquire(size)
            except ResourceError:
                if (make_room or self._make_room)():
                    continue
                if time.monotonic() >= deadline:
                    in_use = self.pool.bytes_in_use
                    raise BusyError(f"{in_use} of {self.limit} bytes of memory are in use") from None
                time.sleep(_SECONDS_BETWEEN_LOOKS)

    def close(self) -> None:
        """Releases all buffers, also for clients that still map them; those in use when their use ends."""
        self._closed = True
        self.pool.close(free=True)
