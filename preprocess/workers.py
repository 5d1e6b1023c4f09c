"""Worker processes, any of which may die without harm to the others.

Each worker has its own pipe for jobs and results. (The executors of ``concurrent.futures`` share queues and their locks
between workers: one death ends the whole pool, and a death while workers start makes it hang.)
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from vlmdata.errors import VlmdataError

#: Number of workers that may die on the same job before an error.
MAX_DEATHS = 5
#: A worker ends immediately when told to, unless it is blocked in a read or write.
_SECONDS_TO_END = 30.0


class WorkersDied(Exception):
    """Several workers in a row died on one job.

    Attributes:
        job: The job.
        deaths: Number of dead workers.
        cause: How the last one ended, in words.
    """

    def __init__(self, job: Any, deaths: int, cause: str):
        super().__init__(f"{deaths} worker processes died in a row on {job}: {cause}")
        self.job = job
        self.deaths = deaths
        self.cause = cause


class WorkerError(Exception):
    """An error in a worker, with its traceback as text."""


def start_worker_server(preload: Sequence[str]) -> None:
    """Starts the process from which workers are forked. Returns while it is still importing libraries.

    It imports everything once and starts no threads, so forking is quick and safe. Ctrl-C reaches all processes of
    a terminal; this process and its workers ignore it and leave it to the parent.

    Args:
        preload: Modules to import.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    resource_tracker.ensure_running()  # first, as it unblocks SIGINT when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_in_workers[J, R](
    prepare: Callable[[], Callable[[J], R]],
    jobs: Sequence[J],
    workers: int,
    preload: Sequence[str],
    *,
    on_death: Callable[[J], J] = lambda job: job,
    most_deaths: int = MAX_DEATHS,
) -> Generator[R]:
    """Runs jobs in worker processes and yields results in any order.

    If a worker dies, another one runs its job. No worker outlives the iteration; close the
    iterator when leaving it early.

    Args:
        prepare: Called once in each worker; returns the function that runs a job. Picklable.
        jobs: Picklable.
        workers: Number of processes.
        preload: Modules to import before workers are forked.
        on_death: Called with a job whose worker died; returns the job to run in its place. Deaths on another job are
            counted anew.
        most_deaths: Number of workers that may die on the same job before an error.

    Raises:
        WorkersDied: If a job killed its worker repeatedly.
        VlmdataError: If the function raised one.
        WorkerError: If it raised anything else.
    """
    jobs = list(jobs)
    waiting = deque(range(len(jobs)))
    deaths: Counter[int] = Counter()
    pool: dict[Connection[Any, Any], _Worker] = {}

    def died(job: int, exit_code: int | None = None) -> None:
        deaths[job] += 1
        again = on_death(jobs[job])
        if again != jobs[job]:
            jobs[job], deaths[job] = again, 0
        if deaths[job] >= most_deaths:
            raise WorkersDied(jobs[job], deaths[job], _cause(exit_code))
        waiting.appendleft(job)

    def hire(job: int) -> None:
        try:
            start_worker_server(preload)  # it may have died too
            worker = _Worker(prepare)
        except (EOFError, OSError):
            died(job)
        else:
            pool[worker.pipe] = worker
            give(worker, job)

    def give(worker: _Worker, job: int) -> None:
        worker.job = job
        try:
            worker.pipe.send(jobs[job])
        except OSError:
            lose(worker)

    def lose(worker: _Worker) -> None:
        del pool[worker.pipe]
        worker.end()
        if worker.job is not None:
            died(worker.job, worker.exit_code)

    try:
        while waiting or any(worker.job is not None for worker in pool.values()):
            while waiting and len(pool) < workers:
                hire(waiting.popleft())
            for pipe in wait(list(pool)):
                worker = pool[pipe]  # type: ignore[index]
                try:
                    result, error = worker.pipe.recv()
                except (EOFError, OSError):
                    lose(worker)
                    continue
                if error is not None:
                    raise error
                worker.job = None
                if waiting:
                    give(worker, waiting.popleft())
                yield result
    finally:
        for worker in pool.values():
            worker.end()


class _Worker:
    """A worker process, from its parent's side.

    Attributes:
        pipe: Sends jobs and receives (result, error).
        job: Number of its current job.
    """

    def __init__(self, prepare: Callable[[], Callable[[Any], Any]]):
        context = multiprocessing.get_context("forkserver")
        self.job: int | None = None
        self.pipe, pipe = context.Pipe()
        # Nothing is sent here. The pipe closes when the parent closes it or dies, which ends the worker.
        lifeline, self._lifeline = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(pipe, lifeline, prepare), daemon=True)
        try:
            self._process.start()
        finally:
            pipe.close()
            lifeline.close()

    @property
    def exit_code(self) -> int | None:
        """Exit code of the ended process; negative for a signal, None if unknown."""
        return self._process.exitcode

    def end(self) -> None:
        """Ends the process in any state and waits until it is gone."""
        self._lifeline.close()
        try:
            while self.pipe.poll(_SECONDS_TO_END):
                self.pipe.recv()
        except (EOFError, OSError):
            pass
        self.pipe.close()
        self._process.join(timeout=1)


def _serve(
    pipe: Connection[Any, Any], lifeline: Connection[Any, Any], prepare: Callable[[], Callable[[Any], Any]]
) -> None:
    """Main loop of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with, args=(lifeline,), daemon=True).start()
    work: Callable[[Any], Any] | None = None
    while True:
        job = pipe.recv()
        answer: tuple[Any, Exception | None]
        try:
            work = work or prepare()
            answer = work(job), None
        except VlmdataError as error:
            answer = None, error
        except Exception:
            answer = None, WorkerError(f"in a worker process:\n{traceback.format_exc()}")
        pipe.send(answer)


def _cause(exit_code: int | None) -> str:
    if exit_code is None:
        return "for an unknown cause"
    if exit_code >= 0:
        return f"with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    meaning = {"SIGKILL": ", as when memory is short", "SIGSEGV": ", a crash in a library"}.get(name, "")
    return f"by {name}{meaning}"


def _exit_with(lifeline: Connection[Any, Any]) -> None:
    wait([lifeline])
    os._exit(0)
