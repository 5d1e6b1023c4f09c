"""The batches of a rank, in order, from a service."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vlmdata.loader.config import Reading
from vlmdata.loader.feed.pipeline import Pipeline
from vlmdata.loader.feed.workers import Finish
from vlmdata.loader.fill.buffers import BufferPool, Lease
from vlmdata.loader.fill.damage import Filled
from vlmdata.loader.request.request import PackRequest
from vlmdata.service.client.servers import Servers
from vlmdata.service.protocol import BatchQuery

#: Seconds that a query's own error, which says more, has before the pipeline's.
_GRACE_SECONDS = 5.0


@dataclass(frozen=True, eq=False)
class ServedBatches:
    """Fetches the batches of one rank.

    Attributes:
        servers: The servers.
        query: A query of this rank; the position is filled in.
        config: Reading options.
    """

    servers: Servers
    query: BatchQuery
    config: Reading

    def fetch(self, request: PackRequest, pool: BufferPool, stopped: threading.Event) -> tuple[Lease, Filled]:
        """Fetches a batch; see :meth:`Servers.fetch`."""
        return self.servers.fetch(
            self.query.at(request.position),
            request.layout.bytes,
            pool,
            self.config.checks != "off",
            self.config.timeout,
            stopped,
        )

    def begin[Item](
        self, requests: Iterator[PackRequest], pool: BufferPool, finish: Finish[Item]
    ) -> Iterator[Item] | Pipeline[Item]:
        """Starts to fetch batches, in the order of the requests."""
        if self.config.num_workers == 0:
            stopped = threading.Event()
            return (finish(request, *self.fetch(request, pool, stopped)) for request in requests)
        return ServedPipeline(requests, self, pool, finish)


class ServedPipeline[Item](Pipeline[Item]):
    """Batches fetched ahead of time by ``num_workers`` threads, up to ``prefetch_factor`` batches per thread.

    Args:
        requests: Requests in order, possibly endless.
        batches: Fetches a batch.
        pool: Buffers.
        finish: Applied to every filled buffer in the pipeline's thread; it may start a copy to a device.
    """

    def __init__(
        self,
        requests: Iterator[PackRequest],
        batches: ServedBatches,
        pool: BufferPool,
        finish: Finish[Item],
    ):
        super().__init__(batches.config.timeout + _GRACE_SECONDS)
        self._requests, self._batches, self._pool, self._finish = requests, batches, pool, finish
        self._ahead = batches.config.num_workers * batches.config.prefetch_factor
        self._threads = ThreadPoolExecutor(batches.config.num_workers, thread_name_prefix="vlmdata-fetch")
        self.start()

    def make(self) -> None:
        """Fetches batches and passes them on in order."""
        under_way: deque[tuple[PackRequest, Future[tuple[Lease, Filled]]]] = deque()
        try:
            failure = self._fill(under_way)
            while under_way and not self.stopped.is_set():
                request, future = under_way.popleft()
                try:
                    lease, filled = future.result()
                except Exception as error:
                    self.put(error)  # while it can: nothing is put once this is stopped
                    return
                failure = failure or self._fill(under_way)
                if self.stopped.is_set():
                    lease.release()
                else:
                    self.put(self._finish(request, lease, filled))
            self.put(failure)  # or None: the requests have ended
        finally:
            self.stopped.set()
            for _, future in under_way:
                if not future.cancel():
                    future.add_done_callback(_release)

    def close(self, wait: bool = True) -> None:
        """Stops fetching."""
        self.stopped.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if wait and not self.is_current_thread:
            self.join(_GRACE_SECONDS)

    def _fill(self, under_way: deque[tuple[PackRequest, Future[tuple[Lease, Filled]]]]) -> Exception | None:
        """Starts queries until enough are under way. Returns why there are no more requests, if that is an error."""
        while len(under_way) < self._ahead and not self.stopped.is_set():
            try:
                request = next(self._requests)
            except StopIteration:
                return None
            except Exception as error:
                return error  # belongs after the batches under way
            under_way.append((request, self._threads.submit(self._batches.fetch, request, self._pool, self.stopped)))
        return None


def _release(future: Future[tuple[Lease, Filled]]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result()[0].release()
