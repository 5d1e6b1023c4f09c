"""A batch is copied from a server's memory, or refused; whatever a place says, nothing else happens."""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.loader.config import Service
from vlmdata.loader.fill.buffers import BufferName, BufferPool, LeasedBuffer
from vlmdata.loader.state import Position
from vlmdata.packing.config import PlanConfig
from vlmdata.service import shared_memory
from vlmdata.service.address import parse_address
from vlmdata.service.client.connection import Call, Connection, ServerLostError
from vlmdata.service.protocol import BatchQuery, Header
from vlmdata.service.server.answer import SCHEMA, record_batch
from vlmdata.service.shared_memory import IN_ANSWER, Maps, SharedMemoryError, SharedPack, this_place

NOTHING = np.zeros(0, np.uint8)


def place_of(lease: LeasedBuffer, size: int) -> SharedPack:
    found = SharedPack.of(lease.name, lease.renew(), ((0, size),))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def pack() -> SharedPack:
    """A buffer of this process with the numbers 0, 1, 2, … 255, 0, …"""
    lease = BufferPool().acquire(1000)
    lease.memory()[:1000] = np.arange(1000) % 256
    return place_of(lease, 1000)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 900), st.integers(0, 100)), max_size=8))
def test_pieces_come_in_order_from_memory_and_answer(pack: SharedPack, chosen: list[tuple[bool, int, int]]) -> None:
    numbers = (np.arange(1000) % 256).astype(np.uint8)
    pieces = tuple((offset if shared else IN_ANSWER, size) for shared, offset, size in chosen)
    in_answer = np.concatenate([NOTHING, *[numbers[at : at + size] for shared, at, size in chosen if not shared]])
    buffer = np.zeros(sum(size for _, size in pieces), np.uint8)
    dataclasses.replace(pack, pieces=pieces).copy(in_answer, buffer, Maps())
    assert np.array_equal(buffer, np.concatenate([NOTHING, *[numbers[at : at + size] for _, at, size in chosen]]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inode": 1}, "is not the server's memory"),
        ({"process": 1 << 30}, "cannot be opened"),
        ({"file": 1 << 80}, "cannot be opened"),
        ({"pieces": ((0, 101),)}, "longer than the batch"),
        ({"pieces": ((0, 50), (0, 51))}, "longer than the batch"),
        ({"pieces": ((0, -1), (0, 101))}, "longer than the batch"),
        ({"pieces": ((0, 99),)}, "shorter than the batch"),
        ({"pieces": ((IN_ANSWER, 100),)}, "lacks a piece"),
        ({"pieces": ((-2, 100),)}, "outside of the memory"),
        ({"pieces": (((4 << 20) - 99, 100),)}, "outside of the memory"),
        ({"pieces": ((1 << 90, 100),)}, "outside of the memory"),
        ({"bytes": 1 << 90}, "is not the server's memory"),
        ({"bytes": -8}, "is not the server's memory"),
        ({"bytes": 100}, "another batch by now"),
        ({"generation": 0}, "another batch by now"),
    ],
)
def test_a_wrong_place_is_refused(pack: SharedPack, changes: dict[str, object], message: str) -> None:
    with pytest.raises(SharedMemoryError, match=message):
        dataclasses.replace(pack, **changes).copy(NOTHING, np.zeros(100, np.uint8), Maps())  # type: ignore[arg-type]


def test_a_pipe_is_refused_and_not_waited_for() -> None:
    read, write = os.pipe()
    place = SharedPack(os.getpid(), read, os.fstat(read).st_ino, 1, 1, ((0, 1),))
    with pytest.raises(SharedMemoryError, match="is not the server's memory"):
        place.copy(NOTHING, np.zeros(1, np.uint8), Maps())
    os.close(read)
    os.close(write)


def test_memory_that_could_be_cut_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    path.write_bytes(bytes(100))
    with open(path, "rb") as file:
        place = SharedPack(os.getpid(), file.fileno(), os.fstat(file.fileno()).st_ino, 92, 0, ((0, 92),))
        with pytest.raises(SharedMemoryError, match=r"cannot be mapped|could be cut while it is read"):
            place.copy(NOTHING, np.zeros(92, np.uint8), Maps())
    lease = BufferPool().acquire(100)
    with pytest.raises(OSError, match="not permitted"):
        os.truncate(lease.name.path, 0)


