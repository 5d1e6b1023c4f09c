"""Packs in memory: each is read once for all ranks that ask for it, and kept while there is room."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import numpy.typing as npt

from vlmdata.loader.buffers import BufferName, BufferPool
from vlmdata.loader.config import PARTS, BatchPart, OnDamage, Pixels
from vlmdata.loader.damage import Filled
from vlmdata.loader.request import PackRequest
from vlmdata.service.filling import Fillers, LateFillError
from vlmdata.service.memory import BusyError, PackMemory

_TOKENS: frozenset[BatchPart] = frozenset(("tokens", "labels"))
_ALL: frozenset[BatchPart] = frozenset(PARTS)


@dataclass(frozen=True)
class PackKey:
    """Identifies a pack.

    Attributes:
        plan: Fingerprint of the plan's settings.
        epoch: The epoch.
        pack: Its number in the epoch.
        on_damage: What a sample with changed bytes does.
        pixels: Dtype of its pixels; None without them.
    """

    plan: str
    epoch: int
    pack: int
    on_damage: OnDamage
    pixels: Pixels | None


@dataclass(frozen=True, eq=False)
class FilledPack:
    """A whole pack.

    Attributes:
        request: Its request, with the buffer's layout.
        buffer: uint8, the buffer.
        name: Its name.
        filled: What reading it came to.
    """

    request: PackRequest
    buffer: npt.NDArray[np.uint8]
    name: BufferName
    filled: Filled


@dataclass(frozen=True)
class PackCounts:
    """Counts since the start.

    Attributes:
        made: Packs that were read and decoded.
        shared: Queries answered from a pack that another query had made.
        bytes_read: Bytes read from shards.
    """

    made: int = 0
    shared: int = 0
    bytes_read: int = 0


class Packs:
    """All packs of a server. Thread-safe.

    Args:
        fillers: Read packs.
        memory: Limit in bytes.
        timeout: Seconds to wait for memory, or for a pack that another query makes.
        sending: Returns the ids of the buffers that are being sent. Forgetting these packs would free nothing.
        relieve: Takes memory from answers to stalled clients; returns False if there are none.
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
        self.counts = PackCounts()

    def get(
        self, request: PackRequest, plan: str, on_damage: OnDamage, hold: Callable[[PackKey, int], None]
    ) -> FilledPack:
        """Returns a whole pack, made now or shared with other queries.

        Args:
            request: The request of a client. Its parts decide whether the pack needs pixels.
            plan: Fingerprint of data and plan.
            on_damage: What a sample with changed bytes does.
            hold: Called with the pack and its bytes before it is made. It may wait, or refuse.

        Raises:
            VlmdataError: If the data is damaged.
            BusyError: If there is no memory in time.
        """
        pixels = request.pixels if any(each.name == "patches" for each in request.layout.fields) else None
        key = PackKey(plan, request.position.epoch, request.pack, on_damage, pixels)
        whole = request.of(_TOKENS if pixels is None else _ALL, None)
        hold(key, BufferPool.rounded(whole.layout.bytes))
        with self._lock:
            # One with pixels also serves those who need none, but its failure must not be theirs.
            others = [replace(key, pixels=dtype) for dtype in get_args(Pixels)] if pixels is None else []
            known = next((each for each in others if each in self._packs and self._packs[each].done()), key)
            future = self._packs.get(known)
            if future is not None:
                self._packs.move_to_end(known)
                self.counts = replace(self.counts, shared=self.counts.shared + 1)
            else:
                made = self._packs[key] = Future[FilledPack]()
        if future is None:
            return self._make(key, whole, made)
        try:
            return future.result(self._timeout)
        except TimeoutError:
            raise BusyError(f"a pack that another query makes was not ready within {self._timeout:.0f} s") from None

    def _make(self, key: PackKey, request: PackRequest, future: Future[FilledPack]) -> FilledPack:
        try:
            pack = self._fill(request, key.on_damage)
        except BaseException as error:
            with self._lock:
                del self._packs[key]
            future.set_exception(error)
            raise
        with self._lock:
            self.counts = replace(
                self.counts, made=self.counts.made + 1, bytes_read=self.counts.bytes_read + pack.filled.bytes_read
            )
        future.set_result(pack)
        return pack

    def _fill(self, request: PackRequest, on_damage: OnDamage) -> FilledPack:
        lease = self.memory.acquire(request.layout.bytes, time.monotonic() + self._timeout)
        try:
            filled = self._fillers.fill(request, lease.name, self.memory.names(), on_damage)
        except LateFillError as error:
            error.future.cancel()
            error.future.add_done_callback(lambda _: self.memory.release(lease))  # a worker may write to it until then
            raise
        except BaseException:
            self.memory.release(lease)
            raise
        return FilledPack(request, self.memory.array(lease), lease.name, filled)

    def _make_room(self) -> bool:
        """Forgets the pack that was used least recently and is not being sent."""
        sending = self._sending()
        with self._lock:
            for key, future in self._packs.items():
                if future.done() and id(future.result().buffer) not in sending:
                    del self._packs[key]
                    return True
        return self._relieve()
