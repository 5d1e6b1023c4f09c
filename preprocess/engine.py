"""Running shard jobs: in this process, or on a pool of processes that may die without losing anything."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocess.config import PreprocessConfig
from preprocess.shard_job import RowOutcome, ShardContext, ShardJob, ShardRecord, run_shard
from preprocess.sources.rows import Source
from vlmdata.errors import ResourceError
from vlmdata.format.schema import shard_name

#: What workers import, once, in the server they are forked from.
_PRELOADED = ["preprocess.engine", "torchvision.transforms.v2", "transformers", "datasets"]
#: Pools that may break one after the other without a single shard finished, before we give up.
_MAX_FRUITLESS_POOLS = 3
_FIELDS = ("rows", "images", "tokens", "rejected")


class Counters:
    """Row counts that workers write and the parent reads, without a lock that a dying worker could take along.

    Every shard has its own line in shared memory, written by the one process that makes it.
    """

    def __init__(self, shards: int):
        self._shared = multiprocessing.RawArray("q", shards * len(_FIELDS))

    def table(self) -> npt.NDArray[np.int64]:
        """int64 (shards, 4): rows, images, tokens, rejected; a live view."""
        return np.frombuffer(self._shared, dtype=np.int64).reshape(-1, len(_FIELDS))

    def start(self, shard: int) -> None:
        """Forgets what an earlier attempt at the shard counted."""
        self.table()[shard] = 0

    def add(self, shard: int, outcome: RowOutcome) -> None:
        """Counts a row."""
        self.table()[shard] += (1, outcome.images, outcome.tokens, outcome.rejected)


@dataclass(frozen=True, eq=False)
class Run:
    """What a process needs to make any shard of a run."""

    source: Source
    config: PreprocessConfig
    directory: Path
    counters: Counters


def run_jobs(run: Run, jobs: Sequence[ShardJob], workers: int) -> Iterator[ShardRecord]:
    """Makes shards, yielding each record as it is finished, in any order.

    Args:
        run: The run.
        jobs: Shards to make.
        workers: 1 works in this process; more is that many processes.

    Raises:
        ResourceError: If the disk is full or not writable, or worker processes keep dying.
    """
    if workers <= 1 or len(jobs) <= 1:
        yield from _run_here(run, jobs)
    else:
        yield from _run_pool(run, jobs, min(workers, len(jobs)))


def _run_here(run: Run, jobs: Sequence[ShardJob]) -> Iterator[ShardRecord]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one worker is one core, here as in a pool
    try:
        context = ShardContext.build(run.source, run.config, run.directory)
        for job in jobs:
            yield _run_counted(job, context, run.counters)
    finally:
        torch.set_num_threads(threads)


def _run_counted(job: ShardJob, context: ShardContext, counters: Counters) -> ShardRecord:
    counters.start(job.number)
    try:
        return run_shard(job, context, lambda outcome: counters.add(job.number, outcome))
    except (OSError, MemoryError) as error:
        rows = f"rows {job.row_start} to {job.row_stop - 1}"
        if isinstance(error, MemoryError):
            what, remedy = "out of memory", "use fewer --workers or a lower --max-source-pixels"
        else:
            what, remedy = describe(error), "make room (or permission)"
        raise ResourceError(
            f"{context.directory}: shard {job.number} ({rows}) failed: {what}. "
            f"Finished shards are kept; {remedy} and run the same command again to continue."
        ) from error


def describe(error: OSError) -> str:
    """What the system says of an error, without the additions of libraries."""
    return str(error) if error.errno is None else os.strerror(error.errno)


def _run_pool(run: Run, jobs: Sequence[ShardJob], workers: int) -> Iterator[ShardRecord]:
    remaining = {shard_name(job.number): job for job in jobs}
    fruitless = 0
    while remaining:
        before = len(remaining)
        try:
            for record in _one_pool(run, list(remaining.values()), workers):
                del remaining[record.info.name]
                yield record
        except BrokenProcessPool:
            # A worker was killed (out of memory, most often). Shards are pure: make what is missing anew.
            fruitless = fruitless + 1 if len(remaining) == before else 0
            if fruitless >= _MAX_FRUITLESS_POOLS:
                first = min(remaining.values(), key=lambda job: job.number)
                raise ResourceError(
                    f"worker processes died {fruitless} times without finishing a shard; unfinished: {len(remaining)}, "
                    f"from shard {first.number} (rows {first.row_start} to {first.row_stop - 1}). Out of memory? "
                    "Use fewer --workers or a lower --max-source-pixels; finished shards are kept."
                ) from None


def start_worker_server() -> None:
    """Starts the process that workers are forked from, and returns while it still imports their libraries.

    It imports everything once and starts no thread, so forking it is quick and safe. Ctrl-C reaches every process of
    a terminal; this one and its workers leave it to the parent.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    resource_tracker.ensure_running()  # first, as it unblocks SIGINT when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _one_pool(run: Run, jobs: Sequence[ShardJob], workers: int) -> Iterator[ShardRecord]:
    start_worker_server()
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(run,))
    try:
        for future in as_completed(_submit(pool, jobs)):
            yield future.result()
    except BaseException:
        # What is under way is not worth waiting for: a shard is made anew from its rows.
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, jobs: Sequence[ShardJob]) -> list[Future[ShardRecord]]:
    try:
        return [pool.submit(_run_in_worker, job) for job in jobs]
    except (EOFError, ConnectionError) as error:
        raise BrokenProcessPool("the server of workers died while it was asked for one") from error


_run: Run | None = None


def _start_worker(run: Run) -> None:
    global _run
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _run = run


def _die_with_parent() -> None:
    parent: Any = multiprocessing.parent_process()
    wait([parent.sentinel])
    os._exit(1)


@cache
def _worker_context() -> ShardContext:
    # Built by the first job and not by the initializer: what fails here is then told to the parent as it is.
    assert _run is not None
    return ShardContext.build(_run.source, _run.config, _run.directory)


def _run_in_worker(job: ShardJob) -> ShardRecord:
    assert _run is not None
    return _run_counted(job, _worker_context(), _run.counters)
