"""A sequence of batches from one position on. Owns the workers, the buffers and the copy stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from vlmdata.batch import PackedBatch
from vlmdata.loader.feed.batches import batch_of
from vlmdata.loader.feed.device import DeviceCopy, DeviceMover
from vlmdata.loader.feed.pipeline import Finish, Pipeline
from vlmdata.loader.fill.buffers import BufferPool, Lease
from vlmdata.loader.fill.fill import Filled
from vlmdata.loader.request.request import PackRequest
from vlmdata.loader.request.stream import RankStream
from vlmdata.loader.state import Position


@dataclass(frozen=True, eq=False)
class LoadedBatch:
    """A batch with the loader's data about it.

    Attributes:
        batch: The batch.
        following: Position of the next batch.
        bytes_read: Bytes read from shards for it.
        damaged: What is wrong with the samples that are masked, by their number in the pack.
        copy: The copy to the device, while in progress.
    """

    batch: PackedBatch
    following: Position
    bytes_read: int
    damaged: Mapping[int, str] = field(default_factory=dict)
    copy: DeviceCopy | None = None


class BatchSource(Protocol):
    """Makes batches, or gets them made."""

    def begin[Item](
        self, requests: Iterator[PackRequest], pool: BufferPool, finish: Finish[Item]
    ) -> Iterator[Item] | Pipeline[Item]:
        """Starts to make batches, in the order of the requests; ``finish`` turns each filled buffer into an item."""


class Session:
    """Batches from ``start`` on, until a jump to another position.

    Args:
        stream: Batches to load.
        source: Source of the batches: shards, or a service.
        device: Device of the batches; None leaves them on the host.
        start: The first batch.
    """

    def __init__(
        self,
        stream: RankStream,
        source: BatchSource,
        device: torch.device | None,
        start: Position,
    ):
        self._next: Position | None = start
        self._process = os.getpid()
        self._device = device
        self._pool = BufferPool()
        self._mover = DeviceMover(device) if device is not None and device.type == "cuda" else None
        self._pipeline: Pipeline[LoadedBatch] | None = None
        begun = source.begin(stream.requests(start), self._pool, self._finish)
        if isinstance(begun, Pipeline):
            self._pipeline = begun
        self._batches = iter(begun)

    def continues_at(self, position: Position) -> bool:
        """True if the next batch is at this position. False in a fork, which has neither thread nor workers."""
        return self._next == position and self._process == os.getpid()

    def take(self) -> LoadedBatch:
        """Returns the next batch, on the device and safe to use on its current stream. After an error there is none."""
        self._next = None
        loaded = next(self._batches)
        self._next = loaded.following
        if loaded.copy is None:
            return loaded
        assert self._mover is not None
        self._mover.receive(loaded.batch, loaded.copy)
        return replace(loaded, copy=None)

    def close(self) -> None:
        """Stops everything. Returned batches stay valid."""
        if self._process != os.getpid():
            return  # the workers and buffers are the parent's
        if self._pipeline is not None:
            self._pipeline.close()
        if self._mover is not None:
            self._mover.close()
        self._pool.close()
        # These objects refer back to this one. Breaking the cycle releases memory now, not at a later collection.
        self._pipeline, self._batches = None, iter(())

    def _finish(self, request: PackRequest, lease: Lease, filled: Filled) -> LoadedBatch:
        """Converts a filled buffer to a batch. Runs in the pipeline's thread, one batch ahead of the consumer."""
        batch, copy = batch_of(request, lease.array(), tuple(filled.damaged)), None
        if self._mover is not None:
            self._mover.pin(lease.memory())
            batch, copy = self._mover.send(batch)
        elif self._device is not None:
            batch = batch.to(self._device)
        return LoadedBatch(batch, request.following, filled.bytes_read, filled.damaged, copy)


class CurrentSession:
    """The current session of a loader, if any. Separate from the loader, so that it can end later."""

    def __init__(self) -> None:
        self._session: Session | None = None

    def at(self, position: Position, begin: Callable[[], Session]) -> Session:
        """Returns the current session if it continues at this position, else a new one."""
        if self._session is None or not self._session.continues_at(position):
            self.end()
            self._session = begin()
        return self._session

    def end(self) -> None:
        """Ends the session, if any."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
