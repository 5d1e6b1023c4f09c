"""Rows of files that are sequences of records: JSON lines, CSV, tar.

Counting them remembers the offset of about one record per MiB. To read a row, a worker starts at the last remembered
record before it and skips the records between. Rows read in order need no skipping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from preprocess.sources.counting import Counted, Places
from vlmdata.errors import SourceError


class RecordFile(Protocol):
    """One file of records. Cheap to pickle."""

    @property
    def path(self) -> str:
        """Location of the file, for messages."""

    def open(self, offset: int) -> BinaryIO:
        """Opens a stream at an offset."""

    def records(self, stream: BinaryIO) -> Iterator[tuple[int, Any]]:
        """Yields each record from the stream's position, parsed as little as possible, with its offset.

        Raises:
            SourceError: If damage to the file affects more than a row.
        """

    def values(self, record: Any, stream: BinaryIO) -> Mapping[str, Any]:
        """Returns the column values of a record.

        Raises:
            RowRejected: MALFORMED_ROW if it cannot be read.
        """


@dataclass
class _Cursor:
    """An open file, and the number of its next record."""

    file: int
    stream: BinaryIO
    records: Iterator[tuple[int, Any]]
    next_row: int
    places: Places

    def read(self, row: int) -> Any:
        """Reads the record of a row from ``next_row`` on.

        Raises:
            StopIteration: If the file ends earlier, or a record has moved.
        """
        while True:
            offset, record = next(self.records)
            known, place = self.places.before(self.next_row)
            if known == self.next_row and known and place != offset:
                raise StopIteration
            self.next_row += 1
            if self.next_row > row:
                return record


@dataclass(eq=False)
class RecordRows:
    """The records of several files, in order.

    Attributes:
        files: The files.
        places: Remembered places of records, per file.
        starts: int64 (files + 1,) number of the first row of each file, and of all rows.
    """

    files: Sequence[RecordFile]
    places: Sequence[Places]
    starts: npt.NDArray[np.int64]
    _cursor: _Cursor | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, files: Sequence[RecordFile], counted: Sequence[Counted]) -> RecordRows:
        """Creates the rows of files that have been counted."""
        starts = np.cumsum([0, *(each.count for each in counted)], dtype=np.int64)
        return cls(files, [each.places for each in counted], starts)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def columns(self) -> None:
        """None: rows may differ in their columns."""

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
                f"SOURCE {self.files[at].path}: record {row} is not where it was counted; the file was changed while "
                "it was being read, or its index (.idx) belongs to another file"
            ) from None
        return self.files[at].values(record, cursor.stream)

    def _at(self, at: int, row: int) -> _Cursor:
        """Returns a cursor at or before the row, but not before the nearest remembered place."""
        first, offset = self.places[at].before(row)
        cursor = self._cursor
        if cursor is None or cursor.file != at or not first <= cursor.next_row <= row:
            if cursor is not None:
                cursor.stream.close()
            stream = self.files[at].open(offset)
            cursor = self._cursor = _Cursor(at, stream, self.files[at].records(stream), first, self.places[at])
        return cursor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cursor": None}
