"""Killed and stuck workers, killed processes: the order stays, and nothing waits for ever."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
from torch.utils.data import DataLoader

from tests.loader.consumer import consume
from tests.loader.helpers import assert_same, epoch_of, packs_of, stream, wait_until, worker_pids
from vlmdata.errors import ResourceError, UsageError
from vlmdata.loader.loader import StreamingLoader
from vlmdata.loader.state import Position
from vlmdata.packing import plan_epoch

ROOT = Path(__file__).resolve().parents[2]


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


class TestKilledWorkers:
    def test_the_epoch_is_completed_with_the_same_batches(self, chat: Path) -> None:
        whole = epoch_of(chat)
        with stream(chat, num_workers=2) as loader:
            iterator = iter(loader)
            found = [next(iterator)]
            first = worker_pids()
            kill(first[:1])
            found += iterator
            assert len(first) == 2
            assert set(first) & set(worker_pids()) == {first[1]}  # only the killed one was replaced
        assert_same(found, whole)

    def test_are_nothing_to_a_data_loader_of_the_program(self, chat: Path) -> None:
        """Its handler of SIGCHLD raises in the main thread, wherever that is, for each killed worker it knows of."""
        assert list(DataLoader(range(4), num_workers=1)) == [0, 1, 2, 3]
        assert callable(signal.getsignal(signal.SIGCHLD))
        with stream(chat, num_workers=2) as loader:
            iterator = iter(loader)
            found = [next(iterator)]
            for pid in worker_pids():
                kill([pid])
                time.sleep(0.1)  # where the signal arrives
            found += iterator
        assert_same(found, epoch_of(chat))

    def test_after_every_few_batches_is_not_too_often(self, chat: Path) -> None:
        found = []
        with stream(chat, num_workers=2) as loader:
            for number, batch in enumerate(loader):
                found.append(batch)
                if number % 3 == 0:
                    kill(worker_pids())
        assert_same(found, epoch_of(chat))

    def test_again_and_again_is_an_error_that_says_so(self, chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with stream(chat, num_workers=2, multiprocessing_context="fork") as loader:
            iterator = iter(loader)
            found = packs_of([next(iterator)])
            monkeypatch.setattr("vlmdata.workers._exit_with_parent", lambda: kill([os.getpid()]))
            kill(worker_pids())
            with pytest.raises(ResourceError, match=r"died 4 times in a row.*Out of memory"):  # noqa: PT012
                for batch in iterator:
                    found += packs_of([batch])
            monkeypatch.undo()
            found += packs_of(loader)
        assert found == packs_of(epoch_of(chat))


class TestStuckWorkers:
    @pytest.fixture
    def stuck(self, chat: Path) -> Iterator[tuple[StreamingLoader, int]]:
        """A loader that ran out of batches since its workers are stopped, and how many it gave."""
        with stream(chat, num_workers=2) as loader:
            iterator = iter(loader)
            next(iterator)
            for pid in worker_pids():
                os.kill(pid, signal.SIGSTOP)
            # Only from now on: on a busy machine the first batch may take longer.
            session: Any = loader._session._session
            session._pipeline._timeout = 3.0
            given = 1
            with pytest.raises(ResourceError, match=r"no batch came for 3 s.*state is valid"):  # noqa: PT012
                for _ in iterator:
                    given += 1
            assert given < 12
            yield loader, given

    def test_it_goes_on_where_it_stood(self, chat: Path, stuck: tuple[StreamingLoader, int]) -> None:
        loader, given = stuck
        assert packs_of(loader) == packs_of(epoch_of(chat))[given:]

    def test_it_goes_on_from_a_state(self, chat: Path, stuck: tuple[StreamingLoader, int]) -> None:
        loader, given = stuck
        state = json.loads(json.dumps(loader.state_dict()))
        loader.load_state_dict(state)
        assert packs_of(loader) == packs_of(epoch_of(chat))[given:]
        with stream(chat) as another:
            another.load_state_dict(state)
            assert packs_of(another) == packs_of(epoch_of(chat))[given:]


class TestEpochsThatCannotBePlanned:
    """An error belongs to its position in the order: prefetching into the next epoch does not bring it forward."""

    @pytest.fixture
    def options(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What the settings alone make impossible is refused at the start, so the planner is made to fail."""

        def planned(table: Any, config: Any, epoch: int, *rest: Any) -> Any:
            if epoch == 1:
                raise UsageError("epoch 1 cannot be planned")
            return plan_epoch(table, config, epoch, *rest)

        monkeypatch.setattr("vlmdata.packing.plan.run.plan_epoch", planned)
        return {"parts": (), "global_batch": 2}

    @pytest.mark.parametrize("num_workers", [0, 1, 2])
    def test_the_current_epoch_is_completed_first(self, chat: Path, options: dict[str, Any], num_workers: int) -> None:
        with stream(chat, num_workers=num_workers, **options) as loader:
            whole = packs_of(loader)
            assert len(whole) > 6
            for _ in range(2):  # it is the same error whenever it is asked for
                with pytest.raises(ValueError, match="epoch 1"):
                    next(iter(loader))
                assert loader.position == Position(1, 0, 0)

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_state_saved_on_the_way_comes_to_the_same_place(
        self, chat: Path, options: dict[str, Any], num_workers: int
    ) -> None:
        with stream(chat, **options) as loader:
            whole = packs_of(loader)
        with stream(chat, num_workers=num_workers, **options) as loader:
            assert packs_of(islice(loader, 3)) == whole[:3]
            middle = loader.state_dict()
            assert packs_of(loader) == whole[3:]
            end = loader.state_dict()
        for state, rest in ((middle, whole[3:]), (end, [])):
            with stream(chat, num_workers=num_workers, **options) as loader:
                loader.load_state_dict(json.loads(json.dumps(state)))
                if rest:
                    assert packs_of(loader) == rest
                with pytest.raises(ValueError, match="epoch 1"):
                    next(iter(loader))

    def test_killed_workers_do_not_bring_it_forward(self, chat: Path, options: dict[str, Any]) -> None:
        with stream(chat, num_workers=2, prefetch_factor=4, **options) as loader:
            whole = packs_of(stream(chat, **options))
            found = []
            for batch in loader:
                found += packs_of([batch])
                if len(found) == len(whole) - 5:  # the error is behind what is under way
                    kill(worker_pids())
            assert found == whole


