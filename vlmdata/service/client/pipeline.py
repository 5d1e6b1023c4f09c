"""The batches of a rank, in order, from a service."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from vlmdata.loader.config import Reading
from vlmdata.loader.feed.pipeline import Finish, Pipeline
from vlmdata.loader.fill.buffers import BufferPool, Lease
from vlmdata.loader.fill.fill import Filled
from vlmdata.loader.request.request import PackRequest
from vlmdata.loader.request.stream import RankStream
from vlmdata.loader.state import Position
from vlmdata.service.client.race import fetch
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
        """Fetches a batch; see :func:`vlmdata.service.client.race.fetch`."""
        return fetch(
            self.servers,
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
        stopped = threading.Event()
        if self.config.num_workers == 0:
            return (finish(request, *self.fetch(request, pool, stopped)) for request in requests)
        threads = ThreadPoolExecutor(self.config.num_workers, thread_name_prefix="vlmdata-fetch")

        def stop(wait: bool) -> None:
            stopped.set()
            threads.shutdown(wait=False, cancel_futures=True)

        return Pipeline(
            requests,
            lambda request: threads.submit(self.fetch, request, pool, stopped),
            self.config.num_workers * self.config.prefetch_factor,
            finish,
            stop,
            self.config.timeout + _GRACE_SECONDS,
        )


@dataclass(frozen=True, eq=False)
class CollationService:
    """A service whose datasets are opened.

    Attributes:
        servers: Its servers.
    """

    servers: Servers

    def batches(self, stream: RankStream, start: Position, datasets: Sequence[str], reading: Reading) -> ServedBatches:
        """Returns the source of a rank's batches; see :class:`vlmdata.loader.data.BatchService`."""
        query = BatchQuery(
            datasets=tuple(datasets),
            plan=stream.config,
            position=start,
            dp_rank=stream.dp_rank,
            dp_size=stream.dp_size,
            context_parallel=stream.context_parallel,
            parts=stream.parts,
            pixels=stream.pixels,
            on_damage=reading.on_damage,
        )
        return ServedBatches(self.servers, query, reading)

    def close(self) -> None:
        """Closes the connections."""
        self.servers.close()
