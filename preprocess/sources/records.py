"""Rows of files that are sequences of records: JSON lines, CSV, tar.

To read a row, a worker starts at the last record before it whose offset was remembered when they were counted, about
one per MiB. Rows read in order need no skipping.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, ClassVar

import numpy as np
import numpy.typing as npt

from vlmdata.errors import SourceError
from vlmdata.preprocess import json_text
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.preprocess.sources.byte_files import ByteFile
from vlmdata.preprocess.sources.counting import Counted, Places, count_records, places_of
from vlmdata.preprocess.sources.data_files import DataFile, beside
from vlmdata.preprocess.sources.identity import stream_digest
from vlmdata.preprocess.sources.reader import FilesRead, Reader, pickled_with_code
from vlmdata.reasons import Reason

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
#: Bytes that messages show before one that is not UTF-8.
_BYTES_BEFORE = 20


@dataclass(frozen=True)
class RecordFile(Reader):
    """One file of records. A subclass reads a format of records one after another. Cheap to pickle.

    Attributes:
        lines: Whether each line is a record, so that plain files are counted without reading their records.
        index_ending: Ending of an index that may be beside a file, appended to its name; empty if there is none.
        file: The file, whose bytes are uncompressed if its name ends in ``.gz``.
        body: Offset of the first record.
    """

    lines: ClassVar[bool] = False
    index_ending: ClassVar[str] = ""

    file: ByteFile
    body: int = field(default=0, kw_only=True)

    @classmethod
    def open(cls, file: ByteFile, index: DataFile | None = None) -> RecordFile:
        """Returns the reader of a file and its index; a SourceError if its header cannot be read."""
        return cls(file)

    @classmethod
    def count(cls, file: ByteFile, index: DataFile | None, block: int) -> Counted:
        """Counts the records of a file, and records the offsets of some, at least ``block`` bytes apart."""
        # The hash of a compressed file is that of its compressed bytes.
        unknown = file.file.is_remote or file.restart_points is not None
        counted = cls.open(file, index).pass_over(block)
        return replace(counted, content=None if unknown else stream_digest(file.file))

    def pass_over(self, block: int) -> Counted:
        """Counts the records in sequence."""
        with self.file.open(self.body, counting=True) as stream:
            count, places = places_of((offset for offset, _ in self.records(stream)), block)
        return Counted(count, places)

    @abstractmethod
    def records(self, stream: BinaryIO) -> Iterator[tuple[int, Any]]:
        """Yields each record from the stream's position, parsed as little as possible, with its offset.

        A SourceError is damage to the file that affects more than a row.
        """

    @abstractmethod
    def values(self, record: Any, stream: BinaryIO) -> Mapping[str, Any]:
        """Returns the column values of a record; MALFORMED_ROW if it cannot be read."""

    @classmethod
    def read(cls, files: Sequence[DataFile], code: str = "") -> FilesRead:
        """Counts the records of files."""
        indexes = beside(files, cls.index_ending) if cls.index_ending else {}

        def count(file: ByteFile, block: int) -> Counted:
            return cls.count(file, indexes.get(file.path), block)

        kind = f"{cls.words()} {code}" if code else cls.words()
        counted = count_records(kind, files, count, lines=cls.lines, beside=list(indexes.values()))
        opened = [
            cls.open(ByteFile(file, of_file.restart_points), indexes.get(file.place))
            for file, of_file in zip(files, counted, strict=True)
        ]
        contents, metadata = [of_file.content for of_file in counted], [of_file.metadata for of_file in counted]
        return FilesRead(RecordRows.of(opened, counted), contents, metadata)


@dataclass
class _RecordCursor:
    """An open file, and the number of its next record."""

    file: int
    stream: BinaryIO
    records: Iterator[tuple[int, Any]]
    next_row: int
    places: Places

    def read(self, row: int) -> Any:
        """Reads the record of a row from ``next_row`` on; StopIteration if the file ends earlier, or one has moved."""
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
    """The records of several files, in order."""

    files: Sequence[RecordFile]
    places: Sequence[Places]  # remembered places of records, per file
    file_starts: npt.NDArray[np.int64]  # int64 (files + 1,) number of the first row of each file, and of all rows
    _cursor: _RecordCursor | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, files: Sequence[RecordFile], counted: Sequence[Counted]) -> RecordRows:
        """Creates the rows of files that have been counted."""
        starts = np.cumsum([0, *(each.count for each in counted)], dtype=np.int64)
        return cls(files, [each.places for each in counted], starts)

    def __len__(self) -> int:
        return int(self.file_starts[-1])

    def columns(self) -> None:
        """None: rows may differ in their columns."""

    def values(self, number: int) -> Mapping[str, Any]:
        """Column values of a row; MALFORMED_ROW if it cannot be read, a SourceError if the file has changed."""
        at = int(np.searchsorted(self.file_starts, number, "right")) - 1
        row = number - int(self.file_starts[at])
        cursor = self._at(at, row)
        try:
            record = cursor.read(row)
        except StopIteration:
            raise SourceError(
                f"SOURCE {self.files[at].file.path}: record {row} is not where it was counted; the file was changed "
                "while it was being read, or its index (.idx) belongs to another file"
            ) from None
        return self.files[at].values(record, cursor.stream)

    def _at(self, at: int, row: int) -> _RecordCursor:
        """Returns a cursor at or before the row, but not before the nearest remembered place."""
        first, offset = self.places[at].before(row)
        cursor = self._cursor
        if cursor is None or cursor.file != at or not first <= cursor.next_row <= row:
            if cursor is not None:
                cursor.stream.close()
            stream = self.files[at].file.open(max(offset, self.files[at].body))
            cursor = self._cursor = _RecordCursor(at, stream, self.files[at].records(stream), first, self.places[at])
        return cursor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cursor": None}

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return pickled_with_code(self, map(type, self.files))


@dataclass(frozen=True)
class JsonLinesFile(RecordFile):
    """A file of JSON lines, which may be compressed with gzip."""

    name = "jsonl"
    endings = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
    title = "JSON lines"
    lines = True

    def pass_over(self, block: int) -> Counted:
        """Counts the lines in sequence, up to the last one that is not blank."""
        count = 0

        def offsets(lines: Iterator[tuple[int, bytes]]) -> Iterator[int]:
            nonlocal count
            for number, (offset, line) in enumerate(lines, start=1):
                if not line.isspace():
                    count = number
                yield offset

        with self.file.open(counting=True) as stream:
            _, places = places_of(offsets(self.records(stream)), block)
        return Counted(count, places)

    def records(self, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yields the lines and their offsets."""
        offset = stream.tell()
        for line in stream:
            yield offset, line
            offset += len(line)

    def values(self, record: bytes, stream: BinaryIO) -> Mapping[str, Any]:
        """Parses the object in a line; MALFORMED_ROW if the line has none."""
        return object_in(record.removeprefix(BYTE_ORDER_MARK), "line")


def object_in(record: bytes, what: str) -> Mapping[str, Any]:
    """Parses the JSON object in a part of a file, ``line`` or ``element``; MALFORMED_ROW if there is none."""
    try:
        text = record.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        near = record[max(error.start - _BYTES_BEFORE, 0) :].decode("utf-8", "backslashreplace").rstrip("\r\n")
        raise RowRejected(
            Reason.MALFORMED_ROW,
            f"not UTF-8: byte {error.start} of the {what} is {record[error.start]:#04x}, near {excerpt(near)}; "
            "convert the file to UTF-8",
        ) from error
    if not text.strip():
        raise RowRejected(Reason.MALFORMED_ROW, f"a blank {what}")
    try:
        values = json_text.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowRejected(Reason.MALFORMED_ROW, f"not JSON: {error}: {excerpt(text)}") from error
    if not isinstance(values, dict):
        raise RowRejected(Reason.MALFORMED_ROW, f"not a JSON object: {excerpt(text)}")
    return values
