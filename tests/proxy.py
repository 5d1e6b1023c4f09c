"""A real HTTP proxy in front of an object store's server, and what goes wrong on the way."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Trouble:
    """What happens to a request.

    Attributes:
        status: Answered with this status, and not passed on; 0 passes it on.
        code: S3's name of the error.
        delay: Seconds before it is passed on.
        cut: Whether the connection is closed in the middle of the answer.
        without: Headers that are taken out of the request.
    """

    status: int = 0
    code: str = "InternalError"
    delay: float = 0.0
    cut: bool = False
    without: tuple[str, ...] = ()


@dataclass
class Proxy:
    """A proxy that is running.

    Attributes:
        endpoint: Its URL.
        trouble: Decides what happens to a request, by its number, method and path with query; None is nothing.
        requests: Method and path of every request so far.
    """

    endpoint: str
    trouble: Callable[[int, str, str], Trouble | None] = lambda number, method, path: None
    requests: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def troubled(upstream: str) -> Iterator[Proxy]:
    """Runs a proxy to a server until the block is left.

    Args:
        upstream: URL of the server.
    """
    proxy = Proxy("")
    target = urlsplit(upstream)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _pass_on(self) -> None:
            with lock:
                number = len(proxy.requests)
                proxy.requests.append((self.command, self.path))
            trouble = proxy.trouble(number, self.command, self.path) or Trouble()
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            time.sleep(trouble.delay)
            if trouble.status:
                content = f"<Error><Code>{trouble.code}</Code><Message>in the proxy</Message></Error>".encode()
                self._answer(trouble.status, {"Content-Type": "application/xml"}, content, cut=False)
                return
            headers = {name: value for name, value in self.headers.items() if name.lower() not in trouble.without}
            connection = http.client.HTTPConnection(str(target.hostname), target.port)
            try:
                connection.request(self.command, self.path, body, headers)
                response = connection.getresponse()
                content = response.read()
                kept = {name: value for name, value in response.getheaders() if name.lower() not in _HOP}
            finally:
                connection.close()
            self._answer(response.status, kept, content, cut=trouble.cut)

        def _answer(self, status: int, headers: dict[str, str], content: bytes, cut: bool) -> None:
            self.send_response(status)
            # The answer to HEAD tells the length of a body that it does not have.
            length = headers.pop("Content-Length", str(len(content)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(content)))
            if cut:
                self.wfile.flush()
                self.close_connection = True
                with suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # the other end may be killed at any moment

    with Server(("127.0.0.1", 0), Handler) as server:
        proxy.endpoint = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield proxy
        finally:
            server.shutdown()


#: Headers that concern one connection only.
_HOP = frozenset({"connection", "transfer-encoding", "keep-alive", "date", "server"})
