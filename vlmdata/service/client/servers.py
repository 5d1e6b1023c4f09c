"""All servers of a collation service: which one is asked, and what follows a failure or a slow answer."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from vlmdata.errors import ConfigMismatchError, ResourceError, UsageError
from vlmdata.loader.config import Service
from vlmdata.loader.fill.filler import DAMAGE, damaged_file
from vlmdata.service.address import Server, ServiceAddress
from vlmdata.service.client.connection import (
    OF_ONE_SERVER,
    CertificateError,
    Connection,
    TokenRefusedError,
    in_thread,
    more_telling,
)
from vlmdata.service.protocol import Description

_log = logging.getLogger("vlmdata.service.client")

#: Seconds for which a failed server is asked last, doubled with each failure in a row.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
#: Seconds between two rounds in which no server answered.
PAUSE_BETWEEN_ROUNDS = 0.25
#: A slow answer is hedged after this many times the usual time of an answer, if that is more than ``hedge``.
_USUAL_TIMES = 3.0
_LATENCIES = 32
#: Seconds that a server has for an answer, if hardly any are left.
_LEAST_SECONDS = 0.1
#: Seconds between two look-ups of names, while servers fail and while all are well.
_SECONDS_BETWEEN_LOOKUPS, _SECONDS_BETWEEN_LOOKUPS_WHEN_WELL = 10.0, 60.0


@dataclass
class _Health:
    """The state of a server, as this client sees it."""

    failures: int = 0
    until: float = 0.0  # asked last until then
    logged: set[type[Exception]] = field(default_factory=set)  # kinds of failures in a row


class Servers:
    """The servers of a service, for one rank. Thread-safe."""

    def __init__(self, address: ServiceAddress, options: Service):
        self.address, self._options = address, options
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._servers = address.servers()
        self._looked_up, self._looking = time.monotonic(), False
        self._connections: dict[Server, Connection] = {}
        self._health: dict[Server, _Health] = {}
        self._accepted = False  # whether a server has answered: a token that is refused later is being replaced
        self._damaged: set[tuple[Server, str]] = set()  # servers and files, each logged once
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)

    def ask[Answer](self, question: Callable[[Connection, float], Answer], timeout: float) -> Answer:
        """Returns the first server's answer to a question, the next one's if that fails, and so on.

        ``question`` asks one server, which has this many seconds to answer: its share of what is left of ``timeout``.

        Raises:
            ResourceError: If no server answers; names all.
            UsageError: If the certificates of all servers are wrong.
            VlmdataError: If a server refuses.
        """
        deadline, problems = time.monotonic() + timeout, dict[Server, Exception]()
        while True:
            servers = self.order(0)
            for number, server in enumerate(servers):
                seconds = max((deadline - time.monotonic()) / (len(servers) - number), _LEAST_SECONDS)
                try:
                    answer = question(self.connection(server), seconds)
                except OF_ONE_SERVER as error:
                    problems[server] = more_telling(problems.get(server), error)
                    if self._waits_for_token(error):
                        self.forget(server)
                    if len(servers) > 1 or not isinstance(error, CertificateError):  # which is raised
                        self.failed(server, error)
                    continue
                self.succeeded(server)
                return answer
            if all(isinstance(error, CertificateError) for error in problems.values()):
                raise UsageError(
                    f"{self.address.text}: " + "; ".join(str(problems[server]) for server in sorted(problems))
                )
            refusals = (ConfigMismatchError, UsageError, *DAMAGE)
            if all(isinstance(each, refusals) and not self._waits_for_token(each) for each in problems.values()):
                raise next(iter(problems.values()))
            if time.monotonic() + PAUSE_BETWEEN_ROUNDS > deadline:
                raise self.nobody(problems, timeout)
            time.sleep(PAUSE_BETWEEN_ROUNDS)

    def describe(self, timeout: float) -> dict[Server, Description]:
        """Returns what all servers that answer say of themselves. Raises the errors of :meth:`ask`."""
        self.ask(Connection.describe, timeout)
        asked = {
            server: in_thread(partial(Connection.describe, self.connection(server), timeout))
            for server in self.order(0)
        }
        wait(asked.values(), timeout)
        return {server: each.result() for server, each in asked.items() if each.done() and each.exception() is None}

    def forget(self, server: Server) -> None:
        """Drops the connection to a server; the next one reads token and certificates again."""
        with self._lock:
            self._connections.pop(server, None)

    def close(self) -> None:
        """Closes all connections, without waiting for calls under way."""
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    def order(self, rank: int) -> list[Server]:
        """Returns the servers in the order in which a rank asks them: its own first, those that failed last."""
        self._look_up_sometimes()
        with self._lock:
            now, servers = time.monotonic(), self._servers
            first = rank % len(servers)
            turned = [*servers[first:], *servers[:first]]
            return sorted(turned, key=lambda each: max(self._health.get(each, _Health()).until - now, 0.0))

    def hedge_seconds(self) -> float:
        """Returns the time after which another server is asked, too."""
        with self._lock:
            usual = median(self._latencies) if self._latencies else 0.0
        return max(self._options.hedge, _USUAL_TIMES * usual)

    def failed(self, server: Server, error: Exception) -> None:
        """Notes that a server did not answer."""
        with self._lock:
            now = time.monotonic()
            health = self._health.get(server)
            if health is None or now > health.until + _LONGEST_PAUSE:  # what was long ago says nothing
                health = self._health[server] = _Health()
            health.failures += 1
            health.until = now + min(_FIRST_PAUSE * 2 ** (health.failures - 1), _LONGEST_PAUSE)
            first, others = type(error) not in health.logged, len(self._servers) > 1
            health.logged.add(type(error))
        is_raised = isinstance(error, UsageError | ConfigMismatchError) and not self._waits_for_token(error)
        if first and (others or not is_raised):
            _log.warning("%s. Asking %s.", str(error).rstrip("."), "the other servers" if others else "it again")

    def _waits_for_token(self, error: Exception) -> bool:
        return self._accepted and isinstance(error, TokenRefusedError)

    def damaged(self, server: Server, message: str) -> None:
        """Notes that a server's copy of the data is damaged. It is asked as before: its other shards may be sound."""
        place = (server, damaged_file(message.removeprefix(f"server {server}: ")))
        with self._lock:
            is_news, others = place not in self._damaged, len(self._servers) > 1
            self._damaged.add(place)
        if is_news and others:
            _log.warning("%s This server's copy is damaged. Asking the other servers.", message)

    def succeeded(self, server: Server, seconds: float | None = None) -> None:
        """Notes that a server has answered, and after how many seconds."""
        with self._lock:
            self._accepted = True
            health = self._health.pop(server, None)
            if seconds is not None:
                self._latencies.append(seconds)
        if health is not None:
            _log.warning("server %s: answers again.", server)

    def connection(self, server: Server) -> Connection:
        """Returns the connection to a server."""
        with self._lock:
            if server not in self._connections:
                self._connections[server] = Connection(server, self.address, self._options)
            return self._connections[server]

    def require_own_process(self) -> None:
        """Raises a UsageError in a fork of the process that made the connections."""
        if self._process != os.getpid():
            raise UsageError(
                f"{self.address.text}: a loader of a collation service cannot be used in a forked process, since gRPC "
                "has no threads there. Create the loader in that process, or start it with spawn."
            )

    def nobody(self, problems: dict[Server, Exception], timeout: float) -> ResourceError:
        """Returns the error of servers none of which answered."""
        listed = "\n".join(f"  {error}" for error in problems.values()) or "  no server is known"
        return ResourceError(
            f"{self.address.text}: no server answered within {timeout:.3g} s:\n{listed}\n"
            "Check that `vlmdata serve` runs there (`vlmdata serve --status HOST:PORT`); the loader's state is valid."
        )

    def _look_up_sometimes(self) -> None:
        """Looks names up again, without waiting for the answer: a name server may be slow, or gone."""
        if not self.address.has_names:
            return
        with self._lock:
            now = time.monotonic()
            fails = any(each.until + _LONGEST_PAUSE > now for each in self._health.values())
            pause = _SECONDS_BETWEEN_LOOKUPS if fails else _SECONDS_BETWEEN_LOOKUPS_WHEN_WELL
            if self._looking or now - self._looked_up < pause:
                return
            self._looking = True
        in_thread(self._look_up)

    def _look_up(self) -> None:
        """Looks names up: servers may have been added or removed."""
        try:
            servers = self.address.servers(self._servers)
            with self._lock:
                self._servers = servers
                for gone in self._connections.keys() - set(servers):
                    del self._connections[gone]  # closed after its last call
                self._health = {server: health for server, health in self._health.items() if server in servers}
        finally:
            with self._lock:
                self._looked_up, self._looking = time.monotonic(), False
