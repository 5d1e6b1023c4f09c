"""The memory of packs never exceeds its limit."""

from __future__ import annotations

import os
import resource
import time
from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service.packs import MIB, pack_request
from vlmdata.errors import UsageError
from vlmdata.loader.fill.filler import Filled
from vlmdata.service.server.packs import BusyError, LateFillError, PackMemory, Packs


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 9 * MIB), st.booleans()), max_size=30))
def test_is_within_the_limit_whatever_is_asked_for(asked: list[tuple[int, bool]]) -> None:
    kept = []
    memory = PackMemory(24 * MIB, lambda: bool(kept) and kept.pop(0) is not None)
    try:
        for size, keep in asked:
            array = memory.acquire(size, time.monotonic()).array()
            array[[0, size - 1]] = 1
            assert memory.pool.total_bytes <= 24 * MIB
            assert memory.pool.bytes_in_use <= memory.pool.total_bytes
            if keep:
                kept.append(array)
        kept.clear()
        array = None
        assert memory.pool.bytes_in_use == 0
    finally:
        memory.close()


def test_a_query_waits_until_views_are_gone_and_not_longer_than_its_time() -> None:
    memory = PackMemory(8 * MIB, lambda: False)
    view = memory.acquire(8 * MIB, time.monotonic()).array()[5:9]
    with pytest.raises(BusyError, match=f"{8 * MIB} of {8 * MIB} bytes of memory are in use"):
        memory.acquire(1, time.monotonic() + 0.1)
    del view
    memory.acquire(1, time.monotonic() + 0.1).release()
    memory.close()


def test_more_than_the_limit_is_refused_at_once() -> None:
    memory = PackMemory(8 * MIB, lambda: True)
    with pytest.raises(UsageError, match="more than the 8388608 bytes of the server's --memory that are for"):
        memory.acquire(8 * MIB + 1, time.monotonic() + 60)
    memory.close()


def test_a_buffer_has_one_descriptor_and_is_charged_for_what_it_uses() -> None:
    memory = PackMemory(64 * MIB, lambda: False)
    before = len(os.listdir("/proc/self/fd"))
    for kept in [[memory.acquire(size, time.monotonic()).array() for size in range(1, 3 * MIB, 150_000)]]:
        assert len(os.listdir("/proc/self/fd")) == before + len(kept)
        needed = sum(array.nbytes for array in kept)
        assert memory.pool.bytes_in_use == needed < 1.2 * sum(range(1, 3 * MIB, 150_000))
    del kept
    small = [memory.acquire(1000, time.monotonic()).array() for _ in range(100)]
    assert memory.pool.bytes_in_use <= len(small) * MIB // 16, "no small pack is charged a large free buffer"
    memory.close()


@pytest.mark.parametrize("known", [True, False])
def test_packs_leave_descriptors_for_clients(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Packs are forgotten if descriptors lack, as if memory does, also where others took them meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/proc/self/fd")) + 20
    monkeypatch.setattr("vlmdata.service.server.packs.open_file_limit", lambda: 20 if known else soft)
    packs = Packs(_Fillers(), 64 * MIB, 0.1, frozenset, lambda: False)  # type: ignore[arg-type]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        for number in range(60):
            packs.get(pack_request(number, (number % 7 + 1) * 10_000 * (number % 3 * 20 + 1)), "plan", "raise")
            assert not known or limit - len(os.listdir("/proc/self/fd")) >= 9
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert packs.counts.made == 60
    packs.memory.close()


class _LateFillers:
    """Workers that are not done in time."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()

    def fill(self, *_: object) -> None:
        raise LateFillError(0.1, self.future)


def test_a_buffer_that_a_late_worker_may_write_to_is_not_used_again() -> None:
    fillers = _LateFillers()
    packs = Packs(fillers, 8 * MIB, 0.1, frozenset, lambda: False)  # type: ignore[arg-type]
    with pytest.raises(LateFillError, match="not read within 0 s"):
        packs.get(pack_request(3, MIB), "plan", "raise")
    assert packs.memory.pool.bytes_in_use > 0
    fillers.future.set_result(None)
    assert packs.memory.pool.bytes_in_use == 0
    packs.memory.close()


class _Fillers:
    """Workers that are done at once."""

    def fill(self, *_: object) -> Filled:
        return Filled(1)


def test_packs_that_are_being_sent_stay() -> None:
    """Forgetting one would free nothing, and the next rank that asks for it would have it made again."""
    sending: set[int] = set()
    packs = Packs(_Fillers(), 8 * MIB, 0.1, lambda: sending, lambda: False)  # type: ignore[arg-type]
    sending.add(id(packs.get(pack_request(0), "plan", "raise").buffer))
    for number in (1, 2, 3):
        packs.get(pack_request(number), "plan", "raise")
    assert packs.counts.made == 4
    packs.get(pack_request(0), "plan", "raise")
    assert (packs.counts.made, packs.counts.shared) == (4, 1)
    sending.add(id(packs.get(pack_request(3), "plan", "raise").buffer))
    with pytest.raises(BusyError, match="bytes of memory are in use"):
        packs.get(pack_request(4), "plan", "raise")
