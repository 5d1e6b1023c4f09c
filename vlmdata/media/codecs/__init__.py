"""Codecs: how items are stored in shards. One file each; docs/extend/codec.md shows how to add one."""

from __future__ import annotations

from collections.abc import Buffer, Collection
from functools import cache
from importlib import import_module

import numpy as np
import numpy.typing as npt

from vlmdata.errors import DatasetFormatError, UsageError
from vlmdata.families import Family
from vlmdata.media.codecs.base import MOST_FILE_PIXELS, Grid, Item, ItemCodec

#: The codec of items in ``patches.npy``: patches as they are.
RAW = "raw"
#: Codecs by name. To add one, add a file here with a constant ``CODEC``, and a line below.
REGISTRY: dict[str, str] = {
    RAW: "vlmdata.media.codecs.raw",
    "zstd": "vlmdata.media.codecs.zstd",
    "jxl": "vlmdata.media.codecs.jxl",
    "source": "vlmdata.media.codecs.source",
}

__all__ = [
    "MOST_FILE_PIXELS",
    "RAW",
    "REGISTRY",
    "Grid",
    "Item",
    "ItemCodec",
    "codec",
    "codec_feature",
    "codecs_of",
    "decode_item",
    "describe_codecs",
    "require_codecs",
]


def codec(name: str) -> ItemCodec:
    """Returns the codec of a name.

    Raises:
        ValueError: If the name is unknown.
    """
    if name not in REGISTRY:
        raise ValueError(f"unknown codec {name!r}; known codecs: {', '.join(REGISTRY)}")
    return _load(REGISTRY[name])


@cache
def _load(module: str) -> ItemCodec:
    found: ItemCodec = import_module(module).CODEC
    return found


def describe_codecs() -> str:
    """Describes all codecs and their purpose, as one sentence in Markdown."""
    return "; ".join(f"`{name}`: {codec(name).summary}" for name in REGISTRY)


def codec_feature(name: str) -> str:
    """Returns the manifest feature of datasets with items of this codec."""
    return f"patches-{name}"


def codecs_of(features: Collection[str]) -> list[str]:
    """Returns the names of the codecs in a manifest's features."""
    return [name for name in REGISTRY if codec_feature(name) in features]


def require_codecs(features: Collection[str]) -> None:
    """Checks that the items of a dataset can be decoded here.

    Args:
        features: The dataset's features.

    Raises:
        UsageError: If a package that one of its codecs needs is not installed.
    """
    for name in REGISTRY:
        if codec_feature(name) in features:
            codec(name).libraries()


def decode_item(name: str, stored: Buffer, grid: Grid, family: Family, out: npt.NDArray[np.uint8], what: str) -> None:
    """Decodes one item into a buffer.

    Args:
        name: The item's codec.
        stored: Its bytes in the shard.
        grid: Its patches along t, h, w.
        family: The dataset's family.
        out: uint8 (P, bytes per patch), C-contiguous; filled completely.
        what: Shard, key and item, for messages.

    Raises:
        DatasetFormatError: If the codec is unknown or cannot decode the bytes.
        UsageError: If a package that the codec needs is not installed.
    """
    try:
        codec(name).decode(stored, grid, family, out)
    except (MemoryError, UsageError):
        raise
    except Exception as error:  # every library has its own errors
        raise DatasetFormatError(
            f"{what}: its {memoryview(stored).nbytes:,} bytes do not decode with codec {name}: "
            f"{type(error).__name__}: {error}. Run `vlmdata verify` on the dataset to see how to repair it."
        ) from error
