"""The answer to a query: a rank's part of a pack, as views of the pack's buffer, or as their place in shared memory."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from vlmdata.loader.request.pack_request import PackRequest
from vlmdata.service.protocol import Header, encode_trailer
from vlmdata.service.server.packs import BusyError, FilledPack
from vlmdata.service.shared_memory import IN_ANSWER, SharedPack

SCHEMA = pa.schema([("bytes", pa.uint8())])
#: Bytes of a record batch (benchmarks/service.py).
_CHUNK = 4 << 20
#: Seconds between two looks whether a client has read shared memory; they double while it has not.
_FIRST_LOOK, _LONGEST_LOOK = 0.001, 0.05

_FILE_CHUNK = 1 << 20

Bytes = npt.NDArray[np.uint8]
#: A record batch and its metadata.
Sent = tuple[pa.RecordBatch, pa.Buffer | None]


def pieces(request: PackRequest, pack: FilledPack) -> list[Bytes]:
    """Returns the bytes of a batch's buffer, in order: views of the pack, except slices of tokens, which are copied."""
    if request.context_parallel is None and request.arrays == pack.request.arrays:
        return [pack.buffer[: request.arrays.bytes]]
    views = pack.request.arrays.views(pack.buffer)
    found: list[Bytes] = []
    at = 0
    for field in request.arrays.placed:
        if field.offset > at:
            found.append(np.zeros(field.offset - at, np.uint8))
        view = views[field.name]
        if field.name in ("patches", "video_patches"):
            found += _items(request, view.view(np.uint8), videos=field.name == "video_patches")
        elif view.shape == field.shape:
            found.append(_flat(view))
        else:
            whole = view.reshape(-1)
            found.append(_flat(np.concatenate([whole[a:b] for a, b in request.ranges.tolist()])))
        at = field.offset + field.bytes
    if request.arrays.bytes > at:
        found.append(np.zeros(request.arrays.bytes - at, np.uint8))
    return [each for each in found if each.size]


def _items(request: PackRequest, patches: Bytes, *, videos: bool) -> list[Bytes]:
    """Returns the patches of the images or of the videos held by a request, adjacent ones together."""
    images = request.pack.images
    of_kind = request.rows * (images.are_videos == videos)
    held = request.held.take(images.are_videos[request.held.items] == videos)
    counts = held.rows(images.grids, request.rows)
    starts = (np.cumsum(of_kind) - of_kind)[held.items] + counts // np.maximum(held.counts, 1) * held.begins
    first = np.flatnonzero(np.append(-1, (starts + counts)[:-1])[: len(starts)] != starts)
    last = np.append(first[1:], len(starts))[: len(first)] - 1
    return [_flat(patches[starts[a] : starts[b] + counts[b]]) for a, b in zip(first, last, strict=True)]


def _flat(array: npt.NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Answer:
    """An answer on its way to a client. It can give up its memory if the client does not read.

    ``copies`` says whether chunks are copied before they are sent. A chunk that is not copied keeps the memory of the
    whole pack until the client has read it.
    """

    def __init__(self, request: PackRequest, pack: FilledPack, copies: Callable[[], bool]):
        self.bytes = request.arrays.bytes
        self.pack = weakref.ref(pack.buffer)
        self.pack_bytes = pack.buffer.nbytes
        self.given_up = False
        self.progress = time.monotonic()
        self._copies = copies
        self._damaged = pack.filled.damaged
        self._pieces: list[Bytes] | None = pieces(request, pack)
        self._checksum = xxhash.xxh3_64()
        self._lock = threading.RLock()  # garbage collection may end a stream inside the critical section

    def batches(self) -> Iterator[Sent]:
        """Yields all record batches but the last one, with their metadata; a BusyError if the memory was given up."""
        metadata: pa.Buffer | None = pa.py_buffer(Header(self.bytes, self._damaged).encode())
        at = 0
        while at < self.bytes or metadata is not None:  # an empty batch has a header, too
            batch = record_batch(self._chunk(at, self._copies()))
            at += batch.num_rows
            yield batch, metadata
            metadata = None
            self.progress = time.monotonic()
        self.give_up()

    def last(self) -> Iterator[Sent]:
        """Yields the last record batch."""
        yield record_batch(np.zeros(0, np.uint8)), pa.py_buffer(encode_trailer(self._checksum.intdigest()))

    def wait(self) -> None:
        """Waits until the client needs the pack no longer."""

    def give_up(self) -> None:
        """Gives up the memory of what is not sent yet."""
        with self._lock:
            self._pieces = None

    def _chunk(self, at: int, copy: bool) -> Bytes:
        """Returns the next bytes, and counts them into the checksum. A copy does not keep the pack."""
        with self._lock:
            if self._pieces is None:
                raise BusyError("the client read too slowly, and others needed the memory")
            for piece in self._pieces:
                if at < len(piece):
                    chunk = piece[at : at + _CHUNK]
                    break
                at -= len(piece)
            else:
                return np.zeros(0, np.uint8)
        chunk = chunk.copy() if copy else chunk
        self._checksum.update(chunk)
        return chunk


class SharedAnswer(Answer):
    """An answer that names the place of the batch in this server's memory, until the client has ended its query."""

    def __init__(self, request: PackRequest, pack: FilledPack, is_over: Callable[[], bool]):
        super().__init__(request, pack, lambda: False)
        self._is_over = is_over
        begin, end = pack.buffer.ctypes.data, pack.buffer.ctypes.data + pack.buffer.nbytes
        places, outside = [], [np.zeros(0, np.uint8)]
        for piece in self._pieces or []:
            shared = begin <= piece.ctypes.data < end
            places.append((piece.ctypes.data - begin if shared else IN_ANSWER, len(piece)))
            if not shared:
                outside.append(piece)
        self._shared = SharedPack.of(pack.name, pack.generation, tuple(places))
        self._outside = np.concatenate(outside)

    def batches(self) -> Iterator[Sent]:
        """Yields the header, with the pieces that are not in shared memory."""
        header = Header(self.bytes, self._damaged, self._shared)
        yield record_batch(self._outside), pa.py_buffer(header.encode())

    def last(self) -> Iterator[Sent]:
        """Yields nothing."""
        yield from ()

    def wait(self) -> None:
        """Waits until the client has ended its query, or others have taken the memory."""
        pause = _FIRST_LOOK
        while not self.given_up and not self._is_over():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOOK)


