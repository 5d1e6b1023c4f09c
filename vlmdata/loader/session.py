"""A run of batches from one position on: owns the workers, the buffers and the copy stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vlmdata.batch import PackedBatch
from vlmdata.loader.buffers import BufferPool
from vlmdata.loader.config import Reading
from vlmdata.loader.device import DeviceMover, InFlight
from vlmdata.loader.shards import DatasetShards
from vlmdata.loader.state import Position
from vlmdata.loader.stream import RankStream, Tag
from vlmdata.loader.workers import Filled, WorkerPipeline, make_here


@dataclass(frozen=True, eq=False)
class Ready:
    """A batch on its way to the consumer."""

    tag: Tag
    batch: PackedBatch
    bytes_read: int


@dataclass(frozen=True, eq=False)
class _Flying:
    """The same, while its copy to the device is under way."""

    tag: Tag
    flight: InFlight
    bytes_read: int


class Session:
    """Batches from ``start`` on, until somebody jumps elsewhere.

    Args:
        stream: What to load.
        shards: Where from.
        config: How.
        device: Where batches go; None leaves them on the host.
        start: The first batch.
    """

    def __init__(
        self,
        stream: RankStream,
        shards: Sequence[DatasetShards],
        config: Reading,
        device: torch.device | None,
        start: Position,
    ):
        self._next: Position | None = start
        self._process = os.getpid()
        self._rank_stream, self._device = stream, device
        self._pool = BufferPool()
        self._mover = DeviceMover(device) if device is not None and device.type == "cuda" else None
        self._pipeline: WorkerPipeline[Tag] | None = None
        if config.num_workers == 0:
            made = make_here(stream.jobs(start), shards, self._pool, config.verify)
            self._items: Iterator[Ready | _Flying] = (self._prepare(filled) for filled in made)
        else:
            self._pipeline = WorkerPipeline(stream.jobs(start), shards, self._pool, config, self._prepare)
            self._items = iter(self._pipeline)

    def continues_at(self, position: Position) -> bool:
        """Whether the next batch is the one at this position. Not in a fork, which has neither thread nor workers."""
        return self._next == position and self._process == os.getpid()

    def take(self) -> Ready:
        """The next batch, on the device and safe to use on its current stream. After an error there is none."""
        self._next = None
        item = next(self._items)
        self._next = item.tag.following
        if isinstance(item, _Flying):
            assert self._mover is not None
            return Ready(item.tag, self._mover.receive(item.flight), item.bytes_read)
        return item

    def close(self) -> None:
        """Stops everything; batches that were taken stay valid."""
        if self._process != os.getpid():
            return  # the workers and buffers are the parent's
        if self._pipeline is not None:
            self._pipeline.close()
        if self._mover is not None:
            self._mover.close()
        self._pool.close()
        # These hold this object as well: without the knot, what they hold is given back now, not at some collection.
        self._pipeline, self._items = None, iter(())

    def _prepare(self, filled: Filled[Tag]) -> Ready | _Flying:
        """Runs in the pipeline's thread, one batch ahead of the consumer."""
        batch = self._rank_stream.batch_of(filled)
        if self._mover is not None:
            self._mover.pin(filled.lease.memory())
            return _Flying(filled.job.tag, self._mover.send(batch), filled.bytes_read)
        if self._device is not None:
            batch = batch.to(self._device)
        return Ready(filled.job.tag, batch, filled.bytes_read)


class CurrentSession:
    """The session a loader is in, if any. Apart from the loader, so that it can be ended when the loader is gone."""

    def __init__(self) -> None:
        self._session: Session | None = None

    def at(self, position: Position, begin: Callable[[], Session]) -> Session:
        """The current session if it goes on at this position, else a new one."""
        if self._session is None or not self._session.continues_at(position):
            self.end()
            self._session = begin()
        return self._session

    def end(self) -> None:
        """Ends the session, if there is one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
