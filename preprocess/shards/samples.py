"""Writes encoded samples to a shard."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from preprocess.encode import EncodedSample
from preprocess.shards.items import Items
from vlmdata.format.index_row import IndexRow
from vlmdata.format.schema import sample_key
from vlmdata.format.shard import Placement, ShardWriter
from vlmdata.format.turns import (
    DROPPED_REASONING,
    LAST_TURNS_WITH_DROPPED_REASONING,
    ROWS_UNLIKE_INFERENCE,
    ROWS_WITH_DROPPED_REASONING,
)


@dataclass(frozen=True)
class Place:
    """Place of a sample in the list of its row: its number (None without a list) and the list's length."""

    sample: int | None
    of: int


def write_sample(
    encoded: EncodedSample, items: Items, row: int, place: Place, shard: int, writer: ShardWriter
) -> IndexRow:
    """Appends a sample to a shard. Returns its index row.

    Args:
        encoded: The sample.
        items: Its images as stored (see :func:`preprocess.shards.items.encoded_items`).
        row: Its source row.
        place: Its place in the list of the row.
        shard: Number of the shard.
        writer: Writes the shard.
    """
    key = sample_key(row, place.sample, place.of)
    grids = tuple(image.grid for image in encoded.images)
    targets = int(encoded.loss_mask.sum())
    metadata: dict[str, Any] = {
        "key": key,
        "source_row": row,
        "length": encoded.length,
        "padded_length": len(encoded.input_ids),
        "num_targets": targets,
        "target_turns": encoded.target_turns,
        "truncated": encoded.truncated,
        "image_grid_thw": grids,
        "images": [dict(image.origin) for image in encoded.images],
    }
    if place.sample is not None:
        metadata["sample"] = place.sample
    if encoded.turn_weights:
        metadata["turn_weights"] = encoded.turn_weights
    if encoded.dropped_reasoning:
        metadata["dropped_reasoning"] = encoded.dropped_reasoning
    if encoded.columns:
        metadata["columns"] = dict(encoded.columns)
    pieces = _pieces(encoded)
    if items:
        del pieces["patches"]
    placement: Placement = writer.add(
        key, metadata, pieces, [items[image] for image in encoded.images] if items else []
    )
    return IndexRow(
        key=key,
        source_row=row,
        shard=shard,
        placement=placement,
        length=encoded.length,
        padded_length=len(encoded.input_ids),
        num_targets=targets,
        target_turns=encoded.target_turns,
        truncated=encoded.truncated,
        item_starts=encoded.image_starts,
    )


def count_turns(row: Counter[str], encoded: EncodedSample) -> None:
    """Adds a sample to the counts of its row: what the template did to assistant turns."""
    if encoded.dropped_reasoning:
        row[DROPPED_REASONING] += encoded.dropped_reasoning
        row[ROWS_WITH_DROPPED_REASONING] = 1
    if encoded.drops_last_reasoning:
        row[LAST_TURNS_WITH_DROPPED_REASONING] += 1
    if encoded.unlike_inference:
        row[ROWS_UNLIKE_INFERENCE] = 1


def _pieces(encoded: EncodedSample) -> dict[str, list[Any]]:
    pieces: dict[str, list[Any]] = {
        "input_ids": [encoded.input_ids],
        "loss_mask": [encoded.loss_mask],
        "position_ids": [encoded.position_ids],
        "image_grid_thw": [encoded.image_grid_thw],
        "patches": encoded.patches,
    }
    return pieces if encoded.loss_weights is None else pieces | {"loss_weights": [encoded.loss_weights]}
