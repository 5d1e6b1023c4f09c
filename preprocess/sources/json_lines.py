"""JSON lines: one JSON object per line. An invalid line rejects one row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from preprocess import json_text
from preprocess.reject import RowRejected, excerpt
from preprocess.sources.byte_files import ByteFile
from preprocess.sources.counting import Counted, places_of
from vlmdata.reasons import Reason

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
#: Bytes that messages show before one that is not UTF-8.
_BYTES_BEFORE = 20


@dataclass(frozen=True)
class JsonLinesFile:
    """A file of JSON lines, which may be compressed with gzip."""

    file: ByteFile

    body = 0

    @staticmethod
    def pass_over(file: ByteFile, block: int) -> Counted:
        """Counts the lines of a compressed file."""
        lines = JsonLinesFile(file)
        with file.open() as stream:
            return Counted(*places_of((offset for offset, _ in lines.records(stream)), block))

    def records(self, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yields the lines and their offsets."""
        offset = stream.tell()
        for line in stream:
            yield offset, line
            offset += len(line)

    def values(self, record: bytes, stream: BinaryIO) -> Mapping[str, Any]:
        """Parses the object in a line; MALFORMED_ROW if the line has none."""
        record = record.removeprefix(_BYTE_ORDER_MARK)
        try:
            line = record.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            near = record[max(error.start - _BYTES_BEFORE, 0) :].decode("utf-8", "backslashreplace").rstrip("\r\n")
            raise RowRejected(
                Reason.MALFORMED_ROW,
                f"not UTF-8: byte {error.start} of the line is {record[error.start]:#04x}, near {excerpt(near)}; "
                "convert the file to UTF-8",
            ) from error
        if not line.strip():
            raise RowRejected(Reason.MALFORMED_ROW, "a blank line")
        try:
            values = json_text.loads(line)
        except (ValueError, RecursionError) as error:
            raise RowRejected(Reason.MALFORMED_ROW, f"not JSON: {error}: {excerpt(line)}") from error
        if not isinstance(values, dict):
            raise RowRejected(Reason.MALFORMED_ROW, f"not a JSON object: {excerpt(line)}")
        return values
