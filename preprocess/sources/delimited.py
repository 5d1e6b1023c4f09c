"""CSV and TSV files: a header line, then one record per row. Every value is text; an empty field is None.

Quotes follow RFC 4180 in both: a field that starts with a quote ends at the next quote that is not doubled, and may
contain separators and newlines.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from vlmdata.errors import SourceError
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.preprocess.sources.byte_files import ByteFile
from vlmdata.preprocess.sources.data_files import DataFile
from vlmdata.preprocess.sources.records import RecordFile
from vlmdata.reasons import Reason

#: The csv module's default limit, 128 KiB, is too small for an image in base64.
_FIELD_LIMIT = min(sys.maxsize, (1 << 31) - 1)

#: Bytes per request to a remote file when only the header is read.
_HEADER_BYTES = 16 << 10


@dataclass(frozen=True)
class _Damaged:
    """A record that the csv module cannot read."""

    problem: str


@dataclass(frozen=True)
class DelimitedFile(RecordFile):
    """A CSV or TSV file, which may be compressed with gzip. Its body begins after the header."""

    name = "csv"
    endings = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
    title = "CSV or TSV"

    delimiter: str  # separator of fields
    columns: tuple[str, ...]  # column names from the header

    @classmethod
    def open(cls, file: ByteFile, index: DataFile | None = None) -> DelimitedFile:
        """Reads the names of the columns; a SourceError if there is no usable header."""
        delimiter = "\t" if ".tsv" in file.path.lower()[-7:] else ","
        with file.open(0, _HEADER_BYTES, counting=True) as stream:
            lines = _Lines(stream)
            try:
                columns = tuple(next(_reader(lines, delimiter), []))
            except csv.Error as error:
                raise SourceError(f"SOURCE {file.path}: the header, line 1, cannot be read: {error}") from error
        if not columns:
            problem = "the header, line 1, is blank" if lines.offset else "it has no rows"
            raise SourceError(f"SOURCE {file.path}: {problem}")
        columns = (columns[0].removeprefix("\ufeff"), *columns[1:])
        _require_names(file.path, columns)
        return cls(file, delimiter, columns, body=lines.offset)

    def records(self, stream: BinaryIO) -> Iterator[tuple[int, list[str] | _Damaged]]:
        """Yields the records and their offsets. Skips blank lines between records.

        A quote that is never closed, which would make the rest of the file one field, is a SourceError.
        """
        lines = _Lines(stream)
        reader = _reader(lines, self.delimiter)
        while True:
            offset = lines.offset
            try:
                record: list[str] | _Damaged = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if lines.ended:
                    raise SourceError(
                        f"SOURCE {self.file.path}: the record at byte {offset} opens a quote that is not closed before "
                        f"the end of the file ({error}); double a quote that is part of the text"
                    ) from error
                record = _Damaged(f"{error}: {excerpt(lines.last.strip())}")
            if record:
                yield offset, record

    def values(self, record: list[str] | _Damaged, stream: BinaryIO) -> Mapping[str, Any]:
        """Returns the fields by column; MALFORMED_ROW if they do not fit the header, or are not UTF-8."""
        if isinstance(record, _Damaged):
            raise RowRejected(Reason.MALFORMED_ROW, f"not a record of {self.file.path}: {record.problem}")
        if len(record) != len(self.columns):
            raise RowRejected(
                Reason.MALFORMED_ROW,
                f"{len(record)} fields, but the header has {len(self.columns)}: {excerpt(self.delimiter.join(record))}",
            )
        for name, text in zip(self.columns, record, strict=True):
            if not text.isascii() and any("\udc80" <= character <= "\udcff" for character in text):
                shown = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
                raise RowRejected(Reason.MALFORMED_ROW, f"{name} is not UTF-8: {excerpt(shown)}")
        return {name: text or None for name, text in zip(self.columns, record, strict=True)}


class _Lines:
    """Lines of text for the csv module, with their offsets."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self.offset = stream.tell()
        self.last = ""
        self.ended = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._stream.readline()
        if not line:
            self.ended = True
            raise StopIteration
        self.offset += len(line)
        self.last = line.decode("utf-8", "surrogateescape")
        return self.last


def _reader(lines: _Lines, delimiter: str) -> Iterator[list[str]]:
    csv.field_size_limit(_FIELD_LIMIT)
    return csv.reader(lines, delimiter=delimiter, strict=True)


def _require_names(path: str, columns: tuple[str, ...]) -> None:
    repeated = sorted({name for name in columns if columns.count(name) > 1})
    if "" in columns or repeated:
        problem = f"names {', '.join(repeated)} twice" if repeated and repeated[0] else "has a column without a name"
        raise SourceError(f"SOURCE {path}: the header, line 1, {problem}: {excerpt(', '.join(columns))}")
    if len(columns) == 1 and (found := next((mark for mark in ";\t|" if mark in columns[0]), None)):
        raise SourceError(
            f"SOURCE {path}: the header, line 1, has one column, {columns[0]!r}. Fields of .csv are separated by "
            f"commas and of .tsv by tabs, not by {found!r}; save it in one of these forms."
        )
