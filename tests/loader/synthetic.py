"""A dataset written straight through the format, from random numbers: needs neither preprocess nor its packages."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import xxhash

from vlmdata.families import family as family_of
from vlmdata.families.base import Family
from vlmdata.families.blocks import Blocks
from vlmdata.families.chat import IMAGE, VIDEO
from vlmdata.format.index_row import IndexRow, index_table, used_features
from vlmdata.format.manifest import Manifest, ShardInfo, Totals
from vlmdata.format.schema import sample_key, shard_name
from vlmdata.format.shard import EncodedItem, ShardWriter
from vlmdata.format.tokenizer_info import ItemTokens, TokenizerInfo, TurnTokens
from vlmdata.media.codecs import RAW, ItemShape

IMAGE_TOKEN, PAD, VIDEO_TOKEN = 1000, 1001, 5
TOKENS = {IMAGE: IMAGE_TOKEN, VIDEO: VIDEO_TOKEN}
ITEMS = {kind: ItemTokens(token, (3,), (4,)) for kind, token in TOKENS.items()}
#: ``second_per_grid_ts`` of all videos.
SECONDS_PER_PATCH = 1.0
#: Fields of the manifest that :func:`describe` writes.
DESCRIBED = ("totals", "rejects", "shards", "index_sha256", "features")


def write_dataset(
    folder: Path,
    shards: int = 4,
    samples_per_shard: int = 8,
    seed: int = 0,
    first_token_is_target: bool = False,
    weighted: bool = False,
    family: str = "",
    videos: bool = False,
    video_copies: int = 2,
    longest_text: int = 200,
    largest_image: int = 8,
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
        videos: Whether about half of the items are videos, of one to four temporal patches.
        video_copies: Temporal copies stored of each of their patches.
        longest_text: Limit of the tokens of text after an item.
        largest_image: Longest side of an image, in tokens; without meaning in families with tiles.
    """
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    rows: list[IndexRow] = []
    infos: list[ShardInfo] = []
    for shard in range(shards):
        first = len(rows)
        with ShardWriter(folder / shard_name(shard)) as writer:
            rows += [
                _add_sample(
                    writer,
                    random,
                    row,
                    shard,
                    first_token_is_target,
                    weighted,
                    family_of(family or "qwen3_5"),
                    video_copies if videos else 0,
                    longest_text,
                    largest_image,
                )
                for row in range(first, first + samples_per_shard)
            ]
            size, sha256 = writer.close()
        infos.append(ShardInfo(shard_name(shard), first, len(rows), samples_per_shard, 0, size, sha256))
    tokenizer = TokenizerInfo("synthetic", "0" * 64, "0" * 64, 1002, PAD, TurnTokens(1, 2, (6,)), ITEMS)
    return describe(folder, rows, infos, config={}, config_hash="", source={}, tokenizer=tokenizer, family=family)


