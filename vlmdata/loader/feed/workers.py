"""Makes batches in order: in this process, or ahead of time in PyTorch DataLoader workers.

The DataLoader iterates over requests (its sampler), each with the name of a buffer. A worker fills the buffer and
returns only the number of bytes read. A dead worker is noticed when its batch is due, and the pipeline starts again
from exactly that batch. PyTorch's SIGCHLD handler would raise in the middle of the training step instead. Two things
keep it out: the DataLoader runs in a separate thread, which cannot install it, and its workers are taken off the list
of processes that it looks at, because another DataLoader of the program may have installed it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader

from vlmdata.errors import ResourceError, VlmdataError
from vlmdata.loader.config import OnDamage, Reading, Verify
from vlmdata.loader.feed.pipeline import Pipeline
from vlmdata.loader.feed.starting import worker_context
from vlmdata.loader.fill.buffers import BufferMaps, BufferName, BufferPool, Lease
from vlmdata.loader.fill.damage import Filled, fill
from vlmdata.loader.request.request import PackRequest
from vlmdata.storage.shards import DatasetShards, ShardStore

#: Number of worker deaths in a row, without a batch in between, before an error.
_MAX_RESTARTS = 3
#: Seconds for a killed process to disappear; one that waits for a dead network file system never does.
_DEATH_SECONDS = 10.0
#: Seconds after which PyTorch, while no batch comes, looks whether its workers live. Its own default is 5.
_LOOK_SECONDS = 0.25
#: Seconds in which a working worker returns its batch, which lets the waiting thread end.
_GRACE_SECONDS = 1.0


#: Converts a filled buffer, given its request and the number of bytes read. Takes ownership of the buffer.
type Finish[Item] = Callable[[PackRequest, Lease, Filled], Item]


class _Filler(torch.utils.data.Dataset[Any]):
    """Runs in a worker: fills the buffer of a request."""

    def __init__(self, datasets: Sequence[DatasetShards], verify: Verify, on_damage: OnDamage):
        self._datasets, self._verify, self._on_damage = datasets, verify, on_damage
        self._store: ShardStore | None = None
        self._buffers = BufferMaps()

    def __getitem__(self, item: tuple[PackRequest, BufferName]) -> Filled | VlmdataError:
        if self._store is None:
            self._store = ShardStore(self._datasets, self._verify)
        request, name = item
        try:
            return fill(request, self._store, self._buffers.array(name), self._on_damage)
        except VlmdataError as error:
            return error  # returned, because DataLoader would wrap it in a traceback


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
        return WorkerPipeline(requests, self.datasets, pool, self.config, finish)

    def _here[Item](self, requests: Iterator[PackRequest], pool: BufferPool, finish: Finish[Item]) -> Iterator[Item]:
        """Makes batches in this process, one at a time."""
        store = ShardStore(self.datasets, self.config.checks)
        try:
            for request in requests:
                lease = pool.acquire(request.layout.bytes)
                yield finish(request, lease, fill(request, store, lease.memory(), self.config.on_damage))
        finally:
            store.close()


class WorkerPipeline[Item](Pipeline[Item]):
    """Batches made ahead of time by worker processes, in the order of the requests.

    Args:
        requests: Requests in order, possibly endless.
        datasets: Sources of the shards.
        pool: Buffers.
        config: Reading options.
        finish: Applied to every filled buffer in the pipeline's thread; it may start a copy to a device.
    """

    def __init__(
        self,
        requests: Iterator[PackRequest],
        datasets: Sequence[DatasetShards],
        pool: BufferPool,
        config: Reading,
        finish: Finish[Item],
    ):
        super().__init__(config.timeout)
        self._requests, self._datasets, self._pool, self._config = requests, datasets, pool, config
        self._finish = finish
        self._iterator: Any = None
        self._failure: Exception | None = None  # why requests stopped, unless they just ended
        self.start()

    def close(self, wait: bool = True) -> None:
        """Stops the workers.

        Args:
            wait: Whether to wait until they and the thread are gone.
        """
        self.stopped.set()
        wait = wait and not self.is_current_thread  # garbage collection may run in any thread
        if wait:
            self.join(_GRACE_SECONDS)
        _kill_workers(self._iterator, wait)  # a stuck worker would ignore anything softer
        if wait:
            self.join(_DEATH_SECONDS)

    def make(self) -> None:
        """Takes batches from the workers, and starts workers again that were killed."""
        pending: list[tuple[PackRequest, Lease]] = []
        restarts = 0
        while not self.stopped.is_set():
            try:
                if self._iterator is None:
                    self._iterator = self._loader(pending)
                outcome = next(self._iterator)
            except StopIteration:
                self.put(self._failure)
                return
            except RuntimeError as error:
                if self.stopped.is_set():
                    return
                if _is_only_late(error):
                    continue
                # DataLoader's error for a killed worker. Everything not delivered is still pending.
                restarts += 1
                if restarts > _MAX_RESTARTS:
                    raise ResourceError(
                        f"loader workers died {restarts} times in a row, the last time: {error}. Out of memory? "
                        "Use fewer num_workers or a smaller prefetch_factor; the loader's state is valid."
                    ) from error
                if not _kill_workers(self._iterator):  # before others write to the same buffers
                    raise ResourceError(
                        "a loader worker died and another one cannot be stopped: storage hangs. Check the disk "
                        "or the network; the loader's state is valid."
                    ) from error
                self._iterator = None
                continue
            restarts = 0
            if isinstance(outcome, VlmdataError):
                self.put(outcome)
                return
            self._deliver(*pending.pop(0), outcome)

    def clean_up(self) -> None:
        """Kills the workers."""
        _kill_workers(self._iterator)
        self._iterator = self._failure = None  # its traceback refers to this object

    def _loader(self, pending: list[tuple[PackRequest, Lease]]) -> Any:
        """Creates a DataLoader over the pending requests, followed by the remaining ones."""
        again = list(pending)

        def requests() -> Iterator[tuple[PackRequest, BufferName]]:
            for request, lease in again:
                yield request, lease.name
            while not self.stopped.is_set():
                try:
                    request = next(self._requests)
                    lease = self._pool.acquire(request.layout.bytes)
                except StopIteration:
                    return
                except Exception as error:
                    # For example, the next epoch cannot be planned. The error belongs to this position in the order:
                    # batches in progress are delivered first, which raising it here would prevent.
                    self._failure = error
                    return
                pending.append((request, lease))
                yield request, lease.name

        loader = DataLoader(
            _Filler(self._datasets, self._config.checks, self._config.on_damage),
            batch_size=None,
            sampler=_Sequence(requests),
            num_workers=self._config.num_workers,
            prefetch_factor=self._config.prefetch_factor,
            timeout=_LOOK_SECONDS,
            collate_fn=_as_it_is,
            worker_init_fn=_leave_process_group,
            generator=torch.Generator(),  # otherwise every start draws from the training's random stream
            multiprocessing_context=worker_context(self._config.multiprocessing_context),
        )
        iterator = iter(loader)
        _take_off_list(iterator)
        return iterator

    def _deliver(self, request: PackRequest, lease: Lease, filled: Filled) -> None:
        if not self.stopped.is_set():
            self.put(self._finish(request, lease, filled))


def _is_only_late(error: RuntimeError) -> bool:
    """Whether DataLoader says that no batch came in time, with all workers alive: the next call goes on waiting."""
    return str(error).startswith("DataLoader timed out")


def _take_off_list(iterator: Any) -> None:
    """Keeps PyTorch's SIGCHLD handler from raising when one of the iterator's workers dies, or is killed here."""
    if iterator._worker_pids_set:
        iterator._worker_pids_set = False  # else the iterator would take them off again at its end, an error
        _remove_worker_pids(id(iterator))


def _kill_workers(iterator: Any, wait: bool = True) -> bool:
    """Kills a DataLoader iterator's processes. Returns False if they still exist after a while."""
    workers = getattr(iterator, "_workers", ())
    for worker in workers:
        worker.kill()
    deadline = time.monotonic() + (_DEATH_SECONDS if wait else 0)
    for worker in workers:
        worker.join(timeout=max(0.0, deadline - time.monotonic()))
    return not any(worker.is_alive() for worker in workers)


class _Sequence(torch.utils.data.Sampler[Any]):
    """A sampler over the values of a generator function."""

    def __init__(self, make: Callable[[], Iterator[Any]]):
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


def _as_it_is(item: Any) -> Any:
    return item


def _leave_process_group(worker: int) -> None:
    """Keeps signals to the process group, such as ctrl-C, from a worker: the current step still needs batches.

    Workers end when killed here or, at the latest, when PyTorch's watchdog finds their parent gone.
    """
    os.setpgid(0, 0)
