"""Closes a dataset: writes its tables, its tokenizer folder and its manifest when its shards are in place.

Whoever makes a dataset describes it by a :class:`Derivation`: of rows of a source, of other datasets, or of both. The
manifest, or the list of versions, is written last, so a dataset exists whole or not at all.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from vlmdata.format.manifest import Manifest, canonical_hash
from vlmdata.format.schema import (
    INDEX_NAME,
    LEDGER_NAME,
    MANIFEST_NAME,
    SCHEMA_VERSION,
    TOKENIZER_DIR,
    VERSIONS_NAME,
)
from vlmdata.format.writing import Hashing
from vlmdata.storage.base import Lock, Store
from vlmdata.storage.transfer import transfer
from vlmdata.storage.versions import Version, versions_to_json
from vlmdata.version import __version__

#: Largest number of row groups of an index. Describing one takes about 4 kB in the file and 20 kB in memory.
MOST_ROW_GROUPS = 1000


@dataclass(frozen=True, eq=False)
class Derivation:
    """What a dataset holds besides its shards.

    Attributes:
        manifest: Called when the tables are written. What follows from other fields and files is filled in: hashes,
            the schema version, the writer.
        schema: Columns of the index.
        index: Rows of the index, one table for each row group.
        ledger: Lines of the ledger.
        tokenizer: Gives the dataset its tokenizer folder. Returns the sha256 of its files.
        image_files: Writes the list of image files, if there is one. Returns its entry of the manifest's source.
        rows: Writes the table of rows, given the sha256 of the index.
        earlier: All versions before it; empty if it is the first.
    """

    manifest: Callable[[], Manifest]
    schema: pa.Schema
    index: Iterable[pa.Table]
    ledger: Iterable[bytes]
    tokenizer: Callable[[], Mapping[str, str]]
    image_files: Callable[[], Mapping[str, Any]] = dict
    rows: Callable[[str], None] = lambda index_sha256: None
    earlier: Sequence[Version] = ()


def close(out: Store, lock: Lock, made: Derivation) -> Manifest:
    """Writes what a dataset lacks besides its shards, and commits it if no other run took over.

    Args:
        out: Where its files are.
        lock: The lock of the dataset, of all its versions.
        made: The dataset.

    Raises:
        LockedError: If another run took over. The dataset is not complete then.
        OSError: If the disk is full or not writable.
    """
    image_files = made.image_files()
    with writing_index(out, made.schema, made.index) as index:
        index_sha256 = index.sha256
    made.rows(index_sha256)
    with writing_ledger(out, made.ledger) as ledger:
        ledger_sha256 = ledger.sha256
    lock.check()
    tokenizer_files = made.tokenizer()
    manifest = made.manifest()
    manifest = replace(
        manifest,
        config_hash=canonical_hash(manifest.config),
        source={**manifest.source, **image_files},
        index_sha256=index_sha256,
        ledger_sha256=ledger_sha256,
        family=manifest.model_family.name,
        schema_version=SCHEMA_VERSION,
        created_by=f"vlmdata {__version__}",
        tokenizer_files=tokenizer_files,
    )
    if made.earlier:
        out.put(MANIFEST_NAME, manifest.to_json())
        version = Version(made.earlier[-1].number + 1, manifest.fingerprint)
        lock.commit(VERSIONS_NAME, versions_to_json([*made.earlier, version]))
    else:
        lock.commit(MANIFEST_NAME, manifest.to_json())
    return manifest


@contextmanager
def writing_index(out: Store, schema: pa.Schema, tables: Iterable[pa.Table]) -> Iterator[Hashing]:
    """Writes the index, a row group a table. Yields the file, so that its hash can be checked, then renames it."""
    with out.writing(INDEX_NAME) as unnamed:
        file = Hashing(unnamed)
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for table in tables:
                if table.num_rows:
                    writer.write_table(table)
        yield file


@contextmanager
def writing_ledger(out: Store, lines: Iterable[bytes]) -> Iterator[Hashing]:
    """Writes the ledger. Yields the file, so that its hash can be checked, then renames it."""
    with out.writing(LEDGER_NAME) as unnamed:
        file = Hashing(unnamed)
        for line in lines:
            file.write(line)
        yield file


def take_tokenizer(store: Store, files: Mapping[str, str], out: Store) -> Mapping[str, str]:
    """Gives ``out`` the files of a tokenizer folder: name -> sha256. Returns them."""
    folders = {posixpath.dirname(f"{TOKENIZER_DIR}/{name}") for name in files}
    out.prepare(*folders)
    out.tidy(*folders)  # of a run that was killed here
    for name in files:
        transfer(store, f"{TOKENIZER_DIR}/{name}", out, f"{TOKENIZER_DIR}/{name}")
    return files


def with_shards(table: pa.Table, numbers: npt.NDArray[np.integer]) -> pa.Table:
    """Returns a table with other numbers in its column of shards: ``numbers`` has the new one of each old one."""
    at = table.schema.get_field_index("shard")
    shards = numbers.astype(np.int32)[table["shard"].to_numpy()]
    return table.set_column(at, table.schema.field(at), pa.array(shards, pa.int32()))


def row_groups(table: pa.Table, shards: int) -> Iterator[pa.Table]:
    """Yields the row groups of an index or a table of rows, which ascend by shard: at most a thousand."""
    groups = table["shard"].to_numpy() // shards_together(shards)
    bounds = np.flatnonzero(np.diff(groups, prepend=-1, append=-1)).tolist()
    for first, stop in pairwise(bounds):
        yield table.slice(first, stop - first)


def shards_together(shards: int) -> int:
    """Returns how many of so many shards have one row group."""
    return max(1, -(-shards // MOST_ROW_GROUPS))