def describe(folder: Path, rows: Sequence[IndexRow], shards: Sequence[ShardInfo], **more: Any) -> Path:
    """Writes the index and the manifest of shards that are in a folder.

    Args:
        folder: The dataset.
        rows: Of the index.
        shards: What the manifest says of the shards.
        more: The fields of the manifest that do not follow from these.
    """
    pq.write_table(index_table(rows), folder / "index.parquet")
    manifest = Manifest(
        totals=Totals(
            rows=len(rows),
            samples=len(rows),
            rejected=0,
            tokens=sum(row.length for row in rows),
            padding=sum(row.padded_length - row.length for row in rows),
            targets=sum(row.num_targets for row in rows),
            items=sum(len(row.items) for row in rows),
            patches=sum(row.num_patches for row in rows),
            bytes=sum(info.bytes for info in shards),
            truncated=0,
        ),
        rejects={},
        shards=tuple(shards),
        index_sha256=hashlib.sha256((folder / "index.parquet").read_bytes()).hexdigest(),
        features=tuple(sorted(used_features(rows))),
        **{"ledger_sha256": "", **more},
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
    video_copies: int,
    longest_text: int,
    largest_image: int,
) -> IndexRow:
    grids = family.merge_size * random.integers(1, largest_image + 1, (row % 4, 3))
    if family.most_views > 1:  # tiles of one size
        grids[:] = math.isqrt(family.min_pixels) // family.patch_size
    grids[:, 0] = 1
    kinds = [IMAGE] * len(grids)
    if video_copies:
        kinds = [(IMAGE, VIDEO)[each] for each in random.integers(0, 2, len(grids))]
        for grid, kind in zip(grids, kinds, strict=True):
            grid[:] = (random.integers(1, 5), *(2 * random.integers(1, 4, 2))) if kind == VIDEO else grid
    pieces, starts = [random.integers(7, 999, random.integers(1, 30))], []
    for grid, kind in zip(grids, kinds, strict=True):
        for number, block in enumerate(family.expansion(kind).blocks(tuple(grid.tolist()))):
            if number:  # the time of the next temporal patch, between vision marks
                pieces += [np.array([4]), random.integers(7, 999, random.integers(1, 5)), np.array([3])]
            starts += [sum(map(len, pieces))] * (number == 0)
            pieces.append(np.full(np.prod(block) // family.patches_per_token, TOKENS[kind]))
        pieces.append(random.integers(7, 999, random.integers(1, longest_text)))
    ids = np.concatenate(pieces)
    length, padded = len(ids), -(-len(ids) // 16) * 16
    mask = np.zeros(padded, np.uint8)
    mask[0] = first_token_is_target
    mask[1:length] = ~np.isin(ids[1:], list(TOKENS.values())) & (random.random(length - 1) < 0.5)
    copies = [video_copies if kind == VIDEO else 1 for kind in kinds]
    patches = [
        random.integers(0, 256, (grid.prod() * frames, family.patch_bytes), dtype=np.uint8)
        for grid, frames in zip(grids, copies, strict=True)
    ]
    positions = np.zeros((len(family.position_axes), padded), np.int32)
    shapes = [ItemShape(kind, tuple(grid.tolist()), n) for kind, grid, n in zip(kinds, grids, copies, strict=True)]
    positions[:, :length] = _positions(family, ids, shapes)

    def grids_of(kind: str) -> np.ndarray:
        return grids[[each == kind for each in kinds]].astype(np.int32).reshape(-1, 3)

    weights = {"loss_weights": [(mask * random.uniform(0.5, 3, padded)).astype(np.float32)]} if weighted else {}
    placement = writer.add(
        sample_key(row),
        {"images": [{"kind": kind, "seconds_per_patch": SECONDS_PER_PATCH} for kind in kinds]}
        if VIDEO in kinds
        else {},
        {
            "input_ids": [np.pad(ids, (0, padded - length), constant_values=PAD).astype(np.int32)],
            "loss_mask": [mask],
            "position_ids": [positions],
            "image_grid_thw": [grids_of(IMAGE)],
            **({"video_grid_thw": [grids_of(VIDEO)]} if VIDEO in kinds else {}),
            **weights,
            **({} if VIDEO in kinds else {"patches": patches or [np.zeros((0, family.patch_bytes), np.uint8)]}),
        },
        [
            EncodedItem(array, shape, RAW, xxhash.xxh3_64_intdigest(array))
            for array, shape in zip(patches, shapes, strict=True)
        ]
        if VIDEO in kinds
        else (),
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


def _positions(family: Family, ids: np.ndarray, items: list[ItemShape]) -> np.ndarray:
    step = family.video.temporal_step(SECONDS_PER_PATCH) if family.video else 1
    steps = [step if item.kind == VIDEO else 1 for item in items]
    blocks = Blocks.of(
        family, [(item.kind, item.grid) for item in items], {kind: (token,) for kind, token in TOKENS.items()}, steps
    )
    return family.position_ids(len(ids), blocks.locate(ids), blocks.grids, blocks.steps)
