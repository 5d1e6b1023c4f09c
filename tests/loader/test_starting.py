"""Several loaders of one process start their workers at the same time."""

from __future__ import annotations

import multiprocessing.popen_fork
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.loader.helpers import epoch_of, packs_of, stream


def test_loaders_in_several_threads_start_their_workers_one_at_a_time(
    chat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An audit hook of filelock refuses a fork while another thread forks."""
    forking: list[int] = []
    most = 0
    fork = os.fork

    def slow_fork() -> int:
        nonlocal most
        forking.append(threading.get_ident())
        most = max(most, len(forking))
        time.sleep(0.02)
        try:
            return fork()
        finally:
            forking.remove(threading.get_ident())

    monkeypatch.setattr(multiprocessing.popen_fork.os, "fork", slow_fork)
    whole = packs_of(epoch_of(chat, parts=()))
    found: list[Any] = []

    def consume() -> None:
        try:
            found.append(packs_of(epoch_of(chat, parts=(), num_workers=2, multiprocessing_context="fork")))
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=consume) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [whole] * 3
    assert most == 1


def test_a_fork_that_is_refused_for_a_moment_is_tried_again(chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork of a thread that is not ours may be in the way."""
    fork = os.fork
    refusals = 3

    def refused() -> int:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise RuntimeError("os.fork is unsafe while filelock is changing descriptor ownership")
        return fork()

    monkeypatch.setattr(multiprocessing.popen_fork.os, "fork", refused)
    found = packs_of(epoch_of(chat, parts=(), num_workers=2, multiprocessing_context="fork"))
    assert found == packs_of(epoch_of(chat, parts=()))
    assert refusals < 0


def test_other_start_methods_work_as_well(chat: Path) -> None:
    found = packs_of(epoch_of(chat, parts=(), num_workers=1, multiprocessing_context="forkserver"))
    assert found == packs_of(epoch_of(chat, parts=()))


def test_an_unknown_start_method_is_an_error_at_the_first_batch(chat: Path) -> None:
    with (
        stream(chat, num_workers=1, multiprocessing_context="thread") as loader,
        pytest.raises(ValueError, match="thread"),
    ):
        next(iter(loader))


def test_a_process_forked_while_workers_start_can_start_its_own(chat: Path) -> None:
    import vlmdata.workers as starting

    with starting._one_at_a_time:
        process = os.fork()
        if process == 0:
            os._exit(0 if starting._one_at_a_time.acquire(blocking=False) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
