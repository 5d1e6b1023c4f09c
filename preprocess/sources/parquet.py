"""Parquet files: each row group is a fragment. The footer has their numbers of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from vlmdata.errors import SourceError
from vlmdata.preprocess.sources.data_files import DataFile
from vlmdata.preprocess.sources.tables import Fragments, TableFile

_TAIL = 64 << 10
_MAGIC = b"PAR1"
#: Row groups up to this many stored bytes are fetched in a few large reads, larger ones column by column.
_FETCHED_AT_ONCE = 256 << 20
_COLUMN_BUFFER = 1 << 20
#: Approximate decoded bytes of rows in memory at a time.
_BATCH_BYTES = 32 << 20
_MOST_ROWS = 1024


def _footer(file: DataFile) -> bytes:
    with file.open(buffered=0, counting=True) as stream:
        tail = _end(stream, file.size, _TAIL)
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if len(tail) < 12 or tail[-4:] != _MAGIC or length > file.size:
            raise damaged(file, "it does not end with a Parquet footer")
        return tail[-length:] if length <= len(tail) else _end(stream, file.size, length)


def _end(stream: Any, size: int, wanted: int) -> bytes:
    stream.seek(max(0, size - wanted))
    data: bytes = stream.read(wanted)
    return data


def damaged(file: DataFile, why: object) -> SourceError:
    """Returns the error for a file that cannot be read."""
    said = str(why).strip().splitlines()
    what = said[0] if said else why
    return SourceError(f"SOURCE {file.place}: the file is damaged, cut off or of another kind: {what}")


class ParquetReader(TableFile):
    """An open Parquet file."""

    name = "parquet"
    endings = (".parquet",)

    @classmethod
    def count(cls, file: DataFile) -> Fragments:
        """Reads the footer; a SourceError if the file has none."""
        footer = _footer(file)
        try:
            metadata = pq.read_metadata(pa.BufferReader(footer))
            counts = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
            return Fragments(counts, metadata.schema.to_arrow_schema(), xxhash.xxh3_128_hexdigest(footer))
        except (pa.ArrowException, OSError) as error:
            raise damaged(file, error) from error

    def __init__(self, file: DataFile, _places: object = None):
        self._file = file
        self._stream = file.open(buffered=0)
        try:
            metadata = pq.read_metadata(self._stream)
            groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
            columns = [[group.column(column) for column in range(group.num_columns)] for group in groups]
            stored = max((sum(column.total_compressed_size for column in each) for each in columns), default=0)
            at_once = file.is_remote and stored <= _FETCHED_AT_ONCE
            self._stream.seek(0)
            self._parquet = pq.ParquetFile(
                self._stream, metadata=metadata, pre_buffer=at_once, buffer_size=0 if at_once else _COLUMN_BUFFER
            )
        except (pa.ArrowException, OSError) as error:
            self._stream.close()
            raise damaged(file, error) from error

    def batches(self, fragment: int) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a row group in batches; a SourceError if they cannot be read."""
        group = self._parquet.metadata.row_group(fragment)
        row_bytes = max(1, group.total_byte_size // max(1, group.num_rows))
        rows = min(_MOST_ROWS, max(1, _BATCH_BYTES // row_bytes))
        try:
            yield from self._parquet.iter_batches(rows, row_groups=[fragment], use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise damaged(self._file, error) from error

    def close(self) -> None:
        """Closes the file."""
        self._parquet.close()
        self._stream.close()
