"""A proxy between a program and an HTTP server: it counts requests, and fails as servers and networks do."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Request:
    """A request that came by.

    Attributes:
        method: Of HTTP.
        path: Without the query.
        query: What follows the path.
        range: The value of its ``Range`` header; empty without.
        sent: Bytes of the answer's body.
    """

    method: str
    path: str
    query: str
    range: str
    sent: int


#: What happens to an answer: ``error`` puts a status in its place, ``cut`` ends the connection after half the body,
#: ``slow`` waits before it.
FAULTS = ("error 500", "error 503", "cut", "slow")


@dataclass
class FaultyProxy:
    """A running proxy.

    Attributes:
        upstream: URL of the server.
        endpoint: URL of the proxy.
        requests: Those that were answered, faults included.
        fault: Gives the fault for a request, if any: called with its number and with it.
    """

    upstream: str
    endpoint: str = ""
    requests: list[Request] = field(default_factory=list)
    fault: Callable[[int, str, str], str | None] = lambda number, method, path: None

    def gets(self, name: str) -> list[Request]:
        """Successful reads of an object whose name ends so."""
        return [each for each in self.requests if each.method == "GET" and each.path.endswith(name) and not each.query]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultyProxy

    def _answer(self) -> None:
        proxy, (path, _, query) = self.proxy, self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = proxy.fault(len(proxy.requests), self.command, path)
        if fault == "slow":
            time.sleep(0.3)
        upstream = http.client.HTTPConnection(urlsplit(proxy.upstream).netloc, timeout=60)
        with contextlib.closing(upstream):
            upstream.request(self.command, self.path, body, dict(self.headers))
            response = upstream.getresponse()
            data, status, headers = response.read(), response.status, response.getheaders()
        if fault is not None and fault.startswith("error"):
            status, data = int(fault.split()[1]), b"<Error><Code>InternalError</Code></Error>"
            headers = [("Content-Type", "application/xml")]
        proxy.requests.append(Request(self.command, path, query, self.headers.get("Range", ""), len(data)))
        self.send_response(status)
        length = next((value for name, value in headers if name.lower() == "content-length"), str(len(data)))
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        if fault == "cut":
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
        elif self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *values: object) -> None:
        pass


@contextlib.contextmanager
def proxying(upstream: str) -> Iterator[FaultyProxy]:
    """Runs a proxy until the block is left."""
    proxy = FaultyProxy(upstream)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": proxy}))
    server.daemon_threads = True
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]  # cut connections are meant
    proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
