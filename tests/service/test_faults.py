"""Servers that die, stall, stop and come back, and networks that cut and delay: the stream stays what it is."""

from __future__ import annotations

import dataclasses
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pyarrow.flight as flight
import pytest

from tests.ports import free_port
from tests.service.servers import Proxy, Server, assert_equal, first_query, serving, start, wait_until
from vlmdata import PackedBatch, StreamingLoader
from vlmdata.errors import ConfigMismatchError, ResourceError, UsageError
from vlmdata.service.client import filler
from vlmdata.service.client.filler import Race
from vlmdata.service.shared_memory import this_place

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"capacity": 1024, "global_batch": 2, "seed": 5}
#: Seconds for what takes one on an idle machine.
PATIENCE = 240.0


@pytest.fixture(scope="module")
def batches(chat: Path) -> list[PackedBatch]:
    """Two epochs of a local loader."""
    with StreamingLoader(chat, **OPTIONS) as loader:
        return [*loader, *loader]


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Server]]:
    """The servers of the test before, which the next one uses again."""
    servers: list[Server] = []
    yield servers
    for server in servers:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture
def two(chat: Path, pair: list[Server]) -> list[Server]:
    """Two servers, which a test may harm. Their ports are none that others get while a server is down."""
    arguments = (str(chat), "-j", "1")
    for server in pair:
        if server.process.poll() is None and server.arguments != arguments:
            server.stop()
    pair[:] = [each for each in pair if each.process.poll() is None]
    while len(pair) < 2:
        pair.append(start(*arguments, "--port", free_port()))
    return pair


def both(servers: list[Server]) -> str:
    return f"grpc://127.0.0.1:{servers[0].port},127.0.0.1:{servers[1].port}"


class Client(threading.Thread):
    """A loader that takes a batch now and then and compares it with the local one."""

    def __init__(self, place: str, expected: list[PackedBatch], **options: Any):
        super().__init__(daemon=True)
        self.taken = 0
        self.go = threading.Semaphore(0)
        self._place, self._expected, self._options = place, expected, OPTIONS | {"timeout": PATIENCE} | options
        self.error: BaseException | None = None
        self.slowest = 0.0
        self.start()

    def run(self) -> None:
        try:
            with StreamingLoader(self._place, **self._options) as loader:
                batches = (batch for _ in range(2) for batch in loader)
                for expected in self._expected:
                    self.go.acquire()
                    begun = time.monotonic()
                    assert_equal(expected, next(batches))
                    self.slowest = max(self.slowest, time.monotonic() - begun)
                    self.taken += 1
        except BaseException as error:
            self.error = error

    def advance(self, to: int) -> None:
        """Lets it take batches until it has so many."""
        for _ in range(to - self.taken):
            self.go.release()
        wait_until(lambda: self.taken >= to or self.error is not None, f"batch {to} did not come", PATIENCE)
        if self.error is not None:
            raise self.error


def test_servers_killed_and_restarted_in_turn_lose_and_double_nothing(
    two: list[Server], batches: list[PackedBatch]
) -> None:
    clients = [Client(both(two), batches), Client(both(two), batches, num_workers=2, prefetch_factor=1)]
    part = len(batches) // 3
    for victim in range(2):
        for client in clients:
            client.advance((victim + 1) * part)
        two[victim].kill()
        for client in clients:
            client.advance((victim + 1) * part + 1)
        two[victim] = two[victim].again()
    for client in clients:
        client.advance(len(batches))


def test_a_stopped_server_is_hedged(two: list[Server], batches: list[PackedBatch]) -> None:
    client = Client(both(two), batches, hedge=0.5)
    client.advance(2)
    two[0].signal(signal.SIGSTOP)
    client.advance(len(batches))
    two[0].signal(signal.SIGCONT)


