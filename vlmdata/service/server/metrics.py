"""Counters for Prometheus, and a health check, over HTTP. Without a port, nothing is counted, and no package needed."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from vlmdata.errors import UsageError
from vlmdata.service.server.config import ServerConfig

_log = logging.getLogger("vlmdata.service")

#: Connections at the same time. The port asks for no token, so strangers must not get any number of them.
_MAX_CONNECTIONS = 32
#: Time for a request and its answer. It bounds the whole connection, however little of it comes at a time.
_SECONDS_OF_A_CONNECTION = 5.0
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True)
class Shown:
    """A value that the server has anyway, and that is shown; ``counts`` if it only grows."""

    name: str
    text: str
    value: float
    counts: bool = False


class Counting:
    """Takes counts and forgets them. :class:`Metrics` keeps them, and has a port."""

    port: int | None = None

    def sent(self, size: int) -> None:
        """Counts a batch that was sent."""

    def answered(self, seconds: float) -> None:
        """Counts a query whose answer begins."""

    def refused(self, reason: str) -> None:
        """Counts a query that is not answered."""

    def serve(self) -> None:
        """Starts the HTTP server, if there is a port for it."""

    def close(self) -> None:
        """Stops it."""


def counting(config: ServerConfig, shown: Callable[[], list[Shown]], problem: Callable[[], str]) -> Counting:
    """Returns real counters if there is a port to show them; a UsageError if a package for that is not installed.

    ``problem`` says why the server takes no queries now; "" if it does.
    """
    if config.metrics_port is None:
        return Counting()
    try:
        return Metrics(config.host, config.metrics_port, shown, problem)
    except ImportError as error:
        raise UsageError(f"--metrics-port needs a package ({error}): pip install 'vlmdata[service]'") from error


class Metrics(Counting):
    """The counters of a server, and the HTTP server that shows them, with the values that the server has anyway."""

    def __init__(self, host: str, port: int, shown: Callable[[], list[Shown]], problem: Callable[[], str]):
        from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

        disable_created_metrics()  # type: ignore[no-untyped-call] # one more line a counter, which nobody reads
        self._place, self._problem = (host, port), problem
        self.registry = CollectorRegistry()
        self._batches = Counter("vlmdata_batches", "Batches sent.", registry=self.registry)
        self._bytes = Counter("vlmdata_bytes", "Bytes of batches sent.", registry=self.registry)
        self._refused = Counter("vlmdata_refused", "Queries not answered.", ["reason"], registry=self.registry)
        self._seconds = Histogram(
            "vlmdata_answer_seconds", "Time until an answer begins.", buckets=_SECONDS, registry=self.registry
        )
        self.registry.register(_State(shown))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest connection first

    def sent(self, size: int) -> None:
        """Counts a batch that was sent."""
        self._batches.inc()
        self._bytes.inc(size)

    def answered(self, seconds: float) -> None:
        """Counts a query whose answer begins."""
        self._seconds.observe(seconds)

    def refused(self, reason: str) -> None:
        """Counts a query that is not answered."""
        self._refused.labels(reason).inc()

    def serve(self) -> None:
        """Starts ``/metrics`` and ``/healthz``, or raises a UsageError if the port is taken."""
        try:
            listening = socket.create_server(self._place, backlog=_MAX_CONNECTIONS)
        except OSError as error:
            raise UsageError(f"--metrics-port {self._place[1]}: {error.strerror or error}") from error
        self.port = listening.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        serving = self._serve(listening)
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[serving], daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the HTTP server."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()
            self._loop = None

    async def _serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._connected, sock=listening)
        await self._stopped.wait()
        server.close()
        for writer in self._open:
            writer.transport.abort()
        while self._open:
            await asyncio.sleep(0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers a request, within bounds that silent and slow clients cannot use up."""
        if len(self._open) >= _MAX_CONNECTIONS:  # the oldest one ends and gives way
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(_SECONDS_OF_A_CONNECTION):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(request.decode("latin-1")))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that goes away, or is sent away, is no error
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    def _answer(self, request: str) -> bytes:
        from prometheus_client.exposition import choose_encoder

        first, *headers = request.split("\r\n")
        path = "".join(first.split(" ")[1:2]).partition("?")[0]
        status, kind, body = "404 Not Found", "text/plain", b""
        if path == "/healthz":
            problem = self._problem()
            status, body = ("503 Service Unavailable", f"{problem}\n".encode()) if problem else ("200 OK", b"")
        elif path == "/metrics":
            accepted = [each.partition(":")[2] for each in headers if each.lower().startswith("accept:")]
            try:
                encode, its_kind = choose_encoder(",".join(accepted))
                status, kind, body = "200 OK", its_kind, encode(self.registry)
            except Exception:
                _log.exception("metrics cannot be shown")
                status = "500 Internal Server Error"
                body = b"metrics cannot be shown; the server's log has the details\n"
        body = body or f"{status.partition(' ')[2]}\n".encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        return head.encode() + body


class _State:
    """Values that the server has anyway."""

    def __init__(self, shown: Callable[[], list[Shown]]):
        self._shown = shown

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for each in self._shown():
            family = CounterMetricFamily if each.counts else GaugeMetricFamily
            yield family(each.name, each.text, value=each.value)
