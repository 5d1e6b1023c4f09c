"""A batch is copied from a server's memory, or refused; whatever a place says, nothing else happens."""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.loader.buffers import BufferName, BufferPool
from vlmdata.loader.served import shared_memory
from vlmdata.loader.served.shared_memory import IN_ANSWER, SharedMemoryError, SharedPack, this_place

NOTHING = np.zeros(0, np.uint8)


@pytest.fixture(scope="module")
def pack() -> SharedPack:
    """A buffer of this process with the numbers 0, 1, 2, … 255, 0, …"""
    lease = BufferPool().acquire(1000)
    lease.memory()[:1000] = np.arange(1000) % 256
    found = SharedPack.of(lease.name, ((0, 1000),))
    assert found is not None
    return found


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 900), st.integers(0, 100)), max_size=8))
def test_pieces_come_in_order_from_memory_and_answer(pack: SharedPack, chosen: list[tuple[bool, int, int]]) -> None:
    numbers = (np.arange(1000) % 256).astype(np.uint8)
    pieces = tuple((offset if shared else IN_ANSWER, size) for shared, offset, size in chosen)
    in_answer = np.concatenate([NOTHING, *[numbers[at : at + size] for shared, at, size in chosen if not shared]])
    buffer = np.zeros(sum(size for _, size in pieces), np.uint8)
    dataclasses.replace(pack, pieces=pieces).copy(in_answer, buffer)
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
        ({"pieces": ((-2, 100),)}, "cannot be read"),
        ({"pieces": ((1 << 62, 100),)}, "given the memory up"),
        ({"pieces": ((1 << 90, 100),)}, "cannot be read"),
    ],
)
def test_a_wrong_place_is_refused(pack: SharedPack, changes: dict[str, object], message: str) -> None:
    with pytest.raises(SharedMemoryError, match=message):
        dataclasses.replace(pack, **changes).copy(NOTHING, np.zeros(100, np.uint8))  # type: ignore[arg-type]


def test_a_pipe_is_refused_and_not_waited_for() -> None:
    read, write = os.pipe()
    place = SharedPack(os.getpid(), read, os.fstat(read).st_ino, ((0, 1),))
    with pytest.raises(SharedMemoryError, match="is not the server's memory"):
        place.copy(NOTHING, np.zeros(1, np.uint8))
    os.close(read)
    os.close(write)


def test_no_file_stays_open(pack: SharedPack) -> None:
    before = os.listdir("/proc/self/fd")
    for changes in ({}, {"inode": 1}, {"pieces": ((0, 2),)}):
        with suppress(SharedMemoryError):
            dataclasses.replace(pack, **changes).copy(NOTHING, np.zeros(1000, np.uint8))  # type: ignore[arg-type]
    assert os.listdir("/proc/self/fd") == before


def test_memory_that_is_given_up_is_noticed() -> None:
    pool = BufferPool(4 << 20)
    lease = pool.acquire(100)
    place = SharedPack.of(lease.name, ((0, 100),))
    assert place is not None
    os.truncate(lease.name.path, 0)
    with pytest.raises(SharedMemoryError, match="given the memory up"):
        place.copy(NOTHING, np.zeros(100, np.uint8))


def test_buffers_with_a_name_are_not_shared() -> None:
    assert SharedPack.of(BufferName("/tmp/vlmdata-batch-x", 8, 1), ((0, 8),)) is None


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
