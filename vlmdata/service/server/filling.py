"""Worker processes that read and decode packs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from vlmdata.errors import ResourceError
from vlmdata.loader.config import OnDamage
from vlmdata.loader.fill.buffers import BufferMaps, BufferName
from vlmdata.loader.fill.fill import Filled, fill
from vlmdata.loader.request.request import PackRequest
from vlmdata.service.server.memory import BusyError
from vlmdata.storage.choices import Verify
from vlmdata.storage.shards import DatasetShards, ShardStore
from vlmdata.workers import PoolClosed, Workers, WorkersDied

#: Workers that may die over one pack.
_MAX_DEATHS = 4
#: Seconds for workers to end when the server does.
_GRACE_SECONDS = 5.0


type _Job = tuple[PackRequest, BufferName, Collection[int], OnDamage]


class LateFillError(BusyError):
    """A pack was not read in time.

    Attributes:
        future: Done when the buffer is no longer written to.
    """

    def __init__(self, seconds: float, future: Future[Any]):
        super().__init__(f"a pack was not read within {seconds:.0f} s: storage is slow")
        self.future = future


class Fillers:
    """A fixed number of worker processes. Workers that are killed are replaced. Thread-safe.

    Args:
        datasets: Sources of the shards.
        workers: Number of processes.
        verify: Checks of stored bytes and pixels.
        timeout: Seconds for one pack.
    """

    def __init__(self, datasets: Sequence[DatasetShards], workers: int, verify: Verify, timeout: float):
        self._timeout = timeout
        # Not fork: gRPC has threads. Started now, not at the first query.
        self._pool: Workers[_Job, Filled] = Workers(
            partial(_prepare, tuple(datasets), verify), workers, max_deaths=_MAX_DEATHS, start_now=True
        )

    @property
    def restarts(self) -> int:
        """Number of workers that were replaced."""
        return self._pool.restarts

    def fill(self, request: PackRequest, name: BufferName, existing: Collection[int], on_damage: OnDamage) -> Filled:
        """Reads a pack into a buffer.

        Args:
            request: The pack.
            name: The buffer.
            existing: Inodes of all buffers that exist; workers unmap others.
            on_damage: What a sample with changed bytes does.

        Raises:
            DatasetFormatError: If the data is damaged.
            ResourceError: If workers die over this pack.
            LateFillError: If it takes too long; the buffer may still be written to.
            BusyError: If the server is closed.
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
                f"{error.deaths} workers died over pack {request.pack}, the last one {error.cause}. Out of memory?"
            ) from None

    def close(self) -> None:
        """Ends the workers, without waiting long for one that does not end."""
        self._pool.close(_GRACE_SECONDS)


def _prepare(datasets: Sequence[DatasetShards], verify: Verify) -> Callable[[_Job], Filled]:
    """Runs in a worker; returns what fills the buffer of a request."""
    store, buffers = ShardStore(datasets, verify), BufferMaps()

    def fill_named(job: _Job) -> Filled:
        request, name, existing, on_damage = job
        buffers.keep_only(existing)
        return fill(request, store, buffers.array(name), on_damage)

    return fill_named
