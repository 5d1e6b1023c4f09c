"""Counts the records of files, and records the offsets of some of them.

Lines are counted without parsing, remote files in parallel ranges. CSV records and tar samples need one sequential
pass per file; of tars, only headers are read. Results are cached.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from vlmdata.preprocess.sources.byte_files import ByteFile, is_gzip, on_disk, restart_points, spacing_of
from vlmdata.preprocess.sources.data_files import STREAM_BYTES, DataFile
from vlmdata.preprocess.sources.identity import stream_digest
from vlmdata.preprocess.sources.kept import array_from_text, array_to_text, kept

#: Smallest distance between two recorded places, in bytes of the (uncompressed) file.
_BLOCK_BYTES = 1 << 20
#: Largest number of recorded places per source.
_MOST_PLACES = 1 << 20
#: Bytes per range when counting the lines of a remote file.
_RANGE_BYTES = 32 << 20
_TAIL_BYTES = 4 << 10
_THREADS = 16


@dataclass(frozen=True, eq=False)
class Places:
    """Offsets of some records of a file."""

    rows: npt.NDArray[np.int64]  # int64 (n,) record numbers, ascending from 0
    offsets: npt.NDArray[np.int64]  # int64 (n,) byte offsets

    def before(self, row: int) -> tuple[int, int]:
        """Returns the last recorded record up to ``row``, and its offset."""
        at = int(np.searchsorted(self.rows, row, "right")) - 1
        return int(self.rows[at]), int(self.offsets[at])


@dataclass(frozen=True, eq=False)
class Counted:
    """Result of counting the records of a file."""

    count: int  # number of records
    places: Places  # offsets of some records
    restart_points: bytes | None = None  # where decompression can start; None for a plain file
    content: str | None = None  # hash of the file's bytes; None unless all were read from disk
    metadata: str | None = None  # hash of the file's own metadata; None if it has none

    def to_json(self) -> Any:
        """Returns the result as JSON values."""
        points = None if self.restart_points is None else base64.b64encode(self.restart_points).decode()
        places = [array_to_text(self.places.rows), array_to_text(self.places.offsets)]
        return [self.count, places, points, self.content, self.metadata]

    @classmethod
    def from_json(cls, values: Any) -> Counted:
        """Parses the result of :meth:`to_json`."""
        count, (rows, offsets), points, content, metadata = values
        places = Places(array_from_text(rows), array_from_text(offsets))
        return cls(count, places, None if points is None else base64.b64decode(points), content, metadata)


#: Scans a file and records places, at least a given number of bytes apart.
Pass = Callable[[ByteFile, int], Counted]


def count_records(
    kind: str, files: Sequence[DataFile], pass_over: Pass, *, lines: bool, beside: Sequence[DataFile] = ()
) -> list[Counted]:
    """Counts the records of files by scanning them with ``pass_over``, or reuses an earlier count.

    With ``lines``, each line is a record, so that plain files need no scan. The count also depends on ``beside``.
    """
    block = max(_BLOCK_BYTES, sum(file.size for file in files) // _MOST_PLACES)

    def count() -> list[Counted]:
        ranges = max(1, _THREADS // len(files))
        spacing = spacing_of(list(files))
        one = partial(_count_file, pass_over=pass_over, lines=lines, block=block, spacing=spacing, ranges=ranges)
        with ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(one, files))

    return kept(
        f"{kind} {block}",
        [*files, *beside],
        count,
        lambda found: [each.to_json() for each in found],
        lambda values: [Counted.from_json(each) for each in values],
    )


def _count_file(file: DataFile, *, pass_over: Pass, lines: bool, block: int, spacing: int, ranges: int) -> Counted:
    if is_gzip(file):
        with on_disk(file) as here:
            points = restart_points(here, spacing, file.place)
            found = pass_over(ByteFile(here, points), block)
            return Counted(found.count, found.places, points, stream_digest(here))
    if lines:
        return _count_lines(file, block, ranges)
    return pass_over(ByteFile(file), block)


def _count_lines(file: DataFile, block: int, ranges: int) -> Counted:
    """Counts the lines of a plain file. A file on disk is read once and hashed at the same time."""
    digest = None if file.is_remote else xxhash.xxh3_128()
    step = _RANGE_BYTES if file.is_remote else max(1, file.size)
    starts = range(0, file.size, step)
    with ThreadPoolExecutor(ranges) as threads:
        pieces = list(threads.map(lambda start: _lines_in(file, start, start + step, block, digest), starts))
    rows, offsets, before = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)], 0
    for lines, begun, at in pieces:
        inside = at < file.size  # a newline at the end of the file does not start a line
        rows.append(before + begun[inside])
        offsets.append(at[inside])
        before += lines
    places = Places(np.concatenate(rows), np.concatenate(offsets))
    count = 0 if (blank := _blank_lines_at_end(file)) is None else before - blank + 1
    return Counted(count, places, content=None if digest is None else digest.hexdigest())


def _lines_in(
    file: DataFile, start: int, stop: int, block: int, digest: Any
) -> tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the number of newlines in a range, and the numbers and offsets of lines at least a block apart."""
    lines, rows, offsets, target = 0, list[int](), list[int](), start + block
    with file.open(buffered=0, counting=True) as stream:
        stream.seek(start)
        at = start
        while at < stop and (chunk := stream.read(min(STREAM_BYTES, stop - at))):
            if digest is not None:
                digest.update(chunk)
            begun = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + (at + 1)
            place = int(np.searchsorted(begun, target))
            while place < len(begun):
                rows.append(lines + place + 1)
                offsets.append(int(begun[place]))
                target = offsets[-1] + block
                place = int(np.searchsorted(begun, target))
            lines += len(begun)
            at += len(chunk)
    return lines, np.array(rows, dtype=np.int64), np.array(offsets, dtype=np.int64)


def _blank_lines_at_end(file: DataFile) -> int | None:
    """Returns the number of newlines after the last text; None without any text."""
    newlines, stop = 0, file.size
    with file.open(buffered=0, counting=True) as stream:
        while stop:
            start = max(0, stop - _TAIL_BYTES)
            stream.seek(start)
            tail = stream.read(stop - start)
            blank = tail[len(tail.rstrip()) :]
            newlines += blank.count(b"\n")
            if len(blank) < len(tail):
                return newlines
            stop = start
    return None


def places_of(offsets: Any, block: int) -> tuple[int, Places]:
    """Returns the number of ascending offsets, and places at least ``block`` bytes apart, starting with the first."""
    rows, found, count = [0], [0], 0
    for count, offset in enumerate(offsets, start=1):
        if count == 1:
            found[0] = offset
        elif offset - found[-1] >= block:
            rows.append(count - 1)
            found.append(offset)
    return count, Places(np.array(rows, dtype=np.int64), np.array(found, dtype=np.int64))
