"""Real servers in processes of their own, and a TCP proxy in front of one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.forked import Forked
from vlmdata import PackedBatch, StreamingLoader
from vlmdata.loader.state import Position
from vlmdata.service.protocol import BatchQuery
from vlmdata.service.shared_memory import this_place


@dataclass
class Server:
    """A running `vlmdata serve`."""

    process: subprocess.Popen[str]
    port: int
    metrics_port: int | None
    arguments: tuple[str, ...]

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kills it as the kernel does when memory is short."""
        self.process.kill()
        self.process.communicate()

    def again(self) -> Server:
        """Starts it again at the same port."""
        return start(*self.arguments, "--port", str(self.port))

    def stop(self) -> tuple[int, str]:
        """Ends it as systemd does; returns exit code and log."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        self.process.terminate()
        try:
            _, log = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGABRT)  # writes where each thread is
            _, log = self.process.communicate()
            raise AssertionError(f"the server did not end:\n{log}") from None
        return self.process.returncode, log


def serve(*arguments: str, stderr: int) -> subprocess.Popen[str]:
    """Starts the command; its outputs are pipes."""
    return Forked(
        "vlmdata.cli.main:main",
        ["vlmdata", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )


def start(*arguments: Any) -> Server:
    """Starts a server, and waits until it answers."""
    texts = tuple(map(str, arguments))
    process = serve(*texts, stderr=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r":(\d+)$", line.strip())
    if found is None:
        _, log = process.communicate(timeout=30)
        raise AssertionError(f"the server did not start: {line}{log}")
    metrics = None
    if "--metrics-port" in texts:
        metrics = int(re.search(r":(\d+)/metrics", process.stdout.readline())[1])  # type: ignore[index]
    kept = [text for n, text in enumerate(texts) if text != "--port" and (n == 0 or texts[n - 1] != "--port")]
    return Server(process, int(found[1]), metrics, tuple(kept))


@contextmanager
def serving(*arguments: Any) -> Iterator[Server]:
    """A server at a free port until the block is left."""
    server = start(*arguments, "--port", 0)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def assert_equal(a: PackedBatch, b: PackedBatch) -> None:
    """Asserts that two batches are the same to the last bit."""
    one, two = a.tensors(), b.tensors()
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype, name
        assert torch.equal(tensor, two[name]), name
    assert (a.sample_keys, a.origins, a.masked) == (b.sample_keys, b.origins, b.masked)
    assert (a.epoch, a.step, a.micro_batch, a.pack) == (b.epoch, b.step, b.micro_batch, b.pack)


class Proxy:
    """Passes TCP connections on to the server of a port, slowly or not to the end."""

    def __init__(self, port: int):
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        #: Bytes of answers after which connections are cut; None is never.
        self.cut_after: int | None = None
        #: Bytes of answers, of all connections, after which one bit is changed, once; None is never.
        self.flip_after: int | None = None
        #: Seconds before each piece of an answer.
        self.delay = 0.0
        self.cuts = 0
        #: Bytes of answers so far, of all connections.
        self.answered = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for each in [self._listener, *self._sockets]:
            with suppress(OSError):
                each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(65_536):
                if answers and self.delay:
                    time.sleep(self.delay)
                passed += len(data)
                self.answered += len(data) if answers else 0
                if answers and self.flip_after is not None and self.answered > self.flip_after:
                    middle = len(data) // 2
                    data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
                    self.flip_after = None
                if answers and self.cut_after is not None and passed > self.cut_after:
                    self.cuts += 1
                    break
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 240.0) -> None:
    """Waits for something that must happen."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def first_query(loader: StreamingLoader) -> BatchQuery:
    """A query for the loader's first batch, from a client that can read the server's memory."""
    return BatchQuery(
        tuple(each for _, each in loader.fingerprints),
        loader.plan_config,
        Position(),
        0,
        1,
        None,
        frozenset({"tokens", "labels", "pixels"}),
        "uint8",
        "raise",
        this_place(),
    )
