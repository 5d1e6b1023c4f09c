"""The metrics' HTTP server, which strangers may reach."""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from vlmdata.errors import UsageError
from vlmdata.service.server import metrics
from vlmdata.service.server.config import ServerConfig
from vlmdata.service.server.server import CollationServer


def test_their_package_is_needed_only_with_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    without = metrics.counting(ServerConfig(), list, str)
    without.sent(1)
    without.serve()
    assert without.port is None
    with pytest.raises(UsageError, match=r"--metrics-port needs a package .*: pip install 'vlmdata\[service\]'"):
        metrics.counting(ServerConfig(metrics_port=0), list, str)


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server that counts nothing."""
    packs = metrics.Shown("vlmdata_packs_made", "Packs read and decoded.", 0, counts=True)
    shown = metrics.Metrics("127.0.0.1", 0, lambda: [packs], str)
    shown.serve()
    assert shown.port is not None
    yield shown.port
    shown.close()


def get(port: int, path: str) -> str:
    with urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        text: str = answer.read().decode()
    return text


def test_a_server_that_cannot_take_connections_is_unhealthy(chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(CollationServer([chat], ServerConfig(port=0, workers=1, metrics_port=0, drain=1.0))) as server:
        server.metrics.serve()
        assert server.metrics.port is not None
        assert get(server.metrics.port, "/healthz") == "OK\n"
        monkeypatch.setattr("vlmdata.service.server.server.free_descriptors", lambda: 15)
        with pytest.raises(HTTPError, match="503") as refused:
            get(server.metrics.port, "/healthz")
        assert "only 15 file descriptors are left" in refused.value.read().decode()


class TestConnections:
    def test_slow_ones_give_way(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """More than there is room for hang in the middle of a request, and more come all the time."""
        monkeypatch.setattr(metrics, "_SECONDS_OF_A_CONNECTION", 1e9)
        slow = []
        for _ in range(3):
            for _ in range(metrics._MAX_CONNECTIONS):
                slow.append(socket.create_connection(("127.0.0.1", port)))
                slow[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: h")
            assert get(port, "/healthz") == "OK\n"
            assert "vlmdata_packs_made_total 0.0" in get(port, "/metrics")
        for each in slow:
            each.close()

    def test_each_has_an_end(
        self, port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Also if a byte comes now and then."""
        monkeypatch.setattr(metrics, "_SECONDS_OF_A_CONNECTION", 0.2)
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.settimeout(0.05)
            slow.sendall(b"GET / HTTP/1.1\r\nX: ")
            deadline = time.monotonic() + 60
            with suppress(ConnectionError):
                while time.monotonic() < deadline:
                    slow.sendall(b"x")
                    with suppress(TimeoutError):
                        if not slow.recv(1):
                            break
            assert time.monotonic() < deadline, "the connection is still open"
        assert capfd.readouterr().err == ""

    def test_their_errors_write_nothing(self, port: int, capfd: pytest.CaptureFixture[str]) -> None:
        for sent in (b"\x16\x03\x01\x00", b"GET /metrics HTTP/1.1\r\n\r\n", b"nonsense\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends with a reset
                stranger.sendall(sent)
        assert get(port, "/healthz") == "OK\n"
        assert capfd.readouterr().err == ""
