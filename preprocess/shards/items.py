"""Encodes the images of a sample with the run's codec."""

from __future__ import annotations

from collections.abc import Buffer, Mapping

import xxhash

from preprocess.config import PreprocessConfig, TrainTurns
from preprocess.encode import EncodedImage, EncodedSample
from preprocess.registry import problem_of
from vlmdata.errors import UsageError, VlmdataError
from vlmdata.format.shard import EncodedItem
from vlmdata.media.codecs import RAW, Item, codec

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
        UsageError: If the codec fails.
    """
    if config.pixels == RAW and config.train_turns is not TrainTurns.EACH:
        return {}
    made: dict[EncodedImage, EncodedItem] = {}
    for number, image in enumerate(encoded.images):
        if image not in made:  # references to one file are one object
            made[image] = known.get(image) or _encoded(image, f"key {key}, image {number}", config)
    return made


def _encoded(image: EncodedImage, what: str, config: PreprocessConfig) -> EncodedItem:
    item = Item(image.patches, image.grid, config.model_family, image.file)
    return EncodedItem(encode_item(config.pixels, item, what), config.pixels, xxhash.xxh3_64_intdigest(image.patches))


def encode_item(name: str, item: Item, what: str) -> Buffer:
    """Encodes one item with a codec.

    Args:
        name: The codec.
        item: The item.
        what: Key and image, for messages.

    Raises:
        UsageError: If the codec fails.
    """
    try:
        stored = codec(name).encode(item)
        memoryview(stored)
    except (MemoryError, VlmdataError):
        raise
    except Exception as error:  # the codec may be the user's, and every library has its own errors
        _, rows, columns = item.grid
        raise UsageError(
            f"--pixels {name}: the codec cannot encode {what} ({columns}x{rows} patches): {problem_of(error)}. A codec "
            "must encode every image: correct its `encode`, or choose another --pixels."
        ) from error
    return stored
