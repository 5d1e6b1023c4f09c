"""An HTTP proxy in front of an object store's server: it counts requests, and fails as servers and networks do."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.parse import urlsplit

import pytest

from tests.object_store import ObjectStore, forget_file_systems

#: Headers that concern one connection only.
_HOP = frozenset({"connection", "transfer-encoding", "keep-alive", "date", "server"})


@dataclass(frozen=True)
class Trouble:
    """What happens to a request.

    Attributes:
        status: Answered with this status, and not passed on; 0 passes it on.
        code: S3's name of the error.
        delay: Seconds before it is passed on.
        cut: Whether the connection is closed in the middle of the answer.
        without: Headers that are taken out of the request.
        flipped: Byte of the answer, as a share of its length, that is changed; negative changes none.
    """

    status: int = 0
    code: str = "InternalError"
    delay: float = 0.0
    cut: bool = False
    without: tuple[str, ...] = ()
    flipped: float = -1.0


#: What goes wrong in networks and passes.
FAULTS = (Trouble(status=500), Trouble(status=503), Trouble(cut=True), Trouble(delay=0.3))


@dataclass(frozen=True)
class Request:
    """A request.

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
    sent: int = 0


@dataclass
class Proxy:
    """A running proxy.

    Attributes:
        endpoint: Its URL.
        trouble: Decides what happens to a request, by its number and itself; None is nothing.
        requests: Those that were answered, with or without trouble.
    """

    endpoint: str = ""
    trouble: Callable[[int, Request], Trouble | None] = lambda number, request: None
    requests: list[Request] = field(default_factory=list)

    def gets(self, name: str) -> list[Request]:
        """Reads of objects whose names end so."""
        return [each for each in self.requests if each.method == "GET" and each.path.endswith(name) and not each.query]


@contextmanager
def proxying(upstream: str) -> Iterator[Proxy]:
    """Runs a proxy to a server, given by its URL, until the block is left."""
    running, numbers, target = Proxy(), count(), urlsplit(upstream).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _pass_on(self) -> None:
            path, _, query = self.path.partition("?")
            request = Request(self.command, path, query, self.headers.get("Range", ""))
            trouble = running.trouble(next(numbers), request) or Trouble()
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            time.sleep(trouble.delay)
            if trouble.status:
                content = f"<Error><Code>{trouble.code}</Code><Message>in the proxy</Message></Error>".encode()
                status, kept = trouble.status, {"Content-Type": "application/xml"}
            else:
                headers = {name: value for name, value in self.headers.items() if name.lower() not in trouble.without}
                with closing(http.client.HTTPConnection(target, timeout=60)) as connection:
                    connection.request(self.command, self.path, body, headers)
                    response = connection.getresponse()
                    content, status = response.read(), response.status
                    kept = {name: value for name, value in response.getheaders() if name.lower() not in _HOP}
            if trouble.flipped >= 0:
                changed = bytearray(content)
                changed[int(trouble.flipped * len(content))] ^= 1
                content = bytes(changed)
            running.requests.append(replace(request, sent=len(content)))
            self._answer(status, kept, content, trouble.cut)

        def _answer(self, status: int, headers: dict[str, str], content: bytes, cut: bool) -> None:
            self.send_response(status)
            # The answer to HEAD tells the length of a body that it does not have.
            length = headers.pop("Content-Length", str(len(content)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(content)))
            if not cut or content:
                self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if cut else content)
            if cut:
                self.wfile.flush()
                self.close_connection = True
                with suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # the other end may be killed at any moment

    with Server(("127.0.0.1", 0), Handler) as server:
        running.endpoint = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield running
        finally:
            server.shutdown()


@pytest.fixture
def proxy(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """What this process and those that it starts take for the object store's server."""
    with proxying(object_store.endpoint) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        forget_file_systems()
        yield running
