"""The real server in a thread, and a client that sends exactly what it is told to."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmdata.inspect.connections import server_of
from vlmdata.inspect.dataset import describe_dataset
from vlmdata.inspect.packs import EpochPacks
from vlmdata.inspect.server import InspectApp, MixtureApp, build_app
from vlmdata.loader.loader import StreamingLoader
from vlmdata.storage.open import open_dataset


@dataclass(frozen=True)
class Answer:
    """What came back; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Client:
    """Asks a server on this machine. Paths go out as they are, and any Host header may be sent."""

    port: int

    @property
    def home(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        hosts: Sequence[str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.putrequest(method, path, skip_host=True)
        for host in [f"127.0.0.1:{self.port}"] if hosts is None else hosts:
            connection.putheader("Host", host)
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        found = Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        connection.close()
        return found


@contextmanager
def serving(directory: Path, *, host: str = "127.0.0.1", check: int | None = None, **options: Any) -> Iterator[Client]:
    """The application over a dataset, on a free port."""
    dataset = open_dataset(directory)
    loader = StreamingLoader(
        directory, capacity=2048, global_batch=1, dp_rank=0, context_parallel=2, parts=("tokens", "labels")
    )
    with _running(
        InspectApp(dataset, describe_dataset(dataset, check=check), EpochPacks(loader, 0)), host, options
    ) as client:
        yield client


@contextmanager
def mixture_server(file: Path, steps: int) -> Iterator[Client]:
    """The application over a mixture file, on a free port."""
    loader = StreamingLoader(file, capacity=2048, global_batch=1, dp_rank=0, parts=("tokens", "labels"))
    with _running(MixtureApp(file.name, EpochPacks(loader, 0, steps)), "127.0.0.1", {}) as client:
        yield client


@contextmanager
def _running(served: MixtureApp, host: str, options: dict[str, Any]) -> Iterator[Client]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        app = build_app(served, host=host, port=port, **options)
        server = server_of(app, log_level="critical")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield Client(port)
        finally:
            server.should_exit = True
            thread.join(30)