def test_no_file_stays_open(pack: SharedPack) -> None:
    before, maps = os.listdir("/proc/self/fd"), Maps()
    for changes in ({}, {}, {"inode": 1}, {"pieces": ((0, 2),)}):
        with suppress(SharedMemoryError):
            dataclasses.replace(pack, **changes).copy(NOTHING, np.zeros(1000, np.uint8), maps)  # type: ignore[arg-type]
    assert os.listdir("/proc/self/fd") == before


def test_maps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_MOST_MAPS", 2)
    pool, maps = BufferPool(), Maps()
    before = maps_of_this_process()
    leases = [pool.acquire(100) for _ in range(3)]
    for lease in leases:
        place_of(lease, 100).copy(NOTHING, np.zeros(100, np.uint8), maps)
    assert maps_of_this_process() == before + len(leases) + 2
    maps.clear()
    assert maps_of_this_process() == before + len(leases), "unmapped once nothing refers to it"


def maps_of_this_process() -> int:
    """Of shared buffers."""
    return Path("/proc/self/maps").read_text().count("memfd:vlmdata-batch")


def test_memory_that_is_used_again_or_given_up_is_noticed() -> None:
    pool, maps, copied = BufferPool(4 << 20), Maps(), np.zeros(100, np.uint8)
    lease = pool.acquire(100)
    place = place_of(lease, 100)
    place.copy(NOTHING, copied, maps)
    after = place_of(lease, 100)
    with pytest.raises(SharedMemoryError, match="another batch by now"):
        place.copy(NOTHING, copied, maps)
    after.copy(NOTHING, copied, maps)
    lease.memory()[:] = 1
    pool.close(free=True)
    after.copy(NOTHING, copied, maps)
    assert copied.all()  # it is still in use
    mapped = maps.memory(after)
    lease.release()
    with pytest.raises(SharedMemoryError, match="another batch by now"):
        after.copy(NOTHING, copied, maps)
    assert not mapped[: after.bytes].any()  # the system has the memory back


@pytest.mark.parametrize("asks_first", [True, False])
def test_memory_that_was_not_asked_for_is_not_opened(pack: SharedPack, asks_first: bool) -> None:
    class Hostile(flight.FlightServerBase):  # type: ignore[misc]
        def do_get(self, *_: object) -> Any:
            place = dataclasses.replace(pack, generation=0) if asks_first else pack
            metadata = pa.py_buffer(Header(1000, {}, place).encode())
            return flight.GeneratorStream(SCHEMA, iter([(record_batch(NOTHING), metadata)]))

    query = BatchQuery(("a" * 64,), PlanConfig(64, 1), Position(), 0, 1, None, frozenset({"tokens"}), "uint8", "raise")
    buffer = np.zeros(1000, np.uint8)
    with Hostile("grpc://127.0.0.1:0") as server:
        address = parse_address(f"grpc://127.0.0.1:{server.port}")
        connection = Connection(address.servers()[0], address, Service(shared_memory=asks_first))
        with pytest.raises(ServerLostError, match="names memory instead of sending the bytes"):
            connection.batch(query, buffer, 1000, True, 60.0, Call())
        connection.close()
    assert not buffer.any()


def test_memory_that_is_used_again_during_a_copy_is_noticed() -> None:
    lease = BufferPool().acquire(100)
    place = place_of(lease, 100)

    class Meanwhile(Maps):
        def memory(self, pack: SharedPack) -> Any:
            class View(np.ndarray):  # type: ignore[type-arg]
                def __getitem__(self, key: Any) -> Any:
                    if key == slice(0, 100):
                        lease.renew()
                    return super().__getitem__(key)

            return super().memory(pack).view(View)

    with pytest.raises(SharedMemoryError, match="another batch by now"):
        place.copy(NOTHING, np.zeros(100, np.uint8), Meanwhile())


def test_buffers_with_a_name_are_not_shared() -> None:
    assert SharedPack.of(BufferName("/tmp/vlmdata-batch-x", 8, 1), 1, ((0, 8),)) is None


def test_the_place_is_that_of_the_user_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = this_place()
    assert len(here) == 64
    assert this_place.__wrapped__() == here
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert this_place.__wrapped__() != here
    monkeypatch.undo()
    monkeypatch.setattr(os, "readlink", lambda _: "pid:[1]")
    assert this_place.__wrapped__() != here
    monkeypatch.undo()
    monkeypatch.setattr(shared_memory, "Path", lambda _: Path("/nowhere"))
    assert this_place.__wrapped__() == ""
