"""Completes a dataset: merges the records of all shards to index, ledger, tokenizer folder and manifest."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import batched
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlmdata.errors import ConfigMismatchError, ResourceError
from vlmdata.families.processor import learned_of
from vlmdata.format.index_row import index_schema
from vlmdata.format.manifest import Manifest, Totals, summed
from vlmdata.format.schema import (
    IMAGE_FILES,
    IMAGE_FILES_NAME,
    PROGRESS_DIR,
    TOKENIZER_DIR,
)
from vlmdata.format.source_columns import SOURCE, SourceTypes, column_name, columns_of
from vlmdata.format.tokenizer_files import hash_tokenizer_files
from vlmdata.format.writing import Hashing
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer
from vlmdata.preprocess.engines.base import system_message
from vlmdata.preprocess.recipes.image_files import SCHEMA as FILES_SCHEMA
from vlmdata.preprocess.recipes.image_files import FileVersions, merge_files, shards_of_paths
from vlmdata.preprocess.run.claim import Part, job_array
from vlmdata.preprocess.run.row_table import has_all_rows, rows_of_shards, write_row_table
from vlmdata.preprocess.shards.fingerprints import of_samples
from vlmdata.preprocess.shards.job import FILES_SUFFIX, RUN_FILE, ShardRecord, progress_name
from vlmdata.storage import Lock, Store
from vlmdata.storage.derive import Derivation, close, shards_together
from vlmdata.wording import counted

#: Further keys are counted together, so that data with names or ids as keys cannot fill the manifest.
_MOST_KEYS = 200
_OTHERS = "(other keys)"


def close_dataset(
    store: Store,
    lock: Lock,
    identity: Mapping[str, Any],
    records: list[ShardRecord],
    tokenizer: ChatTokenizer,
    parts: int = 1,
) -> Manifest:
    """Merges the records of all shards, then writes the manifest, if no other run took over.

    Raises:
        ConfigMismatchError: If an image file had different contents for different shards. Writes nothing.
        ResourceError: If the disk is full.
    """
    try:
        features = tuple(sorted({feature for record in records for feature in record.features}))
        config, shards = of_samples(identity["config"], features), range(len(records))
        manifest = Manifest(
            config=config,
            config_hash="",
            source=identity["source"],
            tokenizer=tokenizer.info,
            totals=Totals.summed(record.totals for record in records),
            rejects=summed(record.rejects for record in records),
            shards=tuple(record.info for record in records),
            index_sha256="",
            ledger_sha256="",
            features=features,
            family=identity["config"]["options"]["family"],
            unused_keys=most_frequent(summed(record.unused for record in records)),
            unknown_keys=most_frequent(summed(record.unknown for record in records)),
            turns=summed(record.turns for record in records),
            processor=learned_of(tokenizer.family),
        )
        schema, index = merged_index(store, shards, features, identity["config"]["options"].get("keep_columns", ()))
        made = Derivation(
            lambda: manifest,
            schema,
            index,
            merged_ledger(store, [shard for shard in shards if records[shard].info.rejected]),
            tokenizer=partial(_save_tokenizer, store, tokenizer),
            image_files=partial(_merge_image_files, store, parts),
            rows=partial(_merge_rows, store, shards),
        )
        return close(store, lock, made)
    except OSError as error:
        raise ResourceError(
            f"{store}: {counted(len(records), 'shard')} made, but completing the dataset failed: "
            f"{system_message(error)}. Free disk space and run the same command again."
        ) from error


def _save_tokenizer(store: Store, tokenizer: ChatTokenizer) -> Mapping[str, str]:
    with saved_tokenizer(store, tokenizer) as folder:
        return hash_tokenizer_files(folder)


def _merge_image_files(store: Store, parts: int) -> Mapping[str, Any]:
    with merged_image_files(store, store, parts) as files:
        pass
    if files is None:
        return {}
    store.stamp(IMAGE_FILES_NAME, store.modified_ns(RUN_FILE))
    return {IMAGE_FILES: files}


def _merge_rows(store: Store, shards: Sequence[int], index_sha256: str) -> None:
    if has_all_rows(store, shards):
        write_row_table(store, rows_of_shards(store, shards), index_sha256)


def merged_index(
    records: Store, shards: Sequence[int], features: Collection[str], kept: Sequence[str] = ()
) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """Merges the index rows of shards. Returns the columns, and the rows by row group: at most a thousand.

    Rows are streamed: memory does not grow with the dataset. Only columns of ``features`` are kept, and the source
    columns ``kept``. Their types depend on all rows, which are read twice then.
    """
    types = _source_types(records, shards, kept)
    indexed = index_schema(features)
    schema = pa.schema([*indexed, *(pa.field(column_name(name), kind) for name, kind in types.items())])

    def rows(content: bytes) -> pa.Table:
        table = pq.read_table(io.BytesIO(content), schema=indexed)
        for name, column in columns_of(source_values(content) if types else [], types).items():
            table = table.append_column(schema.field(name), column)
        return table

    contents = records.read_all(progress_name(shard, "parquet") for shard in shards)
    groups = batched(contents, shards_together(len(shards)))
    return schema, (pa.concat_tables(map(rows, group)) for group in groups)


def _source_types(records: Store, shards: Sequence[int], kept: Sequence[str]) -> dict[str, pa.DataType]:
    found = SourceTypes(kept)
    for content in records.read_all(progress_name(shard, "parquet") for shard in shards) if kept else ():
        found.add(source_values(content))
    return found.types


def source_values(content: bytes) -> list[dict[str, Any]]:
    """Returns the values of source columns of each sample in the index rows of a shard."""
    with pq.ParquetFile(io.BytesIO(content)) as file:
        if SOURCE not in file.schema_arrow.names:
            return [{}] * int(file.metadata.num_rows)
        return list(map(json.loads, file.read(columns=[SOURCE])[SOURCE].to_pylist()))


def merged_ledger(records: Store, shards: Sequence[int]) -> Iterator[bytes]:
    """Yields the rejects of each of some shards."""
    return records.read_all(progress_name(shard, "jsonl") for shard in shards)


@contextmanager
def merged_image_files(store: Store, records: Store, parts: int = 1) -> Iterator[dict[str, Any] | None]:
    """Merges the image file lists of shards. Yields the list's manifest entry, then renames the list.

    Yields None, and writes nothing, if no row named an image file. The caller sets the list's modification time
    (:meth:`Store.stamp`) to the start of the run: later file changes count. The time is not part of the content,
    which is the same for every copy of the source.

    Raises:
        ConfigMismatchError: If a file had different contents for different shards.
    """
    found = [name for name in records.listing(PROGRESS_DIR) if name.endswith(f".{FILES_SUFFIX}")]
    if not found:
        yield None
        return
    with store.writing(IMAGE_FILES_NAME) as unnamed:
        file = Hashing(unnamed)
        names = [f"{PROGRESS_DIR}/{name}" for name in sorted(found, key=lambda name: (len(name), name))]
        versions = FileVersions()
        tables = (pq.read_table(io.BytesIO(content), schema=FILES_SCHEMA) for content in records.read_all(names))
        counts = merge_files(tables, file, versions)
        if several := versions.several():
            raise _changed_files(store, shards_of_paths(records.read_all(names), several), parts)
        yield {**counts, "sha256": file.sha256}


def _changed_files(store: Store, changed: Mapping[str, Sequence[int]], parts: int) -> ConfigMismatchError:
    shards = sorted({shard for each in changed.values() for shard in each})
    path, its = next(iter(changed.items()))
    more = f" and {counted(len(changed) - 1, 'other file')}" if len(changed) > 1 else ""
    again = "the same command"
    if parts > 1:
        numbers = job_array(Part.for_shard(shard, parts) for shard in shards)
        again = f"the parts {numbers} of {parts}, whose shards name such files,"
    return ConfigMismatchError(
        f"{store}: image files changed while the shards were made: {path}{more} had different contents for shards "
        f"{its[0]} and {its[-1]}. Run {again} again: shards of earlier contents are recreated"
        f"{', then `vlmdata finish`' if parts > 1 else ''}."
    )


@contextmanager
def saved_tokenizer(store: Store, tokenizer: ChatTokenizer) -> Iterator[Path]:
    """Saves the tokenizer in the dataset, so that the dataset can be read and audited without other files.

    Yields the folder for inspection, then renames it.
    """
    with store.writing_folder(TOKENIZER_DIR) as folder:
        try:
            tokenizer.save(folder)
        except OSError:
            raise
        except Exception as error:  # its Rust part raises this on a full disk
            raise OSError(f"the tokenizer cannot be saved: {error}") from error
        yield folder


def most_frequent(counts: Mapping[str, int]) -> dict[str, int]:
    """Returns the counts of the most frequent keys, and of all others together, sorted by name."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    others = sum(count for _, count in ordered[_MOST_KEYS:])
    return dict(sorted([*ordered[:_MOST_KEYS], *([(_OTHERS, others)] if others else [])]))
