"""One client machine takes its share of a server and no more; others go on."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.flight as flight
import pytest

from tests.service.servers import Proxy, assert_equal, first_query, wait_until
from vlmdata import PackedBatch, StreamingLoader
from vlmdata.service.server.clients import Clients, Share
from vlmdata.service.server.config import ServerConfig
from vlmdata.service.server.memory import BusyError
from vlmdata.service.server.server import CollationServer

OPTIONS: dict[str, Any] = {"capacity": 1024, "global_batch": 2, "seed": 21, "timeout": 240.0, "hedge": 240.0}


def never(*_: object) -> bool:
    return False


def always(*_: object) -> bool:
    return True


class TestShares:
    def test_calls_beyond_the_share_wait_and_later_ones_are_refused(self) -> None:
        clients = Clients(2, 100, 240.0, never)
        held = [clients.enter("a", never) for _ in range(2)]
        begun: list[Share] = []
        waiting = [threading.Thread(target=lambda: begun.append(clients.enter("a", never))) for _ in range(2)]
        for each in waiting:
            each.start()
        wait_until(lambda: clients.waiting == 2, "they do not wait")
        with pytest.raises(BusyError, match="2 queries of this machine are under way, and 2 wait"):
            clients.enter("a", never)
        clients.enter("b", never).end()
        assert not begun
        for each in held:
            each.end()
        for each in waiting:
            each.join(240)
        assert len(begun) == 2

    def test_a_call_whose_client_is_gone_waits_no_longer(self) -> None:
        clients = Clients(1, 100, 240.0, never)
        held = clients.enter("a", never)
        with pytest.raises(BusyError, match="did not end"):
            clients.enter("a", always)
        held.end()
        assert not clients._machines

    def test_packs_of_a_machine_have_a_limit_together(self) -> None:
        clients = Clients(9, 100, 240.0, never)
        one, same, other = (clients.enter("a", never) for _ in range(3))
        one.hold("pack", 70)
        same.hold("pack", 70)
        other._is_over = always
        with pytest.raises(BusyError):
            other.hold("second", 31)
        one.release()
        with pytest.raises(BusyError):
            other.hold("second", 31)
        same.end()
        other.hold("second", 101)  # alone, it may be larger
        third = clients.enter("b", never)
        third.hold("pack", 70)

    def test_a_stalled_call_gives_its_place_to_one_that_waits(self) -> None:
        stalled: list[Share] = []

        def relieve(machine: str) -> bool:
            for each in stalled:
                each.release()
            return bool(stalled) and machine == "a"

        clients = Clients(1, 100, 240.0, relieve)
        stalled.append(clients.enter("a", never))
        stalled[0].hold("pack", 100)
        again = clients.enter("a", never)
        again.hold("other", 100)
        for each in (*stalled, again):
            each.end()
        assert not clients._machines

    def test_stalled_calls_keep_no_more_threads_than_the_limit(self) -> None:
        clients = Clients(1, 100, 240.0, never)
        stalled = [clients.enter("a", never)]
        for _ in range(3):
            stalled[-1].release()
            stalled.append(clients.enter("a", never))
        stalled[-1].release()
        with pytest.raises(BusyError):
            clients.enter("a", always)
        stalled[0].end()
        clients.enter("a", always)

    def test_ending_twice_counts_once(self) -> None:
        clients = Clients(1, 100, 240.0, never)
        share = clients.enter("a", never)
        for _ in range(2):
            share.end()
        assert not clients._machines


def test_a_machine_that_keeps_its_calls_holds_up_only_itself(chat: Path) -> None:
    """Calls of shared memory are under way until the client ends them. The other machine is another address."""
    config = ServerConfig(port=0, workers=1, drain=1.0, client_calls=2, stall=1e9)
    with closing(CollationServer([chat], config)) as server, StreamingLoader(chat, **OPTIONS) as local:
        place, expected = f"grpc://127.0.0.1:{server.port}", list(local)
        query = first_query(local)
        client = flight.FlightClient(place)
        readers = [client.do_get(flight.Ticket(query.encode())) for _ in range(2)]
        for reader in readers:
            reader.read_chunk()
        batches: list[PackedBatch] = []

        def load() -> None:
            with StreamingLoader(place, num_workers=3, **OPTIONS) as loader:
                batches.extend(loader)

        same_machine = threading.Thread(target=load, daemon=True)
        same_machine.start()
        wait_until(lambda: server.clients.waiting == 2, "no call waits")
        proxy = Proxy(server.port, source="127.0.0.2")
        with StreamingLoader(f"grpc://127.0.0.1:{proxy.port}", shared_memory=False, num_workers=1, **OPTIONS) as loader:
            for one, two in zip(expected, loader, strict=True):
                assert_equal(one, two)
        proxy.close()
        assert not batches
        for reader in readers:
            reader.cancel()
        same_machine.join(240)
        assert not same_machine.is_alive()
        for one, two in zip(expected, batches, strict=True):
            assert_equal(one, two)
