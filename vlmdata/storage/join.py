"""Joins finished datasets into one with the same shards, byte for byte.

Shards and rows are numbered consecutively over all datasets. Index and ledger have the new numbers. The shards keep the
old numbers in their keys and metadata; the manifest records the difference for each shard (``row_offset``).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlmdata.errors import DatasetFormatError, UsageError
from vlmdata.format.index import DatasetIndex
from vlmdata.format.index_row import index_schema, with_columns
from vlmdata.format.ledger import Rejection, read_ledger
from vlmdata.format.manifest import Manifest, ShardInfo, Totals, summed
from vlmdata.format.schema import (
    INDEX_NAME,
    JOINED,
    LEDGER_NAME,
    parse_key,
    shard_name,
)
from vlmdata.format.selection import SELECTION, Selection, rows_digest
from vlmdata.format.source_columns import EXACT, source_fields
from vlmdata.storage import Store
from vlmdata.storage.derive import Derivation, close, take_tokenizer
from vlmdata.storage.join_checks import real_place, require_alike, require_distinct, require_whole
from vlmdata.storage.linked import Making, TakenShard, made_in, manifest_of, row_numbers, take_shards
from vlmdata.storage.transfer import How


@dataclass(frozen=True)
class JoinResult:
    """The result of a join: the new manifest, and the number of shards by the way they were transferred."""

    manifest: Manifest
    transferred: Mapping[How, int]


@dataclass(frozen=True, eq=False)
class _Part:
    """A dataset to be joined."""

    store: Store
    manifest: Manifest
    first_shard: int  # number of shards in the datasets before it
    first_row: int  # number of rows in the datasets before it
    row_offset: int  # added to its row numbers; above first_row if a dataset before it selects rows of its source

    def shards(self) -> Iterable[ShardInfo]:
        """Yields its shards as shards of the new dataset."""
        for number, info in enumerate(self.manifest.shards, start=self.first_shard):
            yield dataclasses.replace(
                info,
                name=shard_name(number),
                row_start=info.row_start + self.first_row,
                row_stop=info.row_stop + self.first_row,
                row_offset=info.row_offset + self.row_offset,
            )

    def index(self, schema: pa.Schema) -> pa.Table:
        """Returns its index as rows of the new index; fills in columns of absent optional members."""
        with self.store.local(INDEX_NAME) as folder:
            table = DatasetIndex.read(folder / INDEX_NAME).table
        columns = {
            "key": pa.array(shifted_keys(table["key"].to_pylist(), self.row_offset), pa.string()),
            "source_row": pc.add(table["source_row"], self.row_offset),
            "shard": pc.add(table["shard"], self.first_shard),
            **{
                field.name: _as_type(table[field.name], field.type)
                for field in source_fields(schema)
                if field.name in table.column_names
            },
        }
        for name, column in columns.items():
            table = table.set_column(table.schema.get_field_index(name), name, column)
        return with_columns(table, schema)

    def rejections(self) -> list[Rejection]:
        """Returns its rejections with the new row numbers."""
        with self.store.local(LEDGER_NAME) as folder:
            found = list(read_ledger(folder / LEDGER_NAME))
        return [dataclasses.replace(each, row=each.row + self.row_offset) for each in found]


def _joined_columns(parts: Sequence[_Part]) -> list[pa.Field]:
    """Returns the source columns of all datasets; one of different types is text, or a floating-point number."""
    found: dict[str, set[pa.DataType]] = {}
    for part in parts:
        with part.store.local(INDEX_NAME) as folder:
            for field in source_fields(pq.read_schema(folder / INDEX_NAME)):
                found.setdefault(field.name, set()).add(field.type)
    exact = {name for name, types in found.items() if types == {pa.int64(), pa.float64()} and _are_exact(parts, name)}
    return [
        pa.field(name, next(iter(types)) if len(types) == 1 else pa.float64() if name in exact else pa.string())
        for name, types in sorted(found.items())
    ]


def _are_exact(parts: Sequence[_Part], name: str) -> bool:
    """Whether all whole numbers in a column are floating-point numbers, too."""
    for part in parts:
        with part.store.local(INDEX_NAME) as folder:
            table = DatasetIndex.read(folder / INDEX_NAME).table
        if name in table.column_names and table[name].type == pa.int64() and len(table):
            least, most = pc.min_max(table[name]).as_py().values()
            if most is not None and max(-least, most) > EXACT:
                return False
    return True


def _as_type(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_list(column.type):
        return column.cast(kind)
    values = column.to_pylist()
    return column if column.type == kind else pa.array([None if v is None else json.dumps(v) for v in values], kind)


def join_datasets(
    sources: Sequence[Store],
    out: Store,
    *,
    allow_duplicates: bool = False,
    on_shard: Callable[[int, int], None] = lambda done, shards: None,
) -> JoinResult:
    """Joins finished datasets, of the current format or 1.1, to one of the current format. They stay unchanged.

    Args:
        sources: At least two datasets, in the order of the new one.
        out: Directory of the new dataset: empty, new, or with an interrupted join of the same datasets.
        allow_duplicates: Whether datasets may repeat the samples of others.
        on_shard: Called with the number of transferred shards and of all shards.

    Raises:
        ConfigMismatchError: If the datasets differ in family, tokenizer or another property that readers assume to
            be equal, one is of format 1.0, or ``out`` has other contents.
        DatasetFormatError: If a dataset is damaged: its index, ledger or tokenizer does not match its manifest, or a
            shard is missing or has another size. The contents of shards are not read.
        ResourceError: If the disk is full, or another command is at work in ``out``.
        UsageError: If there are fewer than two datasets, one repeats another, or ``out`` is one of them or within one.
    """
    if len(sources) < 2:
        raise UsageError("vlmdata join: give at least two datasets")
    for each in sources:
        if f"{real_place(out)}/".startswith(f"{real_place(each)}/"):
            raise UsageError(f"--out {out}: it is one of the datasets to join, or in one ({each}); give another folder")
    parts = _parts(sources, allow_duplicates)
    plan = json.dumps([part.manifest.fingerprint for part in parts]).encode()
    shards = [
        TakenShard(part.store, info, new.name)
        for part in parts
        for info, new in zip(part.manifest.shards, part.shards(), strict=True)
    ]
    with made_in(out, Making("join", "joining", "of other datasets", plan)) as lock:
        transferred = take_shards(shards, out, on_shard)
        manifest = close(out, lock, _derivation(parts, out))
    return JoinResult(manifest, transferred)


def _parts(sources: Sequence[Store], allow_duplicates: bool) -> list[_Part]:
    manifests = [manifest_of(store) for store in sources]
    inputs = list(zip(sources, manifests, strict=True))
    for each in inputs[1:]:
        require_alike(inputs[0], each)
    if not allow_duplicates:
        require_distinct(inputs)
    for store, manifest in inputs:
        require_whole(store, manifest)
    shards = accumulate((len(manifest.shards) for manifest in manifests), initial=0)
    rows = accumulate((manifest.totals.rows for manifest in manifests), initial=0)
    numbers = accumulate((row_numbers(manifest) for manifest in manifests), initial=0)
    return [_Part(*part) for part in zip(sources, manifests, shards, rows, numbers, strict=False)]


def _derivation(parts: Sequence[_Part], out: Store) -> Derivation:
    """Returns the dataset that the parts make, one after another."""
    manifests = [part.manifest for part in parts]
    features = tuple(sorted({feature for manifest in manifests for feature in manifest.features}))
    schema = pa.schema([*index_schema(features), *_joined_columns(parts)])
    rows: list[npt.NDArray[np.int64]] = []

    def index() -> Iterator[pa.Table]:
        for part in parts:
            table = part.index(schema)
            rows.append(table["source_row"].to_numpy())
            yield table

    def ledger() -> Iterator[bytes]:
        for part in parts:
            rejections = part.rejections()
            rows.append(np.array([each.row for each in rejections], dtype=np.int64))
            yield from (each.to_line() for each in rejections)

    def manifest() -> Manifest:
        return dataclasses.replace(
            manifests[0],
            config=_common([each.config for each in manifests]) | {JOINED: [dict(each.config) for each in manifests]},
            source=_source(parts, np.unique(np.concatenate(rows))),
            totals=Totals.summed(each.totals for each in manifests),
            rejects=summed(each.rejects for each in manifests),
            shards=tuple(info for part in parts for info in part.shards()),
            features=features,
            unused_keys=summed(each.unused_keys for each in manifests),
            unknown_keys=summed(each.unknown_keys for each in manifests),
            turns=summed(each.turns for each in manifests),
            version={},
        )

    def tokenizer() -> Mapping[str, str]:
        return take_tokenizer(parts[0].store, manifests[0].tokenizer_files, out)

    return Derivation(manifest, schema, index(), ledger(), tokenizer)


def _source(parts: Sequence[_Part], rows: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Returns the source of the new dataset. It has a selection if a dataset selects rows of its source."""
    source: dict[str, Any] = {
        "kind": JOINED,
        "rows": sum(part.manifest.totals.rows for part in parts),
        "datasets": [
            {
                "fingerprint": part.manifest.fingerprint,
                "shards": len(part.manifest.shards),
                "row_offset": part.row_offset,
                "source": dict(part.manifest.source),
            }
            for part in parts
        ],
    }
    if any(SELECTION in part.manifest.source for part in parts):
        numbers = sum(row_numbers(part.manifest) for part in parts)
        source[SELECTION] = dataclasses.asdict(Selection(numbers, rows_digest(rows)))
    return source


def _common(configs: Sequence[Any]) -> dict[str, Any]:
    """Returns the entries that are equal in all configurations."""
    found: dict[str, Any] = {}
    for name, value in configs[0].items():
        values = [config.get(name) for config in configs]
        if all(isinstance(each, Mapping) for each in values):
            found[name] = _common(values)
        elif all(each == value for each in values):
            found[name] = value
    return found


def shifted_keys(keys: Sequence[str], by: int) -> list[str]:
    """Returns keys with row numbers increased by ``by``.

    Raises:
        DatasetFormatError: If one is not a key.
    """
    shifted = []
    for key in keys:
        if parse_key(key) is None:
            raise DatasetFormatError(f"the index has {key!r}, which is not a key. Run `vlmdata verify` on its dataset.")
        row, dash, sample = key.partition("-")
        shifted.append(f"{int(row) + by:09d}{dash}{sample}")
    return shifted
