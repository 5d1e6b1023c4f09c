"""Counters for Prometheus, and a health check, over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from vlmdata.errors import UsageError
from vlmdata.service.counting import Counting

if TYPE_CHECKING:
    from vlmdata.service.server import CollationServer

disable_created_metrics()  # type: ignore[no-untyped-call] # one more line a counter, which nobody reads

#: Connections at the same time. The port asks for no token, so strangers must not get threads without limit.
_MAX_CONNECTIONS = 32
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Metrics(Counting):
    """The counters of a server, and the HTTP server that shows them.

    Args:
        server: The server, for what it counts itself.
    """

    def __init__(self, server: CollationServer):
        self._server = server
        self.registry = CollectorRegistry()
        self._batches = Counter("vlmdata_batches", "Batches sent.", registry=self.registry)
        self._bytes = Counter("vlmdata_bytes", "Bytes of batches sent.", registry=self.registry)
        self._refused = Counter("vlmdata_refused", "Queries not answered.", ["reason"], registry=self.registry)
        self._seconds = Histogram(
            "vlmdata_answer_seconds", "Time until an answer begins.", buckets=_SECONDS, registry=self.registry
        )
        self.registry.register(_State(server))
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
        """Starts ``/metrics`` and ``/healthz``.

        Raises:
            UsageError: If the port is taken.
        """
        config = self._server.config
        assert config.metrics_port is not None
        try:
            self._http = make_server(config.host, config.metrics_port, self._application(), _Threads, _Quiet)
        except OSError as error:
            raise UsageError(f"--metrics-port {config.metrics_port}: {error.strerror or error}") from error
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
                return metrics(environment, start)  # type: ignore[no-any-return]
            status = "404 Not Found" if path != "/healthz" else "200 OK"
            if path == "/healthz" and self._server.is_draining:
                status = "503 Service Unavailable"
            start(status, [("Content-Type", "text/plain")])
            return [status.partition(" ")[2].encode() + b"\n"]

        return application


class _State:
    """Values that the server has anyway."""

    def __init__(self, server: CollationServer):
        self._server = server

    def collect(self) -> Iterable[Any]:
        counts, memory = self._server.packs.counts, self._server.packs.memory
        for name, text, value in (
            ("vlmdata_packs_made", "Packs read and decoded.", counts.made),
            ("vlmdata_packs_made_ahead", "Of these, packs made before a query asked.", counts.ahead),
            ("vlmdata_packs_dropped", "Of the latter, packs forgotten before a query asked.", counts.dropped),
            ("vlmdata_packs_shared", "Queries answered from a pack made for another one.", counts.shared),
            ("vlmdata_bytes_read", "Bytes read from shards.", counts.bytes_read),
            ("vlmdata_worker_restarts", "Times that workers were replaced.", self._server.restarts),
            ("vlmdata_answers_given_up", "Answers to stalled clients that lost memory.", self._server.answers.given_up),
            ("vlmdata_files_given_up", "Files whose clients stalled while others waited.", self._server.files.given_up),
        ):
            yield CounterMetricFamily(name, text, value=value)
        for name, text, size in (
            ("vlmdata_memory_in_use_bytes", "Bytes of packs in use.", memory.bytes_in_use),
            ("vlmdata_memory_limit_bytes", "Limit of these.", memory.limit),
            ("vlmdata_plans_in_use_bytes", "Bytes of plans.", self._server.plans.bytes_in_use),
            ("vlmdata_plans_limit_bytes", "Limit of these.", self._server.config.plan_memory),
            ("vlmdata_answers_under_way", "Answers being sent.", len(self._server.answers)),
            ("vlmdata_damaged_files", "Files in which damage was met.", self._server.damaged_files),
        ):
            yield GaugeMetricFamily(name, text, value=size)


class _Threads(ThreadingMixIn, WSGIServer):
    daemon_threads = True  # one that waits for a silent connection must not hold up others
    request_queue_size = _MAX_CONNECTIONS

    def __init__(self, *arguments: Any, **options: Any):
        self._free = threading.Semaphore(_MAX_CONNECTIONS)
        super().__init__(*arguments, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread of its own; closes connections beyond the limit."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers, and makes room for another connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class _Quiet(WSGIRequestHandler):
    timeout = 5.0  # seconds for a request to arrive

    def log_message(self, *_: Any) -> None:
        pass
