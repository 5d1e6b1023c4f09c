"""Running shard jobs: in this process, or in worker processes that may die without losing anything."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from preprocess.config import PreprocessConfig
from preprocess.shard_job import RowOutcome, ShardContext, ShardJob, ShardRecord, run_shard
from preprocess.sources.rows import Source
from preprocess.workers import WorkersDied, run_in_workers, start_worker_server
from vlmdata.errors import ResourceError
from vlmdata.format.manifest import TokenizerInfo

#: What workers import, once, in the server they are forked from.
PRELOADED = ["preprocess.engine", "torchvision.transforms.v2", "transformers", "datasets"]
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
    tokenizer: TokenizerInfo


def run_jobs(run: Run, jobs: Sequence[ShardJob], workers: int) -> Generator[ShardRecord]:
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
        yield from _run_in_processes(run, jobs, min(workers, len(jobs)))


def _run_here(run: Run, jobs: Sequence[ShardJob]) -> Generator[ShardRecord]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one worker is one core, here as in a pool
    try:
        context = ShardContext.build(run.source, run.config, run.directory, run.tokenizer)
        for job in jobs:
            yield _run_counted(job, context, run.counters)
    finally:
        torch.set_num_threads(threads)


def _run_counted(job: ShardJob, context: ShardContext, counters: Counters) -> ShardRecord:
    counters.start(job.number)
    try:
        return run_shard(job, context, lambda outcome: counters.add(job.number, outcome))
    except (OSError, MemoryError) as error:
        if isinstance(error, MemoryError):
            what, remedy = "out of memory", "use fewer --workers or a lower --max-source-pixels"
        else:
            what, remedy = describe(error), "make room (or permission)"
        raise ResourceError(
            f"{context.directory}: shard {job.number} ({_rows(job, context.source)}) failed: {what}. "
            f"Finished shards are kept; {remedy} and run the same command again to continue."
        ) from error


def _rows(job: ShardJob, source: Source) -> str:
    return f"rows {source.numbers[job.row_start]} to {source.numbers[job.row_stop - 1]}"


def describe(error: OSError) -> str:
    """What the system says of an error, without the additions of libraries."""
    return str(error) if error.errno is None else os.strerror(error.errno)


def _run_in_processes(run: Run, jobs: Sequence[ShardJob], workers: int) -> Generator[ShardRecord]:
    with closing(run_in_workers(partial(_prepare, run), jobs, workers, PRELOADED)) as records:
        try:
            yield from records
        except WorkersDied as error:
            job: ShardJob = error.job
            raise ResourceError(
                f"{run.directory}: {error.deaths} worker processes died, one after the other, over shard {job.number} "
                f"({_rows(job, run.source)}). Out of memory? Finished shards are kept; use fewer --workers or a lower "
                "--max-source-pixels and run the same command again to continue."
            ) from None


def start_workers_early() -> None:
    """Lets the libraries of workers be imported while this process is still busy with other things."""
    start_worker_server(PRELOADED)


def _prepare(run: Run) -> Callable[[ShardJob], ShardRecord]:
    import torch

    torch.set_num_threads(1)
    context = ShardContext.build(run.source, run.config, run.directory, run.tokenizer)
    return lambda job: _run_counted(job, context, run.counters)
