"""A web server that sends the files of a folder as wholes, without ranges."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass(frozen=True)
class Web:
    """A running server.

    Attributes:
        url: Of the folder, without a slash at its end.
        asked: Paths of the requests so far.
    """

    url: str
    asked: list[str] = field(default_factory=list)


@contextmanager
def serving_files(folder: Path) -> Iterator[Web]:
    """Serves a folder until the block is left."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            web.asked.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        web = Web(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield web
        finally:
            server.shutdown()
