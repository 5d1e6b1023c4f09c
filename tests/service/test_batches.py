"""Served batches are those of a local loader, to the last bit."""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pyarrow.flight as flight
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.service.servers import Server, assert_equal, first_query, serving, wait_until
from vlmdata import Blend, PackedBatch, StreamingLoader
from vlmdata.cli.serve import _show_status
from vlmdata.errors import ConfigMismatchError, ResourceError, UsageError
from vlmdata.loader.config import Service
from vlmdata.loader.state import Position
from vlmdata.packing import Change
from vlmdata.packing import config as plan_config
from vlmdata.service.address import parse_address
from vlmdata.service.client.connection import Connection
from vlmdata.service.protocol import STATUS, BatchQuery, Header
from vlmdata.service.shared_memory import IN_ANSWER, Maps, SharedMemoryError, SharedPack

OPTIONS: dict[str, Any] = {"capacity": 1024, "global_batch": 4, "pad_multiple": 4}

RANKS = {
    "whole": {},
    "bytes": {"shared_memory": False},
    "workers": {"num_workers": 2},
    "slice 0 of 2": {"context_parallel": 2, "context_parallel_rank": 0},
    "slice 3 of 4": {"context_parallel": 4, "context_parallel_rank": 3, "num_workers": 1, "shared_memory": False},
    "rank 1 of 2": {"dp_rank": 1, "dp_size": 2},
    "tokens": {"parts": ("tokens",)},
    "labels of a slice": {"parts": ("labels",), "context_parallel": 2, "context_parallel_rank": 1},
    "pixels": {"parts": ("pixels",)},
    "nothing": {"parts": ()},
    "fixed length, last step padded": {"pad_to_capacity": True, "global_batch": 7},
    "unchecked": {"verify": "off", "shared_memory": False},
    "float pixels of a slice": {"pixels": "bfloat16", "context_parallel": 2, "context_parallel_rank": 0},
}


@pytest.mark.parametrize("options", RANKS.values(), ids=RANKS)
def test_equal_those_of_a_local_loader(server: Server, chat: Path, receipts: Path, options: dict[str, Any]) -> None:
    options = OPTIONS | options
    with (
        StreamingLoader([chat, receipts], **options | {"num_workers": 0}) as local,
        StreamingLoader(server.url, **options) as served,
    ):
        assert len(local) == len(served) > 4
        for one, two in zip(local, served, strict=True):
            assert_equal(one, two)


def test_a_tower_of_its_own_is_refused(server: Server) -> None:
    with pytest.raises(UsageError, match="the packs of one data-parallel rank, but vision_rank needs those of all"):
        StreamingLoader(server.url, **OPTIONS, dp_size=1, vision_ranks=1, vision_rank=0, parts=("pixels",))


