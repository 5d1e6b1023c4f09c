"""The record of a shard's rows: the content and image files by which a later run knows them, and their counts."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlmdata.storage import Store
from vlmdata.wording import encodable

#: Ending of the record of a shard's rows in an unfinished run.
ROWS_SUFFIX = "rows"
#: Counts by key that are kept for each row, under their names in the manifest.
NOTES = ("unused_keys", "unknown_keys", "turns")
SCHEMA = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),  # as in keys, index and ledger
        pa.field("source_row", pa.int64(), nullable=False),  # its number in the source of this version
        pa.field("content", pa.binary(16)),  # xxh3-128 of its content; null if a row ended the process that read it
        # Names of the columns that were read of it, as JSON, and the xxh3-128 of these; null if all of them were.
        pa.field("columns", pa.string()),
        pa.field("read", pa.binary(16)),
        pa.field("files", pa.list_(pa.string())),  # paths of the image files that it names; null if there are none
        pa.field("file_bytes", pa.int64(), nullable=False),  # of the image files of its samples
        pa.field("notes", pa.string()),  # counts by key as JSON; null if there are none
        pa.field("file", pa.string()),  # name of its file in the source of this version; null if unknown
        pa.field("file_row", pa.int64()),  # its number in that
        pa.field("id", pa.string()),  # what the data calls it; null if no column tells
    ]
)


@dataclass(frozen=True)
class RowRecord:
    """One row of a shard."""

    row: int  # its number in keys, index and ledger
    source_row: int  # its number in the source
    content: bytes | None  # hash of its content; None if unknown
    columns: Sequence[str] | None  # that were read of it; None if all were, or it is not known
    read: bytes | None  # hash of these
    files: Sequence[str]  # paths of the image files that it names
    file_bytes: int  # bytes of the image files of its samples
    notes: Mapping[str, Mapping[str, int]]  # counts by key, under the names of :data:`NOTES`
    file: str | None = None  # its place in the source, if known
    file_row: int | None = None
    id: str | None = None  # what the data calls it


def as_recorded(place: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the place of a row as it is recorded: its id as text."""
    return {
        name: encodable(str(value)) if name == "id" else value for name, value in place.items() if value is not None
    }


def write_rows(store: Store, name: str, shard: int, rows: Iterable[RowRecord]) -> None:
    """Writes the record of a shard's rows."""
    with store.writing(name) as file:
        pq.write_table(pa.Table.from_pylist([_fields(shard, each) for each in rows], schema=SCHEMA), file)


def read_rows(content: bytes) -> pa.Table:
    """Returns the rows of a record."""
    return pq.read_table(io.BytesIO(content), schema=SCHEMA)


def sum_notes(rows: pa.Table) -> dict[str, dict[str, int]]:
    """Returns the sums of the counts of rows, each sorted by key, under the names of :data:`NOTES`."""
    sums = {name: Counter[str]() for name in NOTES}
    values = rows["notes"].combine_chunks().dictionary_encode()
    counted = Counter(values.indices.drop_null().to_pylist())
    for at, text in enumerate(values.dictionary.to_pylist()):
        for name, counts in json.loads(text).items():
            for key, count in counts.items():
                sums[name][key] += count * counted[at]
    return {name: dict(sorted(counts.items())) for name, counts in sums.items()}


def _fields(shard: int, row: RowRecord) -> dict[str, Any]:
    notes = {name: dict(counts) for name, counts in row.notes.items() if counts}
    return {
        "shard": shard,
        "row": row.row,
        "source_row": row.source_row,
        "content": row.content,
        "columns": None if row.columns is None else json.dumps(row.columns, ensure_ascii=False),
        "read": row.read,
        "files": sorted(row.files) or None,
        "file_bytes": row.file_bytes,
        "notes": json.dumps(notes, sort_keys=True, ensure_ascii=False) if notes else None,
        "file": row.file,
        "file_row": row.file_row,
        "id": row.id,
    }
