"""Making batches in order: in this process, or ahead of time in PyTorch DataLoader workers.

The DataLoader iterates over requests (its sampler), each naming a buffer; a worker fills the buffer and returns only
how much it read. It runs in a thread of its own, which also keeps PyTorch from installing its SIGCHLD handler: that
would raise in the middle of the training step when a worker dies. Here a dead worker is noticed when its batch is
due, and the pipeline starts again from exactly that batch.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from vlmdata.errors import ResourceError, VlmdataError
from vlmdata.loader.assemble import assemble, layout_of
from vlmdata.loader.buffers import BufferMaps, BufferName, BufferPool, Lease
from vlmdata.loader.config import Reading
from vlmdata.loader.request import PackRequest
from vlmdata.loader.shards import DatasetShards, ShardStore
from vlmdata.loader.starting import worker_context

#: Worker deaths in a row, with no batch in between, before we give up.
_MAX_RESTARTS = 3
#: Seconds that a killed process may take to be gone; one that waits for a dead network file system never is.
_DEATH_SECONDS = 10.0
#: Seconds in which a worker that works gives its batch, which ends the thread's waiting and the thread. Once workers
#: are killed it takes PyTorch 5 s to notice.
_GRACE_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class Job[T]:
    """A request and whatever the caller needs to know of it when it is filled."""

    request: PackRequest
    tag: T


@dataclass(frozen=True, eq=False)
class Filled[T]:
    """A filled buffer.

    Attributes:
        job: What was asked for.
        lease: The buffer; whoever takes the batch out of it owns it.
        bytes_read: Bytes read from shards.
    """

    job: Job[T]
    lease: Lease
    bytes_read: int


class _Maker(torch.utils.data.Dataset[Any]):
    """What a worker runs: a map from request to filled buffer."""

    def __init__(self, datasets: Sequence[DatasetShards], verify: bool):
        self._datasets, self._verify = datasets, verify
        self._store: ShardStore | None = None
        self._buffers = BufferMaps()

    def __getitem__(self, item: tuple[PackRequest, BufferName]) -> int | VlmdataError:
        if self._store is None:
            self._store = ShardStore(self._datasets, self._verify)
        request, name = item
        try:
            return assemble(request, self._store, self._buffers.array(name))
        except VlmdataError as error:
            return error  # as a value: DataLoader would wrap it in a traceback


def make_here[T](
    jobs: Iterator[Job[T]], datasets: Sequence[DatasetShards], pool: BufferPool, verify: bool
) -> Iterator[Filled[T]]:
    """Makes batches in this process, one at a time."""
    store = ShardStore(datasets, verify)
    try:
        for job in jobs:
            lease = pool.acquire(layout_of(job.request).bytes)
            yield Filled(job, lease, assemble(job.request, store, lease.memory()))
    finally:
        store.close()


class WorkerPipeline[T]:
    """Batches made ahead of time by worker processes, in the order of the jobs.

    Args:
        jobs: Jobs in order, without end or with one.
        datasets: Where shards come from.
        pool: Buffers.
        config: How.
        on_thread: Applied to every filled buffer in the pipeline's thread (a copy to a device, say).
    """

    def __init__(
        self,
        jobs: Iterator[Job[T]],
        datasets: Sequence[DatasetShards],
        pool: BufferPool,
        config: Reading,
        on_thread: Callable[[Filled[T]], Any],
    ):
        self._jobs, self._datasets, self._pool, self._config = jobs, datasets, pool, config
        self._on_thread = on_thread
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=1)  # one ahead of the consumer
        self._stopped = threading.Event()
        self._iterator: Any = None
        self._failure: Exception | None = None  # why there are no further jobs, if they did not just end
        self._thread = threading.Thread(target=self._run, name="vlmdata-pipeline", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                item = self._ready.get(timeout=self._config.timeout)
            except queue.Empty:
                self.close(wait=False)
                raise ResourceError(
                    f"no batch came for {self._config.timeout:.0f} s: a worker is stuck, or storage is slow. Look at "
                    "the workers and the disk, or raise `timeout`; the loader's state is intact."
                ) from None
            if item is None:
                return
            if isinstance(item, BaseException):
                try:
                    raise item
                finally:
                    del item  # else its traceback holds this frame and this frame it, with all batches, for long
            yield item

    def close(self, wait: bool = True) -> None:
        """Stops the workers.

        Args:
            wait: Whether they and the thread are gone afterwards; else they are only told to go.
        """
        self._stopped.set()
        wait = wait and self._thread is not threading.current_thread()  # garbage is collected in any thread
        if wait:
            self._thread.join(timeout=_GRACE_SECONDS)
        _kill_workers(self._iterator, wait)  # a worker that is stuck would not listen to anything softer
        if wait:
            self._thread.join(timeout=_DEATH_SECONDS)

    def _run(self) -> None:
        pending: list[tuple[Job[T], Lease]] = []
        restarts = 0
        try:
            while not self._stopped.is_set():
                try:
                    if self._iterator is None:
                        self._iterator = self._loader(pending)
                    outcome = next(self._iterator)
                except StopIteration:
                    self._put(self._failure)
                    return
                except RuntimeError as error:
                    if self._stopped.is_set():
                        return
                    # DataLoader's word for a worker that was killed. All it had not delivered is still pending.
                    restarts += 1
                    if restarts > _MAX_RESTARTS:
                        raise ResourceError(
                            f"loader workers died {restarts} times in a row, the last time: {error}. Out of memory? "
                            "Use fewer num_workers or a smaller prefetch_factor; the loader's state is intact."
                        ) from error
                    if not _kill_workers(self._iterator):  # before others write to the same buffers
                        raise ResourceError(
                            "a loader worker died and another one cannot be stopped: storage hangs. Look at the disk "
                            "or the network; the loader's state is intact."
                        ) from error
                    self._iterator = None
                    continue
                restarts = 0
                if isinstance(outcome, VlmdataError):
                    self._put(outcome)
                    return
                self._deliver(Filled(*pending.pop(0), outcome))
        except BaseException as error:
            self._put(error)
        finally:
            _kill_workers(self._iterator)
            self._iterator = self._failure = None  # its traceback holds this object

    def _loader(self, pending: list[tuple[Job[T], Lease]]) -> Any:
        """A new DataLoader over what is pending and then the jobs that follow."""
        again = list(pending)

        def requests() -> Iterator[tuple[PackRequest, BufferName]]:
            for job, lease in again:
                yield job.request, lease.name
            while not self._stopped.is_set():
                try:
                    job = next(self._jobs)
                    lease = self._pool.acquire(layout_of(job.request).bytes)
                except StopIteration:
                    return
                except Exception as error:
                    # The next epoch cannot be planned, say. That is an error of this position in the order: batches
                    # under way are delivered first, which raising it here would prevent.
                    self._failure = error
                    return
                pending.append((job, lease))
                yield job.request, lease.name

        loader = DataLoader(
            _Maker(self._datasets, self._config.verify),
            batch_size=None,
            sampler=_Sequence(requests),
            num_workers=self._config.num_workers,
            prefetch_factor=self._config.prefetch_factor,
            collate_fn=_as_it_is,
            worker_init_fn=_leave_process_group,
            generator=torch.Generator(),  # else every start draws from the training's own random numbers
            multiprocessing_context=worker_context(self._config.multiprocessing_context),
        )
        return iter(loader)

    def _deliver(self, filled: Filled[T]) -> None:
        if not self._stopped.is_set():
            self._put(self._on_thread(filled))

    def _put(self, item: Any) -> None:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return


def _kill_workers(iterator: Any, wait: bool = True) -> bool:
    """Ends a DataLoader iterator's processes at once; False if they are not gone after a while."""
    workers = getattr(iterator, "_workers", ())
    for worker in workers:
        worker.kill()
    deadline = time.monotonic() + (_DEATH_SECONDS if wait else 0)
    for worker in workers:
        worker.join(timeout=max(0.0, deadline - time.monotonic()))
    return not any(worker.is_alive() for worker in workers)


class _Sequence(torch.utils.data.Sampler[Any]):
    """A sampler over what a function yields."""

    def __init__(self, make: Callable[[], Iterator[Any]]):
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


def _as_it_is(item: Any) -> Any:
    return item


def _leave_process_group(worker: int) -> None:
    """Keeps a worker from signals to the whole process group, such as ctrl-C: a step under way still needs batches.

    Workers end when they are killed here or, at the latest, when PyTorch's watch finds their parent gone.
    """
    os.setpgid(0, 0)
