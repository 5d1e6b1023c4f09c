"""JSON files: a list of objects, or objects one after another.

To find where an element ends, only quotes, brackets and commas are read. So a row that is not JSON is rejected on its
own, and no more than one element is in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from vlmdata.errors import SourceError
from vlmdata.preprocess.sources.byte_files import ByteFile
from vlmdata.preprocess.sources.counting import Counted
from vlmdata.preprocess.sources.data_files import DataFile
from vlmdata.preprocess.sources.records import BYTE_ORDER_MARK, JsonLinesFile, RecordFile, object_in

#: Bytes per request to a remote file when only the beginning is read.
_HEAD_BYTES = 1 << 20
_CHUNK = 1 << 16
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
#: Text up to a bracket, or also up to a comma. They do not match text that ends within a string.
_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+[\[\]{}]", re.DOTALL)
_BRACKET_OR_COMMA = re.compile(rb'(?:[^"\[\]{},]++|' + _STRING + rb")*+[\[\]{},]", re.DOTALL)
_TO_ELEMENT = re.compile(rb"[\s,]*+[^\s,]")
_TO_TEXT = re.compile(rb"\s*+\S")
#: Identifies sources that earlier versions read through Arrow, so that no run mixes both readings.
AS_TEXT = {"reader": "json"}


@dataclass(frozen=True)
class JsonFile(RecordFile):
    """A JSON file, which may be compressed with gzip. The body of a list begins after its bracket."""

    name = "json"
    endings = (".json", ".json.gz")
    identity = AS_TEXT

    is_list: bool  # whether it is a list; otherwise objects follow one another

    @classmethod
    def open(cls, file: ByteFile, index: DataFile | None = None) -> RecordFile:
        """Returns the reader of a JSON file by its first lines; a SourceError if it has no list and no objects.

        A file of one object per line is JSON lines, whatever its name.
        """
        with file.open(0, _HEAD_BYTES, counting=True) as stream:
            bytes_before = len(BYTE_ORDER_MARK) if stream.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0
            stream.seek(bytes_before)
            text = _Text(stream)
            first = text.pass_over(_TO_TEXT)
            if first is None:
                raise SourceError(f"SOURCE {file.path}: it has no rows")
            if first not in b"[{":
                raise SourceError(
                    f"SOURCE {file.path}: it begins with {chr(first)!r}, not with the [ of a list of objects or the {{ "
                    "of an object; give JSON in UTF-8"
                )
            if first == ord("["):
                return cls(file, is_list=True, body=text.offset)
            stream.seek(text.offset - 1)
            lines = (line.strip() for line in stream if not line.isspace())
            if next(lines).endswith(b"}") and next(lines, None) != b"{":
                return JsonLinesFile(file)
            return cls(file, is_list=False, body=bytes_before)

    @classmethod
    def count(cls, file: ByteFile, index: DataFile | None, block: int) -> Counted:
        """Counts the rows of a JSON file; a SourceError if a list has no end."""
        if file.restart_points == b"":
            raise SourceError(f"SOURCE {file.path}: it has no rows")
        return super().count(file, index, block)

    def records(self, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yields the elements and their offsets.

        A list without an end, or with text after it, is a SourceError.
        """
        text = _Text(stream)
        while (first := text.pass_over(_TO_ELEMENT if self.is_list else _TO_TEXT)) is not None:
            if self.is_list and first == ord("]"):
                if text.pass_over(_TO_TEXT) is not None:
                    raise SourceError(
                        f"SOURCE {self.file.path}: there is text after the end of the list, at byte {text.offset - 1}"
                    )
                return
            text.begin()
            offset = text.offset
            if not self._pass_over_element(text) and self.is_list:
                raise SourceError(
                    f"SOURCE {self.file.path}: the file is damaged or cut off: the element at byte {offset} is not "
                    "closed before the end"
                )
            yield offset, text.taken()
        if self.is_list:
            raise SourceError(f"SOURCE {self.file.path}: the file is damaged or cut off: the list has no ]")

    def values(self, record: bytes, stream: BinaryIO) -> Mapping[str, Any]:
        """Parses an element; MALFORMED_ROW if it is not an object."""
        return object_in(record, "element")

    def _pass_over_element(self, text: _Text) -> bool:
        """Moves behind an element, in a list before its comma. Returns False if the file ends before it does."""
        depth = 0
        while (mark := text.pass_over(_BRACKET if depth or not self.is_list else _BRACKET_OR_COMMA)) is not None:
            if mark in b"[{":
                depth += 1
            elif depth:
                depth -= 1
                if not depth and not self.is_list:
                    return True
            elif self.is_list and mark in b",]":
                text.back()
                return True
        text.to_end()
        return False


class _Text:
    """The text of a stream, of which no more is kept than from the beginning of an element on."""

    def __init__(self, stream: BinaryIO):
        self._stream, self._data = stream, b""
        self._before = stream.tell()  # offset of the data in the stream
        self._begin = self._at = 0

    @property
    def offset(self) -> int:
        """Offset in the stream."""
        return self._before + self._at

    def pass_over(self, pattern: re.Pattern[bytes]) -> int | None:
        """Moves behind text that fits a pattern, and returns its last byte; None if the stream ends before."""
        while (found := pattern.match(self._data, self._at)) is None:
            # Twice as much each time, because the pattern is matched again from its beginning.
            more = self._stream.read(max(_CHUNK, len(self._data) - self._begin))
            if not more:
                return None
            self._data = self._data[self._begin :] + more
            self._before, self._at, self._begin = self._before + self._begin, self._at - self._begin, 0
        self._at = found.end()
        return self._data[self._at - 1]

    def begin(self) -> None:
        """Begins an element at the byte before."""
        self.back()
        self._begin = self._at

    def back(self) -> None:
        """Moves one byte back."""
        self._at -= 1

    def to_end(self) -> None:
        """Moves to the end of the stream, after :meth:`pass_over` reached it."""
        self._at = len(self._data)

    def taken(self) -> bytes:
        """Returns the element, from its beginning up to here, and lets go of it."""
        begin, self._begin = self._begin, self._at
        return self._data[begin : self._at]
