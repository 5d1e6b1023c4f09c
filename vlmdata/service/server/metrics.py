"""Counters for Prometheus, and a health check, over HTTP."""

from __future__ import annotations

import io
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from vlmdata.errors import UsageError
from vlmdata.service.server.counting import Counting, Shown

_log = logging.getLogger("vlmdata.service")

disable_created_metrics()  # type: ignore[no-untyped-call] # one more line a counter, which nobody reads

#: Connections at the same time. The port asks for no token, so strangers must not get threads without limit.
_MAX_CONNECTIONS = 32
#: Time for a request and its answer. It bounds the whole connection, however little of it comes at a time.
_SECONDS_OF_A_CONNECTION = 5.0
#: Time for the thread of a connection that gives way to end.
_SECONDS_TO_GIVE_WAY = 1.0
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Metrics(Counting):
    """The counters of a server, and the HTTP server that shows them, with the values that the server has anyway."""

    def __init__(self, host: str, port: int, shown: Callable[[], list[Shown]], is_draining: Callable[[], bool]):
        self._place, self._is_draining = (host, port), is_draining
        self.registry = CollectorRegistry()
        self._batches = Counter("vlmdata_batches", "Batches sent.", registry=self.registry)
        self._bytes = Counter("vlmdata_bytes", "Bytes of batches sent.", registry=self.registry)
        self._refused = Counter("vlmdata_refused", "Queries not answered.", ["reason"], registry=self.registry)
        self._seconds = Histogram(
            "vlmdata_answer_seconds", "Time until an answer begins.", buckets=_SECONDS, registry=self.registry
        )
        self.registry.register(_State(shown))
        self._http: WSGIServer | None = None

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
            self._http = make_server(*self._place, self._application(), _Threads, _Quiet)
        except OSError as error:
            raise UsageError(f"--metrics-port {self._place[1]}: {error.strerror or error}") from error
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, name="vlmdata-metrics", daemon=True).start()

    def close(self) -> None:
        """Stops the HTTP server."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def _application(self) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
        metrics = make_wsgi_app(self.registry)

        def application(environment: dict[str, Any], start: Any) -> Iterable[bytes]:
            path = environment.get("PATH_INFO")
            if path == "/metrics":
                try:
                    return metrics(environment, start)  # type: ignore[no-any-return]
                except Exception:
                    _log.exception("metrics cannot be shown")
                    start("500 Internal Server Error", [("Content-Type", "text/plain")])
                    return [b"metrics cannot be shown; the server's log has the details\n"]
            status = "404 Not Found" if path != "/healthz" else "200 OK"
            if path == "/healthz" and self._is_draining():
                status = "503 Service Unavailable"
            start(status, [("Content-Type", "text/plain")])
            return [status.partition(" ")[2].encode() + b"\n"]

        return application


class _State:
    """Values that the server has anyway."""

    def __init__(self, shown: Callable[[], list[Shown]]):
        self._shown = shown

    def collect(self) -> Iterable[Any]:
        for each in self._shown():
            family = CounterMetricFamily if each.counts else GaugeMetricFamily
            yield family(each.name, each.text, value=each.value)


class _Threads(ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread of its own, within bounds that silent and slow clients cannot use up."""

    daemon_threads = True  # one that waits for a silent connection must not hold up others
    request_queue_size = _MAX_CONNECTIONS

    def __init__(self, *arguments: Any, **options: Any):
        self._free = threading.Semaphore(_MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # and when they came, the oldest first
        super().__init__(*arguments, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread of its own. Where all are taken, the oldest connection ends and gives way."""
        if not self._free.acquire(blocking=False):
            self._end_older(than=math.inf, most=1)
            if not self._free.acquire(timeout=_SECONDS_TO_GIVE_WAY):
                self.shutdown_request(request)
                return
        with self._lock:
            self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread to be had
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers, and makes room for another connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        with self._lock:
            self._open.pop(request, None)
            super().shutdown_request(request)  # with the lock: nobody ends a connection that is closed

    def service_actions(self) -> None:
        """Ends connections that have taken too long; called twice a second."""
        self._end_older(than=time.monotonic() - _SECONDS_OF_A_CONNECTION)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Writes nothing: a client that goes away, or is sent away, is no error. Others are logged where they arise."""

    def _end_older(self, than: float, most: int = _MAX_CONNECTIONS) -> None:
        with self._lock:
            for request in [each for each, came in self._open.items() if came < than][:most]:
                del self._open[request]
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)  # ends the wait of its thread, which closes it


class _Quiet(WSGIRequestHandler):
    """Writes nothing to stderr, neither requests nor that a client went away."""

    def log_message(self, *_: Any) -> None:
        pass

    def get_stderr(self) -> Any:
        return io.StringIO()