def test_no_server_is_an_error_that_names_all(
    two: list[Server], batches: list[PackedBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(both(two), batches)
    client.advance(1)
    for server in two:
        server.kill()
    monkeypatch.setattr(filler, "Race", lambda *given: Race(*given[:5], 3.0))  # in place of the timeout
    with pytest.raises(ResourceError, match="no server answered within 3 s") as caught:
        client.advance(2)
    for server in two:
        assert f"server 127.0.0.1:{server.port}: " in str(caught.value)


def test_servers_with_different_data_are_refused_at_the_start(chat: Path, receipts: Path) -> None:
    with ExitStack() as stack:
        one, other = (stack.enter_context(serving(data, "-j", 1)) for data in (chat, receipts))
        with pytest.raises(ConfigMismatchError, match=r"servers have different data. .*: chat \w{16}; .*: receipts"):
            StreamingLoader(both([one, other]), **OPTIONS)


def test_a_server_that_gets_other_data_later_is_passed_over(
    chat: Path, receipts: Path, two: list[Server], caplog: pytest.LogCaptureFixture
) -> None:
    _right, wrong = two
    with StreamingLoader(both(two), dp_rank=1, dp_size=2, **OPTIONS) as loader:
        wrong.kill()
        wrong.arguments = (str(receipts), "-j", "1")
        two[1] = wrong = wrong.again()
        refusal = f"server 127.0.0.1:{wrong.port}: the client wants the dataset with fingerprint"
        with StreamingLoader(chat, dp_rank=1, dp_size=2, **OPTIONS) as local:
            for _ in range(60):  # epochs: on a busy machine, the connection is down for the first of them
                for one, other in zip(local, loader, strict=True):
                    assert_equal(one, other)
                if refusal in caplog.text:
                    break
                time.sleep(0.5)
    assert refusal in caplog.text
    assert "the server has receipts" in caplog.text


def test_a_forked_process_is_told_what_to_do(two: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    with StreamingLoader(both(two), **OPTIONS) as loader:
        monkeypatch.setattr(loader._service.servers, "_process", -1)
        with pytest.raises(UsageError, match="cannot be used in a forked process, since gRPC has no threads there"):
            next(iter(loader))


class TestNetwork:
    def test_a_cut_connection_is_used_again(self, two: list[Server], batches: list[PackedBatch]) -> None:
        proxy = Proxy(two[0].port)
        largest = max(sum(tensor.nbytes for tensor in batch.tensors().values()) for batch in batches)
        proxy.cut_after = 2 * largest
        client = Client(f"grpc://127.0.0.1:{proxy.port}", batches, shared_memory=False)
        client.advance(len(batches))
        proxy.close()
        assert proxy.cuts > 1

    def test_bytes_changed_on_the_way_are_noticed_and_fetched_again(
        self, two: list[Server], batches: list[PackedBatch], caplog: pytest.LogCaptureFixture
    ) -> None:
        proxy = Proxy(two[0].port)
        client = Client(f"grpc://127.0.0.1:{proxy.port}", batches, shared_memory=False)
        client.advance(1)
        with_images = max(batches, key=lambda batch: sum(tensor.nbytes for tensor in batch.tensors().values()))
        client.advance(next(n for n, batch in enumerate(batches) if batch is with_images))
        size = sum(tensor.nbytes for tensor in with_images.tensors().values())
        proxy.flip_after = proxy.answered + size // 2
        client.advance(len(batches))
        proxy.close()
        assert proxy.flip_after is None
        assert "bytes of the batch were changed on the way" in caplog.text

    def test_a_slow_connection_is_hedged(self, two: list[Server], batches: list[PackedBatch]) -> None:
        proxy = Proxy(two[0].port)
        place = f"grpc://127.0.0.1:{proxy.port},127.0.0.1:{two[1].port}"
        client = Client(place, batches[:6], hedge=0.3, shared_memory=False)
        client.advance(1)
        proxy.delay = 1.0
        client.advance(6)
        proxy.close()


def test_killed_workers_are_replaced(chat: Path, batches: list[PackedBatch]) -> None:
    """One of two, and then all."""
    with serving(chat, "-j", 2) as server:
        client = Client(server.url, batches)
        client.advance(1)
        one, other = workers_of(server)
        one.kill()
        client.advance(len(batches) // 2)
        assert not one.is_running()
        assert other.is_running()
        for worker in workers_of(server):
            worker.kill()
        client.advance(len(batches))
        assert not other.is_running()


def workers_of(server: Server) -> list[psutil.Process]:
    family = psutil.Process(server.process.pid).children(recursive=True)
    return [each for each in family if each.parent().pid != server.process.pid]


def test_sigterm_lets_answers_end_and_refuses_new_ones(two: list[Server], batches: list[PackedBatch]) -> None:
    client = Client(both(two), batches)
    client.advance(2)
    code, log = two[0].stop()
    assert code == 0, log
    assert "stopping" in log
    assert "Traceback" not in log
    client.advance(len(batches))


def test_a_silent_connection_to_the_metrics_does_not_hold_up_the_end(chat: Path) -> None:
    server = start(chat, "-j", 1, "--port", 0, "--metrics-port", 0)
    with socket.create_connection(("127.0.0.1", server.metrics_port)):
        code, log = server.stop()
    assert code == 0, log


@pytest.mark.parametrize("place", ["", this_place()], ids=["bytes", "shared memory"])
def test_a_client_that_does_not_read_gives_up_its_memory(chat: Path, place: str) -> None:
    """Clients that stop reading hold all memory; another one is served nevertheless."""
    options = {"capacity": 400_000, "global_batch": 1, "pad_to_capacity": True}
    with serving(chat, "-j", 1, "--memory", "64M", "--drain", 1, "--stall", 1) as server:
        with StreamingLoader(server.url, **options) as loader:
            first = first_query(loader)
        readers = []
        for seed in range(3):
            query = dataclasses.replace(first, plan=dataclasses.replace(first.plan, seed=seed + 1), place=place)
            reader = flight.FlightClient(server.url).do_get(flight.Ticket(query.encode()))
            reader.read_chunk()
            readers.append(reader)
        before = psutil.Process(server.process.pid).memory_info().rss
        with (
            StreamingLoader(server.url, timeout=PATIENCE, **options) as loader,
            StreamingLoader(chat, **options) as local,
        ):
            assert_equal(next(iter(local)), next(iter(loader)))
        assert psutil.Process(server.process.pid).memory_info().rss - before < 96 << 20
