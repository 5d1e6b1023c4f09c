"""The client's view of its servers: names, failures and recovery."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.service.servers import wait_until
from vlmdata import StreamingLoader
from vlmdata.errors import ConfigMismatchError, ResourceError, UsageError
from vlmdata.loader.config import Service
from vlmdata.loader.fill.buffers import BufferPool
from vlmdata.loader.fill.filler import Filled
from vlmdata.service.address import Server, parse_address
from vlmdata.service.client import servers as module
from vlmdata.service.client.connection import CertificateError, ServerLostError, TokenRefusedError
from vlmdata.service.client.filler import Race
from vlmdata.service.client.servers import Servers


class Names:
    """A name server that answers what it is told, when it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.addresses: list[str] = ["10.0.0.1", "10.0.0.2"]
        self.go = threading.Event()
        self.go.set()
        self.asked = 0
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked += 1
        assert self.go.wait(60)
        if not self.addresses:
            raise socket.gaierror
        return [(0, 0, 0, "", (address, port)) for address in self.addresses]


class Clock:
    """The time that the client sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=lambda _: None))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def servers_of(text: str) -> Servers:
    return Servers(parse_address(text), Service())


def hosts(servers: Servers) -> list[str]:
    return [each.host for each in servers.order(0)]


def test_names_are_looked_up_again_while_all_is_well(names: Names, clock: Clock) -> None:
    servers = servers_of("grpc://data.internal")
    assert hosts(servers) == ["10.0.0.1", "10.0.0.2"]
    names.addresses.append("10.0.0.3")
    clock.now += 59
    assert hosts(servers) == ["10.0.0.1", "10.0.0.2"]
    assert names.asked == 1
    clock.now += 2
    wait_until(lambda: len(hosts(servers)) == 3, "the new server is not found")


def test_a_slow_name_server_holds_nothing_up(names: Names, clock: Clock) -> None:
    servers = servers_of("grpc://data.internal")
    names.go.clear()
    clock.now += 100
    for _ in range(3):
        assert hosts(servers) == ["10.0.0.1", "10.0.0.2"]
    names.addresses = ["10.0.0.4", "10.0.0.5"]
    names.go.set()
    wait_until(lambda: hosts(servers) == ["10.0.0.4", "10.0.0.5"], "the names are not looked up")
    assert names.asked == 2


def test_servers_that_are_gone_are_forgotten(names: Names, clock: Clock) -> None:
    servers = servers_of("grpc://data.internal")
    gone, stays = servers.order(0)
    for each in (gone, stays):
        servers.connection(each)
        servers.failed(each, ServerLostError("refused"))
    names.addresses = ["10.0.0.2", "10.0.0.3"]
    clock.now += 20
    wait_until(lambda: "10.0.0.3" in hosts(servers), "the names are not looked up")
    assert set(servers._connections) == set(servers._health) == {stays}
    servers.close()


def test_a_name_that_is_unknown_for_a_moment_keeps_its_servers(names: Names, clock: Clock) -> None:
    servers = servers_of("grpc://data.internal:7")
    names.addresses = []
    clock.now += 100
    servers.order(0)
    wait_until(lambda: not servers._looking, "the look-up does not end")
    assert names.asked == 2
    assert servers.order(0) == [Server("10.0.0.1", 7, "data.internal"), Server("10.0.0.2", 7, "data.internal")]


def test_addresses_are_not_looked_up(names: Names, clock: Clock) -> None:
    servers = servers_of("grpc://10.0.0.1,10.0.0.2,[::1],localhost")
    asked = names.asked
    clock.now += 1000
    servers.order(0)
    assert not servers._looking
    assert names.asked == asked


def test_failures_of_long_ago_do_not_count(clock: Clock) -> None:
    servers = servers_of("grpc://10.0.0.1,10.0.0.2")
    first, second = servers.order(0)
    for _ in range(10):
        servers.failed(first, ServerLostError("refused"))
    assert servers.order(0) == [second, first]
    clock.now += 29
    assert servers.order(0) == [second, first]
    clock.now += 2
    assert servers.order(0) == [first, second]
    clock.now += 60
    servers.failed(first, ServerLostError("refused"))
    clock.now += 1
    assert servers.order(0) == [first, second]  # a first failure again: half a second


def test_each_kind_of_failure_in_a_row_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A server that was slow, and then has other data, is not passed over in silence."""
    servers = servers_of("grpc://10.0.0.1,10.0.0.2")
    server, _ = servers.order(0)
    for _ in range(2):
        servers.failed(server, ServerLostError("slow"))
        servers.failed(server, ConfigMismatchError("other data"))
    assert caplog.messages == ["slow. Asking the other servers.", "other data. Asking the other servers."]
    servers.succeeded(server)
    servers.failed(server, ServerLostError("slow"))
    assert caplog.messages[2:] == [f"server {server}: answers again.", "slow. Asking the other servers."]


