"""The process pool: jobs of dead workers are done by others, and errors reach the caller."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from pathlib import Path

import pytest

from vlmdata.errors import UsageError
from vlmdata.workers import PoolClosed, WorkerError, Workers, WorkersDied, in_workers


def doubling() -> Callable[[int], int]:
    return lambda number: 2 * number


def failing() -> Callable[[int], int]:
    def fail(number: int) -> int:
        raise UsageError("the user's") if number == 1 else ValueError("the program's")

    return fail


def dying(folder: Path, times: int, number: int) -> int:
    """Dies so many times on the job 3."""
    deaths = len(list(folder.iterdir()))
    if number == 3 and deaths < times:
        (folder / str(deaths)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def sleeping() -> Callable[[int], int]:
    return lambda seconds: time.sleep(seconds) or os.getpid()  # type: ignore[func-returns-value]


def threads_of_torch() -> Callable[[int], int]:
    def threads(_: int) -> int:
        import torch

        return torch.get_num_threads()

    return threads


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torch_has_one_thread_wherever_it_is_imported(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    pool = Workers(threads_of_torch, 1, method=method)
    assert pool.submit(0).result(240) == 1
    pool.close()


def test_all_jobs_are_done_in_any_order() -> None:
    assert sorted(in_workers(doubling, range(50), 3)) == list(range(0, 100, 2))


def test_many_jobs_may_wait() -> None:
    """More than the pipe that wakes the thread would hold."""
    pool = Workers(sleeping, 1, method="fork")
    futures = [pool.submit(600) for _ in range(30_000)]
    assert pool.close()
    assert all(isinstance(each.exception(), PoolClosed) for each in futures)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_errors_of_the_function_reach_the_caller(method: str) -> None:
    pool = Workers(failing, 1, method=method)
    with pytest.raises(UsageError, match="the user's"):
        pool.submit(1).result(240)
    with pytest.raises(WorkerError, match=r"(?s)Traceback.*the program's"):
        pool.submit(2).result(240)
    assert pool.restarts == 0
    pool.close()


def test_what_cannot_be_pickled_is_an_error_of_its_job() -> None:
    pool = Workers(doubling, 1, method="fork")
    with pytest.raises(Exception, match="pickle"):
        pool.submit(lambda: None).result(240)  # type: ignore[arg-type]
    assert pool.submit(4).result(240) == 8
    pool.close()
    with pytest.raises(Exception, match="pickle"):
        list(in_workers(lambda: doubling(), range(2), 1))


def test_the_job_of_a_dead_worker_is_done_by_another(tmp_path: Path) -> None:
    pool = Workers(lambda: partial(dying, tmp_path, 2), 2, method="fork", max_deaths=3)
    futures = [pool.submit(number) for number in range(8)]
    assert [each.result(240) for each in futures] == list(range(8))
    assert pool.restarts == 2
    pool.close()


def test_a_job_on_which_workers_die_in_a_row_is_named_with_the_cause(tmp_path: Path) -> None:
    pool = Workers(lambda: partial(dying, tmp_path, 99), 2, method="fork", max_deaths=3)
    futures = [pool.submit(number) for number in range(8)]
    wait(futures, 240)
    error = futures[3].exception()
    assert isinstance(error, WorkersDied)
    assert (error.job, error.deaths, error.cause) == (3, 3, "by SIGKILL, as when memory is short")
    assert [each.result() for each in futures if each is not futures[3]] == [0, 1, 2, 4, 5, 6, 7]
    pool.close()


def test_another_job_may_take_the_place_of_one_that_is_deadly(tmp_path: Path) -> None:
    pool = Workers(lambda: partial(dying, tmp_path, 99), 1, method="fork", max_deaths=1, on_death=lambda job: job + 10)
    assert pool.submit(3).result(240) == 13
    pool.close()


def test_closing_ends_workers_that_are_busy() -> None:
    pool = Workers(sleeping, 2, method="fork", start_now=True)
    pids = [pool.submit(0).result(240)]
    busy = pool.submit(600)
    assert pool.close()
    with pytest.raises(PoolClosed):
        busy.result(240)
    with pytest.raises(PoolClosed):
        pool.submit(0).result(240)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
