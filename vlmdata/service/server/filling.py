"""Worker processes that read and decode packs."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any

from vlmdata.errors import ResourceError, VlmdataError
from vlmdata.loader.config import OnDamage
from vlmdata.loader.fill.buffers import BufferMaps, BufferName
from vlmdata.loader.fill.fill import Filled, fill
from vlmdata.loader.request.request import PackRequest
from vlmdata.service.server.memory import BusyError
from vlmdata.storage.choices import Verify
from vlmdata.storage.shards import DatasetShards, ShardStore

#: Times that a pack is tried again after a worker was killed.
_MAX_RESTARTS = 3
#: Seconds for workers to end when the server does.
_GRACE_SECONDS = 5.0


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
        self._datasets, self._workers, self._verify, self._timeout = datasets, workers, verify, timeout
        self._lock = threading.Lock()
        self._closed = False
        self.restarts = 0
        self._pool = self._new_pool()
        for each in [self._pool.submit(os.getpid) for _ in range(workers)]:
            each.result()  # started now, not at the first query

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
        for _ in range(_MAX_RESTARTS + 1):
            pool = self._pool
            try:
                future = pool.submit(_fill, request, name, existing, on_damage)
            except RuntimeError:  # broken, or replaced meanwhile
                self._replace(pool)
                continue
            try:
                outcome = future.result(self._timeout)
            except TimeoutError:
                raise LateFillError(self._timeout, future) from None
            except CancelledError:
                raise BusyError("the server is stopping") from None
            except BrokenProcessPool:
                self._replace(pool)
                continue
            if isinstance(outcome, VlmdataError):
                raise outcome
            return outcome
        raise ResourceError(f"{_MAX_RESTARTS + 1} workers died over pack {request.pack}. Out of memory?")

    def close(self) -> None:
        """Stops the workers, without waiting long for packs that they make, or for broken workers that do not end."""
        self._closed = True
        options = {"wait": True, "cancel_futures": True}
        ending = threading.Thread(target=self._pool.shutdown, kwargs=options, daemon=True)
        ending.start()
        ending.join(_GRACE_SECONDS)  # else Python warns at the end of semaphores that are left

    def _replace(self, broken: ProcessPoolExecutor) -> None:
        with self._lock:
            if self._closed:
                raise BusyError("the server is stopping")
            if self._pool is broken:
                broken.shutdown(wait=True)  # before others write to the same buffers
                self._pool = self._new_pool()  # has no processes before it gets work
                self.restarts += 1
                if self._closed:
                    raise BusyError("the server is stopping")

    def _new_pool(self) -> ProcessPoolExecutor:
        # Not fork: gRPC has threads.
        return ProcessPoolExecutor(
            self._workers, get_context("forkserver"), _start, (tuple(self._datasets), self._verify)
        )


_store: ShardStore
_buffers: BufferMaps


def _start(datasets: Sequence[DatasetShards], verify: Verify) -> None:
    global _store, _buffers
    # Ctrl-C in a terminal reaches the process group, and the server drains. SIGTERM must end a worker: its pool sends
    # it when another worker was killed.
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    _store, _buffers = ShardStore(datasets, verify), BufferMaps()


def _end_with_the_server() -> None:
    """Ends this worker when the server was killed; its pool would wait for work forever."""
    server = parent_process()
    assert server is not None
    server.join()
    os._exit(1)


def _fill(
    request: PackRequest, name: BufferName, existing: Collection[int], on_damage: OnDamage
) -> Filled | VlmdataError:
    _buffers.keep_only(existing)
    try:
        return fill(request, _store, _buffers.array(name), on_damage)
    except VlmdataError as error:
        return error  # returned, because a raised one loses its traceback and may not be picklable
