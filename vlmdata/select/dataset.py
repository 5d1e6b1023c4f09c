"""Makes a dataset of chosen samples of another one, with the same shards, byte for byte.

The index has the chosen samples. Shards without any are left out, and the others are numbered anew. Samples keep their
keys and row numbers. The ledger is empty, because rejected rows are not chosen.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vlmdata.errors import UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.index import DatasetIndex
from vlmdata.format.index_row import index_schema
from vlmdata.format.manifest import (
    DROPPED_REASONING,
    ROWS_WITH_DROPPED_REASONING,
    Manifest,
    ShardInfo,
    recounted,
)
from vlmdata.format.schema import (
    DOCUMENTS,
    SELECTED,
    shard_name,
)
from vlmdata.format.selection import SELECTION, Selection, rows_digest
from vlmdata.format.source_columns import source_fields
from vlmdata.format.tokenizer_files import recorded_tokenizer_files
from vlmdata.select.choice import Choice, Chosen, Mask
from vlmdata.storage.base import Store
from vlmdata.storage.derive import Derivation, close, row_groups, take_tokenizer, with_shards
from vlmdata.storage.join_checks import real_place, require_whole
from vlmdata.storage.linked import Making, TakenShard, made_in, manifest_of, row_numbers, take_shards
from vlmdata.storage.transfer import How


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
    index = DatasetIndex(with_shards(table, np.searchsorted(taken, np.arange(len(parent.shards)))))
    source = _source(parent, index, choice, chosen)
    plan = json.dumps([source, rows_digest(np.flatnonzero(chosen.mask))], sort_keys=True).encode()
    shards = [TakenShard(store, parent.shards[old], shard_name(new)) for new, old in enumerate(taken.tolist())]
    with made_in(out, Making("selection", "selecting", "of another dataset or of other samples", plan)) as lock:
        transferred = take_shards(shards, out, on_shard)
        infos = _shards(index, [dataclasses.replace(shard.info, name=shard.name) for shard in shards])
        features = index.features - ({DOCUMENTS} - set(parent.features))
        schema = pa.schema([*index_schema(features), *source_fields(index.table.schema)])
        made = dataclasses.replace(
            parent,
            source=source,
            totals=index.totals(infos, index.file_bytes if parent.totals.file_bytes else 0),
            rejects={},
            shards=infos,
            features=tuple(sorted(features)),
            unused_keys={},
            unknown_keys={},
            turns=_turns(dataset, chosen.mask) if parent.turns else {},
            version={},
        )
        tokenizer_files = recorded_tokenizer_files(dataset.directory, parent)  # also of a manifest of 1.0
        manifest = close(
            out,
            lock,
            Derivation(
                lambda: made,
                schema,
                row_groups(index.table.select(schema.names).cast(schema), len(infos)),
                ledger=(),
                tokenizer=lambda: take_tokenizer(store, tokenizer_files, out),
            ),
        )
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
    """Returns the shards with the counts of the selection. A row is in one shard only."""
    _, first = np.unique(index.source_row, return_index=True)
    rows, samples = (np.bincount(shard, minlength=len(taken)).tolist() for shard in (index.shard[first], index.shard))
    return recounted(taken, rows, samples, [0] * len(taken))


def _turns(dataset: VlmDataset, chosen: Mask) -> dict[str, int]:
    """Counts the turns without their reasoning. What else the manifest counts of turns is of rows, not of samples."""
    positions = np.flatnonzero(chosen)
    counts = np.array([dataset.metadata(i).get(DROPPED_REASONING, 0) for i in positions.tolist()], np.int64)
    rows: npt.NDArray[np.int64] = dataset.index.source_row[positions[counts > 0]]
    found = {DROPPED_REASONING: int(counts.sum()), ROWS_WITH_DROPPED_REASONING: len(np.unique(rows))}
    return {name: count for name, count in found.items() if count}
