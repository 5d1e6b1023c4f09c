"""The engine for one machine: this process, or worker processes that may die without loss."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from preprocess.engines.base import Engine, ShardWork, make_shard, rows_of
from preprocess.engines.deaths import REJECTING, Deaths, watched
from preprocess.shards.counters import Counters
from preprocess.shards.job import ShardJob, ShardRecord
from vlmdata.errors import ResourceError
from vlmdata.workers import MAX_DEATHS, WorkersDied, in_workers, start_worker_server

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

    @dataclass(frozen=True)
    class Options:
        """Options of the engine. With ``reject_after_deaths``, even one worker is a process of its own."""

        reject_after_deaths: Annotated[
            int | None, "Reject a row that has ended this many worker processes; none: the fifth death ends the run."
        ] = None

        def __post_init__(self) -> None:
            if self.reject_after_deaths is not None and self.reject_after_deaths < 1:
                raise ValueError(f"reject_after_deaths is {self.reject_after_deaths}; it must be at least 1")

    def __init__(self, options: Options | None = None, *, watch: bool = False):
        """``watch`` says where the process ended, if it makes shards itself and dies."""
        self._reject_after = None if options is None else options.reject_after_deaths
        self._watch = watch

    def warm_up(self, workers: int) -> None:
        """Imports the libraries of workers while this process is still busy."""
        if workers > 1 or self._reject_after is not None:
            start_worker_server(PRELOADED)

    def run(
        self, work: ShardWork, jobs: Sequence[ShardJob], workers: int, counters: Counters
    ) -> Generator[ShardRecord]:
        """Makes shards; see :meth:`Engine.run`."""
        if self._reject_after is None and (workers <= 1 or len(jobs) <= 1):
            return _run_here(work, jobs, counters, self._watch)
        return _run_in_processes(work, jobs, min(workers, len(jobs)), counters, self._reject_after)


def _run_here(work: ShardWork, jobs: Sequence[ShardJob], counters: Counters, watch: bool) -> Generator[ShardRecord]:
    import torch

    threads = torch.get_num_threads()
    try:
        context = work.prepare()
        with watched() if watch else nullcontext() as watcher:
            for job in jobs:
                counting = counters if watcher is None else watcher.counting(job, work.source, counters)
                yield make_shard(job, context, counting)
    finally:
        torch.set_num_threads(threads)


def _run_in_processes(
    work: ShardWork, jobs: Sequence[ShardJob], workers: int, counters: Counters, reject_after: int | None
) -> Generator[ShardRecord]:
    deaths = Deaths(work.source, counters, reject_after)
    most = max(MAX_DEATHS, reject_after or 0)
    prepare = partial(_prepare, work, counters)
    with closing(in_workers(prepare, jobs, workers, PRELOADED, on_death=deaths.again, max_deaths=most)) as records:
        try:
            yield from records
        except WorkersDied as error:
            job: ShardJob = error.job
            row = deaths.last_row
            at = "" if row is None else f", at row {row}"
            rejecting = "" if row is None else f" If row {row} itself is the cause, {REJECTING}."
            raise ResourceError(
                f"{work.store}: {error.deaths} worker processes died in a row on shard {job.number} "
                f"({rows_of(job, work.source)}), the last one {error.cause}{at}. Finished shards are kept; use fewer "
                f"--workers or a lower --max-source-pixels and run the same command again to continue.{rejecting}"
            ) from None


def _prepare(work: ShardWork, counters: Counters) -> Callable[[ShardJob], ShardRecord]:
    context = work.prepare()
    return lambda job: make_shard(job, context, counters)
