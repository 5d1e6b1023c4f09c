"""The engine for one machine: this process, or worker processes that may die without loss."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from vlmdata.errors import ResourceError
from vlmdata.media.c_library import keep_memory
from vlmdata.preprocess.engines.base import Engine, ShardWork, make_shard, rows_of
from vlmdata.preprocess.shards.counters import Counters
from vlmdata.preprocess.shards.job import RowOutcome, ShardJob, ShardRecord
from vlmdata.preprocess.sources.rows import Source
from vlmdata.workers import MAX_DEATHS, WorkersDied, in_workers, start_worker_server

#: Modules that workers import once, in the server from which they are forked.
PRELOADED = [
    "vlmdata.preprocess.engines.local",
    "vlmdata.media.decode",
    "vlmdata.media.resize",
    "vlmdata.preprocess.encode.encoder",
    "torch",
    "transformers.models.auto.tokenization_auto",
]
REJECTING = "--reject-after-deaths 2 rejects such a row"
#: Says the last line that it read, once nobody can write another one.
_WATCH = """
import sys
last = b""
for line in sys.stdin.buffer:
    last = line
if last:
    sys.stderr.write("\\n" + last.decode())
"""


def preloaded(own_code: bool) -> list[str]:
    """Returns the modules that workers import once: with ``datasets`` if this process needed it to open the source.

    Args:
        own_code: Whether the user's own code runs in the workers. It may need all of transformers.
    """
    alone = [] if own_code else ["vlmdata.preprocess.chat.only_tokenizers"]
    return [*alone, *PRELOADED, *(["datasets"] if "datasets" in sys.modules else [])]


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
        #: Whether the user's own code may run in workers.
        self.own_code = True

    def warm_up(self, workers: int) -> None:
        """Imports the libraries of workers while this process is still busy."""
        if workers > 1 or self._reject_after is not None:
            start_worker_server(preloaded(self.own_code))

    def run(
        self, work: ShardWork, jobs: Sequence[ShardJob], workers: int, counters: Counters
    ) -> Generator[ShardRecord]:
        """Makes shards; see :meth:`Engine.run`."""
        if self._reject_after is None and (workers <= 1 or len(jobs) <= 1):
            return _run_here(work, jobs, counters, self._watch)
        preload = preloaded(self.own_code)
        return _run_in_processes(work, jobs, min(workers, len(jobs)), counters, self._reject_after, preload)


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
    work: ShardWork,
    jobs: Sequence[ShardJob],
    workers: int,
    counters: Counters,
    reject_after: int | None,
    preload: Sequence[str],
) -> Generator[ShardRecord]:
    deaths = Deaths(work.source, counters, reject_after)
    most = max(MAX_DEATHS, reject_after or 0)
    prepare = partial(_prepare, work, counters)
    with closing(in_workers(prepare, jobs, workers, preload, on_death=deaths.again, max_deaths=most)) as records:
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
    keep_memory()
    context = work.prepare()
    return lambda job: make_shard(job, context, counters)


class Deaths:
    """Deaths of workers, by row.

    Args:
        source: The rows.
        counters: Counts that the workers write.
        reject_after: Deaths on a row after which it is rejected; None never rejects.
    """

    def __init__(self, source: Source, counters: Counters, reject_after: int | None):
        self._source = source
        self._counters = counters
        self._reject_after = reject_after
        self._of_rows: Counter[int] = Counter()
        self.last_row: int | None = None

    def again(self, job: ShardJob) -> ShardJob:
        """Counts a death. Returns the job to run again, without a row that has ended too many workers."""
        done = self._counters.stop(job.number)
        self.last_row = row = None if done is None else _row(job, self._source, done)
        if row is None:
            return job
        self._of_rows[row] += 1
        if self._reject_after is None or self._of_rows[row] < self._reject_after:
            return job
        return replace(job, deadly=job.deadly | {row})


class _Teller:
    """Counts rows, and tells a watching process which row is next."""

    def __init__(self, job: ShardJob, source: Source, counters: Counters, pipe: int):
        self._job, self._source, self._counters, self._pipe = job, source, counters, pipe
        self._done = 0

    def start(self, shard: int) -> None:
        """Begins the shard."""
        self._counters.start(shard)
        self._tell()

    def add(self, shard: int, outcome: RowOutcome) -> None:
        """Counts a row."""
        self._counters.add(shard, outcome)
        self._done += 1
        self._tell()

    def _tell(self) -> None:
        row = _row(self._job, self._source, self._done)
        where = f"row {row}" if row is not None else "the end"
        said = (
            f"error: the process ended without a word (killed, out of memory, or a crash in a library) at {where} of "
            f"shard {self._job.number}. Finished shards are kept: run the same command again to continue. If it ends "
            f"there again, {REJECTING}.\n"
        )
        with suppress(OSError):
            os.write(self._pipe, said.encode())


class Watch:
    """A process that says where this one ended, if it ends without a word."""

    def __init__(self, pipe: int):
        self._pipe = pipe

    def counting(self, job: ShardJob, source: Source, counters: Counters) -> _Teller:
        """Returns a counter of the job's rows that tells the watching process of each."""
        return _Teller(job, source, counters, self._pipe)


@contextmanager
def watched() -> Iterator[Watch]:
    """Starts a process that reports on stderr if this process ends inside the block other than by an exception."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCH],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process
        )
    except OSError:  # no memory or no processes left: the run can do without
        yield Watch(-1)
        return
    assert process.stdin is not None
    pipe = process.stdin.fileno()
    os.set_blocking(pipe, False)  # a process that does not read must not hold up the run
    try:
        yield Watch(pipe)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


def _row(job: ShardJob, source: Source, done: int) -> int | None:
    """Returns the row after the first ``done`` of a job; None at its end."""
    place = job.row_start + done
    return source.numbers[place] if place < job.row_stop else None
