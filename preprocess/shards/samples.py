"""Writes encoded samples to a shard, with their images and videos in the codec of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Buffer, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from vlmdata.errors import UsageError, VlmdataError
from vlmdata.format.index_row import IndexRow
from vlmdata.format.manifest import (
    DROPPED_REASONING,
    DROPPED_TURNS,
    LAST_TURNS_WITH_DROPPED_REASONING,
    ROWS_UNLIKE_INFERENCE,
    ROWS_WITH_DROPPED_REASONING,
    ROWS_WITH_DROPPED_TURNS,
    ROWS_WITH_SHRUNK_IMAGES,
)
from vlmdata.format.schema import BOX_IMAGES, KEPT, SHORTENED, VARIANT, sample_key
from vlmdata.format.shard import EncodedItem, Placement, ShardWriter
from vlmdata.format.source_columns import SOURCE, TEMPLATE_ARGUMENTS
from vlmdata.media.codecs import IMAGE, RAW, VIDEO, Item, Unsuitable, codec
from vlmdata.preprocess.config import PreprocessConfig, TrainTurns
from vlmdata.preprocess.encode import EncodedSample, SampleItem
from vlmdata.preprocess.encode.shorten import MAX_PIXELS, TURNS
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason
from vlmdata.registry import problem_of


@dataclass(frozen=True)
class Place:
    """Place of a sample in the list of its row: its number (None without a list) and the list's length."""

    sample: int | None
    of: int


def write_sample(
    encoded: EncodedSample,
    items: Items,
    row: int,
    place: Place,
    shard: int,
    writer: ShardWriter,
    kept: str | None = None,
    source: Mapping[str, Any] | None = None,
) -> IndexRow:
    """Appends a sample to a shard. Returns its index row.

    Args:
        encoded: The sample.
        items: Its images and videos as stored (see :func:`vlmdata.preprocess.shards.samples.encoded_items`).
        row: Its source row.
        place: Its place in the list of the row.
        shard: Number of the shard.
        writer: Writes the shard.
        kept: What it was made of, to store with it (``--keep-conversations``).
        source: Values of source columns to store with it (``--keep-columns``).
    """
    key = sample_key(row, place.sample, place.of)
    targets = int(encoded.loss_mask.sum())
    metadata: dict[str, Any] = {
        "key": key,
        "source_row": row,
        "length": encoded.length,
        "padded_length": len(encoded.input_ids),
        "num_targets": targets,
        "target_turns": encoded.target_turns,
        "truncated": encoded.truncated,
        "image_grid_thw": encoded.image_grid_thw.tolist(),
        "images": [dict(item.origin) for item in encoded.items],
    }
    if encoded.video_grid_thw is not None:
        metadata["video_grid_thw"] = encoded.video_grid_thw.tolist()
    if place.sample is not None:
        metadata["sample"] = place.sample
    if encoded.turn_weights:
        metadata["turn_weights"] = encoded.turn_weights
    if encoded.dropped_reasoning:
        metadata["dropped_reasoning"] = encoded.dropped_reasoning
    if encoded.columns:
        metadata["columns"] = dict(encoded.columns)
    if encoded.template_arguments:
        metadata[TEMPLATE_ARGUMENTS] = dict(encoded.template_arguments)
    if boxes := [list(box) for box in encoded.box_images if box[0] < len(encoded.items)]:
        metadata[BOX_IMAGES] = boxes
    if encoded.variant:
        metadata[VARIANT] = dict(encoded.variant)
    if encoded.shortened:
        metadata[SHORTENED] = dict(encoded.shortened)
    if kept is not None:
        metadata[KEPT] = kept
    if source:
        metadata[SOURCE] = dict(source)
    pieces = _pieces(encoded)
    if items:
        del pieces["patches"]
    placement: Placement = writer.add(key, metadata, pieces, [items[item] for item in encoded.items] if items else [])
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
        item_starts=encoded.item_starts,
        source=source or {},
    )


