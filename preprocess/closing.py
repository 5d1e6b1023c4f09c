"""Closing a dataset: from the records of all shards to index, ledger, tokenizer folder and manifest."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from preprocess.chat.tokenizer import ChatTokenizer
from preprocess.engines.base import system_message
from preprocess.image_files import merge_files
from preprocess.key_counts import KeyCounts
from preprocess.shard_job import FILES_SUFFIX, PROGRESS_DIR, RUN_FILE, ShardRecord, progress_path
from vlmdata import __version__
from vlmdata.errors import ResourceError
from vlmdata.format.atomic import atomic_path, sync, write_atomically
from vlmdata.format.index_row import index_schema
from vlmdata.format.manifest import Manifest, Totals, canonical_hash
from vlmdata.format.schema import IMAGE_FILES, IMAGE_FILES_NAME, INDEX_NAME, LEDGER_NAME, MANIFEST_NAME, TOKENIZER_DIR
from vlmdata.format.tokenizer_files import hash_tokenizer_files
from vlmdata.wording import counted


def close_dataset(
    directory: Path, identity: Mapping[str, Any], records: list[ShardRecord], tokenizer: ChatTokenizer
) -> Manifest:
    """Merges the shards' records and writes the manifest, last of all."""
    try:
        features = tuple(sorted({feature for record in records for feature in record.features}))
        shards = range(len(records))
        with merged_index(directory, directory, shards, features) as index:
            index_hash = file_sha256(index)
        with merged_ledger(directory, directory, shards) as ledger:
            ledger_hash = file_sha256(ledger)
        began_ns = (directory / PROGRESS_DIR / RUN_FILE).stat().st_mtime_ns
        with merged_image_files(directory, directory, shards, began_ns) as files:
            image_files = {} if files is None else {IMAGE_FILES: files}
        with saved_tokenizer(directory, tokenizer) as folder:
            tokenizer_files = hash_tokenizer_files(folder)
        keys = KeyCounts.sum(record.keys for record in records).to_json()
        rejects: Counter[str] = Counter()
        for record in records:
            rejects.update(record.rejects)
        manifest = Manifest(
            config=identity["config"],
            config_hash=canonical_hash(identity["config"]),
            source={**identity["source"], **image_files},
            tokenizer=tokenizer.info,
            totals=_sum([record.totals for record in records]),
            rejects=dict(sorted(rejects.items())),
            shards=tuple(record.info for record in records),
            index_sha256=index_hash,
            ledger_sha256=ledger_hash,
            features=features,
            family=identity["config"]["options"]["family"],
            unused_keys=keys["unused"],
            unknown_keys=keys["unknown"],
            created_by=f"vlmdata {__version__}",
            tokenizer_files=tokenizer_files,
        )
        write_atomically(directory / MANIFEST_NAME, manifest.to_json())
    except OSError as error:
        raise ResourceError(
            f"{directory}: {counted(len(records), 'shard')} made, but closing the dataset failed: "
            f"{system_message(error)}. Make room and run the same command again."
        ) from error
    return manifest


def _sum(totals: list[Totals]) -> Totals:
    names = Totals.__dataclass_fields__
    return Totals(**{name: sum(getattr(each, name) for each in totals) for name in names})


@contextmanager
def merged_index(directory: Path, records: Path, shards: Iterable[int], features: Collection[str]) -> Iterator[Path]:
    """Merges the index rows of shards; yields the file for a look at it, then gives it its name.

    One row group per shard, streamed: memory does not grow with the dataset. Only columns of used features stay.

    Args:
        directory: The dataset.
        records: Folder with the shards' records in its progress folder.
        shards: Shard numbers, ascending.
        features: Format features that the dataset uses.
    """
    schema = index_schema(features)
    with atomic_path(directory / INDEX_NAME) as path:
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for shard in shards:
                table = pq.read_table(progress_path(records, shard, "parquet"), schema=schema)
                if table.num_rows:
                    writer.write_table(table, row_group_size=max(1, table.num_rows))
        yield path


@contextmanager
def merged_ledger(directory: Path, records: Path, shards: Iterable[int]) -> Iterator[Path]:
    """Merges the rejects of shards; yields the file for a look at it, then gives it its name."""
    with atomic_path(directory / LEDGER_NAME) as path:
        with open(path, "wb") as ledger:
            for shard in shards:
                ledger.write(progress_path(records, shard, "jsonl").read_bytes())
        yield path


@contextmanager
def merged_image_files(
    directory: Path, records: Path, shards: Iterable[int], began_ns: int
) -> Iterator[dict[str, Any] | None]:
    """Merges the lists of image files of shards; yields what the manifest says of it, then gives the list its name.

    Yields None, and writes nothing, if no row named an image file.

    Args:
        directory: The dataset.
        records: Folder with the shards' records in its progress folder.
        shards: Shard numbers, ascending.
        began_ns: When the run began. The list gets this modification time: it says from when on changes of files
            count, and it is no part of the content, which is the same for every copy of the source.
    """
    found = [path for shard in shards if (path := progress_path(records, shard, FILES_SUFFIX)).exists()]
    if not found:
        yield None
        return
    with atomic_path(directory / IMAGE_FILES_NAME) as path:
        counts = merge_files(found, path)
        yield {**counts, "sha256": file_sha256(path)}
        os.utime(path, ns=(began_ns, began_ns))


@contextmanager
def saved_tokenizer(directory: Path, tokenizer: ChatTokenizer) -> Iterator[Path]:
    """Puts the tokenizer beside the data, so the dataset can be read and audited on its own.

    Yields the folder for a look at it, then gives it its name.
    """
    final, partial = directory / TOKENIZER_DIR, directory / PROGRESS_DIR / TOKENIZER_DIR
    shutil.rmtree(partial, ignore_errors=True)
    try:
        tokenizer.save(partial)
    except OSError:
        raise
    except Exception as error:  # its Rust half says so when the disk is full
        raise OSError(f"the tokenizer cannot be saved: {error}") from error
    for entry in [*partial.rglob("*"), partial]:
        sync(entry)
    yield partial
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def file_sha256(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
