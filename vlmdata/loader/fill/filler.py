"""Fills buffers with batches from shards: in this process, or in worker processes.

A worker gets a request with the name of a buffer, fills the buffer and answers with little more than the number of
bytes read. If it dies, another worker fills the same buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from vlmdata.errors import ChangedDataError, DatasetFormatError, ResourceError, UnreadableDataError
from vlmdata.loader.config import OnDamage, Reading
from vlmdata.loader.fill.assemble import assemble, extents, image_of, read_members, stored_members
from vlmdata.loader.fill.buffers import BufferMaps, BufferName, BufferPool, LeasedBuffer
from vlmdata.loader.request.index_rows import TOKEN_MEMBERS
from vlmdata.loader.request.pack_request import PackRequest
from vlmdata.storage.choices import Verify
from vlmdata.storage.shards import DatasetShards, ShardStore
from vlmdata.workers import Workers, WorkersDied

#: Number of workers that may die over one batch.
_MAX_DEATHS = 4
#: Errors of a copy of the data that is damaged. Another copy may be sound.
DAMAGE = (DatasetFormatError, UnreadableDataError)


@dataclass(frozen=True)
class Filled:
    """Bytes read for a buffer, and what is wrong with the samples that are masked, by their number in the pack."""

    bytes_read: int
    damaged: Mapping[int, str] = field(default_factory=dict)


type FilledBuffer = tuple[LeasedBuffer, Filled]
#: A request, its buffer, the inodes of all buffers that exist (workers unmap others), and what changed bytes do.
type FillJob = tuple[PackRequest, BufferName, Collection[int], OnDamage]


def fill(request: PackRequest, store: ShardStore, buffer: npt.NDArray[np.uint8], on_damage: OnDamage) -> Filled:
    """Reads a batch into a buffer (uint8) of at least ``request.arrays.bytes``.

    Raises:
        ChangedDataError: If a sample has changed bytes and is not masked.
        DatasetFormatError: If a shard is missing, has another size, or does not decode.
        UnreadableDataError: If a shard cannot be read.
    """
    masks = on_damage == "mask"
    before, damaged = store.bytes_read, dict[int, str]()
    with store.fetched(extents(request, whole=masks)) if store.fetches_ranges else nullcontext():
        if masks:
            damaged = assemble_masked(request, store, buffer)
        else:
            assemble(request, store, buffer)
    return Filled(store.bytes_read - before, damaged)


def filling_workers(
    datasets: Sequence[DatasetShards], verify: Verify, count: int, method: str | None, *, start_now: bool
) -> Workers[FillJob, Filled]:
    """Returns worker processes that fill buffers; see :class:`vlmdata.workers.Workers`."""
    prepare = partial(_prepare, tuple(datasets), verify)
    # A server of processes imports this once; otherwise each worker would, for seconds and with memory of its own.
    preload = [__name__]
    return Workers(prepare, count, method=method, preload=preload, max_deaths=_MAX_DEATHS, start_now=start_now)


def _prepare(datasets: Sequence[DatasetShards], verify: Verify) -> Callable[[FillJob], Filled]:
    """Runs in a worker; returns what fills the buffer of a request."""
    store, buffers = ShardStore(datasets, verify), BufferMaps()

    def fill_named(job: FillJob) -> Filled:
        request, name, existing, on_damage = job
        buffers.keep_only(existing)
        return fill(request, store, buffers.array(name), on_damage)

    return fill_named


class FillerHere:
    """Fills buffers in this process, when they are asked for."""

    ahead = 0

    def __init__(self, datasets: Sequence[DatasetShards], reading: Reading):
        self._store, self._on_damage = ShardStore(datasets, reading.checks), reading.on_damage
        self.timeout = reading.timeout

    def start(self, request: PackRequest, pool: BufferPool) -> Future[FilledBuffer]:
        """Fills a buffer; the future is done."""
        lease, done = pool.acquire(request.arrays.bytes), Future[FilledBuffer]()
        done.set_result((lease, fill(request, self._store, lease.memory(), self._on_damage)))
        return done

    def stop(self, wait: bool) -> None:
        """Closes the shards."""
        self._store.close()


class FillerInWorkers:
    """Fills buffers in worker processes, up to ``prefetch_factor`` ahead per worker."""

    def __init__(self, datasets: Sequence[DatasetShards], reading: Reading):
        self._workers = filling_workers(
            datasets, reading.checks, reading.num_workers, reading.multiprocessing_context, start_now=False
        )
        self._on_damage = reading.on_damage
        self.ahead, self.timeout = reading.num_workers * reading.prefetch_factor, reading.timeout

    def start(self, request: PackRequest, pool: BufferPool) -> Future[FilledBuffer]:
        """Gives a request to the workers."""
        lease = pool.acquire(request.arrays.bytes)
        found: Future[FilledBuffer] = Future()

        def pass_on(done: Future[Filled]) -> None:
            if not found.set_running_or_notify_cancel():
                return
            if (error := done.exception()) is None:
                found.set_result((lease, done.result()))
            elif isinstance(error, WorkersDied):
                found.set_exception(
                    ResourceError(
                        f"loader workers died {error.deaths} times in a row, the last one {error.cause}. Out of "
                        "memory? Use fewer num_workers or a smaller prefetch_factor; the loader's state is valid."
                    )
                )
            else:
                found.set_exception(error)

        self._workers.submit((request, lease.name, pool.inodes(), self._on_damage)).add_done_callback(pass_on)
        return found

    def stop(self, wait: bool) -> None:
        """Ends the workers."""
        if wait:
            self._workers.close()
        else:
            self._workers.close(0)


def assemble_masked(request: PackRequest, store: ShardStore, buffer: npt.NDArray[np.uint8]) -> dict[int, str]:
    """Reads a batch into a buffer. Returns what is wrong with the masked samples, by their number in the pack."""
    try:
        assemble(request, store, buffer)
        _check_the_rest(request, store)
    except ChangedDataError:
        damaged = _find_damaged(request, store)
        assemble(request, store, buffer, damaged)
        return damaged
    return {}


def _check_the_rest(request: PackRequest, store: ShardStore) -> None:
    """Checks what :func:`assemble` did not read: other parts of the samples, and images of other slices."""
    here = stored_members(request)
    read_members(request.pack.samples, [name for name in TOKEN_MEMBERS if name not in here], store, request.pack.family)
    _check_images(request, store, np.setdiff1d(np.arange(len(request.pack.images.grids)), request.read).tolist())


def _find_damaged(request: PackRequest, store: ShardStore) -> dict[int, str]:
    """Returns what is wrong with each sample that has changed bytes."""
    found, samples, images = {}, request.pack.samples, request.pack.images
    for number in range(len(samples.keys)):
        try:
            read_members(samples.take([number]), TOKEN_MEMBERS, store, request.pack.family)
            _check_images(request, store, np.flatnonzero(images.sample == number).tolist())
        except ChangedDataError as error:
            found[number] = str(error)
    return found


def _check_images(request: PackRequest, store: ShardStore, images: Collection[int]) -> None:
    """Checks the stored bytes of images, without decoding them."""
    rows, samples = request.pack.images, request.pack.samples
    for image in images:
        sample = int(rows.sample[image])
        store.read(
            int(samples.dataset[sample]),
            int(samples.shard[sample]),
            int(rows.offsets[image]),
            memoryview(np.empty(int(rows.bytes[image]), np.uint8)),
            int(rows.checksums[image]),
            image_of(request.pack, sample, image),
        )


def damaged_file(message: str) -> str:
    """Returns the file that an error of damaged data names: all of them begin with it."""
    return message.partition(": ")[0]
