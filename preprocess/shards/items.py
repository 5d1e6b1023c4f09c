"""Encodes the images of a sample with the run's codec."""

from __future__ import annotations

from collections.abc import Buffer, Mapping

import xxhash

from preprocess.config import PreprocessConfig, TrainTurns
from preprocess.encode import EncodedImage, EncodedSample
from preprocess.reject import RowRejected
from vlmdata.errors import UsageError, VlmdataError
from vlmdata.format.shard import EncodedItem
from vlmdata.media.codecs import IMAGE, RAW, Item, ItemShape, Unsuitable, codec
from vlmdata.reasons import Reason
from vlmdata.registry import problem_of

#: The images of a sample, each distinct one once, as they are stored.
type Items = Mapping[EncodedImage, EncodedItem]


def encoded_items(encoded: EncodedSample, key: str, config: PreprocessConfig, known: Items) -> Items:
    """Encodes the images of a sample with the run's codec; empty if they are plain patches of the sample alone.

    Args:
        encoded: The sample.
        key: Its key, for messages.
        config: The options.
        known: Images that are encoded already. The samples of a conversation's turns share theirs.

    Raises:
        RowRejected: If the codec does not store one of them.
        UsageError: If the codec fails.
    """
    if config.codec.name == RAW and config.train_turns is not TrainTurns.EACH:
        return {}
    made: dict[EncodedImage, EncodedItem] = {}
    for number, image in enumerate(encoded.images):
        if image not in made:  # references to one file are one object
            file = image.file if image.whole else None
            item = Item(image.patches, ItemShape(IMAGE, image.grid), config.model_family, file)
            made[image] = known.get(image) or _encoded(config.codec.name, item, key, number)
    return made


def _encoded(name: str, item: Item, key: str, number: int) -> EncodedItem:
    try:
        payload = encode_item(name, item, f"key {key}, image {number}")
    except Unsuitable as error:
        raise RowRejected(
            Reason.UNSUITABLE_ITEM,
            f"images[{number}]: the codec {name} does not store it: {error}. Choose another --pixels to keep the row",
        ) from error
    return EncodedItem(payload, item.shape, name, xxhash.xxh3_64_intdigest(item.patches))


def encode_item(name: str, item: Item, what: str) -> Buffer:
    """Encodes one item with a codec.

    Args:
        name: The codec.
        item: The item.
        what: Key and item, for messages.

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
            f"--pixels {name}: the codec cannot encode {what} ({columns}x{rows} patches): "
            f"{problem_of(error, type(encoder).__module__)}. Correct its `encode`, or choose another --pixels. For an "
            "item that it does not store, it raises Unsuitable."
        ) from error
    return stored