def main_thread_waits() -> bool:
    """Whether the main thread is in ``Queue.get``."""
    frame: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None and frame.f_code is not queue.Queue.get.__code__:
        frame = frame.f_back
    return frame is not None


def test_an_interrupted_wait_loses_nothing(chat: Path) -> None:
    def interrupt() -> None:
        waited = 0
        while waited < 20:  # in a row; between two batches the signal would hit the test itself
            time.sleep(0.05)
            waited = waited + 1 if main_thread_waits() else 0
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with stream(chat, num_workers=1) as loader:
        found = packs_of(islice(loader, 2))
        for pid in worker_pids():
            os.kill(pid, signal.SIGSTOP)
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            for batch in loader:
                found += packs_of([batch])
        found += packs_of(loader)
    assert found == packs_of(epoch_of(chat))


def test_a_killed_process_is_continued_by_another_from_its_saved_state(chat: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.json"
    process = os.fork()
    if process == 0:
        try:
            consume(str(chat), journal, None, 0.2)
        finally:
            os._exit(1)
    assert wait_until(lambda: len(entry_of(journal)["seen"]) >= 6, 60)
    os.kill(process, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    entry = entry_of(journal)
    assert 6 <= len(entry["seen"]) < 12
    assert len(entry["workers"]) == 2
    assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in entry["workers"]), 60)  # nobody told them

    with stream(chat, num_workers=1) as loader:
        loader.load_state_dict(entry["state"])
        rest = [list(batch.sample_keys) for batch in loader]
    assert entry["seen"] + rest == [list(batch.sample_keys) for batch in epoch_of(chat)]


def test_a_process_that_just_ends_leaves_no_worker_and_makes_no_noise(chat: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.json"
    command = [sys.executable, "-m", "tests.loader.consumer", str(chat), str(journal)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    entry = entry_of(journal)
    assert len(entry["workers"]) == 2
    assert not any(psutil.pid_exists(pid) for pid in entry["workers"])


def entry_of(journal: Path) -> dict[str, Any]:
    return json.loads(journal.read_text()) if journal.exists() else {"seen": []}
