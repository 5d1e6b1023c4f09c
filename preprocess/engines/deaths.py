"""Finds the row at which a process died: from shared memory if it was a worker, else by a process that watches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from preprocess.shards.counters import Counters
from preprocess.shards.job import RowOutcome, ShardJob
from preprocess.sources.rows import Source

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
