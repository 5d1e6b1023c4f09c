"""Worker processes that may die at any moment without harm to the others.

Every worker is asked and answers over a pipe of its own. (The executors of ``concurrent.futures`` share queues and
their locks between workers: one death ends the whole pool, and a death while workers are being started hangs it.)
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

#: Workers that may die over the same job before we give up.
_MAX_DEATHS = 5
#: A worker that is told to end does so at once, unless the system holds it in a read or write.
_SECONDS_TO_END = 30.0


class WorkersDied(Exception):
    """Worker after worker died over one job.

    Attributes:
        job: The job.
        deaths: How many died.
    """

    def __init__(self, job: Any, deaths: int):
        super().__init__(f"{deaths} worker processes died, one after the other, over {job}")
        self.job = job
        self.deaths = deaths


class WorkerError(Exception):
    """What went wrong in a worker, with its traceback as text."""


def start_worker_server(preload: Sequence[str]) -> None:
    """Starts the process that workers are forked from, and returns while it still imports their libraries.

    It imports everything once and starts no thread, so forking it is quick and safe. Ctrl-C reaches every process of
    a terminal; this one and its workers leave it to the parent.

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
    prepare: Callable[[], Callable[[J], R]], jobs: Sequence[J], workers: int, preload: Sequence[str]
) -> Generator[R]:
    """Does jobs in worker processes, yielding results in any order.

    A job whose worker dies is given to another one. However the iteration ends, no worker outlives it; close the
    iterator when leaving it early.

    Args:
        prepare: Called once in every worker; gives the function that does a job. Picklable.
        jobs: Picklable.
        workers: How many processes.
        preload: Modules to import before workers are forked.

    Raises:
        WorkersDied: If a job killed its worker again and again.
        VlmdataError: If the function raised one.
        WorkerError: If it raised anything else.
    """
    waiting = deque(range(len(jobs)))
    deaths: Counter[int] = Counter()
    pool: dict[Connection[Any, Any], _Worker] = {}

    def died(job: int) -> None:
        deaths[job] += 1
        if deaths[job] >= _MAX_DEATHS:
            raise WorkersDied(jobs[job], deaths[job])
        waiting.appendleft(job)

    def hire(job: int) -> None:
        try:
            start_worker_server(preload)  # it, too, may have died
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
            died(worker.job)

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
        pipe: Jobs go in; (result, error) comes out.
        job: Number of the job it is at.
    """

    def __init__(self, prepare: Callable[[], Callable[[Any], Any]]):
        context = multiprocessing.get_context("forkserver")
        self.job: int | None = None
        self.pipe, pipe = context.Pipe()
        # Nothing is ever sent here. It closes when the parent closes it or dies, and that ends the worker.
        lifeline, self._lifeline = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(pipe, lifeline, prepare), daemon=True)
        try:
            self._process.start()
        finally:
            pipe.close()
            lifeline.close()

    def end(self) -> None:
        """Ends the process, whatever it is at, and waits until it is gone."""
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
    """The life of a worker."""
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


def _exit_with(lifeline: Connection[Any, Any]) -> None:
    wait([lifeline])
    os._exit(0)
