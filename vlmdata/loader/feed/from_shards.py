"""Makes batches from shards: in this process, or ahead of time in worker processes.

A worker gets a request with the name of a buffer, fills the buffer and answers with little more than the number of
bytes read. If it dies, another worker fills the same buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from vlmdata.errors import ResourceError
from vlmdata.loader.config import OnDamage, Reading
from vlmdata.loader.feed.pipeline import Finish, Pipeline
from vlmdata.loader.fill.buffers import BufferMaps, BufferName, BufferPool, Lease
from vlmdata.loader.fill.fill import Filled, fill
from vlmdata.loader.request.request import PackRequest
from vlmdata.storage.choices import Verify
from vlmdata.storage.shards import DatasetShards, ShardStore
from vlmdata.workers import Workers, WorkersDied

#: Number of workers that may die over one batch.
_MAX_DEATHS = 4

type _Job = tuple[PackRequest, BufferName]


@dataclass(frozen=True, eq=False)
class ShardBatches:
    """Makes batches from shards.

    Attributes:
        datasets: Sources of the shards.
        config: Reading options.
    """

    datasets: Sequence[DatasetShards]
    config: Reading

    def begin[Item](
        self, requests: Iterator[PackRequest], pool: BufferPool, finish: Finish[Item]
    ) -> Iterator[Item] | Pipeline[Item]:
        """Starts to make batches.

        Args:
            requests: Requests in order, possibly endless.
            pool: Buffers.
            finish: Applied to every filled buffer, in order.
        """
        if self.config.num_workers == 0:
            return self._here(requests, pool, finish)
        return self._in_workers(requests, pool, finish)

    def _here[Item](self, requests: Iterator[PackRequest], pool: BufferPool, finish: Finish[Item]) -> Iterator[Item]:
        """Makes batches in this process, one at a time."""
        store = ShardStore(self.datasets, self.config.checks)
        try:
            for request in requests:
                lease = pool.acquire(request.layout.bytes)
                yield finish(request, lease, fill(request, store, lease.memory(), self.config.on_damage))
        finally:
            store.close()

    def _in_workers[Item](
        self, requests: Iterator[PackRequest], pool: BufferPool, finish: Finish[Item]
    ) -> Pipeline[Item]:
        """Makes batches ahead of time, up to ``prefetch_factor`` per worker."""
        config = self.config
        workers: Workers[_Job, Filled] = Workers(
            partial(_prepare, tuple(self.datasets), config.checks, config.on_damage),
            config.num_workers,
            method=config.multiprocessing_context,
            max_deaths=_MAX_DEATHS,
        )

        def start(request: PackRequest) -> Future[tuple[Lease, Filled]]:
            lease = pool.acquire(request.layout.bytes)
            return _with_lease(workers.submit((request, lease.name)), lease)

        ahead = config.num_workers * config.prefetch_factor
        return Pipeline(
            requests, start, ahead, finish, lambda wait: workers.close() if wait else workers.close(0), config.timeout
        )


def _prepare(datasets: Sequence[DatasetShards], verify: Verify, on_damage: OnDamage) -> Callable[[_Job], Filled]:
    """Runs in a worker; returns what fills the buffer of a request."""
    store, buffers = ShardStore(datasets, verify), BufferMaps()

    def fill_named(job: _Job) -> Filled:
        request, name = job
        return fill(request, store, buffers.array(name), on_damage)

    return fill_named


def _with_lease(filling: Future[Filled], lease: Lease) -> Future[tuple[Lease, Filled]]:
    """Returns the future of a buffer and what filling it came to."""
    found: Future[tuple[Lease, Filled]] = Future()

    def pass_on(done: Future[Filled]) -> None:
        if not found.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is None:
            found.set_result((lease, done.result()))
        elif isinstance(error, WorkersDied):
            found.set_exception(
                ResourceError(
                    f"loader workers died {error.deaths} times in a row, the last one {error.cause}. Out of memory? "
                    "Use fewer num_workers or a smaller prefetch_factor; the loader's state is valid."
                )
            )
        else:
            found.set_exception(error)

    filling.add_done_callback(pass_on)
    return found
