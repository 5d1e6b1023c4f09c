"""The engine for one machine: this process, or worker processes that may die without loss."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial

from preprocess.engines.base import Engine, ShardWork, make_shard, rows_of
from preprocess.shards.counters import Counters
from preprocess.shards.job import ShardJob, ShardRecord
from preprocess.workers import WorkersDied, run_in_workers, start_worker_server
from vlmdata.errors import ResourceError

#: Modules that workers import once, in the server from which they are forked.
PRELOADED = [
    "preprocess.engines.local",
    "vlmdata.media.decode",
    "vlmdata.media.resize",
    "torch",
    "transformers.models.auto.tokenization_auto",
    "datasets",
]


class Local(Engine):
    """Runs one worker or one job in this process, and several in separate processes."""

    def warm_up(self, workers: int) -> None:
        """Imports the libraries of workers while this process is still busy."""
        if workers > 1:
            start_worker_server(PRELOADED)

    def run(
        self, work: ShardWork, jobs: Sequence[ShardJob], workers: int, counters: Counters
    ) -> Generator[ShardRecord]:
        """Makes shards; see :meth:`Engine.run`."""
        if workers <= 1 or len(jobs) <= 1:
            return _run_here(work, jobs, counters)
        return _run_in_processes(work, jobs, min(workers, len(jobs)), counters)


def _run_here(work: ShardWork, jobs: Sequence[ShardJob], counters: Counters) -> Generator[ShardRecord]:
    import torch

    threads = torch.get_num_threads()
    try:
        context = work.prepare()
        for job in jobs:
            yield make_shard(job, context, counters)
    finally:
        torch.set_num_threads(threads)


def _run_in_processes(
    work: ShardWork, jobs: Sequence[ShardJob], workers: int, counters: Counters
) -> Generator[ShardRecord]:
    with closing(run_in_workers(partial(_prepare, work, counters), jobs, workers, PRELOADED)) as records:
        try:
            yield from records
        except WorkersDied as error:
            job: ShardJob = error.job
            raise ResourceError(
                f"{work.store}: {error.deaths} worker processes died in a row on shard {job.number} "
                f"({rows_of(job, work.source)}). Out of memory? Finished shards are kept; use fewer --workers or a "
                "lower --max-source-pixels and run the same command again to continue."
            ) from None


def _prepare(work: ShardWork, counters: Counters) -> Callable[[ShardJob], ShardRecord]:
    context = work.prepare()
    return lambda job: make_shard(job, context, counters)
