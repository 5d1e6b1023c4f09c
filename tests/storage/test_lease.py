"""The lock of an object store: one run at a time, and none that a dead run leaves behind for good."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.object_store import ObjectStore
from tests.proxy import Proxy, Trouble
from vlmdata.errors import ResourceError
from vlmdata.storage import LockedError, Store, lease, open_store
from vlmdata.storage.lease import OwnLock
from vlmdata.storage.objects import Objects

LOCK = ".progress/lock"


@pytest.fixture
def store(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(lease, "PATIENCE", 0.6)
    monkeypatch.setattr(lease, "RENEWED_EVERY", 0.1)
    return open_store(f"{object_store.url}/data")


@pytest.fixture
def other_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Within the block locks are those of another machine."""
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "elsewhere")
        yield patch


def locks(store: Store) -> list[str]:
    """Numbers of the locks of which any object exists."""
    return sorted({name.partition(".")[0] for name in store.listing(LOCK)})


def test_a_run_that_was_killed_on_this_machine_is_in_nobodys_way(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    program = (
        "import os, signal, sys; from vlmdata.storage import open_store\n"
        f"with open_store(sys.argv[1]).lock({LOCK!r}): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(store)], timeout=240).returncode == -9
    assert locks(store) == ["1"]
    with store.lock(LOCK):
        assert "waiting" not in caplog.text
        assert locks(store) == ["2"]
    assert locks(store) == []


def test_one_of_another_machine_is_waited_for_and_refused_while_it_lives(
    store: Store,
    other_machine: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease, "PATIENCE", 60.0)  # the first renewal that is seen ends the waiting
    with store.lock(LOCK):
        other_machine.undo()
        with pytest.raises(LockedError, match="on elsewhere"), store.lock(LOCK):
            pass
    assert "waiting" in caplog.text
    assert locks(store) == []


def test_one_of_another_machine_that_is_renewed_no_more_is_taken_over(store: Store) -> None:
    store.put(f"{LOCK}/7", json.dumps({"host": "elsewhere", "pid": 5, "renewals": 3}).encode())
    with store.lock(LOCK) as lock:
        assert locks(store) == ["8"]
        lock.check()


def test_without_proc_one_of_this_machine_is_waited_for_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Mac, where nothing tells whether its process ended."""
    monkeypatch.setattr(lease, "_text", lambda path: "")
    monkeypatch.setattr("os.path.exists", lambda path: False)
    ended = lease._this_process() | {"pid": 2**22 + 1}
    store.put(f"{LOCK}/7", json.dumps({**ended, "renewals": 3}).encode())
    with store.lock(LOCK):
        assert locks(store) == ["8"]


def test_a_run_that_was_taken_over_gives_up(store: Store) -> None:
    with store.lock(LOCK) as lock:
        store.put(f"{LOCK}/2", b"{}")
        with pytest.raises(LockedError, match="took over"):
            _check_until(lock.check, 60)


class TestFencing:
    """A run that cannot reach the store for longer than another run waits does not complete the dataset."""

    @pytest.fixture
    def cut_off(
        self, store: Store, other_machine: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[OwnLock]:
        """The lock of a run on another machine that does not get through with its renewals."""
        monkeypatch.setattr(lease, "RENEWED_EVERY", 600.0)
        with store.lock(LOCK) as lock:
            other_machine.undo()
            yield lock

    def test_it_completes_nothing_while_another_run_is_at_work(self, store: Store, cut_off: OwnLock) -> None:
        with store.lock(LOCK) as successor:
            with pytest.raises(LockedError, match="could not reach the store"):
                cut_off.commit("manifest.json", b"old")
            assert store.size("manifest.json") is None
            successor.check()
            successor.commit("manifest.json", b"new")
        assert store.read("manifest.json") == b"new"

    def test_nor_after_that_run_has_ended(self, store: Store, cut_off: OwnLock) -> None:
        with store.lock(LOCK) as successor:
            successor.commit("manifest.json", b"new")
        with pytest.raises(LockedError):
            cut_off.commit("manifest.json", b"old")
        assert store.read("manifest.json") == b"new"

    def test_nor_if_a_late_renewal_brings_its_lock_back(self, store: Store, cut_off: OwnLock) -> None:
        with store.lock(LOCK) as successor:
            successor.commit("manifest.json", b"new")
        store.put(f"{LOCK}/1", cut_off.content())
        with pytest.raises(LockedError):
            cut_off.commit("manifest.json", b"old")
        assert store.read("manifest.json") == b"new"

    def test_nor_if_a_later_run_has_the_same_number(self, store: Store, cut_off: OwnLock) -> None:
        with store.lock(LOCK):
            pass
        with store.lock(LOCK) as later:
            assert locks(store) == ["1"]
            with pytest.raises(LockedError):
                cut_off.commit("manifest.json", b"old")
            later.commit("manifest.json", b"new")
        assert store.read("manifest.json") == b"new"

    def test_nor_if_its_last_request_arrives_late(
        self, store: Store, cut_off: OwnLock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The run looked, and had the lock. Then its request to the store was on the way for as long as others wait."""
        copy = Objects.copy

        def late(self: Objects, name: str, to: str) -> None:
            with store.lock(LOCK):
                copy(self, name, to)

        monkeypatch.setattr(Objects, "copy", late)
        with pytest.raises(LockedError):
            cut_off.commit("manifest.json", b"old")
        assert store.size("manifest.json") is None
        assert locks(store) == []

    def test_it_finds_out_at_the_next_check(self, store: Store, cut_off: OwnLock) -> None:
        cut_off.check()
        with store.lock(LOCK), pytest.raises(LockedError, match="took over"):
            cut_off.check()

    def test_it_goes_on_if_nobody_took_over(self, store: Store, cut_off: OwnLock) -> None:
        time.sleep(2 * lease.PATIENCE)  # nobody asked in this time
        cut_off.check()
        cut_off.commit("manifest.json", b"mine")
        assert store.read("manifest.json") == b"mine"

    def test_it_waits_for_a_store_that_copies_after_its_answer(
        self, store: Store, cut_off: OwnLock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copy, read, begun = Objects.copy, Objects.read, threading.Event()

        def answered(self: Objects, name: str, to: str) -> None:
            self.put(to, b"")

        def looked_at(self: Objects, name: str) -> bytes:
            found = read(self, name)
            if name == "manifest.json" and not begun.is_set():
                begun.set()
                copy(self, cut_off.last, name)
            return found

        monkeypatch.setattr(Objects, "copy", answered)
        monkeypatch.setattr(Objects, "read", looked_at)
        cut_off.commit("manifest.json", b"mine")
        assert read(store, "manifest.json") == b"mine"

    def test_an_unreachable_store_is_an_error_and_not_a_loss(
        self, store: Store, cut_off: OwnLock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unreachable(self: Objects, folder: str = "") -> None:
            raise ResourceError("no network")

        with monkeypatch.context() as patch:
            patch.setattr(Objects, "listing", unreachable)
            with pytest.raises(ResourceError, match="no network"):
                cut_off.commit("manifest.json", b"mine")
        cut_off.commit("manifest.json", b"mine")
        assert store.read("manifest.json") == b"mine"


def _check_until(check, seconds):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        check()
        time.sleep(0.02)


@pytest.mark.parametrize("without", [(), ("if-none-match",)], ids=["conditional puts", "none"])
def test_of_runs_that_begin_at_once_no_two_go_on(
    object_store: ObjectStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...]
) -> None:
    monkeypatch.setattr(lease, "_SETTLING", 5.0)
    holders: list[int] = []
    starting, ending = threading.Barrier(4), threading.Barrier(4)

    def run(number: int) -> None:
        with ExitStack() as stack:
            starting.wait()
            try:
                stack.enter_context(open_store(f"{object_store.url}/data").lock(LOCK))
                holders.append(number)
            except LockedError:
                pass
            ending.wait()

    proxy.trouble = lambda number, request: Trouble(without=without)
    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(holders) <= 1
