"""Holds out rows for validation, if a hash of their content is below the share (docs/decisions/0071).

A row stays on its side with more rows, another order or another kind of file. Equal rows are on the same side. A larger
share includes the rows of a smaller one.

Rows may be divided by what several have in common, such as their images (:class:`Grouping`, docs/decisions/0137).
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt
import xxhash

from vlmdata.errors import ResourceError, SourceError
from vlmdata.format.selection import SELECTION, rows_digest
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.sources.rows import Source, column_value
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


class Grouping(Protocol):
    """What several rows may have in common, by which they are held out together. Cheap to pickle."""

    @property
    def name(self) -> str:
        """As given to ``--holdout-by``, for the manifest and messages."""

    def prepare(self, source: Source) -> Callable[[Row], Sequence[int]]:
        """Returns what gives 64-bit hashes of a row. Rows that share one are on one side; a row may have none."""


@dataclass(frozen=True)
class ByColumn:
    """Divides rows by the value of a column, which may be within a mapping: ``meta.document``."""

    name: str

    def prepare(self, source: Source) -> Callable[[Row], Sequence[int]]:
        """Returns what gives the hash of the value. Values count as in :func:`content_hash`."""

        def hashes(row: Row) -> Sequence[int]:
            value = column_value(row.values, self.name)
            return () if value is None or value == "" else (_hash(_as_text(value)),)

        return hashes


def hold_out(
    source: Source,
    share: float,
    by: Grouping | None = None,
    *,
    workers: int = 1,
    preload: Sequence[str] = (),
    on_rows: Callable[[int], None] = lambda rows: None,
) -> dict[str, Source]:
    """Divides a source into ``train`` and ``validation``, under their old numbers. Reads all rows, but decodes nothing.

    ``share`` is between 0 and 1; a SourceError if a side would be empty. Rows that are connected by what they have in
    common (``by``) are on one side; rows that have nothing, by their content. The result does not depend on the number
    of ``workers``, which import the modules ``preload`` before they are forked. ``on_rows`` is called occasionally with
    the number of rows read so far.
    """
    rows, done = source.num_rows, 0
    jobs = [range(start, min(start + _ROWS_PER_JOB, rows)) for start in range(0, rows, _ROWS_PER_JOB)]
    found: dict[int, _Hashes] = {}
    with closing(_parts(source, share, by, jobs, workers, preload)) as parts:
        for start, part in parts:
            found[start] = part
            on_rows(done := done + len(part[0]))
    held = _held_out([found[job.start] for job in jobs], share)
    option = f"--holdout {share}{f' --holdout-by {by.name}' if by else ''}"
    divided = {}
    for side, mask in ((TRAIN, ~held), (VALIDATION, held)):
        numbers = np.flatnonzero(mask)
        if not len(numbers):
            raise SourceError(
                f"{option}: of {counted(len(mask), 'row')} none would be for {side}; "
                f"choose a {'smaller' if side == TRAIN else 'larger'} share"
            )
        selection = {"holdout": share, **({} if by is None else {"by": by.name}), "side": side}
        selection |= {"of_rows": len(mask), "rows_sha256": rows_digest(numbers)}
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
    columns = {name: _as_text(value) for name, value in values.items() if name != KEY_COLUMN and value is not None}
    return _hash({name: value for name, value in columns.items() if value != ""})  # as an empty field of CSV


def _hash(value: Any) -> int:
    digest = xxhash.xxh3_64()
    _feed(digest.update, value)
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


#: Number of hashes of each row, int64 (n,), and the hashes of all, uint64.
type _Hashes = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]
type _Job = Callable[[range], tuple[int, _Hashes]]


def _held_out(parts: Sequence[_Hashes], share: float) -> npt.NDArray[np.bool_]:
    """Returns which rows are held out, bool (n,), given the hashes of what they have in common.

    Rows that are connected by common hashes go with one of these, whichever is the first in an order that is random but
    fixed. So the side of a group does not depend on its size, and one that grows stays where it is or joins another.
    """
    counts = np.concatenate([np.zeros(0, np.int64), *(each for each, _ in parts)])
    flat = np.concatenate([np.zeros(0, np.uint64), *(each for _, each in parts)])
    distinct, places = np.unique(flat, return_inverse=True)
    held_hashes = distinct < np.uint64(math.ceil(share * 2.0**64))
    first_places = np.cumsum(counts) - counts
    parents: dict[int, int] = {}
    for row in np.flatnonzero(counts > 1).tolist():
        first, *others = (_root(parents, at) for at in places[first_places[row] :][: counts[row]].tolist())
        parents.update(dict.fromkeys([first, *others], first))
    leading: dict[int, tuple[int, int]] = {}
    for at in parents:
        root, rank = _root(parents, at), (xxhash.xxh3_64_intdigest(distinct[at].tobytes()), at)
        leading[root] = min(rank, leading.get(root, rank))
    groups = {at: leading[_root(parents, at)][1] for at in parents}
    held_hashes[list(groups)] = held_hashes[list(groups.values())]
    held = np.zeros(len(counts), np.bool_)
    held[counts > 0] = held_hashes[places[first_places[counts > 0]]]
    return held


def _root(parents: dict[int, int], at: int) -> int:
    while (parent := parents.get(at, at)) != at:
        parents[at] = parents.get(parent, parent)
        at = parent
    return at


def _parts(
    source: Source, share: float, by: Grouping | None, jobs: list[range], workers: int, preload: Sequence[str]
) -> Generator[tuple[int, _Hashes]]:
    """Yields the results of jobs, each with its first row."""
    begun = time.monotonic()
    do_job = _prepare(source, by)
    for i, job in enumerate(jobs):
        if workers > 1 and time.monotonic() - begun > _SECONDS_ALONE:
            try:
                yield from in_workers(partial(_prepare, source, by), jobs[i:], workers, preload)
            except WorkersDied as error:
                raise ResourceError(
                    f"--holdout {share}: {error.deaths} worker processes died in succession over rows "
                    f"{error.job.start} to {error.job.stop - 1}. Out of memory? Use fewer --workers."
                ) from None
            return
        yield do_job(job)


def _prepare(source: Source, by: Grouping | None) -> _Job:
    hashes = None if by is None else by.prepare(source)

    def do_job(numbers: range) -> tuple[int, _Hashes]:
        found = [_hashes_of_row(source, number, hashes) for number in numbers]
        counts = np.array([len(each) for each in found], np.int64)
        return numbers.start, (counts, np.array([each for row in found for each in row], np.uint64))

    return do_job


def _hashes_of_row(source: Source, number: int, hashes: Callable[[Row], Sequence[int]] | None) -> Sequence[int]:
    try:
        row = source.row(number)
    except RowRejected:  # it gives no sample on either side
        return ()
    return (() if hashes is None else hashes(row)) or (content_hash(row.values),)


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
