"""Hashes of rows by content: what a later run compares to know which rows are new.

Equal rows have equal hashes wherever they are in the source. Unlike the hash of a holdout
(:mod:`vlmdata.preprocess.sources.holdout`), this one tells values apart that a recipe may tell apart, as ``1`` and
``1.0``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from vlmdata.errors import ResourceError
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row, Struct
from vlmdata.preprocess.sources.rows import Source, id_of
from vlmdata.wording import encodable
from vlmdata.workers import WorkersDied, in_workers

#: Bytes of a hash.
DIGEST_BYTES = 16
Digests = npt.NDArray[np.bytes_]
"""S16 (n,): a hash for each row."""
type Columns = tuple[str, ...]
#: Begins the key of a value that JSON does not have.
_MARK = "\0"
_ROWS_PER_JOB = 1024
#: Smaller sources use no workers, which take seconds to start.
_SECONDS_ALONE = 3.0


@dataclass(frozen=True, eq=False)
class RowDigests:
    """The hashes of the rows of a source, in order."""

    content: Digests  # of all columns
    read: Mapping[Columns, Digests]  # of some columns; of a row that cannot be read, empty
    ids: pa.Array  # text: what the data calls each row; null if no column tells


def row_digest(row: Row | RowRejected) -> bytes:
    """Returns the xxh3-128 of a row's content; of a row that cannot be read, of the reason.

    Columns without a value count as absent: in some kinds of files, other rows determine whether they are there.
    """
    return row_digests_by(row, ())[0]


def row_digests_by(row: Row | RowRejected, several: Iterable[Columns]) -> list[bytes]:
    """Returns :func:`row_digest` of a row, followed by the hashes of some of its columns for each of ``several``.

    Each value is read once. Of a row that cannot be read, the latter are empty.
    """
    if isinstance(row, RowRejected):
        return [_digest([row.reason.value, row.message]), *(b"" for _ in several)]
    found = {name: _as_json(value) for name, value in row.values.items() if value is not None}
    chosen = ({name: found[name] for name in columns if name in found} for columns in several)
    return list(map(_digest, [found, *chosen]))


def _digest(content: Any) -> bytes:
    return xxhash.xxh3_128_digest(json.dumps(content, sort_keys=True, check_circular=False).encode())


def row_digests(
    source: Source,
    several: Sequence[Columns] = (),
    id_column: str | None = None,
    *,
    workers: int = 1,
    preload: Sequence[str] = (),
    on_rows: Callable[[int], None] = lambda rows: None,
) -> RowDigests:
    """Returns the hashes of all rows of a source, in order. Reads all rows, but decodes nothing.

    Args:
        source: The source.
        several: Columns of which hashes are wanted besides those of all columns.
        id_column: Column with the id of a row; None for one of a usual name.
        workers: Number of processes; the result does not depend on it.
        preload: Modules that these import before they are forked.
        on_rows: Called occasionally with the number of rows read so far.

    Raises:
        ResourceError: If processes die over the rows.
    """
    found, done = np.zeros((source.num_rows, 1 + len(several)), f"S{DIGEST_BYTES}"), 0
    jobs = [range(start, min(start + _ROWS_PER_JOB, len(found))) for start in range(0, len(found), _ROWS_PER_JOB)]
    ids: dict[int, pa.Array] = {}
    with closing(_parts(partial(_prepare, source, several, id_column), jobs, workers, preload)) as parts:
        for start, part, its in parts:
            found[start : start + len(part)], ids[start] = part, its
            on_rows(done := done + len(part))
    names = pa.concat_arrays([pa.array([], pa.string()), *(ids[job.start] for job in jobs)])
    return RowDigests(found[:, 0], {columns: found[:, at] for at, columns in enumerate(several, start=1)}, names)


type _Job = Callable[[range], _Part]
type _Part = tuple[int, list[list[bytes]], pa.Array]


def _parts(prepare: Callable[[], _Job], jobs: list[range], workers: int, preload: Sequence[str]) -> Generator[_Part]:
    """Yields the hashes and ids of jobs, each with its first row."""
    begun, do_job = time.monotonic(), prepare()
    for i, job in enumerate(jobs):
        if workers > 1 and time.monotonic() - begun > _SECONDS_ALONE:
            try:
                yield from in_workers(prepare, jobs[i:], workers, preload)
            except WorkersDied as error:
                raise ResourceError(
                    f"{error.deaths} worker processes died in succession while reading rows {error.job.start} to "
                    f"{error.job.stop - 1} of the source. Out of memory? Use fewer --workers."
                ) from None
            return
        yield do_job(job)


def _prepare(source: Source, several: Sequence[Columns], id_column: str | None) -> _Job:
    def do_job(job: range) -> _Part:
        found, ids = [], []
        for number in source.numbers[job.start : job.stop]:
            row = _read(source, number)
            found.append(row_digests_by(row, several))
            ids.append(None if isinstance(row, RowRejected) else id_of(row.values, id_column))
        return job.start, found, pa.array([None if each is None else encodable(str(each)) for each in ids], pa.string())

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
