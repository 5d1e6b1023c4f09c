"""Worker processes, any of which may die without harm to the others: the only process pool of vlmdata.

A thread gives each worker one job at a time through a pipe of its own and waits for answers, deaths and new jobs. If a
worker dies, another one gets its job. (The executors of ``concurrent.futures`` share queues and their locks between
workers: one death ends the whole pool, and a death while workers start makes it hang.)
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from vlmdata.errors import VlmdataError

#: Workers that may die on one job, unless the caller says otherwise.
MAX_DEATHS = 5
#: Seconds for a killed process to disappear. One that waits for a dead network file system never does.
_SECONDS_TO_DIE = 10.0
#: Seconds between two looks for deaths that no pipe shows, because another child of this process holds its end.
_SECONDS_BETWEEN_LOOKS = 1.0
#: Seconds to wait before each further attempt to fork. filelock, which every program with the Hugging Face hub imports,
#: rejects a fork while another thread forks.
_PAUSES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class WorkersDied(Exception):
    """Several workers in a row died on one job. ``cause`` is how the last one ended, in words."""

    def __init__(self, job: Any, deaths: int, cause: str):
        super().__init__(f"{deaths} worker processes died in a row on {job}, the last one {cause}")
        self.job = job
        self.deaths = deaths
        self.cause = cause


class WorkerError(Exception):
    """An error in a worker, with its traceback as text."""


class PoolClosed(Exception):
    """The workers were stopped before the job was done."""


@dataclass(eq=False)
class _Task[Job, Result]:
    job: Job
    future: Future[Result]
    deaths: int = 0


class Workers[Job, Result]:
    """A fixed number of worker processes, started when they get work. Thread-safe; of no use in a fork.

    Args:
        prepare: Called once in each worker; returns the function that does a job. Picklable unless workers are forked.
        method: Start method of :mod:`multiprocessing`; None means the interpreter's default.
        preload: Modules that a forkserver imports before workers are forked.
        max_deaths: Number of workers that may die on one job.
        on_death: Called with a job whose worker died; returns the job to do in its place. Deaths on another job are
            counted anew.
        start_now: Whether to start all workers now, not with the first jobs.

    Raises:
        ValueError: If the platform has no such start method.
    """

    def __init__(
        self,
        prepare: Callable[[], Callable[[Job], Result]],
        count: int,
        *,
        method: str | None = "forkserver",
        preload: Sequence[str] = (),
        max_deaths: int = MAX_DEATHS,
        on_death: Callable[[Job], Job] = lambda job: job,
        start_now: bool = False,
    ):
        self._context: Any = multiprocessing.get_context(method)
        self._prepare, self._count, self._preload = prepare, count, preload
        self._max_deaths, self._on_death, self._start_now = max_deaths, on_death, start_now
        self._waiting: deque[_Task[Job, Result]] = deque()
        self._pool: list[_Worker[Job, Result]] = []
        self._lock = threading.RLock()  # garbage collection may close the pool in its own thread
        self._closed = self._waking = False
        self._woken, self._wake = multiprocessing.Pipe(duplex=False)
        self.restarts = 0  # workers that died so far
        self._thread = threading.Thread(target=self._run, name="vlmdata-workers", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Future[Result]:
        """Queues a job. The future can be cancelled until a worker has the job.

        Its exceptions: a VlmdataError that the function raised, :class:`WorkerError` for anything else that it raised,
        :class:`WorkersDied`, and :class:`PoolClosed`.
        """
        task = _Task[Job, Result](job, Future())
        with self._lock:
            if self._closed:
                task.future.set_exception(PoolClosed())
            else:
                self._waiting.append(task)
                self._wake_up()
        return task.future

    def close(self, seconds: float = 2 * _SECONDS_TO_DIE) -> bool:
        """Kills the workers. Jobs that are not done fail with :class:`PoolClosed`.

        Waits so many seconds until they are gone, and returns whether all are.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._wake_up()
        if threading.current_thread() is not self._thread:  # garbage collection may run in any thread
            self._thread.join(seconds)
        return not self._thread.is_alive() and not self._pool

    def _wake_up(self) -> None:
        """Wakes the thread. The caller holds the lock; one byte is enough, and more could fill the pipe."""
        if not self._waking:
            self._waking = True
            self._wake.send_bytes(b"w")

    def _run(self) -> None:
        try:
            with suppress(EOFError, OSError):  # the first jobs will tell
                while self._start_now and len(self._pool) < self._count:
                    self._start()
            while not self._closed:
                self._give()
                busy: list[Any] = [each.pipe for each in self._pool] + [each.sentinel for each in self._pool]
                ready = set(wait([self._woken, *busy], _SECONDS_BETWEEN_LOOKS))
                if self._woken in ready:
                    with self._lock:
                        self._woken.recv_bytes()
                        self._waking = False
                for worker in list(self._pool):
                    if worker.pipe in ready or worker.sentinel in ready or not worker.is_alive():
                        self._look_at(worker)
        finally:
            self._end()

    def _give(self) -> None:
        """Gives waiting jobs to idle workers, and starts workers while there are too few."""
        idle = [each for each in self._pool if each.task is None]
        while self._waiting and (idle or len(self._pool) < self._count):
            task = self._waiting.popleft()
            if not task.future.running() and not task.future.set_running_or_notify_cancel():
                continue
            worker = None
            try:
                worker = idle.pop() if idle else self._start()
                worker.give(task)
            except (EOFError, OSError) as error:
                if worker is None:
                    self._died(task, f"before it started ({error or type(error).__name__})")
                else:
                    self._lose(worker)
            except Exception as error:  # such as of what cannot be pickled
                if worker is not None:
                    worker.task = None
                    idle.append(worker)
                task.future.set_exception(error)

    def _start(self) -> _Worker[Job, Result]:
        if self._context.get_start_method() == "forkserver":
            start_worker_server(self._preload)  # it may have died too
        worker = _Worker[Job, Result](self._context, self._prepare)
        self._pool.append(worker)
        return worker

    def _look_at(self, worker: _Worker[Job, Result]) -> None:
        """Takes a worker's answer, or finds it dead."""
        try:
            if not worker.pipe.poll():
                self._lose(worker)
                return
            result, error = worker.pipe.recv()
        except (EOFError, OSError):
            self._lose(worker)
            return
        task, worker.task = worker.task, None
        assert task is not None
        if error is None:
            task.future.set_result(result)
        else:
            task.future.set_exception(error)

    def _lose(self, worker: _Worker[Job, Result]) -> None:
        self._pool.remove(worker)
        self.restarts += 1
        worker.kill()
        worker.join(_SECONDS_TO_DIE)  # before another one does its job, perhaps in the same memory
        if worker.task is not None:
            self._died(worker.task, worker.ending())

    def _died(self, task: _Task[Job, Result], cause: str) -> None:
        task.deaths += 1
        again = self._on_death(task.job)
        if again != task.job:
            task.job, task.deaths = again, 0
        if task.deaths >= self._max_deaths:
            task.future.set_exception(WorkersDied(task.job, task.deaths, cause))
        else:
            self._waiting.appendleft(task)

    def _end(self) -> None:
        with self._lock:
            self._closed = True
            unfinished = [*(each.task for each in self._pool), *self._waiting]
            self._waiting.clear()
        for worker in self._pool:
            worker.kill()
        deadline = time.monotonic() + _SECONDS_TO_DIE
        self._pool = [each for each in self._pool if not each.join(max(0.0, deadline - time.monotonic()))]
        for task in unfinished:
            if task is not None and not task.future.cancelled():
                task.future.set_exception(PoolClosed())


