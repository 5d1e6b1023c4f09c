"""Completes a dataset: merges the records of all shards to index, ledger, tokenizer folder and manifest."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlmdata.errors import ConfigMismatchError, ResourceError
from vlmdata.families.processor import learned_of
from vlmdata.format.index_row import index_schema
from vlmdata.format.manifest import Manifest, Totals, canonical_hash, summed
from vlmdata.format.schema import (
    IMAGE_FILES,
    IMAGE_FILES_NAME,
    INDEX_NAME,
    LEDGER_NAME,
    MANIFEST_NAME,
    PROGRESS_DIR,
    TOKENIZER_DIR,
)
from vlmdata.format.source_columns import SOURCE, SourceTypes, column_name, columns_of
from vlmdata.format.tokenizer_files import hash_tokenizer_files
from vlmdata.format.writing import Hashing
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer
from vlmdata.preprocess.engines.base import system_message
from vlmdata.preprocess.recipes.image_files import FileVersions, merge_files, shards_of_paths
from vlmdata.preprocess.run.claim import Part, job_array
from vlmdata.preprocess.run.row_table import has_all_rows, rows_of_shards, write_row_table
from vlmdata.preprocess.shards.fingerprints import of_samples
from vlmdata.preprocess.shards.job import FILES_SUFFIX, RUN_FILE, ShardRecord, progress_name
from vlmdata.storage import Lock, Store
from vlmdata.version import __version__
from vlmdata.wording import counted

#: Largest number of row groups of an index. Describing one takes about 4 kB in the file and 20 kB in memory.
_MOST_ROW_GROUPS = 1000
#: Further keys are counted together, so that data with names or ids as keys cannot fill the manifest.
_MOST_KEYS = 200
_OTHERS = "(other keys)"
_TOTALS = tuple(field.name for field in fields(Totals))


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
        with merged_image_files(store, store, parts) as files:
            image_files = {} if files is None else {IMAGE_FILES: files}
        if files is not None:
            store.stamp(IMAGE_FILES_NAME, store.modified_ns(RUN_FILE))
        features = tuple(sorted({feature for record in records for feature in record.features}))
        shards = range(len(records))
        kept = identity["config"]["options"].get("keep_columns", ())
        with merged_index(store, store, shards, features, kept) as index:
            index_hash = index.sha256
        if has_all_rows(store, shards):
            write_row_table(store, rows_of_shards(store, shards), index_hash)
        with merged_ledger(store, store, [n for n in shards if records[n].info.rejected]) as ledger:
            ledger_hash = ledger.sha256
        with saved_tokenizer(store, tokenizer) as folder:
            tokenizer_files = hash_tokenizer_files(folder)
        config = of_samples(identity["config"], features)
        manifest = Manifest(
            config=config,
            config_hash=canonical_hash(config),
            source={**identity["source"], **image_files},
            tokenizer=tokenizer.info,
            totals=Totals(**{name: sum(getattr(each.totals, name) for each in records) for name in _TOTALS}),
            rejects=summed(record.rejects for record in records),
            shards=tuple(record.info for record in records),
            index_sha256=index_hash,
            ledger_sha256=ledger_hash,
            features=features,
            family=identity["config"]["options"]["family"],
            unused_keys=most_frequent(summed(record.unused for record in records)),
            unknown_keys=most_frequent(summed(record.unknown for record in records)),
            turns=summed(record.turns for record in records),
            created_by=f"vlmdata {__version__}",
            tokenizer_files=tokenizer_files,
            processor=learned_of(tokenizer.family),
        )
        lock.commit(MANIFEST_NAME, manifest.to_json())
    except OSError as error:
        raise ResourceError(
            f"{store}: {counted(len(records), 'shard')} made, but completing the dataset failed: "
            f"{system_message(error)}. Free disk space and run the same command again."
        ) from error
    return manifest


@contextmanager
def merged_index(
    store: Store, records: Store, shards: Sequence[int], features: Collection[str], kept: Sequence[str] = ()
) -> Iterator[Hashing]:
    """Merges the index rows of shards. Yields the file, so that its hash can be checked, then renames it.

    Rows are streamed: memory does not grow with the dataset. Each row group holds one shard or, with over a
    thousand shards, several, so that there are at most a thousand groups. Only columns of ``features`` are kept, and
    the source columns ``kept``. Their types depend on all rows, which are read twice then.
    """
    types = _source_types(records, shards, kept)
    columns = [pa.field(column_name(name), kind) for name, kind in types.items()]
    indexed = index_schema(features)
    schema = pa.schema([*indexed, *columns])
    together = -(-len(shards) // _MOST_ROW_GROUPS)
    contents = records.read_all(progress_name(shard, "parquet") for shard in shards)
    with store.writing(INDEX_NAME) as unnamed:
        file = Hashing(unnamed)
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            group: list[pa.Table] = []
            for number, content in enumerate(contents, start=1):
                table = pq.read_table(io.BytesIO(content), schema=indexed)
                for name, column in columns_of(source_values(content) if types else [], types).items():
                    table = table.append_column(schema.field(name), column)
                group.append(table)
                if number % together and number < len(shards):
                    continue
                table = pa.concat_tables(group)
                group.clear()
                if table.num_rows:
                    writer.write_table(table, row_group_size=table.num_rows)
        yield file


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


@contextmanager
def merged_ledger(store: Store, records: Store, shards: Sequence[int]) -> Iterator[Hashing]:
    """Merges the rejects of shards. Yields the file, so that its hash can be checked, then renames it."""
    with store.writing(LEDGER_NAME) as unnamed:
        file = Hashing(unnamed)
        for content in records.read_all(progress_name(shard, "jsonl") for shard in shards):
            file.write(content)
        yield file


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
        counts = merge_files(records.read_all(names), file, versions)
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
