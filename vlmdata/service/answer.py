"""The answer to a query: a rank's part of a pack, as views of the pack's buffer."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from vlmdata.loader.request import PackRequest
from vlmdata.loader.served.protocol import Header, Trailer
from vlmdata.service.memory import BusyError
from vlmdata.service.packs import FilledPack

SCHEMA = pa.schema([("bytes", pa.uint8())])
#: Bytes of a record batch (benchmarks/service.py).
_CHUNK = 4 << 20

Bytes = npt.NDArray[np.uint8]


def pieces(request: PackRequest, pack: FilledPack) -> list[Bytes]:
    """Returns the bytes of a batch's buffer, in order. Pixels are views of the pack; only slices of tokens are copied.

    Args:
        request: The client's request.
        pack: The whole pack, with at least the parts of the request.
    """
    if request.context_parallel is None and request.layout == pack.request.layout:
        return [pack.buffer[: request.layout.bytes]]
    views = pack.request.layout.views(pack.buffer)
    found: list[Bytes] = []
    at = 0
    for field in request.layout.fields:
        if field.offset > at:
            found.append(np.zeros(field.offset - at, np.uint8))
        view = views[field.name]
        if field.name == "patches":
            found += _images(request, view.view(np.uint8))
        elif view.shape == field.shape:
            found.append(_flat(view))
        else:
            whole = view.reshape(-1)
            found.append(_flat(np.concatenate([whole[a:b] for a, b in request.ranges.tolist()])))
        at = field.offset + field.bytes
    if request.layout.bytes > at:
        found.append(np.zeros(request.layout.bytes - at, np.uint8))
    return [each for each in found if each.size]


def _images(request: PackRequest, patches: Bytes) -> list[Bytes]:
    """Returns the patches of the images held by a request, adjacent images together."""
    ends = np.cumsum(request.images.grids.prod(axis=1))
    starts = ends - request.images.grids.prod(axis=1)
    held = request.held
    first = np.flatnonzero(np.diff(held, prepend=-2) != 1)
    last = np.append(first[1:], len(held))[: len(first)] - 1
    return [_flat(patches[starts[held[a]] : ends[held[b]]]) for a, b in zip(first, last, strict=True)]


def _flat(array: npt.NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Answer:
    """An answer on its way to a client. It can give up its memory if the client does not read.

    Args:
        request: The client's request.
        pack: The pack.
        copies: Says whether chunks are copied before they are sent. A chunk that is not copied keeps the memory of the
            whole pack until the client has read it.
    """

    def __init__(self, request: PackRequest, pack: FilledPack, copies: Callable[[], bool]):
        self.bytes = request.layout.bytes
        self.pack = weakref.ref(pack.buffer)
        self.pack_bytes = pack.buffer.nbytes
        self.given_up = False
        self._copies = copies
        self._damaged = pack.filled.damaged
        self._pieces: list[Bytes] | None = pieces(request, pack)
        self._lock = threading.RLock()  # garbage collection may end a stream inside the critical section
        self.progress = time.monotonic()

    def __iter__(self) -> Iterator[tuple[pa.RecordBatch, pa.Buffer | None]]:
        """Yields record batches with their metadata.

        Raises:
            BusyError: If the memory was given up.
        """
        metadata: pa.Buffer | None = pa.py_buffer(Header(self.bytes, self._damaged).encode())
        checksum, sent = xxhash.xxh3_64(), 0
        while sent < self.bytes:
            chunk = self._chunk(sent)
            checksum.update(chunk)
            sent += len(chunk)
            yield _record_batch(chunk), metadata
            metadata = None
            self.progress = time.monotonic()
        self.give_up()
        if metadata is not None:  # an empty batch
            yield _record_batch(np.zeros(0, np.uint8)), metadata
        yield _record_batch(np.zeros(0, np.uint8)), pa.py_buffer(Trailer(checksum.intdigest()).encode())

    def give_up(self) -> None:
        """Gives up the memory of what is not sent yet."""
        with self._lock:
            self._pieces = None

    def _chunk(self, at: int) -> Bytes:
        with self._lock:
            if self._pieces is None:
                raise BusyError("the client read too slowly, and others needed the memory")
            for piece in self._pieces:
                if at < len(piece):
                    chunk = piece[at : at + _CHUNK]
                    return chunk.copy() if self._copies() else chunk
                at -= len(piece)
        raise AssertionError("unreachable")


def _record_batch(data: Bytes) -> pa.RecordBatch:
    array = pa.Array.from_buffers(pa.uint8(), len(data), [None, pa.py_buffer(data)])
    return pa.RecordBatch.from_arrays([array], schema=SCHEMA)


class Answers:
    """The answers under way.

    Args:
        stall: Seconds without progress after which an answer may lose its memory.
        memory: Bytes of all packs. Answers beyond half of it are sent as copies, so that clients that do not read can
            hold at most the other half.
    """

    def __init__(self, stall: float, memory: int):
        self._stall, self._memory = stall, memory
        self._lock = threading.RLock()  # garbage collection may end a stream inside the critical section
        self._answers: set[Answer] = set()
        self.given_up = 0

    def add(self, answer: Answer) -> None:
        """Notes an answer that begins."""
        with self._lock:
            self._answers.add(answer)

    def remove(self, answer: Answer) -> None:
        """Forgets an answer that has ended."""
        answer.give_up()
        with self._lock:
            self._answers.discard(answer)

    def __len__(self) -> int:
        """Returns the number of answers under way that were not given up."""
        with self._lock:
            return sum(not each.given_up for each in list(self._answers))

    @property
    def threads(self) -> int:
        """Number of answers under way, given up or not; each has a thread of Flight."""
        with self._lock:
            return len(self._answers)

    def crowd(self) -> bool:
        """Returns whether the answers under way, given up or not, may hold more than half of the memory."""
        with self._lock:
            packs = {id(each.pack()): each.pack_bytes for each in list(self._answers) if each.pack() is not None}
        return sum(packs.values()) > self._memory // 2

    def relieve(self) -> bool:
        """Takes the memory of the answer that stalls longest; returns False if none does."""
        with self._lock:
            running = [each for each in list(self._answers) if not each.given_up]
            slowest = min(running, key=lambda each: each.progress, default=None)
            if slowest is None or time.monotonic() - slowest.progress < self._stall:
                return False
            slowest.given_up = True
            self.given_up += 1
        slowest.give_up()
        return True
