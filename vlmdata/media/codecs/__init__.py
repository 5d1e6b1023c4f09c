"""Codecs: how patches are stored in shards. One file each; docs/extend/codec.md shows how to add one."""

from __future__ import annotations

from collections.abc import Buffer
from functools import cache
from importlib import import_module

import numpy as np
import numpy.typing as npt

from vlmdata.errors import DatasetFormatError
from vlmdata.families import Family
from vlmdata.media.codecs.base import Grid, ItemCodec

#: The codec of items in ``patches.npy``: patches as they are.
RAW = "raw"
#: Codecs by name. A new one is a file beside this with a constant ``CODEC``, and a line here.
REGISTRY: dict[str, str] = {
    RAW: "vlmdata.media.codecs.raw",
}

__all__ = ["RAW", "REGISTRY", "Grid", "ItemCodec", "codec", "codec_feature", "decode_item"]


def codec(name: str) -> ItemCodec:
    """The codec of a name.

    Raises:
        ValueError: If there is none.
    """
    if name not in REGISTRY:
        raise ValueError(f"no codec {name!r}; known codecs: {', '.join(REGISTRY)}")
    return _load(REGISTRY[name])


@cache
def _load(module: str) -> ItemCodec:
    found: ItemCodec = import_module(module).CODEC
    return found


def codec_feature(name: str) -> str:
    """The feature that a dataset with items of this codec lists in its manifest."""
    return f"patches-{name}"


def decode_item(name: str, stored: Buffer, grid: Grid, family: Family, out: npt.NDArray[np.uint8], what: str) -> None:
    """Decodes one item into a buffer.

    Args:
        name: The item's codec.
        stored: Its bytes in the shard.
        grid: Its patches along t, h, w.
        family: The dataset's family.
        out: uint8 (P, bytes per patch), C-contiguous; all of it is written.
        what: Shard, key and item, for messages.

    Raises:
        DatasetFormatError: If the codec is not known or cannot decode the bytes.
    """
    try:
        codec(name).decode(stored, grid, family, out)
    except MemoryError:
        raise
    except Exception as error:  # every library has its own
        raise DatasetFormatError(
            f"{what}: its {memoryview(stored).nbytes:,} bytes do not decode with codec {name}: "
            f"{type(error).__name__}: {error}. Run `vlmdata verify` on the dataset; it says how to mend it."
        ) from error
