"""A dataset written straight through the format, from random numbers: needs neither preprocess nor its packages."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from vlmdata.families import family as family_of
from vlmdata.families.base import Family
from vlmdata.format.index_row import IndexRow, index_table, used_features
from vlmdata.format.manifest import Manifest, ShardInfo, Totals
from vlmdata.format.schema import sample_key, shard_name
from vlmdata.format.shard import ShardWriter
from vlmdata.format.tokenizer_info import ItemTokens, TokenizerInfo, TurnTokens

IMAGE_TOKEN, PAD = 1000, 1001
ITEMS = {kind: ItemTokens(token, (3,), (4,)) for kind, token in (("image", IMAGE_TOKEN), ("video", 5))}


def write_dataset(
    folder: Path,
    shards: int = 4,
    samples_per_shard: int = 8,
    seed: int = 0,
    first_token_is_target: bool = False,
    weighted: bool = False,
    family: str = "",
) -> Path:
    """Writes a dataset of samples with no to three images and up to a few hundred tokens.

    Args:
        folder: Where to.
        shards: How many.
        samples_per_shard: In each.
        seed: Of the numbers.
        first_token_is_target: Of every sample.
        weighted: Whether all samples have loss weights.
        family: Of the samples; by default as in format 1.0, which did not say.
    """
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    rows: list[IndexRow] = []
    infos: list[ShardInfo] = []
    for shard in range(shards):
        first = len(rows)
        with ShardWriter(folder / shard_name(shard)) as writer:
            rows += [
                _add_sample(writer, random, row, shard, first_token_is_target, weighted, family_of(family or "qwen3_5"))
                for row in range(first, first + samples_per_shard)
            ]
            size, sha256 = writer.close()
        infos.append(ShardInfo(shard_name(shard), first, len(rows), samples_per_shard, 0, size, sha256))
    pq.write_table(index_table(rows), folder / "index.parquet")
    manifest = Manifest(
        config={},
        config_hash="",
        source={},
        tokenizer=TokenizerInfo("synthetic", "0" * 64, "0" * 64, 1002, PAD, TurnTokens(1, 2, (6,)), ITEMS),
        totals=Totals(
            rows=len(rows),
            samples=len(rows),
            rejected=0,
            tokens=sum(row.length for row in rows),
            padding=sum(row.padded_length - row.length for row in rows),
            targets=sum(row.num_targets for row in rows),
            items=sum(len(row.items) for row in rows),
            patches=sum(row.num_patches for row in rows),
            bytes=sum(info.bytes for info in infos),
            truncated=0,
        ),
        rejects={},
        shards=tuple(infos),
        index_sha256=hashlib.sha256((folder / "index.parquet").read_bytes()).hexdigest(),
        ledger_sha256="",
        features=tuple(sorted(used_features(rows))),
        family=family,
    )
    (folder / "manifest.json").write_bytes(manifest.to_json())
    return folder


def _add_sample(
    writer: ShardWriter,
    random: np.random.Generator,
    row: int,
    shard: int,
    first_token_is_target: bool,
    weighted: bool,
    family: Family,
) -> IndexRow:
    grids = 2 * random.integers(1, 9, (row % 4, 3))
    grids[:, 0] = 1
    pieces, starts = [random.integers(7, 999, random.integers(1, 30))], []
    for grid in grids:
        starts.append(sum(map(len, pieces)))
        pieces += [np.full(grid.prod() // 4, IMAGE_TOKEN), random.integers(7, 999, random.integers(1, 200))]
    ids = np.concatenate(pieces)
    length, padded = len(ids), -(-len(ids) // 16) * 16
    mask = np.zeros(padded, np.uint8)
    mask[0] = first_token_is_target
    mask[1:length] = (ids[1:] != IMAGE_TOKEN) & (random.random(length - 1) < 0.5)
    patches = [random.integers(0, 256, (grid.prod(), family.patch_bytes), dtype=np.uint8) for grid in grids]
    positions = np.zeros((3, padded), np.int32)
    positions[:, :length] = family.position_ids(length, np.array(starts, np.int64), grids)
    weights = {"loss_weights": [(mask * random.uniform(0.5, 3, padded)).astype(np.float32)]} if weighted else {}
    placement = writer.add(
        sample_key(row),
        {},
        {
            "input_ids": [np.pad(ids, (0, padded - length), constant_values=PAD).astype(np.int32)],
            "loss_mask": [mask],
            "position_ids": [positions],
            "image_grid_thw": [grids.astype(np.int32)],
            "patches": patches or [np.zeros((0, family.patch_bytes), np.uint8)],
            **weights,
        },
    )
    return IndexRow(
        key=sample_key(row),
        source_row=row,
        shard=shard,
        placement=placement,
        length=length,
        padded_length=padded,
        num_targets=int(mask.sum()),
        target_turns=1,
        truncated=False,
        item_starts=tuple(starts),
    )
