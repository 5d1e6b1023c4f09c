"""Codecs: how items are stored in shards. One file each; docs/extend/codec.md shows how to add one."""

from __future__ import annotations

from collections.abc import Buffer, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from vlmdata.errors import DatasetFormatError, UsageError, VlmdataError
from vlmdata.families import Family
from vlmdata.media.codecs.base import (
    IMAGE,
    MOST_FILE_PIXELS,
    VIDEO,
    Grid,
    Item,
    ItemCodec,
    ItemShape,
    Unsuitable,
    fault_of_codec,
)
from vlmdata.registry import Registry, problem_of
from vlmdata.wording import Text, excerpt

#: The codec of items in ``patches.npy``: patches as they are.
RAW = "raw"
#: The codec of videos, unless another is given.
ZSTD = "zstd"
#: Codecs by name. To add one, add a file here with a constant ``CODEC``, and a line below.
REGISTRY = Registry[ItemCodec](
    "codec",
    "vlmdata.codecs",
    "--pixels",
    fault_of_codec,
    {
        RAW: "vlmdata.media.codecs.raw:CODEC",
        ZSTD: "vlmdata.media.codecs.zstd:CODEC",
        "jxl": "vlmdata.media.codecs.jxl:CODEC",
        "source": "vlmdata.media.codecs.source:CODEC",
    },
)

__all__ = [
    "IMAGE",
    "MOST_FILE_PIXELS",
    "RAW",
    "REGISTRY",
    "VIDEO",
    "ZSTD",
    "Grid",
    "Item",
    "ItemCodec",
    "ItemShape",
    "Unsuitable",
    "codec",
    "codec_feature",
    "codecs_of",
    "decode_item",
    "describe_codecs",
    "libraries_of",
    "require_codecs",
]


def codec(name: str) -> ItemCodec:
    """Returns the codec of a name: built in, installed, or given by the user (see :class:`Registry`).

    Raises:
        UsageError: If the name is unknown.
    """
    return REGISTRY.named(name)


def describe_codecs() -> str:
    """Describes all codecs and their purpose, as one sentence in Markdown."""
    return "; ".join(f"`{name}`: {codec(name).summary}" for name in REGISTRY)


def codec_feature(name: str) -> str:
    """Returns the manifest feature of datasets with items of this codec."""
    return f"patches-{name}"


def codecs_of(features: Iterable[str]) -> list[str]:
    """Returns the names of the codecs in a manifest's features."""
    prefix = codec_feature("")
    return [feature.removeprefix(prefix) for feature in sorted(features) if feature.startswith(prefix)]


def require_codecs(features: Iterable[str]) -> None:
    """Checks that the items of a dataset with these features can be decoded here.

    Raises:
        UsageError: If a codec is unknown, or a package that it needs is not installed.
    """
    for name in codecs_of(features):
        libraries_of(codec(name))


def libraries_of(made: ItemCodec) -> dict[str, str]:
    """Returns the versions of libraries that can change a codec's bytes, by name.

    Raises:
        UsageError: If a package that the codec needs is not installed, or its ``libraries`` is at fault.
    """
    where = f"codec {made.name}: its `libraries`"
    try:
        found = made.libraries()
    except VlmdataError:
        raise
    except Exception as error:  # the codec may be the user's
        raise UsageError(f"{where} failed: {problem_of(error, type(made).__module__)}.") from error
    if not isinstance(found, Mapping) or not all(isinstance(each, str) for pair in found.items() for each in pair):
        raise UsageError(f"{where} returned {excerpt(found)}; it must return versions as text by name, such as {{}}.")
    return dict(found)


def decode_item(
    name: str, stored: Buffer, shape: ItemShape, family: Family, out: npt.NDArray[np.uint8], what: Text
) -> None:
    """Decodes one item into a buffer.

    Args:
        name: The item's codec.
        stored: Its bytes in the shard.
        shape: Its kind, grid and copies.
        family: The dataset's family.
        out: uint8 (R, bytes per patch), C-contiguous; filled completely.
        what: Shard, key and item, for messages.

    Raises:
        DatasetFormatError: If the codec is unknown or cannot decode the bytes.
        UsageError: If a package that the codec needs is not installed.
    """
    try:
        codec(name).decode(stored, shape, family, out)
    except (MemoryError, UsageError):
        raise
    except Exception as error:  # every library has its own errors
        raise DatasetFormatError(
            f"{what}: its {memoryview(stored).nbytes:,} bytes do not decode with codec {name}: "
            f"{type(error).__name__}: {error}. Run `vlmdata verify` on the dataset to see how to repair it."
        ) from error