def count_turns(row: Counter[str], encoded: EncodedSample) -> None:
    """Adds a sample to the counts of its row: what the template and ``--overlong`` did to its turns and images."""
    if encoded.dropped_reasoning:
        row[DROPPED_REASONING] += encoded.dropped_reasoning
        row[ROWS_WITH_DROPPED_REASONING] = 1
    if encoded.drops_last_reasoning:
        row[LAST_TURNS_WITH_DROPPED_REASONING] += 1
    if encoded.unlike_inference:
        row[ROWS_UNLIKE_INFERENCE] = 1
    if dropped := encoded.shortened.get(TURNS, 0):
        row[DROPPED_TURNS] += dropped
        row[ROWS_WITH_DROPPED_TURNS] = 1
    if encoded.shortened.get(MAX_PIXELS):
        row[ROWS_WITH_SHRUNK_IMAGES] = 1


def _pieces(encoded: EncodedSample) -> dict[str, list[Any]]:
    pieces: dict[str, list[Any]] = {
        "input_ids": [encoded.input_ids],
        "loss_mask": [encoded.loss_mask],
        "position_ids": [encoded.position_ids],
        "image_grid_thw": [encoded.image_grid_thw],
        "patches": encoded.patches,
    }
    optional = {"loss_weights": encoded.loss_weights, "video_grid_thw": encoded.video_grid_thw}
    return pieces | {name: [array] for name, array in optional.items() if array is not None}


#: The images and videos of a sample, each distinct one once, as they are stored.
type Items = Mapping[SampleItem, EncodedItem]


def encoded_items(encoded: EncodedSample, key: str, config: PreprocessConfig, known: Items) -> Items:
    """Encodes the items of a sample with the run's codecs; empty if they are plain images of the sample alone.

    Args:
        encoded: The sample.
        key: Its key, for messages.
        config: The options.
        known: Items that are encoded already. The samples of a conversation's turns share theirs.

    Raises:
        RowRejected: If their codec does not store one of them.
        UsageError: If the codec fails.
    """
    plain = config.codec.name == RAW and all(item.kind == IMAGE for item in encoded.items)
    if plain and config.train_turns is not TrainTurns.EACH:
        return {}
    made: dict[SampleItem, EncodedItem] = {}
    for number, item in enumerate(encoded.items):
        if item not in made:  # references to one file are one object
            file = item.file if item.whole and item.kind == IMAGE else None
            given = Item(item.patches, item.shape, config.model_family, file)
            place = f"{item.kind}s[{sum(each.kind == item.kind for each in encoded.items[:number])}]"
            codec = config.video_codec if item.kind == VIDEO else config.codec
            encoded_item = item.stored or known.get(item)
            made[item] = encoded_item or _encoded(codec.name, given, f"key {key}, {place}", place)
    return made


def _encoded(name: str, item: Item, what: str, place: str) -> EncodedItem:
    try:
        payload = encode_item(name, item, what)
    except Unsuitable as error:
        raise RowRejected(
            Reason.UNSUITABLE_ITEM,
            f"{place}: the codec {name} does not store it: {error}. Choose another {option_of(item)} to keep the row",
        ) from error
    return EncodedItem(payload, item.shape, name, xxhash.xxh3_64_intdigest(item.patches))


def option_of(item: Item) -> str:
    """Returns the option that names the codec of an item."""
    return "--pixels" if item.shape.kind == IMAGE else "--video-pixels"


def encode_item(name: str, item: Item, what: str) -> Buffer:
    """Encodes one item with a codec.

    Raises:
        Unsuitable: If the codec does not store it.
        UsageError: If the codec fails.
    """
    encoder = codec(name)
    try:
        stored = encoder.encode(item)
        memoryview(stored)
    except (MemoryError, VlmdataError, Unsuitable):
        raise
    except Exception as error:  # the codec may be the user's, and every library has its own errors
        _, rows, columns = item.shape.grid
        raise UsageError(
            f"{option_of(item)} {name}: the codec cannot encode {what} ({columns}x{rows} patches): "
            f"{problem_of(error, type(encoder).__module__)}. Correct its `encode`, or choose another "
            f"{option_of(item)}. For an item that it does not store, it raises Unsuitable."
        ) from error
    return stored
