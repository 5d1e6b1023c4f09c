"""Rows of files that are read as a sequence of records: JSON lines, CSV, tar.

Opening a source passes over every file once and remembers where a record begins, one for each MiB. To read a row, a
worker goes to the place before it and passes over what lies between; rows in order follow each other directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from vlmdata.errors import SourceError

#: Least distance of two remembered places, in bytes of the (uncompressed) file.
_BLOCK_BYTES = 1 << 20


class RecordFile(Protocol):
    """One file of records. Cheap to pickle."""

    @property
    def path(self) -> str:
        """Where the file is, for messages."""

    def open(self, offset: int) -> BinaryIO:
        """A stream that stands at an offset."""

    def records(self, stream: BinaryIO) -> Iterator[tuple[int, Any]]:
        """Each record from where the stream stands, unread as far as possible, and the offset at which it begins.

        Raises:
            SourceError: If the file is damaged in a way that costs more than a row.
        """

    def values(self, record: Any, stream: BinaryIO) -> Mapping[str, Any]:
        """Column values of a record.

        Raises:
            RowRejected: MALFORMED_ROW if it cannot be read.
        """


@dataclass(frozen=True, eq=False)
class _Places:
    """Where some records of a file begin.

    Attributes:
        rows: int64 (n,) record numbers, ascending from 0.
        offsets: int64 (n,) byte offsets.
    """

    rows: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def before(self, row: int) -> tuple[int, int]:
        """The last remembered record that is not after ``row``, and its offset."""
        at = int(np.searchsorted(self.rows, row, "right")) - 1
        return int(self.rows[at]), int(self.offsets[at])


@dataclass
class _Cursor:
    """An open file, and the record that it gives next."""

    file: int
    stream: BinaryIO
    records: Iterator[tuple[int, Any]]
    next_row: int

    def read(self, row: int) -> Any:
        """The record of a row that is not before ``next_row``."""
        while True:
            _, record = next(self.records)
            self.next_row += 1
            if self.next_row > row:
                return record


@dataclass(eq=False)
class RecordRows:
    """The records of several files, one after the other.

    Attributes:
        files: The files.
        places: Per file, where records begin.
        starts: int64 (files + 1,) number of the first row of each file, and of all rows.
    """

    files: Sequence[RecordFile]
    places: Sequence[_Places]
    starts: npt.NDArray[np.int64]
    _cursor: _Cursor | None = field(default=None, init=False, repr=False)

    @classmethod
    def scan(cls, files: Sequence[RecordFile]) -> RecordRows:
        """Passes over all files once.

        Raises:
            SourceError: If a file is damaged.
        """
        places, starts = [], [0]
        for file in files:
            found, count = _scan(file)
            places.append(found)
            starts.append(starts[-1] + count)
        return cls(files, places, np.array(starts, dtype=np.int64))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def columns(self) -> None:
        """Rows may differ in their columns."""

    def values(self, number: int) -> Mapping[str, Any]:
        """Column values of a row.

        Raises:
            RowRejected: MALFORMED_ROW if it cannot be read.
            SourceError: If the file has changed since it was opened.
        """
        at = int(np.searchsorted(self.starts, number, "right")) - 1
        row = number - int(self.starts[at])
        cursor = self._at(at, row)
        try:
            record = cursor.read(row)
        except StopIteration:
            raise SourceError(
                f"SOURCE {self.files[at].path}: it has no record {row} any more; it was changed while it was being read"
            ) from None
        return self.files[at].values(record, cursor.stream)

    def _at(self, at: int, row: int) -> _Cursor:
        """A cursor that is not past the row, and not before the place from which it is reached soonest."""
        first, offset = self.places[at].before(row)
        cursor = self._cursor
        if cursor is None or cursor.file != at or not first <= cursor.next_row <= row:
            if cursor is not None:
                cursor.stream.close()
            stream = self.files[at].open(offset)
            cursor = self._cursor = _Cursor(at, stream, self.files[at].records(stream), first)
        return cursor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cursor": None}


def _scan(file: RecordFile) -> tuple[_Places, int]:
    rows, offsets, count = [0], [0], 0
    with file.open(0) as stream:
        for count, (offset, _) in enumerate(file.records(stream), start=1):
            if count == 1:
                offsets[0] = offset
            elif offset - offsets[-1] >= _BLOCK_BYTES:
                rows.append(count - 1)
                offsets.append(offset)
    return _Places(np.array(rows, dtype=np.int64), np.array(offsets, dtype=np.int64)), count
