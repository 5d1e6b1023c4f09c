"""Worker processes that read and decode packs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

from vlmdata.errors import ResourceError
from vlmdata.loader.config import OnDamage
from vlmdata.loader.fill.buffers import BufferName
from vlmdata.loader.fill.filler import Filled, filling_workers
from vlmdata.loader.request.pack_request import PackRequest
from vlmdata.service.server.memory import BusyError
from vlmdata.storage.choices import Verify
from vlmdata.storage.shards import DatasetShards
from vlmdata.workers import PoolClosed, WorkersDied

#: Seconds for workers to end when the server does.
_GRACE_SECONDS = 5.0


class LateFillError(BusyError):
    """A pack was not read in time. When ``future`` is done, the buffer is no longer written to."""

    def __init__(self, seconds: float, future: Future[Any]):
        super().__init__(f"a pack was not read within {seconds:.0f} s: storage is slow")
        self.future = future


class Fillers:
    """A fixed number of worker processes, with ``timeout`` seconds for one pack. Thread-safe."""

    def __init__(self, datasets: Sequence[DatasetShards], workers: int, verify: Verify, timeout: float):
        self._timeout = timeout
        # Not fork: gRPC has threads. Started now, not at the first query.
        self._pool = filling_workers(datasets, verify, workers, "forkserver", start_now=True)

    @property
    def restarts(self) -> int:
        """Number of workers that were replaced."""
        return self._pool.restarts

    def fill(self, request: PackRequest, name: BufferName, existing: Collection[int], on_damage: OnDamage) -> Filled:
        """Reads a pack into a buffer; see :data:`vlmdata.loader.fill.filler.FillJob`.

        Raises a VlmdataError if the data is damaged or workers die over this pack, a LateFillError if it takes too long
        (the buffer may still be written to), and a BusyError if the server is closed.
        """
        future = self._pool.submit((request, name, existing, on_damage))
        try:
            return future.result(self._timeout)
        except TimeoutError:
            raise LateFillError(self._timeout, future) from None
        except PoolClosed:
            raise BusyError("the server is stopping") from None
        except WorkersDied as error:
            raise ResourceError(
                f"{error.deaths} workers died over pack {request.pack.number}, the last one {error.cause}. Out of "
                "memory?"
            ) from None

    def close(self) -> None:
        """Ends the workers, without waiting long for one that does not end."""
        self._pool.close(_GRACE_SECONDS)
