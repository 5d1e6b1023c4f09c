"""Makes a dataset of chosen samples of another one, with the same shards, byte for byte.

The index has the chosen samples. Shards without any are left out, and the others are numbered anew. Samples keep their
keys and row numbers. The ledger is empty, because rejected rows are not chosen.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from vlmdata.errors import UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.index import DatasetIndex
from vlmdata.format.index_row import index_schema
from vlmdata.format.manifest import (
    DROPPED_REASONING,
    ROWS_WITH_DROPPED_REASONING,
    Manifest,
    ShardInfo,
    Totals,
)
from vlmdata.format.schema import (
    DOCUMENTS,
    INDEX_NAME,
    LEDGER_NAME,
    SCHEMA_VERSION,
    SELECTED,
    shard_name,
)
from vlmdata.format.selection import SELECTION, Selection, rows_digest
from vlmdata.format.source_columns import source_fields
from vlmdata.format.tokenizer_files import recorded_tokenizer_files
from vlmdata.format.writing import Hashing
from vlmdata.select.choice import Choice, Chosen, Mask
from vlmdata.storage.base import Store
from vlmdata.storage.join_checks import real_place, require_whole
from vlmdata.storage.linked import Making, TakenShard, made_in, manifest_of, row_numbers, take_shards, take_tokenizer
from vlmdata.storage.transfer import How
from vlmdata.version import __version__

_FILES = "source"  # the codec that stores files as they are
_ROW_GROUPS = 1000  # at most, so that the footer of the index stays small


@dataclass(frozen=True)
class SelectResult:
    """The result of a selection: the new manifest, and the number of shards by the way they were transferred."""

    manifest: Manifest
    transferred: Mapping[How, int]


def select_dataset(
    dataset: VlmDataset,
    store: Store,
    out: Store,
    choice: Choice,
    chosen: Chosen,
    *,
    on_shard: Callable[[int, int], None] = lambda done, shards: None,
) -> SelectResult:
    """Makes a dataset of the current format of chosen samples. The other dataset stays unchanged.

    Args:
        dataset: The dataset to choose from, of any format.
        store: Where it is.
        out: Directory of the new dataset: empty, new, or with an interrupted run of the same selection.
        choice: The criteria, for the manifest.
        chosen: The samples that they leave.
        on_shard: Called with the number of transferred shards and of all shards.

    Raises:
        ConfigMismatchError: If ``out`` has other contents.
        DatasetFormatError: If the dataset is damaged: its index, ledger or tokenizer does not match its manifest, or a
            shard is missing or has another size. The contents of shards are not read.
        ResourceError: If the disk is full, or another command is at work in ``out``.
        UsageError: If ``out`` is the dataset, or within it.
    """
    if f"{real_place(out)}/".startswith(f"{real_place(store)}/"):
        raise UsageError(f"--out {out}: it is the dataset to select from, or in it ({store}); give another folder")
    parent = manifest_of(store)
    require_whole(store, parent, "select")
    table = dataset.index.table.filter(pa.array(chosen.mask))
    taken = np.unique(dataset.index.shard[chosen.mask])
    column = table.schema.get_field_index("shard")
    numbers = np.searchsorted(taken, table["shard"].to_numpy()).astype(np.int32)
    index = DatasetIndex(table.set_column(column, table.schema.field(column), pa.array(numbers)))
    source = _source(parent, index, choice, chosen)
    plan = json.dumps([source, rows_digest(np.flatnonzero(chosen.mask))], sort_keys=True).encode()
    shards = [TakenShard(store, parent.shards[old], shard_name(new)) for new, old in enumerate(taken.tolist())]
    with made_in(out, Making("selection", "selecting", "of another dataset or of other samples", plan)) as complete:
        transferred = take_shards(shards, out, on_shard)
        tokenizer_files = _take_tokenizer(dataset, store, parent, out)
        infos = _shards(index, [shard.info for shard in shards])
        features = index.features - ({DOCUMENTS} - set(parent.features))
        manifest = dataclasses.replace(
            parent,
            source=source,
            totals=_totals(index, infos, parent.totals),
            rejects={},
            shards=infos,
            index_sha256=_write_index(index, sorted(features), out),
            ledger_sha256=_write_ledger(out),
            features=tuple(sorted(features)),
            unused_keys={},
            unknown_keys={},
            turns=_turns(dataset, chosen.mask) if parent.turns else {},
            family=parent.model_family.name,
            schema_version=SCHEMA_VERSION,
            created_by=f"vlmdata {__version__}",
            tokenizer_files=tokenizer_files,
            version={},
        )
        complete(manifest)
    return SelectResult(manifest, transferred)


def _source(parent: Manifest, index: DatasetIndex, choice: Choice, chosen: Chosen) -> dict[str, Any]:
    rows = np.unique(index.source_row)
    counts = {name: getattr(parent.totals, name) for name in ("rows", "samples", "tokens", "targets", "items")}
    return {
        "kind": SELECTED,
        "rows": len(rows),
        SELECTION: dataclasses.asdict(Selection(row_numbers(parent), rows_digest(rows))),
        "dataset": {"fingerprint": parent.fingerprint, **counts, "source": dict(parent.source)},
        "choice": choice.recorded,
        "steps": [dataclasses.asdict(step) for step in chosen.steps],
    }


def _shards(index: DatasetIndex, taken: list[ShardInfo]) -> tuple[ShardInfo, ...]:
    """Returns the shards with the new names and counts. A row is in one shard only."""
    found, start = list[ShardInfo](), 0
    for number, info in enumerate(taken):
        first, stop = np.searchsorted(index.shard, [number, number + 1]).tolist()
        rows = len(np.unique(index.source_row[first:stop]))
        found.append(
            dataclasses.replace(
                info,
                name=shard_name(number),
                row_start=start,
                row_stop=start + rows,
                samples=stop - first,
                rejected=0,
                extra_candidates=stop - first - rows,
                unselected=info.samples + info.unselected - (stop - first),
            )
        )
        start += rows
    return tuple(found)


def _totals(index: DatasetIndex, shards: tuple[ShardInfo, ...], parent: Totals) -> Totals:
    lengths = index.lengths.sum(dtype=np.int64)
    # Of other codecs, the files are unknown.
    has_files = bool(parent.file_bytes) and set(index.item_codecs.tolist()) == {_FILES}
    return Totals(
        rows=shards[-1].row_stop,
        samples=len(index),
        rejected=0,
        tokens=int(lengths),
        padding=int(index.padded_lengths.sum(dtype=np.int64) - lengths),
        targets=int(index.num_targets.sum(dtype=np.int64)),
        items=len(index.grids),
        patches=int(index.num_patches.sum(dtype=np.int64)),
        bytes=sum(info.bytes for info in shards),
        truncated=int(index.truncated.sum()),
        extra_candidates=sum(info.extra_candidates for info in shards),
        item_bytes=index.stored_item_bytes,
        file_bytes=int(index.item_bytes.sum(dtype=np.int64)) if has_files else 0,
    )


def _turns(dataset: VlmDataset, chosen: Mask) -> dict[str, int]:
    """Counts the turns without their reasoning. What else the manifest counts of turns is of rows, not of samples."""
    positions = np.flatnonzero(chosen)
    counts = np.array([dataset.metadata(i).get(DROPPED_REASONING, 0) for i in positions.tolist()], np.int64)
    rows: npt.NDArray[np.int64] = dataset.index.source_row[positions[counts > 0]]
    found = {DROPPED_REASONING: int(counts.sum()), ROWS_WITH_DROPPED_REASONING: len(np.unique(rows))}
    return {name: count for name, count in found.items() if count}


def _write_index(index: DatasetIndex, features: list[str], out: Store) -> str:
    """Writes the index, a row group per shard or per several. Returns its sha256."""
    schema = pa.schema([*index_schema(features), *source_fields(index.table.schema)])
    table = index.table.select(schema.names).cast(schema)
    groups = index.shard // -(-(int(index.shard[-1]) + 1) // _ROW_GROUPS)
    bounds = np.flatnonzero(np.diff(groups, prepend=-1, append=-1)).tolist()
    with out.writing(INDEX_NAME) as unnamed:
        file = Hashing(unnamed)
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for first, stop in pairwise(bounds):
                writer.write_table(table.slice(first, stop - first))
    return str(file.sha256)


def _write_ledger(out: Store) -> str:
    with out.writing(LEDGER_NAME) as unnamed:
        return str(Hashing(unnamed).sha256)


def _take_tokenizer(dataset: VlmDataset, store: Store, parent: Manifest, out: Store) -> Mapping[str, str]:
    """Gives ``out`` the tokenizer folder; returns its hashes, which a manifest of 1.0 does not have."""
    files = recorded_tokenizer_files(dataset.directory, parent)
    take_tokenizer(store, files, out)
    return files
