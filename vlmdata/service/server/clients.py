"""Shares of client machines, so that none of them takes all calls or all memory of a server."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from vlmdata.service.server.memory import BusyError

#: Threads that calls of a machine may keep when they were given up, as a multiple of its calls.
THREADS_PER_CALL = 4
#: Seconds between two looks whether a client that waits has ended its call.
_SECONDS_BETWEEN_LOOKS = 0.25


@dataclass
class _Machine:
    threads: int = 0  # calls that have not ended
    calls: int = 0  # those of them that were not given up
    waiting: int = 0
    packs: Counter[Hashable] = field(default_factory=Counter)  # number of calls by pack
    bytes: int = 0  # of these packs


class Clients:
    """The calls of each client machine. Those beyond its share wait for its other calls. Thread-safe.

    Args:
        calls: Most calls of a machine at the same time. As many may wait.
        memory: Most bytes of packs that its calls use together. A single pack may be larger.
        timeout: Seconds after which a call that waits is given up.
        relieve: Gives up a call of a machine whose client does not read; returns False if there is none.
    """

    def __init__(self, calls: int, memory: int, timeout: float, relieve: Callable[[str], bool]):
        self._calls, self._memory, self._timeout, self._relieve = calls, memory, timeout, relieve
        # Re-entrant: garbage collection may end a call inside the critical section.
        self._changed = threading.Condition(threading.RLock())
        self._machines: defaultdict[str, _Machine] = defaultdict(_Machine)

    @property
    def waiting(self) -> int:
        """Number of calls that wait for others of their machine."""
        with self._changed:
            return sum(each.waiting for each in self._machines.values())

    def enter(self, name: str, is_over: Callable[[], bool]) -> Share:
        """Begins a call, as soon as its machine has room for it.

        Args:
            name: The machine.
            is_over: Whether the client has ended the call meanwhile.

        Raises:
            BusyError: If as many calls of the machine wait already, or the time is over.
        """

        def begin(machine: _Machine) -> bool:
            if machine.calls >= self._calls or machine.threads >= THREADS_PER_CALL * self._calls:
                return False
            machine.calls += 1
            machine.threads += 1
            return True

        self._wait(name, begin, is_over)
        return Share(self, name, is_over)

    def _hold(self, name: str, pack: Hashable, size: int, is_over: Callable[[], bool]) -> None:
        def hold(machine: _Machine) -> bool:
            if pack not in machine.packs:
                if machine.packs and machine.bytes + size > self._memory:
                    return False
                machine.bytes += size
            machine.packs[pack] += 1
            return True

        self._wait(name, hold, is_over)

    def _release(self, name: str, pack: Hashable | None, size: int) -> None:
        with self._changed:
            machine = self._machines[name]
            machine.calls -= 1
            if pack is not None:
                machine.packs[pack] -= 1
                if not machine.packs[pack]:
                    del machine.packs[pack]
                    machine.bytes -= size
            self._changed.notify_all()

    def _end(self, name: str) -> None:
        with self._changed:
            self._machines[name].threads -= 1
            self._forget(name)
            self._changed.notify_all()

    def _wait(self, name: str, take: Callable[[_Machine], bool], is_over: Callable[[], bool]) -> None:
        """Waits until something can be taken from a machine's share."""
        deadline = time.monotonic() + self._timeout
        with self._changed:
            machine = self._machines[name]
            if take(machine):
                return
            if machine.waiting >= self._calls:
                raise BusyError(f"{machine.calls} queries of this machine are under way, and {machine.waiting} wait")
            machine.waiting += 1
        try:
            while True:
                if is_over() or time.monotonic() >= deadline:
                    raise BusyError("the other queries of this machine did not end")
                relieved = self._relieve(name)  # without the lock, since it takes others
                with self._changed:
                    if not relieved:
                        self._changed.wait(_SECONDS_BETWEEN_LOOKS)
                    if take(machine):
                        return
        finally:
            with self._changed:
                machine.waiting -= 1
                self._forget(name)

    def _forget(self, name: str) -> None:
        """Forgets a machine without calls."""
        if not self._machines[name].threads and not self._machines[name].waiting:
            del self._machines[name]


class Share:
    """What one call takes of its machine's share.

    Args:
        clients: All clients.
        machine: The client's machine.
        is_over: Whether the client has ended the call.
    """

    def __init__(self, clients: Clients, machine: str, is_over: Callable[[], bool]):
        self.machine = machine
        self._clients, self._is_over = clients, is_over
        self._pack: Hashable | None = None
        self._size = 0
        self._released = self._ended = False

    def hold(self, pack: Hashable, size: int) -> None:
        """Notes the pack that the call uses, as soon as the machine has room for it.

        Args:
            pack: Identity of the pack. Calls that share one need its room once.
            size: Its bytes.

        Raises:
            BusyError: If there is no room in time.
        """
        self._clients._hold(self.machine, pack, size, self._is_over)
        self._pack, self._size = pack, size

    def release(self) -> None:
        """Gives the call up, with its pack. Its thread may still wait for the client."""
        if not self._released:
            self._released = True
            self._clients._release(self.machine, self._pack, self._size)

    def end(self) -> None:
        """Ends the call."""
        self.release()
        if not self._ended:
            self._ended = True
            self._clients._end(self.machine)
