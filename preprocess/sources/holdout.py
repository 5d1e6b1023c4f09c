"""Holds out rows for validation, if a hash of their content is below the share (docs/decisions/0071).

A row stays on its side with more rows, another order or another kind of file. Equal rows are on the same side. A larger
share includes the rows of a smaller one.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import xxhash

from vlmdata.errors import ResourceError, SourceError
from vlmdata.format.selection import SELECTION, rows_digest
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.sources.rows import Rows, Source
from vlmdata.preprocess.sources.webdataset import KEY_COLUMN
from vlmdata.wording import counted
from vlmdata.workers import WorkersDied, in_workers

TRAIN, VALIDATION = "train", "validation"
_ROWS_PER_JOB = 1024
#: Smaller sources use no workers, which take seconds to start.
_SECONDS_ALONE = 3.0
#: JSON's and Arrow's text of truth values, as Python and pandas write it.
_TRUTHS = {"true": "True", "false": "False"}
#: Length of the longest float that Python writes.
_LONGEST_FLOAT = 24
_CHUNK = 1 << 13  # rows


def hold_out(
    source: Source,
    share: float,
    *,
    workers: int = 1,
    preload: Sequence[str] = (),
    on_rows: Callable[[int], None] = lambda rows: None,
) -> dict[str, Source]:
    """Divides a source into ``train`` and ``validation``, under their old numbers. Reads all rows, but decodes nothing.

    ``share`` is between 0 and 1; a SourceError if a side would be empty. The result does not depend on the number of
    ``workers``, which import the modules ``preload`` before they are forked. ``on_rows`` is called occasionally with
    the number of rows read so far.
    """
    held, done = np.zeros(source.num_rows, dtype=bool), 0
    jobs = [range(start, min(start + _ROWS_PER_JOB, len(held))) for start in range(0, len(held), _ROWS_PER_JOB)]
    with closing(_parts(source.rows, share, jobs, workers, preload)) as parts:
        for start, part in parts:
            held[start : start + len(part)] = part
            on_rows(done := done + len(part))
    divided = {}
    for side, mask in ((TRAIN, ~held), (VALIDATION, held)):
        numbers = np.flatnonzero(mask)
        if not len(numbers):
            raise SourceError(
                f"--holdout {share}: of {counted(len(mask), 'row')} none would be for {side}; "
                f"choose a {'smaller' if side == TRAIN else 'larger'} share"
            )
        selection = {"holdout": share, "side": side, "of_rows": len(mask), "rows_sha256": rows_digest(numbers)}
        identity = {**source.identity, "rows": len(numbers), SELECTION: selection}
        divided[side] = dataclasses.replace(source, numbers=SelectedRows.of(mask), identity=identity)
    return divided


def is_held_out(values: Mapping[str, Any], share: float) -> bool:
    """Returns whether a row with these column values is held out."""
    return content_hash(values) < share * 2.0**64


def content_hash(values: Mapping[str, Any]) -> int:
    """Returns a 64-bit hash of a row's content, equal for every kind of file that holds the row.

    Columns are hashed as text, because CSV holds text only. Images stored in the row are hashed by their bytes,
    regardless of name, and image files by their path. Keys without a value count as absent, and 1.0 as 1, because both
    depend on other rows in some kinds of files. The key of a WebDataset sample is ignored.
    """
    digest = xxhash.xxh3_64()
    columns = {name: _as_text(value) for name, value in values.items() if name != KEY_COLUMN and value is not None}
    _feed(digest.update, {name: value for name, value in columns.items() if value != ""})  # as an empty field of CSV
    return digest.intdigest()


def _as_text(value: Any) -> Any:
    """Returns a column's value as text; lists, mappings and bytes unchanged, and parsed if the text is their JSON.

    Text that no conversion writes for a number or a truth value stays as it is: ``007``, ``1.50``.
    """
    if isinstance(value, Mapping | list | tuple | bytes):
        return value
    text = str(value)
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    if text in _TRUTHS:
        return _TRUTHS[text]
    # Some kinds of files hold whole numbers as floats if other rows have fractions or no value.
    if len(text) <= _LONGEST_FLOAT and text[-1:].isdecimal() and (text.endswith(".0") or "e+" in text):
        try:
            number = float(text)
        except ValueError:
            return text
        if repr(number) == text:
            return str(int(number))
    return text


def _feed(update: Callable[[bytes], object], value: Any) -> None:
    """Writes a value so that different values give different bytes."""
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        value = value["bytes"]  # a stored image and its file name
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, Mapping):
        update(b"{")
        for name in sorted(name for name, item in value.items() if item is not None):
            _feed(update, name)
            _feed(update, value[name])
        update(b"}")
    elif isinstance(value, list | tuple):
        update(b"[")
        for item in value:
            _feed(update, item)
        update(b"]")
    else:
        data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        update(f"{type(value).__name__}:{len(data)}:".encode())
        update(data)


def _parts(
    rows: Rows, share: float, jobs: list[range], workers: int, preload: Sequence[str]
) -> Generator[tuple[int, npt.NDArray[np.bool_]]]:
    """Yields the results of jobs, each with its first row."""
    begun = time.monotonic()
    do_job = _prepare(rows, share)
    for i, job in enumerate(jobs):
        if workers > 1 and time.monotonic() - begun > _SECONDS_ALONE:
            try:
                yield from in_workers(partial(_prepare, rows, share), jobs[i:], workers, preload)
            except WorkersDied as error:
                raise ResourceError(
                    f"--holdout {share}: {error.deaths} worker processes died in succession over rows "
                    f"{error.job.start} to {error.job.stop - 1}. Out of memory? Use fewer --workers."
                ) from None
            return
        yield do_job(job)


def _prepare(rows: Rows, share: float) -> Callable[[range], tuple[int, npt.NDArray[np.bool_]]]:
    def do_job(numbers: range) -> tuple[int, npt.NDArray[np.bool_]]:
        return numbers.start, np.array([_row_is_held_out(rows, number, share) for number in numbers], dtype=bool)

    return do_job


def _row_is_held_out(rows: Rows, number: int, share: float) -> bool:
    try:
        return is_held_out(rows.values(number), share)
    except RowRejected:  # it gives no sample on either side
        return False


@dataclass(frozen=True, eq=False)
class SelectedRows(Sequence[int]):
    """Ascending row numbers."""

    bits: npt.NDArray[np.uint8]  # uint8 (ceil(rows / 8),) as packed by numpy: 1 where the row is chosen
    counts: npt.NDArray[np.int64]  # int64 (chunks + 1,) number of chosen rows before each chunk, and in total

    @classmethod
    def of(cls, mask: npt.NDArray[np.bool_]) -> SelectedRows:
        """Selects the rows where the mask is True."""
        starts = np.arange(0, len(mask), _CHUNK)
        counts = np.add.reduceat(mask, starts, dtype=np.int64) if len(mask) else np.zeros(0, np.int64)
        return cls(np.packbits(mask), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))

    def __len__(self) -> int:
        return int(self.counts[-1])

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"row numbers are read in ascending order, not with a step of {step}")
            return [int(number) for number in self.between(start, max(start, stop))]
        at = range(len(self))[index]
        return int(self.between(at, at + 1)[0])

    def __iter__(self) -> Iterator[int]:
        for chunk in range(len(self.counts) - 1):
            yield from self._chunk(chunk).tolist()

    def between(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Returns the chosen rows from the ``start``-th to before the ``stop``-th, int64 (stop - start,)."""
        first = int(np.searchsorted(self.counts, start, "right")) - 1
        last = int(np.searchsorted(self.counts, stop, "left"))
        chunks = [self._chunk(chunk) for chunk in range(first, last)]
        before = int(self.counts[first])
        return np.concatenate([np.zeros(0, np.int64), *chunks])[start - before : stop - before]

    def _chunk(self, chunk: int) -> npt.NDArray[np.int64]:
        packed = self.bits[chunk * _CHUNK // 8 : (chunk + 1) * _CHUNK // 8]
        return np.flatnonzero(np.unpackbits(packed)) + chunk * _CHUNK
