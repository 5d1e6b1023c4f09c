"""Arrow files and streams: each record batch is a fragment, whose header has its number of rows.

An Arrow file has the messages of a stream after its magic number, so one reader serves both. It reads headers as
described in the Arrow columnar format (encapsulated messages) and skips bodies.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa
import xxhash

from vlmdata.preprocess.sources.data_files import DataFile
from vlmdata.preprocess.sources.parquet import damaged
from vlmdata.preprocess.sources.tables import Fragments, TableFile

_FILE_MAGIC = b"ARROW1\0\0"
_CONTINUES = 0xFFFFFFFF
#: Kinds of messages, and numbers of fields, in Message.fbs.
_SCHEMA, _BATCH = 1, 3
_KIND, _HEADER, _BODY_BYTES = 1, 2, 3
#: Headers are small; bodies between them are often large.
_HEADER_BUFFER = 16 << 10


@dataclass(frozen=True)
class _Message:
    """A message: its kind, offset, size including the body, and the rows of a record batch."""

    kind: int
    offset: int
    size: int
    rows: int
    header: bytes


def _messages(file: DataFile, stream: BinaryIO) -> Iterator[_Message]:
    stream.seek(0)
    offset = len(_FILE_MAGIC) if stream.read(len(_FILE_MAGIC)) == _FILE_MAGIC else 0
    while True:
        stream.seek(offset)
        start = stream.read(8)
        if not start:
            return  # a stream may end without an end mark
        mark, length = struct.unpack("<II", start.ljust(8, b"\0"))
        begins = 8
        if mark != _CONTINUES:  # format before Arrow 0.15
            length, begins = mark, 4
        if length == 0:
            return
        if length > file.size - offset - begins:
            raise damaged(file, f"at byte {offset} there is no Arrow message")
        stream.seek(offset + begins)
        header = stream.read(length)
        try:
            kind, rows, body = _parse(header)
        except (struct.error, IndexError) as error:
            raise damaged(file, f"the Arrow message at byte {offset} cannot be read") from error
        size = begins + length + body
        if body < 0 or offset + size > file.size:
            raise damaged(file, f"the Arrow message at byte {offset} has {size} bytes, more than there are")
        yield _Message(kind, offset, size, rows, header)
        offset += size


def _parse(header: bytes) -> tuple[int, int, int]:
    """Parses kind, rows and body size from a flatbuffer."""
    message = _Table(header, struct.unpack_from("<I", header)[0])
    kind = message.value(_KIND, "<B")
    rows = message.table(_HEADER).value(0, "<q") if kind == _BATCH else 0
    return kind, rows, message.value(_BODY_BYTES, "<q")


@dataclass(frozen=True)
class _Table:
    """A table of a flatbuffer."""

    data: bytes
    at: int

    def value(self, field: int, form: str) -> int:
        """Returns a number; 0 if absent."""
        place = self._place(field)
        return int(struct.unpack_from(form, self.data, place)[0]) if place else 0

    def table(self, field: int) -> _Table:
        """Returns a nested table."""
        place = self._place(field)
        return _Table(self.data, place + struct.unpack_from("<I", self.data, place)[0])

    def _place(self, field: int) -> int:
        fields = self.at - struct.unpack_from("<i", self.data, self.at)[0]
        entry = 4 + 2 * field
        if entry >= struct.unpack_from("<H", self.data, fields)[0]:
            return 0
        offset = struct.unpack_from("<H", self.data, fields + entry)[0]
        return self.at + offset if offset else 0


def _schema(file: DataFile, stream: BinaryIO, messages: list[_Message]) -> pa.Schema:
    if not messages or messages[0].kind != _SCHEMA:
        raise damaged(file, "it does not begin with an Arrow schema")
    try:
        stream.seek(messages[0].offset)
        return pa.ipc.read_schema(pa.py_buffer(stream.read(messages[0].size)))
    except (pa.ArrowException, OSError) as error:
        raise damaged(file, error) from error


class ArrowReader(TableFile):
    """An open Arrow file, given the offset and bytes of each record batch."""

    name = "arrow"
    endings = (".arrow",)

    @classmethod
    def count(cls, file: DataFile) -> Fragments:
        """Reads the headers of all messages; a SourceError if it is not an Arrow file, or is truncated."""
        digest = xxhash.xxh3_128()
        with file.open(_HEADER_BUFFER, counting=True) as stream:
            messages = list(_messages(file, stream))
            for message in messages:
                digest.update(message.header)
            schema = _schema(file, stream, messages)
        batches = [message for message in messages if message.kind == _BATCH]
        counts, places = tuple(batch.rows for batch in batches), tuple((batch.offset, batch.size) for batch in batches)
        return Fragments(counts, schema, digest.hexdigest(), places)

    def __init__(self, file: DataFile, places: Sequence[tuple[int, int]]):
        self._file, self._places = file, places
        self._stream = file.open(buffered=0)
        self._between: dict[int, bytes] = {}

    def batches(self, fragment: int) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a record batch; a SourceError if they cannot be read."""
        # Schema and dictionaries are before and between batches; a later dictionary replaces or extends an earlier.
        before = b"".join(self._before(number) for number in range(fragment + 1))
        try:
            with pa.ipc.open_stream(pa.py_buffer(before + self._read(*self._places[fragment]))) as reader:
                found = reader.read_next_batch()
                found.validate(full=True)
        except (pa.ArrowException, OSError, StopIteration) as error:
            raise damaged(self._file, error) from error
        yield found

    def _before(self, fragment: int) -> bytes:
        """Reads what is between the previous batch and this one."""
        begins = sum(self._places[fragment - 1]) if fragment else 0
        size = self._places[fragment][0] - begins
        if size and fragment not in self._between:
            self._between[fragment] = self._read(begins, size).removeprefix(_FILE_MAGIC)
        return self._between[fragment] if size else b""

    def _read(self, offset: int, size: int) -> bytes:
        self._stream.seek(offset)
        return self._stream.read(size)

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()
