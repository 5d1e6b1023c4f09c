"""Hashes of rows by content: what a later run compares to know which rows are new.

Equal rows have equal hashes wherever they are in the source. Unlike the hash of a holdout
(:mod:`vlmdata.preprocess.sources.holdout`), this one tells values apart that a recipe may tell apart, as ``1`` and
``1.0``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from vlmdata.errors import ResourceError
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row, Struct
from vlmdata.preprocess.sources.rows import Source
from vlmdata.workers import WorkersDied, in_workers

#: Bytes of a hash.
DIGEST_BYTES = 16
Digests = npt.NDArray[np.bytes_]
"""S16 (n,): a hash for each row."""
#: Begins the key of a value that JSON does not have.
_MARK = "\0"
_ROWS_PER_JOB = 1024
#: Smaller sources use no workers, which take seconds to start.
_SECONDS_ALONE = 3.0


def row_digest(row: Row | RowRejected) -> bytes:
    """Returns the xxh3-128 of a row's content; of a row that cannot be read, of the reason.

    Columns without a value count as absent: in some kinds of files, other rows determine whether they are there.
    """
    if isinstance(row, RowRejected):
        found: Any = [row.reason.value, row.message]
    else:
        found = {name: _as_json(value) for name, value in row.values.items() if value is not None}
    text = json.dumps(found, sort_keys=True, check_circular=False)
    return xxhash.xxh3_128_digest(text.encode())


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


def _as_json(value: Any) -> Any:
    """Returns a value of which the JSON text differs from that of every other value."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        # Arrow gives every struct the keys of all structs in its column.
        absent = isinstance(value, Struct)
        return {str(name): _as_json(each) for name, each in value.items() if not (absent and each is None)}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    if isinstance(value, np.ndarray):
        return {f"{_MARK}{value.dtype}": [list(value.shape), xxhash.xxh3_128_hexdigest(value.tobytes())]}
    found = xxhash.xxh3_128_hexdigest(value) if isinstance(value, bytes) else str(value)
    return {f"{_MARK}{type(value).__name__}": found}