class FileAnswer:
    """A file on its way to a client. It ends if the client does not read and others wait."""

    pack_bytes = 0

    def __init__(self, path: Path):
        self._path = path
        self.given_up = False
        self.progress = time.monotonic()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the file's bytes. Raises a BusyError if it was given up, an OSError if the file cannot be read."""
        with open(self._path, "rb") as file:
            while data := file.read(_FILE_CHUNK):
                if self.given_up:
                    raise BusyError("the client read too slowly, and others wait")
                yield record_batch(np.frombuffer(data, np.uint8))
                self.progress = time.monotonic()

    def pack(self) -> None:
        """Returns None: there is no pack."""

    def give_up(self) -> None:
        """Gives the call up: the next chunk is not sent."""
        self.given_up = True


def record_batch(data: Bytes) -> pa.RecordBatch:
    """Returns bytes as a record batch, without a copy."""
    array = pa.Array.from_buffers(pa.uint8(), len(data), [None, pa.py_buffer(data)])
    return pa.RecordBatch.from_arrays([array], schema=SCHEMA)


class Answers:
    """The answers under way. One may lose its memory after ``stall`` seconds without progress.

    Answers beyond half of the packs' memory are sent as copies, so that clients that do not read hold at most the other
    half.
    """

    def __init__(self, stall: float, memory: int):
        self._stall, self._memory = stall, memory
        self._lock = threading.RLock()  # garbage collection may end a stream inside the critical section
        # Weak: Flight may drop a stream before it begins, which then does not say that it ends.
        self._answers: weakref.WeakSet[Answer | FileAnswer] = weakref.WeakSet()
        self.given_up = 0

    def add(self, answer: Answer | FileAnswer) -> None:
        """Notes an answer that begins."""
        with self._lock:
            self._answers.add(answer)

    def remove(self, answer: Answer | FileAnswer) -> None:
        """Forgets an answer that has ended."""
        answer.give_up()
        with self._lock:
            self._answers.discard(answer)

    def __len__(self) -> int:
        """Returns the number of answers under way that were not given up."""
        return len(self._running())

    @property
    def threads(self) -> int:
        """Number of answers under way, given up or not; each has a thread of Flight."""
        with self._lock:
            return len(self._answers)

    def crowd(self) -> bool:
        """Returns whether the answers under way, given up or not, may hold more than half of the memory."""
        with self._lock:
            packs = {id(pack): each.pack_bytes for each in list(self._answers) if (pack := each.pack()) is not None}
        return sum(packs.values()) > self._memory // 2

    def packs(self) -> frozenset[int]:
        """Returns the ids of the buffers that answers need."""
        return frozenset(id(each.pack()) for each in self._running())

    def relieve(self) -> bool:
        """Takes the memory of the answer that stalls longest; returns False if none does."""
        with self._lock:
            slowest = min(self._running(), key=lambda each: each.progress, default=None)
            if slowest is None or time.monotonic() - slowest.progress < self._stall:
                return False
            slowest.given_up = True
            self.given_up += 1
        slowest.give_up()
        return True

    def _running(self) -> list[Answer | FileAnswer]:
        with self._lock:
            return [each for each in list(self._answers) if not each.given_up]
