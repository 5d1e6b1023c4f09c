"""Rewrites one sample of a dataset with every hash, offset and total made consistent: only an audit can object."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from vlmdata.format.index import DatasetIndex
from vlmdata.format.index_row import IndexRow, index_table
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import INDEX_NAME, MANIFEST_NAME, TOKENIZER_DIR
from vlmdata.format.shard import ShardWriter
from vlmdata.format.tokenizer_info import TokenizerInfo
from vlmdata.storage.open import open_dataset


@dataclass
class Draft:
    """A sample whose every part can be changed; the number of targets follows from the mask."""

    key: str
    source_row: int
    length: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    position_ids: np.ndarray
    image_grid_thw: np.ndarray
    patches: np.ndarray
    target_turns: int
    truncated: bool
    item_starts: tuple[int, ...]
    rest: dict[str, Any]
    loss_weights: np.ndarray | None = None

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata that goes with the arrays as they are now."""
        return {
            **self.rest,
            "length": self.length,
            "padded_length": len(self.input_ids),
            "num_targets": int(self.loss_mask.sum()),
            "target_turns": self.target_turns,
            "truncated": self.truncated,
            "image_grid_thw": self.image_grid_thw.tolist(),
        }

    @property
    def pieces(self) -> dict[str, list[np.ndarray]]:
        """The arrays as the writer takes them: patches image by image."""
        per_image = np.split(self.patches, np.cumsum(self.image_grid_thw.prod(axis=1))[:-1])
        names = ["input_ids", "loss_mask", "position_ids", "image_grid_thw"]
        names += ["loss_weights"] if self.loss_weights is not None else []
        return {**{name: [getattr(self, name)] for name in names}, "patches": per_image}


def rewrite_sample(directory: Path, key: str, change: Callable[[Draft], None]) -> None:
    """Applies ``change`` to the sample ``key`` and writes its shard, the index and the manifest anew."""
    manifest, index = Manifest.read(directory), DatasetIndex.read(directory / INDEX_NAME)
    shard = int(index.shard[index.position_of(key)])
    drafts = _drafts(directory, shard)
    change(next(draft for draft in drafts if draft.key == key))
    with ShardWriter(directory / manifest.shards[shard].name) as writer:
        changed = [_write(writer, draft, shard) for draft in drafts]
        size, digest = writer.close()
    rows = [index.row(i) for i in range(len(index)) if index.shard[i] != shard]
    rows = sorted([*rows, *changed], key=lambda row: (row.source_row, row.key))
    pq.write_table(index_table(rows), directory / INDEX_NAME)
    shards = list(manifest.shards)
    shards[shard] = dataclasses.replace(shards[shard], bytes=size, sha256=digest)
    totals = dataclasses.replace(
        manifest.totals,
        tokens=sum(row.length for row in rows),
        padding=sum(row.padded_length - row.length for row in rows),
        targets=sum(row.num_targets for row in rows),
        items=sum(len(row.items) for row in rows),
        patches=sum(row.num_patches for row in rows),
        truncated=sum(row.truncated for row in rows),
        bytes=sum(info.bytes for info in shards),
        item_bytes=sum(item.bytes for row in rows for item in row.items) if manifest.totals.item_bytes else 0,
    )
    rewrite_manifest(directory, shards=tuple(shards), totals=totals, index_sha256=sha256(directory / INDEX_NAME))


def turns(draft: Draft, t: TokenizerInfo) -> list[slice]:
    """The turns of a sample, each from its start token on."""
    starts = [*np.flatnonzero(draft.input_ids == t.turns.start).tolist(), draft.length]
    return [slice(a, b) for a, b in pairwise(starts)]


def rewrite_manifest(directory: Path, **fields: Any) -> None:
    """Writes the manifest anew with other values of some fields."""
    manifest = dataclasses.replace(Manifest.read(directory), **fields)
    (directory / MANIFEST_NAME).write_bytes(manifest.to_json())


def edit_manifest_json(directory: Path, path: str, value: Any) -> None:
    """Sets one value deep in the manifest's JSON, named like ``shards.0.bytes``."""
    fields = json.loads((directory / MANIFEST_NAME).read_text())
    *parents, last = path.split(".")
    target = fields
    for name in parents:
        target = target[int(name)] if isinstance(target, list) else target[name]
    target[last] = value
    (directory / MANIFEST_NAME).write_text(json.dumps(fields))


def rotate_ids(directory: Path) -> None:
    """Gives every ordinary token of a dataset's tokenizer the next one's id."""
    path = directory / TOKENIZER_DIR / "tokenizer.json"
    fields = json.loads(path.read_text())
    vocabulary = fields["model"]["vocab"]
    fields["model"]["vocab"] = {text: (id + 1) % len(vocabulary) for text, id in vocabulary.items()}
    path.write_text(json.dumps(fields))


def sha256(path: Path) -> str:
    """Of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _drafts(directory: Path, shard: int) -> list[Draft]:
    dataset = open_dataset(directory)
    drafts = []
    for i in np.flatnonzero(dataset.index.shard == shard).tolist():
        row, sample = dataset.index.row(i), dataset[i]
        arrays = {name: np.array(array) for name, array in sample.arrays().items()}
        drafts.append(
            Draft(
                key=row.key,
                source_row=row.source_row,
                length=row.length,
                **arrays,
                target_turns=row.target_turns,
                truncated=row.truncated,
                item_starts=row.item_starts,
                rest=dataset.metadata(i),
            )
        )
    return drafts


def _write(writer: ShardWriter, draft: Draft, shard: int) -> IndexRow:
    return IndexRow(
        key=draft.key,
        source_row=draft.source_row,
        shard=shard,
        placement=writer.add(draft.key, draft.metadata, draft.pieces),
        length=draft.length,
        padded_length=len(draft.input_ids),
        num_targets=int(draft.loss_mask.sum()),
        target_turns=draft.target_turns,
        truncated=draft.truncated,
        item_starts=draft.item_starts,
    )
