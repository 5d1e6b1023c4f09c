"""Packs in memory: worker processes read each once for all ranks that ask for it, and it stays while there is room."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from vlmdata.errors import ResourceError, UsageError
from vlmdata.loader.config import PARTS, BatchPart, OnDamage, Pixels
from vlmdata.loader.fill.buffers import BufferName, BufferPool, LeasedBuffer
from vlmdata.loader.fill.filler import Filled, FillJob, filling_workers
from vlmdata.loader.request.pack_request import PackRequest
from vlmdata.machine import open_file_limit
from vlmdata.storage.choices import Verify
from vlmdata.storage.shards import DatasetShards
from vlmdata.workers import PoolClosed, Workers, WorkersDied

_SECONDS_BETWEEN_LOOKS = 0.02
#: Seconds for workers to end when the server does.
_GRACE_SECONDS = 5.0
_TOKENS: frozenset[BatchPart] = frozenset(("tokens", "labels"))
_ALL: frozenset[BatchPart] = frozenset(PARTS)
#: The part of the memory for packs that those may take which nobody has asked for yet.
_AHEAD = 1 / 3


class BusyError(Exception):
    """The server has no room or time for a query now. Another server, or this one later, can answer."""


class PackMemory:
    """Buffers for packs, of at most ``limit`` bytes together. Thread-safe.

    ``make_room`` gives up memory that is not needed, such as cached packs; it returns False if there is none.
    """

    def __init__(self, limit: int, make_room: Callable[[], bool]):
        self.limit = limit
        self.pool = BufferPool(limit, files=open_file_limit() // 2)  # the rest is for connections and shards
        self._make_room = make_room
        self._closed = False

    def acquire(self, size: int, deadline: float, make_room: Callable[[], bool] | None = None) -> LeasedBuffer:
        """Returns a buffer. Waits for memory until ``deadline``, in seconds of ``time.monotonic``, if necessary.

        Raises:
            UsageError: If the buffer alone exceeds the limit.
            BusyError: If no memory becomes free in time, or the server ends.
        """
        if self.pool.rounded(size) > self.limit:
            raise UsageError(
                f"a batch of {size} bytes is more than the {self.limit} bytes of the server's --memory that are for "
                "packs; use a smaller capacity, or give the server more memory"
            )
        while True:
            if self._closed:
                raise BusyError("the server is stopping")
            try:
                return self.pool.acquire(size)
            except ResourceError:
                if (make_room or self._make_room)():
                    continue
                if time.monotonic() >= deadline:
                    in_use = self.pool.bytes_in_use
                    raise BusyError(f"{in_use} of {self.limit} bytes of memory are in use") from None
                time.sleep(_SECONDS_BETWEEN_LOOKS)

    def close(self) -> None:
        """Releases all buffers, also for clients that still map them; those in use when their use ends."""
        self._closed = True
        self.pool.close(free=True)


class LateFillError(BusyError):
    """A pack was not read in time. When ``future`` is done, the buffer is no longer written to."""

    def __init__(self, seconds: float, future: Future[Any]):
        super().__init__(f"a pack was not read within {seconds:.0f} s: storage is slow")
        self.future = future


class Fillers:
    """A fixed number of worker processes, with ``timeout`` seconds for one pack. Thread-safe."""

    def __init__(self, datasets: Sequence[DatasetShards], workers: int, verify: Verify, timeout: float):
        self._datasets, self._workers, self._verify, self._timeout = list(datasets), workers, verify, timeout
        self._lock = threading.Lock()
        self._under_way: set[Future[Filled]] = set()
        self._restarts = 0  # of earlier workers
        self._pool = self._started()

    @property
    def restarts(self) -> int:
        """Number of workers that died and were replaced."""
        return self._restarts + self._pool.restarts

    def add(self, shards: DatasetShards) -> None:
        """Adds a dataset: other workers, who know it, take over. The earlier ones end when their packs are read."""
        with self._lock:
            self._datasets.append(shards)
            earlier, unread = self._pool, self._under_way
            self._pool, self._under_way = self._started(), set()
            self._restarts += earlier.restarts

        def end() -> None:
            wait(list(unread), self._timeout)
            earlier.close(_GRACE_SECONDS)

        threading.Thread(target=end, name="vlmdata-earlier-workers", daemon=True).start()

    def _started(self) -> Workers[FillJob, Filled]:
        # Not fork: gRPC has threads. Started now, not at the first query.
        return filling_workers(self._datasets, self._verify, self._workers, "forkserver", start_now=True)

    def fill(self, request: PackRequest, name: BufferName, existing: Collection[int], on_damage: OnDamage) -> Filled:
        """Reads a pack into a buffer; see :data:`vlmdata.loader.fill.filler.FillJob`.

        Raises a VlmdataError if the data is damaged or workers die over this pack, a LateFillError if it takes too long
        (the buffer may still be written to), and a BusyError if the server is closed.
        """
        with self._lock:
            future, under_way = self._pool.submit((request, name, existing, on_damage)), self._under_way
            under_way.add(future)
        future.add_done_callback(under_way.discard)
        try:
            return future.result(self._timeout)
        except TimeoutError:
            raise LateFillError(self._timeout, future) from None
        except PoolClosed:
            raise BusyError("the server is stopping") from None
        except WorkersDied as error:
            raise ResourceError(
                f"{error.deaths} workers died over pack {request.pack.number}, the last one {error.cause}. Out of "
                "memory?"
            ) from None

    def close(self) -> None:
        """Ends the workers, without waiting long for one that does not end."""
        self._pool.close(_GRACE_SECONDS)


@dataclass(frozen=True)
class PackKey:
    """Identifies a pack by plan, epoch and number, what a damaged sample does, and the dtype of its pixels, if any."""

    plan: str
    epoch: int
    pack: int
    on_damage: OnDamage
    pixels: Pixels | None


@dataclass(frozen=True, eq=False)
class FilledPack:
    """A whole pack in its buffer, whose generation is another one once it is used for another pack."""

    request: PackRequest
    buffer: npt.NDArray[np.uint8]
    name: BufferName
    generation: int
    filled: Filled


@dataclass
class PackCounts:
    """Counts since the start: packs made, made ahead, of these dropped unasked, shared by queries, and bytes read."""

    made: int = 0
    ahead: int = 0
    dropped: int = 0
    shared: int = 0
    bytes_read: int = 0


class Packs:
    """All packs of a server. Thread-safe.

    ``sending`` returns the ids of the buffers that are being sent: forgetting these packs would free nothing.
    ``relieve`` takes memory from answers to stalled clients; it returns False if there are none.
    """

    def __init__(
        self,
        fillers: Fillers,
        memory: int,
        timeout: float,
        sending: Callable[[], Collection[int]],
        relieve: Callable[[], bool],
    ):
        self._fillers, self._timeout, self._sending, self._relieve = fillers, timeout, sending, relieve
        self.memory = PackMemory(memory, self._make_room)
        self._lock = threading.RLock()
        self._packs: OrderedDict[PackKey, Future[FilledPack]] = OrderedDict()
        self._unasked: dict[PackKey, int] = {}  # bytes of packs that are made ahead
        self.counts = PackCounts()

    def get(self, request: PackRequest, plan: str, on_damage: OnDamage) -> FilledPack:
        """Returns a whole pack, made now or shared with other queries; with pixels if the request needs them.

        Raises:
            VlmdataError: If the data is damaged.
            BusyError: If there is no memory in time.
        """
        key, whole = _whole(request, plan, on_damage)
        with self._lock:
            known = self._known(key)
            future = self._packs.get(known)
            if future is not None:
                self._packs.move_to_end(known)
                shared = self._unasked.pop(known, None) is None
                self.counts.shared += shared
            else:
                made = self._packs[key] = Future[FilledPack]()
        if future is None:
            return self._make(key, whole, made, lambda: self._lease(whole))
        try:
            return future.result(self._timeout)
        except TimeoutError:
            raise BusyError(f"a pack that another query makes was not ready within {self._timeout:.0f} s") from None

    def prepare(self, request: PackRequest, plan: str, on_damage: OnDamage) -> None:
        """Makes a pack before a query asks for it, if there is memory for it now. Raises the errors of :meth:`get`."""
        key, whole = _whole(request, plan, on_damage)
        size = self.memory.pool.rounded(whole.arrays.bytes)
        with self._lock:
            unasked = sum(self._unasked.values())
            if self._known(key) in self._packs or key in self._unasked:
                return  # or another rank's query makes it ahead
            if unasked + size > self.memory.limit * _AHEAD:
                return
            self._unasked[key] = size
        try:
            # First: a query that waits for a pack must not wait for one that gets no memory.
            lease = self.memory.acquire(size, time.monotonic(), self._forget_one)
        except BaseException:
            with self._lock:
                self._unasked.pop(key, None)
            raise
        with self._lock:
            if key in self._packs:
                self._unasked.pop(key, None)
                lease.release()
                return
            made = self._packs[key] = Future[FilledPack]()
            self.counts.ahead += 1
        self._make(key, whole, made, lambda: lease)

    def close(self) -> None:
        """Forgets all packs and frees their memory. Those that are being sent keep theirs until then."""
        with self._lock:
            for key in [key for key, future in self._packs.items() if future.done()]:
                del self._packs[key]
        self.memory.close()

    def _known(self, key: PackKey) -> PackKey:
        """Returns the key of a pack that serves as well, if there is one."""
        # One with pixels also serves those who need none, but its failure must not be theirs.
        others = [replace(key, pixels=dtype) for dtype in get_args(Pixels)] if key.pixels is None else []
        return next((each for each in others if each in self._packs and self._packs[each].done()), key)

    def _lease(self, request: PackRequest) -> LeasedBuffer:
        return self.memory.acquire(request.arrays.bytes, time.monotonic() + self._timeout)

    def _make(
        self, key: PackKey, request: PackRequest, future: Future[FilledPack], lease: Callable[[], LeasedBuffer]
    ) -> FilledPack:
        try:
            pack = self._fill(request, key.on_damage, lease())
        except BaseException as error:
            with self._lock:
                del self._packs[key]
                self._unasked.pop(key, None)
            future.set_exception(error)
            raise
        with self._lock:
            self.counts.made += 1
            self.counts.bytes_read += pack.filled.bytes_read
        future.set_result(pack)
        return pack

    def _fill(self, request: PackRequest, on_damage: OnDamage, lease: LeasedBuffer) -> FilledPack:
        try:
            generation = lease.renew()
            filled = self._fillers.fill(request, lease.name, self.memory.pool.inodes(), on_damage)
        except LateFillError as error:
            error.future.cancel()
            error.future.add_done_callback(lambda _: lease.release())  # a worker may write to it until then
            raise
        except BaseException:
            lease.release()
            raise
        return FilledPack(request, lease.array(), lease.name, generation, filled)

    def _make_room(self) -> bool:
        """Forgets a pack, or takes one from a client that does not read."""
        return self._forget_one() or self._relieve()

    def _forget_one(self) -> bool:
        """Forgets the pack that was used least recently and is not being sent."""
        sending = self._sending()
        with self._lock:
            for key, future in self._packs.items():
                if future.done() and id(future.result().buffer) not in sending:
                    del self._packs[key]
                    if self._unasked.pop(key, None) is not None:
                        self.counts.dropped += 1
                    return True
        return False


def _whole(request: PackRequest, plan: str, on_damage: OnDamage) -> tuple[PackKey, PackRequest]:
    """Returns the key of the pack that a client's request needs, and the request for all of it."""
    pixels = request.pixels if request.arrays.has_patches else None
    key = PackKey(plan, request.position.epoch, request.pack.number, on_damage, pixels)
    return key, request.whole(_TOKENS if pixels is None else _ALL)