class TestSharedMemory:
    """Batches of a server on this machine are copied from its memory; if that fails, the bytes are fetched."""

    @pytest.fixture
    def copied(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Bytes of the pieces that were to be copied from memory, per batch."""
        sizes: list[int] = []
        copy = SharedPack.copy

        def counted(place: SharedPack, *given: Any) -> None:
            sizes.append(sum(size for offset, size in place.pieces if offset != IN_ANSWER))
            copy(place, *given)

        monkeypatch.setattr(SharedPack, "copy", counted)
        return sizes

    def first(self, server: Server, expected: PackedBatch, **options: Any) -> StreamingLoader:
        loader = StreamingLoader(server.url, **OPTIONS | options)
        assert_equal(expected, next(iter(loader)))
        return loader

    @pytest.fixture(scope="class")
    def expected(self, chat: Path, receipts: Path) -> PackedBatch:
        with StreamingLoader([chat, receipts], **OPTIONS) as local:
            return next(iter(local))

    def test_is_used(self, server: Server, expected: PackedBatch, copied: list[int]) -> None:
        self.first(server, expected).close()
        assert len(copied) == 1
        assert copied[0] >= expected.patches.nbytes > 0
        self.first(server, expected, shared_memory=False).close()
        assert len(copied) == 1

    def test_is_used_for_the_pixels_of_a_slice(self, server: Server, copied: list[int]) -> None:
        with StreamingLoader(server.url, context_parallel=2, context_parallel_rank=0, **OPTIONS) as loader:
            batches = list(loader)
        assert len(copied) == len(batches)
        for size, batch in zip(copied, batches, strict=True):
            assert size >= batch.patches.nbytes

    def test_of_another_place_is_not_offered(
        self, server: Server, expected: PackedBatch, copied: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("vlmdata.service.client.connection.this_place", lambda: "f" * 64)
        self.first(server, expected).close()
        assert copied == []

    def test_that_cannot_be_opened_is_not_asked_for_again(
        self,
        server: Server,
        copied: list[int],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        chat: Path,
        receipts: Path,
    ) -> None:
        def refused(*_: Any) -> None:
            raise SharedMemoryError("/proc/1/fd/1 cannot be opened: Permission denied")

        monkeypatch.setattr(Maps, "memory", refused)
        caplog.set_level("INFO")
        with StreamingLoader([chat, receipts], **OPTIONS) as local, StreamingLoader(server.url, **OPTIONS) as served:
            for one, two in zip(local, served, strict=True):
                assert_equal(one, two)
        assert len(copied) == 3
        assert "its memory cannot be read (/proc/1/fd/1 cannot be opened: Permission denied); fetches" in caplog.text

    def test_that_holds_another_batch_by_now_is_noticed(
        self, server: Server, expected: PackedBatch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory, changes = Maps.memory, [0, 1]

        def later(maps: Maps, place: SharedPack) -> Any:
            change = changes.pop(0)
            with open(f"/proc/{place.process}/fd/{place.file}", "r+b", buffering=0) as file:  # as the server does
                os.pwrite(file.fileno(), (place.generation ^ change).to_bytes(8, "little"), place.bytes)
                byte = os.pread(file.fileno(), 1, 100)[0]
                os.pwrite(file.fileno(), bytes([byte ^ change]), 100)
                found = memory(maps, place).copy()
                os.pwrite(file.fileno(), bytes([byte]), 100)
                os.pwrite(file.fileno(), place.generation.to_bytes(8, "little"), place.bytes)
            return found

        monkeypatch.setattr(Maps, "memory", later)
        for left in (1, 0):
            self.first(server, expected, verify="off").close()
            assert len(changes) == left

    def test_is_kept_only_while_the_client_reads(self, server: Server) -> None:
        with StreamingLoader(server.url, **OPTIONS) as loader:
            query = first_query(loader)
        under_way = lambda: json.loads(connection(server).action(STATUS))["answers_under_way"]  # noqa: E731
        wait_until(lambda: under_way() == 0, "packs of earlier tests are still kept")
        reader = flight.FlightClient(server.url).do_get(flight.Ticket(query.encode()))
        header = Header.decode(reader.read_chunk().app_metadata.to_pybytes())
        assert header.shared is not None
        assert under_way() == 1
        reader.cancel()
        wait_until(lambda: under_way() == 0, "the pack is still kept")


def test_one_dataset_of_the_service(server: Server, chat: Path, receipts: Path) -> None:
    for place, data in ((f"{server.url}/receipts", [receipts]), (f"{server.url}/chat", [chat])):
        with StreamingLoader(data, **OPTIONS) as local, StreamingLoader(place, **OPTIONS) as served:
            assert served.fingerprints[0][1] == local.fingerprints[0][1]
            assert_equal(next(iter(local)), next(iter(served)))
    blend = Blend("tokens", (0.3, 0.7))
    places = [f"{server.url}/receipts", f"{server.url}/chat"]
    with (
        StreamingLoader([receipts, chat], blend=blend, **OPTIONS) as local,
        StreamingLoader(places, blend=blend, **OPTIONS) as served,
    ):
        for one, two in zip(local, served, strict=True):
            assert_equal(one, two)


def test_a_run_that_changes(server: Server, chat: Path, receipts: Path) -> None:
    """By hand, and later by its schedule."""
    with StreamingLoader(receipts, **OPTIONS) as begun:
        for _ in islice(begun, OPTIONS["global_batch"]):
            pass
        state = begun.state_dict()
    options = {**OPTIONS, "blend": Blend("samples", (1, 2)), "schedule": [Change(2, Blend("epochs", (0, 1)))]}
    with StreamingLoader([chat, receipts], **options) as local, StreamingLoader(server.url, **options) as served:
        for loader in (local, served):
            loader.load_state_dict(state, change=True)
        for epoch in (1, 2):
            for one, two in zip(local, served, strict=True):
                assert_equal(one, two)
                assert one.epoch == epoch
        assert local.state_dict()["plan"] == served.state_dict()["plan"]


def test_a_run_moves_between_local_and_served_in_mid_epoch(server: Server, chat: Path, receipts: Path) -> None:
    def ranks(data: Any, size: int, state: dict[str, Any] | None, steps: int) -> tuple[list[list[Any]], dict[str, Any]]:
        """The batches of some steps, by step, and the state after them."""
        found: list[list[Any]] = [[] for _ in range(steps)]
        for rank in range(size):
            with StreamingLoader(data, dp_rank=rank, dp_size=size, num_workers=rank, **OPTIONS) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                first = loader.position.step
                for batch in islice(loader, steps * OPTIONS["global_batch"] // size):
                    found[batch.step - first].append(batch)
                after = loader.state_dict()
        return [sorted(step, key=lambda batch: batch.pack) for step in found], after

    here = [chat, receipts]
    expected, _ = ranks(here, 1, None, 3)
    state, got = None, []
    for data, size in ((here, 2), (server.url, 4), (here, 1)):
        steps, state = ranks(data, size, state, 1)
        got += steps
    for one, two in zip(expected, got, strict=True):
        for a, b in zip(one, two, strict=True):
            assert a.sample_keys == b.sample_keys
            assert a.pack == b.pack
            assert a.input_ids.equal(b.input_ids)
            assert a.patches.equal(b.patches)


class TestRefusals:
    def test_of_a_client_that_plans_otherwise(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plan_config, "ALGORITHM_VERSION", 999)
        with StreamingLoader(server.url, **OPTIONS) as loader, pytest.raises(ConfigMismatchError, match="999 -> "):
            next(iter(loader))

    def test_of_a_dataset_that_the_service_has_not(self, server: Server) -> None:
        with pytest.raises(UsageError, match=r"no dataset 'other'; the service has: chat \([0-9a-f]{8}\), receipts"):
            StreamingLoader(f"{server.url}/other", **OPTIONS)

    def test_of_an_address_without_a_scheme(self) -> None:
        with pytest.raises(UsageError, match=r"no such directory\. A collation service is grpc://trainer-7:8815"):
            StreamingLoader("trainer-7:8815", **OPTIONS)

    def test_of_a_mix_with_other_data(self, server: Server, chat: Path) -> None:
        with pytest.raises(UsageError, match="cannot be mixed with a collation service; serve it, too"):
            StreamingLoader([server.url, str(chat)], **OPTIONS)

    def test_of_a_batch_beyond_the_servers_memory(self, server: Server) -> None:
        options = OPTIONS | {"capacity": 4 << 20, "pad_to_capacity": True, "balance": False}
        with (
            StreamingLoader(server.url, **options) as loader,
            pytest.raises(UsageError, match="of the server's --memory that are for"),
        ):
            next(iter(loader))

    def test_of_an_endless_epoch(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        blend = Blend("epochs", (17.0, 17.0))
        with (
            StreamingLoader(server.url, blend=blend, **OPTIONS) as loader,
            pytest.raises(UsageError, match="over 16 times"),
        ):
            next(iter(loader))


class TestSharing:
    def test_a_pack_is_read_once_for_all_slices_and_parts(self, chat: Path) -> None:
        with serving(chat, "-j", 1, "--metrics-port", 0) as server:
            for options in (
                {"parts": ("tokens", "pixels")},
                {"parts": ("labels",)},
                {"context_parallel_rank": 0},
                {"context_parallel_rank": 1},
            ):
                with StreamingLoader(server.url, context_parallel=2, **OPTIONS | options) as loader:
                    batches = len(list(loader))
            counts = json.loads(connection(server).action(STATUS))["packs"]
            assert counts["made"] <= batches
            assert counts["shared"] >= 3 * batches
            counted = f"vlmdata_batches_total {4 * batches}.0"
            # The server counts a batch after its last bytes, which may be after the client has it.
            wait_until(lambda: counted in _metrics(server), counted)

    def test_the_status_shows_all_servers_and_fails_if_one_does_not_answer(
        self, server: Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # taken, and refuses connections
            port = nobody.getsockname()[1]
            place = f"127.0.0.1:{port},127.0.0.1:{server.port}"
            for as_json in (False, True):
                with pytest.raises(ResourceError, match=f"server 127.0.0.1:{port}: "):
                    _show_status(place, None, None, as_json)
                shown = capsys.readouterr().out
                assert "receipts" in shown
                assert f"127.0.0.1:{server.port}" in shown
        assert [sorted(each) for each in json.loads(shown)][1] == ["error", "server"]
        _show_status(f"127.0.0.1:{server.port}", None, None, True)
        assert json.loads(capsys.readouterr().out)["server"] == f"127.0.0.1:{server.port}"


def _metrics(server: Server) -> str:
    text: bytes = urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics").read()
    return text.decode()


def connection(server: Server) -> Connection:
    return Connection(parse_address(server.url).servers()[0], parse_address(server.url), Service())


class TestHostileTickets:
    """Whatever a ticket holds, it gives an error of ours, and the server goes on within its memory."""

    @pytest.fixture(scope="class")
    def known(self, server: Server) -> dict[str, Any]:
        """A valid query."""
        with StreamingLoader(server.url, **OPTIONS) as loader:
            fingerprints = tuple(each for _, each in loader.fingerprints)
            query = BatchQuery(
                fingerprints,
                loader.plan_config,
                Position(),
                0,
                1,
                None,
                frozenset({"tokens", "pixels"}),
                "uint8",
                "raise",
            )
        return json.loads(query.encode())

    @pytest.fixture(scope="class")
    def client(self, server: Server) -> Any:
        return flight.FlightClient(server.url)

    @settings(max_examples=200, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def test_are_refused(self, server: Server, known: dict[str, Any], client: Any, data: st.DataObject) -> None:
        ticket = data.draw(st.one_of(st.binary(max_size=200), mutated(known)))
        before = psutil.Process(server.process.pid).memory_info().rss
        try:
            for _ in client.do_get(flight.Ticket(ticket), flight.FlightCallOptions(timeout=60)):
                pass
        except flight.FlightServerError as error:
            kind = json.loads(error.extra_info)["type"]
        else:
            kind = None
        assert kind in (None, "UsageError", "ConfigMismatchError", "NotFoundError")
        assert psutil.Process(server.process.pid).memory_info().rss - before < 128 << 20
        assert client.do_action("health", flight.FlightCallOptions(timeout=10)).__next__().body.to_pybytes() == b"ok"


NUMBERS = st.one_of(st.integers(-3, 3), st.sampled_from([1 << 20, 1 << 31, 1 << 62, 10**30]), st.floats())
VALUES = st.one_of(
    NUMBERS,
    st.none(),
    st.booleans(),
    st.text(max_size=5),
    st.lists(NUMBERS, max_size=4),
    st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2),
)


@st.composite
def mutated(draw: st.DrawFn, query: dict[str, Any]) -> bytes:
    """A valid query with one or two values replaced."""
    copy = json.loads(json.dumps(query))
    for _ in range(draw(st.integers(1, 2))):
        at, parent = copy, None
        while isinstance(at, dict | list) and at and (parent is None or draw(st.booleans())):
            key = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            parent, at = at, at[key]
        if parent is not None:
            parent[key] = draw(VALUES)
    return json.dumps(copy).encode()