def in_workers[Job, Result](
    prepare: Callable[[], Callable[[Job], Result]],
    jobs: Sequence[Job],
    count: int,
    preload: Sequence[str] = (),
    *,
    max_deaths: int = MAX_DEATHS,
    on_death: Callable[[Job], Job] = lambda job: job,
) -> Generator[Result]:
    """Does jobs in worker processes and yields results in any order. The options are those of :class:`Workers`.

    No worker outlives the iteration; close the iterator when leaving it early. Raises the exceptions of
    :meth:`Workers.submit`.
    """
    pool = Workers(prepare, count, preload=preload, max_deaths=max_deaths, on_death=on_death)
    try:
        for future in as_completed([pool.submit(job) for job in jobs]):
            yield future.result()
    finally:
        pool.close()


class _Worker[Job, Result]:
    """A worker process, from its parent's side; ``sentinel`` is ready when it has ended, ``task`` is its job."""

    def __init__(self, context: Any, prepare: Callable[[], Callable[[Job], Result]]):
        self.task: _Task[Job, Result] | None = None
        with _one_at_a_time:
            self.pipe, pipe = context.Pipe()
            # Forks of other threads must not get hold of the worker's end, or its death would not close the pipe.
            try:
                self._process: BaseProcess = context.Process(target=_serve, args=(pipe, prepare), daemon=True)
                _started(self._process)
            finally:
                pipe.close()
        self.sentinel = self._process.sentinel

    def give(self, task: _Task[Job, Result]) -> None:
        """Sends a job."""
        self.task = task
        self.pipe.send(task.job)

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def kill(self) -> None:
        """Ends the process in any state."""
        self._process.kill()

    def join(self, seconds: float) -> bool:
        """Waits until the process is gone. Returns whether it is."""
        self._process.join(seconds)
        if gone := not self._process.is_alive():
            self.pipe.close()
        return gone

    def ending(self) -> str:
        """How the process ended, in words."""
        code = self._process.exitcode
        if code is None:
            return "for an unknown cause"
        if code >= 0:
            return f"with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        meaning = {"SIGKILL": ", as when memory is short", "SIGSEGV": ", a crash in a library"}.get(name, "")
        return f"by {name}{meaning}"


def _started(process: BaseProcess) -> None:
    with _outside_the_working_folder():
        for pause in _PAUSES:
            try:
                return process.start()
            except RuntimeError:
                time.sleep(pause)
        return process.start()


@contextmanager
def _outside_the_working_folder() -> Iterator[None]:
    """Lets new processes not import from the working folder until they have this one's ``sys.path``.

    They start as ``python -c …``, which looks there first: an ``inspect.py`` of the user's would hide Python's own.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


#: Two loaders in one process, one to train and one to evaluate, start their workers from two threads.
_one_at_a_time = threading.Lock()


def _renew_lock() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.Lock()


# A process forked while another thread held the lock would wait for it forever.
os.register_at_fork(after_in_child=_renew_lock)


def start_worker_server(preload: Sequence[str]) -> None:
    """Starts the process from which workers are forked. Returns while it still imports ``preload``.

    It imports everything once and starts no threads, so forking is quick and safe. Ctrl-C reaches all processes of
    a terminal; this process and its workers ignore it and leave it to the parent.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    with _outside_the_working_folder():
        resource_tracker.ensure_running()  # first, as it unblocks SIGINT when it starts
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_worker_server() -> None:
    """Kills the process from which workers are forked, even while it imports. Call it only without workers."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        with suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()  # the standard library has this for its own tests


def _serve(pipe: Connection[Any, Any], prepare: Callable[[], Callable[[Any], Any]]) -> None:
    """Main loop of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Signals to the process group, such as ctrl-C or a scheduler's warning, are for the parent, which still needs work.
    with suppress(OSError):
        os.setpgid(0, 0)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"  # the workers share the cores; torch reads it when it is imported
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
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


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)