def test_servers_share_the_time_for_a_question(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """One that does not answer leaves time for the next."""
    servers = servers_of("grpc://10.0.0.1,10.0.0.2,10.0.0.3")
    monkeypatch.setattr(servers, "connection", lambda server: server)
    asked: list[tuple[str, float]] = []

    def question(server: Any, seconds: float) -> str:
        asked.append((server.host, seconds))
        if len(asked) < 3:
            clock.now += seconds
            raise ServerLostError(f"server {server}: no answer")
        return "here"

    assert servers.ask(question, 3.0) == "here"
    assert asked == [("10.0.0.1", 1.0), ("10.0.0.2", 1.0), ("10.0.0.3", 1.0)]


def test_wrong_certificates_are_an_error_only_if_no_other_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = servers_of("grpc://10.0.0.1,10.0.0.2")
    monkeypatch.setattr(servers, "connection", lambda server: server)
    sound = {"10.0.0.2"}

    def question(server: Any, _: float) -> str:
        if server.host not in sound:
            raise CertificateError(f"server {server}: certificate verify failed")
        return "here"

    assert servers.ask(question, 1e6) == "here"
    sound.clear()
    with pytest.raises(
        UsageError, match=r"server 10\.0\.0\.1:8815: certificate .*; server 10\.0\.0\.2:8815: certificate"
    ):
        servers.ask(question, 1e6)


def test_a_loader_is_as_patient_as_its_timeout() -> None:
    """Also with a server that takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ResourceError, match=r"no server answered within 0\.3 s"):
            StreamingLoader(place, capacity=1024, global_batch=2, timeout=0.3)


@pytest.mark.parametrize("kind", [TokenRefusedError, CertificateError])
def test_what_a_server_refuses_is_read_again_for_each_attempt(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    servers, forgotten, answers = servers_of("grpc://10.0.0.1"), list[Server](), [kind("refused")] * 3

    def batch(*_: Any) -> Filled:
        if answers:
            raise answers.pop()
        return Filled(5)

    monkeypatch.setattr(servers, "connection", lambda _: SimpleNamespace(batch=batch))
    monkeypatch.setattr(servers, "forget", forgotten.append)
    query: Any = SimpleNamespace(dp_rank=0)
    lease, filled = Race(servers, query, 5, BufferPool(), True, 240.0).fetch(threading.Event())
    assert (filled, len(forgotten)) == (Filled(5), 3)
    lease.release()


def test_a_token_file_that_is_absent_for_a_moment_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = servers_of("grpc://10.0.0.1")
    answers: list[Any] = [UsageError("service_token_file: cannot be read: No such file or directory")] * 3

    def connection(server: Server) -> Any:
        if answers:
            raise answers.pop()
        return SimpleNamespace(batch=lambda *_: Filled(5))

    monkeypatch.setattr(servers, "connection", connection)
    query: Any = SimpleNamespace(dp_rank=0)
    pool = BufferPool()
    lease, filled = Race(servers, query, 5, pool, True, 60.0).fetch(threading.Event())
    assert filled == Filled(5)
    assert np.asarray(lease.memory()).size
    lease.release()
