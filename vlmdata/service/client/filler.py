"""Fills the buffers of a rank's batches from a service."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from vlmdata.loader.config import Reading
from vlmdata.loader.fill.buffers import BufferPool
from vlmdata.loader.fill.filler import FilledBuffer
from vlmdata.loader.request.pack_request import PackRequest
from vlmdata.loader.request.rank_stream import RankStream
from vlmdata.service.client.race import Race
from vlmdata.service.client.servers import Servers
from vlmdata.service.protocol import BatchQuery

#: Seconds that a query's own error, which says more, has before the pipeline's.
_GRACE_SECONDS = 5.0


class ServedFiller:
    """Fetches the batches of one rank, ahead of time in as many threads as ``num_workers``."""

    def __init__(self, servers: Servers, stream: RankStream, reading: Reading):
        self.ahead, self.timeout = reading.num_workers * reading.prefetch_factor, reading.timeout + _GRACE_SECONDS
        self._servers, self._reading = servers, reading
        self._query = partial(
            BatchQuery,
            datasets=tuple(each.manifest.fingerprint for each in stream.datasets),
            plan=stream.plans.config,
            dp_rank=stream.dp_rank,
            dp_size=stream.dp_size,
            context_parallel=stream.context_parallel,
            parts=stream.parts,
            pixels=stream.pixels,
            on_damage=reading.on_damage,
        )
        self._threads = ThreadPoolExecutor(max(reading.num_workers, 1), thread_name_prefix="vlmdata-fetch")
        self._stopped = threading.Event()

    def start(self, request: PackRequest, pool: BufferPool) -> Future[FilledBuffer]:
        """Starts to fetch a batch; without ``num_workers``, the future is done."""
        if self.ahead:
            return self._threads.submit(self._fetch, request, pool)
        done = Future[FilledBuffer]()
        done.set_result(self._fetch(request, pool))
        return done

    def stop(self, wait: bool) -> None:
        """Cancels what is under way, without waiting: gRPC may wait for a dead server."""
        self._stopped.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, request: PackRequest, pool: BufferPool) -> FilledBuffer:
        query, reading = self._query(position=request.position), self._reading
        checked = reading.checks != "off"
        race = Race(self._servers, query, request.arrays.bytes, pool, checked, reading.timeout)
        return race.fetch(self._stopped)


@dataclass(frozen=True, eq=False)
class CollationService:
    """A service whose datasets are opened."""

    servers: Servers

    def filler(self, stream: RankStream, reading: Reading) -> ServedFiller:
        """Returns what fills the buffers of a rank's batches."""
        return ServedFiller(self.servers, stream, reading)

    def close(self) -> None:
        """Closes the connections."""
        self.servers.close()
