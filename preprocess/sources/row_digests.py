"""Hashes of rows by content: what a later run compares to know which rows are new.

Equal rows have equal hashes wherever they are in the source. Unlike the hash of a holdout
(:mod:`preprocess.sources.holdout`), this one tells values apart that a recipe may tell apart, as ``1`` and ``1.0``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from preprocess.reject import RowRejected
from preprocess.row import Row, Struct
from preprocess.sources.rows import Source
from vlmdata.errors import ResourceError
from vlmdata.workers import WorkersDied, in_workers

#: Bytes of a hash.
DIGEST_BYTES = 16
Digests = npt.NDArray[np.bytes_]
"""S16 (n,): a hash for each row."""
_ROWS_PER_JOB = 1024
#: Smaller sources use no workers, which take seconds to start.
_SECONDS_ALONE = 3.0


def row_digest(row: Row | RowRejected) -> bytes:
    """Returns the xxh3-128 of a row's content; of a row that cannot be read, of the reason.

    Columns without a value count as absent: in some kinds of files, other rows determine whether they are there.
    """
    digest = xxhash.xxh3_128()
    if isinstance(row, RowRejected):
        digest.update(f"rejected {row.reason} {row.message}".encode("utf-8", "surrogatepass"))
    else:
        _feed(digest.update, {name: value for name, value in row.values.items() if value is not None})
    return digest.digest()


def row_digests(
    source: Source,
    *,
    workers: int = 1,
    preload: Sequence[str] = (),
    on_rows: Callable[[int], None] = lambda rows: None,
) -> Digests:
    """Returns the hashes of all rows of a source, in order. Reads all rows, but decodes nothing.

    Args:
        source: The source.
        workers: Number of processes; the result does not depend on it.
        preload: Modules that these import before they are forked.
        on_rows: Called occasionally with the number of rows read so far.

    Raises:
        ResourceError: If processes die over the rows.
    """
    found, done = np.zeros(source.num_rows, f"S{DIGEST_BYTES}"), 0
    jobs = [range(start, min(start + _ROWS_PER_JOB, len(found))) for start in range(0, len(found), _ROWS_PER_JOB)]
    with closing(_parts(source, jobs, workers, preload)) as parts:
        for start, part in parts:
            found[start : start + len(part)] = part
            on_rows(done := done + len(part))
    return found


def _parts(
    source: Source, jobs: list[range], workers: int, preload: Sequence[str]
) -> Generator[tuple[int, list[bytes]]]:
    """Yields the hashes of jobs, each with its first row."""
    begun, do_job = time.monotonic(), _prepare(source)
    for i, job in enumerate(jobs):
        if workers > 1 and time.monotonic() - begun > _SECONDS_ALONE:
            try:
                yield from in_workers(partial(_prepare, source), jobs[i:], workers, preload)
            except WorkersDied as error:
                raise ResourceError(
                    f"{error.deaths} worker processes died in succession while reading rows {error.job.start} to "
                    f"{error.job.stop - 1} of the source. Out of memory? Use fewer --workers."
                ) from None
            return
        yield do_job(job)


def _prepare(source: Source) -> Callable[[range], tuple[int, list[bytes]]]:
    def do_job(job: range) -> tuple[int, list[bytes]]:
        return job.start, [row_digest(_read(source, number)) for number in source.numbers[job.start : job.stop]]

    return do_job


def _read(source: Source, number: int) -> Row | RowRejected:
    try:
        return source.row(number)
    except RowRejected as error:
        return error


def _feed(update: Callable[[bytes], object], value: Any) -> None:
    """Writes a value so that different values give different bytes."""
    if isinstance(value, Mapping):
        # Arrow gives every struct the keys of all structs in its column.
        names = [name for name, each in value.items() if not (each is None and isinstance(value, Struct))]
        update(b"{%d:" % len(names))
        for name in sorted(names):
            _feed(update, name)
            _feed(update, value[name])
    elif isinstance(value, list | tuple):
        update(b"[%d:" % len(value))
        for each in value:
            _feed(update, each)
    elif isinstance(value, np.ndarray):
        _feed(update, (str(value.dtype), list(value.shape), value.tobytes()))
    else:
        data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        update(f"{type(value).__name__}:{len(data)}:".encode())
        update(data)
