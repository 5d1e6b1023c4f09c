"""``rows.parquet``: the rows of a finished dataset by content, with their shards and numbers.

No reader of samples needs it, so the manifest does not name it. It names the index that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from vlmdata.errors import DatasetFormatError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import PROGRESS_DIR, ROWS_NAME
from vlmdata.preprocess.shards.job import progress_name
from vlmdata.preprocess.shards.rows import ROWS_SUFFIX, SCHEMA, read_rows
from vlmdata.storage import Store
from vlmdata.storage.derive import row_groups

_OF_INDEX = b"index_sha256"
_REMEDY = (
    "Without it, which rows have changed is not known. Restore it from a copy or restore the source, make a second "
    "dataset of the new rows (a loader reads a list of datasets, `vlmdata join` makes one of several), or give another "
    "--out to make all rows again."
)


def write_row_table(store: Store, tables: Iterable[pa.Table], index_sha256: str) -> None:
    """Writes the rows of a dataset, a row group for each table."""
    schema = SCHEMA.with_metadata({_OF_INDEX: index_sha256.encode()})
    with (
        store.writing(ROWS_NAME) as file,
        pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        for table in tables:
            if table.num_rows:
                writer.write_table(table.cast(schema), row_group_size=table.num_rows)


def take_row_table(old: Store, was: Manifest, store: Store, index_sha256: str, made: Manifest | None = None) -> None:
    """Gives a dataset the rows of another one with the same rows and shards, such as its copy in another codec.

    Nothing is written if those of the other are unknown.

    Args:
        old: The other dataset.
        was: Its manifest.
        store: The dataset.
        index_sha256: Of its index.
        made: Its manifest if it has rows already, of which what the source does not determine stays.
    """
    try:
        known = read_row_table(old, was)
        rows = known if made is None or store.size(ROWS_NAME) is None else read_row_table(store, made)
    except DatasetFormatError:
        store.delete([ROWS_NAME])
        return
    if known["row"] != rows["row"]:
        store.delete([ROWS_NAME])
        return
    for name in ("source_row", "content", "files"):
        rows = rows.set_column(SCHEMA.get_field_index(name), SCHEMA.field(name), known[name])
    write_row_table(store, row_groups(rows, len(was.shards)), index_sha256)


def rows_of_shards(records: Store, shards: Sequence[int]) -> Iterator[pa.Table]:
    """Yields the rows of the shards of a run, from their records."""
    yield from map(read_rows, records.read_all(progress_name(shard, ROWS_SUFFIX) for shard in shards))


def has_all_rows(records: Store, shards: Sequence[int]) -> bool:
    """Returns whether all shards of a run have a record of their rows; those of an earlier vlmdata have none."""
    found = records.listing(PROGRESS_DIR)
    return all(progress_name(shard, ROWS_SUFFIX).removeprefix(f"{PROGRESS_DIR}/") in found for shard in shards)


def read_row_table(store: Store, manifest: Manifest) -> pa.Table:
    """Returns the rows of a finished dataset.

    Raises:
        DatasetFormatError: If they are missing, damaged, or of another dataset; names the remedy.
    """
    path = store.path(ROWS_NAME)
    if store.size(ROWS_NAME) is None:
        raise DatasetFormatError(
            f"{path}: not there: the dataset was made by an earlier vlmdata, or by select, join or recode. {_REMEDY}"
        )
    with store.local(ROWS_NAME) as folder:
        try:
            # Not through pq.read_table, which does not verify the checksums of pages.
            with pq.ParquetFile(folder / ROWS_NAME, page_checksum_verification=True) as file:
                table = file.read()
            of = (table.schema.metadata or {}).get(_OF_INDEX, b"").decode()
            for column in SCHEMA:  # earlier versions did not record all
                if column.name not in table.column_names:
                    table = table.append_column(column, pa.nulls(len(table), column.type))
            table = table.select(SCHEMA.names).cast(SCHEMA)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DatasetFormatError(f"{path}: cannot be read: {error}. {_REMEDY}") from error
    if of != manifest.index_sha256 or table.num_rows != manifest.totals.rows:
        raise DatasetFormatError(
            f"{path}: has {table.num_rows} rows of the index {of[:16]}…, but the manifest has {manifest.totals.rows} "
            f"rows and the index {manifest.index_sha256[:16]}…. {_REMEDY}"
        )
    return table
