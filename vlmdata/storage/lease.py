"""Locks an object store against a second run. Such stores have no locks that end with a process.

A run creates the object ``NAME/1`` with a conditional put, and renews it. A second run that finds it stops, unless
the holder is dead: its process has ended (on the same machine), or it has not renewed its lock for half a minute. The
second run then creates ``NAME/2``; of several that try, one succeeds. It removes the objects of lower numbers before it
does anything else. A holder that finds a higher number, or its own objects missing, gives up.

A run that could not reach the store for a while must not complete the dataset under its successor's hands, however long
a request of it was on the way. So it has a second object, ``NAME/1.TOKEN``, which it never writes again: a renewal that
arrives late may bring back ``NAME/1``, but never this proof. And it completes the dataset in three steps
(:meth:`OwnLock.commit`): it writes the last file as ``NAME/1.TOKEN.last``, then looks whether it still holds the lock,
then has the store copy that object to its name. A successor that came before the look is seen. One that comes later
removes the object before it works, so a copy that arrives after that finds no source.

In a store that ignores the condition of a put, two runs that start within two seconds may both continue.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vlmdata.errors import ResourceError
from vlmdata.storage.base import LockedError, Store

#: Seconds between renewals, and seconds without a renewal after which a holder counts as dead.
RENEWED_EVERY = 10.0
PATIENCE = 30.0
#: Seconds within which writers must see each other's unconditional puts.
_SETTLING = 2.0


class CopyingStore(Store, Protocol):
    """A store that copies objects itself."""

    def copy(self, name: str, to: str) -> None:
        """Copies an object within the store, in one step."""


@dataclass(frozen=True)
class StoreLease:
    """The lock of an object store. ``name`` is the folder of the lock objects."""

    store: CopyingStore
    name: str

    @contextmanager
    def acquired(self) -> Iterator[OwnLock]:
        """Takes the lock for the duration of the block.

        Raises:
            LockedError: If another run has it.
        """
        known = self.numbers()
        if known:
            self._require_dead(max(known))
        own = OwnLock(self, max(known, default=0) + 1, _this_process())
        self._create(own)
        if set(self.numbers()) - {*known, own.number}:  # another run started at the same time
            self.store.delete([self.object_name(own.number)])
            raise LockedError("it began at the same moment")
        self.store.put(own.proof, own.content())
        self.store.delete(f"{self.name}/{name}" for name in self.names() if _number(name) < own.number)
        own.start()
        try:
            yield own
        finally:
            own.stop()
            with suppress(ResourceError):
                self.store.delete([self.object_name(own.number), own.proof, own.last])

    def is_locked(self) -> bool:
        """Returns whether a living run has the lock."""
        known = self.numbers()
        if not known:
            return False
        try:
            self._require_dead(max(known))
        except LockedError:
            return True
        return False

    def names(self) -> set[str]:
        """Returns the names of all objects of locks, without the folder."""
        return {name for name in self.store.listing(self.name) if _number(name)}

    def numbers(self) -> list[int]:
        """Returns the numbers of the existing lock objects."""
        return [int(name) for name in self.names() if name.isdecimal()]

    def object_name(self, number: int) -> str:
        """Returns the name of a lock object."""
        return f"{self.name}/{number}"

    def _create(self, own: OwnLock) -> None:
        name = self.object_name(own.number)
        if not self.store.create(name, own.content()):
            raise LockedError("it began at the same moment")
        if self.store.create(name, b"{}"):  # the store ignores the condition
            self.store.put(name, own.content())
            time.sleep(_SETTLING)
            if self.store.read(name) != own.content():
                raise LockedError("it began at the same moment")

    def _require_dead(self, number: int) -> None:
        """Returns if the holder of a lock is dead; raises LockedError if it is alive."""
        first = self._read(number)
        holder = f"process {first.get('pid')} on {first.get('host')}"
        here = _this_process()
        # Without /proc, nothing tells whether a process with this number is still the same one.
        if first and here["started"] and all(first.get(name) == here[name] for name in ("host", "boot", "namespace")):
            if first.get("started") == _started(int(first["pid"])):
                raise LockedError(holder)
            return
        if first:
            logging.getLogger("vlmdata.storage").warning(
                "%s: another run (%s) may be using it; waiting %.0f s to see whether it is alive",
                self.store,
                holder,
                PATIENCE,
            )
            ends = time.monotonic() + PATIENCE
            while time.monotonic() < ends:
                time.sleep(min(1.0, PATIENCE / 10))
                if (now := self._read(number)) and now != first:
                    raise LockedError(holder)

    def _read(self, number: int) -> Mapping[str, Any]:
        try:
            fields: Any = json.loads(self.store.read(self.object_name(number)))
        except (FileNotFoundError, ValueError):
            return {}
        return fields if isinstance(fields, dict) else {}


class OwnLock:
    """A lock of this process, which renews it in a thread.

    The object ``proof`` exists as long as no other run took over; the object ``last`` becomes the last file.
    """

    def __init__(self, lease: StoreLease, number: int, process: Mapping[str, Any]):
        self.number = number
        self._lease = lease
        token = uuid.uuid4().hex
        self.proof = f"{lease.object_name(number)}.{token}"
        self.last = f"{self.proof}.last"
        self._fields = {**process, "token": token}
        self._renewals = 0
        self._lost = False
        self._renewed_at = _now()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="vlmdata-lease", daemon=True)

    def content(self) -> bytes:
        """Current content of the lock object."""
        return json.dumps({**self._fields, "renewals": self._renewals}, sort_keys=True).encode()

    def check(self) -> None:
        """Checks that no other run took over. Asks the store if the last renewal is too long ago.

        Raises:
            LockedError: If one did.
            ResourceError: If the store cannot be reached.
        """
        if not self._lost and _now() - self._renewed_at > PATIENCE:
            self._look()
        if self._lost:
            raise LockedError("it took over while this one was stopped or could not reach the store")

    def commit(self, name: str, content: bytes) -> None:
        """Writes the file that completes the dataset, unless another run took over.

        Raises:
            LockedError: If one did.
            ResourceError: If the file cannot be written.
        """
        store = self._lease.store
        store.put(self.last, content)
        self._look()
        self.check()
        try:
            store.copy(self.last, name)
        except (FileNotFoundError, ResourceError):
            self._look()
            self.check()
            raise
        ends = time.monotonic() + PATIENCE
        is_last = False
        while store.read(name) != content:  # Azure may answer before it has copied
            if is_last:
                raise ResourceError(
                    f"{store.path(name)}: the store has not copied it from {self.last}. Run the same command again."
                )
            time.sleep(PATIENCE / 300)
            is_last = time.monotonic() > ends  # a slow request does not count against the store's copying

    def _look(self) -> None:
        """Asks the store whether this process still has the lock."""
        began = _now()
        lease, names = self._lease, self._lease.names()
        own = {lease.object_name(self.number), self.proof}
        if own - {f"{lease.name}/{name}" for name in names} or any(_number(name) > self.number for name in names):
            self._lost = True
        else:
            self._renewed_at = began

    def start(self) -> None:
        """Starts renewing the lock."""
        self._thread.start()

    def stop(self) -> None:
        """Stops renewing the lock."""
        self._stopping.set()
        self._thread.join()

    def _renew(self) -> None:
        lease = self._lease
        while not self._stopping.wait(RENEWED_EVERY):
            with suppress(ResourceError, OSError):  # the store may be unreachable; the next renewal tries again
                self._look()
                if self._lost:
                    return
                self._renewals += 1
                lease.store.put(lease.object_name(self.number), self.content())


def _number(name: str) -> int:
    """Returns the number of the lock to which an object belongs; 0 for another object."""
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() else 0


def _now() -> float:
    """Returns seconds of a clock that goes on while the machine is suspended, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "namespace": os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else "",
        "pid": pid,
        "started": _started(pid),
    }


def _started(pid: int) -> str:
    """Returns when a process started, in ticks since boot; empty if it does not exist."""
    text = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return text[19] if len(text) > 19 and text[0] not in ("Z", "X") else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
