"""Who asks for what, for ``vlmdata serve --status``."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from vlmdata.service.protocol import BatchQuery

_MAX_CLIENTS = 1024
_SECONDS_REMEMBERED = 600.0


@dataclass(frozen=True)
class ClientActivity:
    """What one rank has asked for.

    Attributes:
        machine: The client's machine.
        plan: First digits of the fingerprint of its plan.
        dp_rank: Data-parallel rank.
        dp_size: Data-parallel size.
        slice: Its slice, "rank/size"; "" for whole packs.
        parts: Parts of its batches.
        position: Epoch, step and micro-batch of its last query.
        batches: Batches since it was first seen.
        bytes: Bytes of these.
        seconds_ago: Seconds since its last query.
    """

    machine: str
    plan: str
    dp_rank: int
    dp_size: int
    slice: str
    parts: str
    position: tuple[int, int, int]
    batches: int
    bytes: int
    seconds_ago: float


class Activity:
    """The clients of the last ten minutes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: OrderedDict[tuple[Any, ...], tuple[ClientActivity, float]] = OrderedDict()

    def note(self, machine: str, query: BatchQuery, size: int) -> None:
        """Notes a query that is answered."""
        part = query.context_parallel
        entry = ClientActivity(
            machine=machine,
            plan=query.plan.fingerprint()[:8],
            dp_rank=query.dp_rank,
            dp_size=query.dp_size,
            slice="" if part is None else f"{part.rank}/{part.size}",
            parts="+".join(sorted(query.parts)),
            position=dataclasses.astuple(query.position),
            batches=1,
            bytes=size,
            seconds_ago=0.0,
        )
        key = (machine, entry.plan, entry.dp_rank, entry.dp_size, entry.slice, entry.parts)
        with self._lock:
            if (before := self._clients.get(key)) is not None:
                known = before[0]
                entry = dataclasses.replace(entry, batches=known.batches + 1, bytes=known.bytes + size)
            self._clients[key] = (entry, time.monotonic())
            self._clients.move_to_end(key)
            if len(self._clients) > _MAX_CLIENTS:
                self._clients.popitem(last=False)

    def clients(self) -> list[ClientActivity]:
        """Returns the clients, those of one plan together."""
        now = time.monotonic()
        with self._lock:
            for key, (_, then) in list(self._clients.items()):
                if now - then > _SECONDS_REMEMBERED:
                    del self._clients[key]
            found = [dataclasses.replace(entry, seconds_ago=now - then) for entry, then in self._clients.values()]
        return sorted(found, key=lambda each: (each.plan, each.dp_rank, each.slice, each.parts, each.machine))
