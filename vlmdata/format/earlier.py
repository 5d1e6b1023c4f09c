"""Schemas 1.0 and 1.1 in terms of 2.0: the one place that knows their names.

Their shards are those of 2.0. Their index has other names, and that of 1.0 lacks columns: its items are raw images, one
after another. Their manifest counts images; it is written back as it was, so it keeps its fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from vlmdata.families import DEFAULT_FAMILY, family
from vlmdata.media.codecs import IMAGE, RAW

_COLUMNS = {"image_grid_thw": "item_grids", "image_starts": "item_starts", "image_checksums": "item_checksums"}
_NOT_IN_1_0 = ("item_offsets", "item_bytes", "pixel_checksums", "item_kinds", "item_codecs")
_TOTALS = {"images": "items", "image_bytes": "item_bytes"}


def is_earlier(schema_version: str) -> bool:
    """Returns True for 1.0 and 1.1."""
    return schema_version.split(".")[0] == "1"


def totals_from(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Renames the totals of a manifest of 1.0 or 1.1."""
    return {_TOTALS.get(name, name): value for name, value in fields.items()}


def totals_to(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`totals_from`."""
    names = {new: old for old, new in _TOTALS.items()}
    return {names.get(name, name): value for name, value in fields.items()}


def upgraded_index(table: pa.Table) -> pa.Table:
    """Renames and adds columns of an index of 1.0 or 1.1. Any other table comes back as it is.

    Raises:
        ValueError, pa.ArrowException: If a column has the wrong type.
    """
    if not set(_COLUMNS) & set(table.column_names):
        return table
    table = table.rename_columns([_COLUMNS.get(name, name) for name in table.column_names])
    if {"item_grids", "item_checksums", "patches_offset"} <= set(table.column_names):
        if not set(_NOT_IN_1_0) & set(table.column_names):
            table = _with_raw_images(table)
        bounds = table.column("item_grids").combine_chunks()
        table = _with_lists(
            table, bounds, {"item_copies": pa.repeat(1, int(bounds.value_lengths().sum().as_py() or 0))}
        )
    return table


def _with_raw_images(table: pa.Table) -> pa.Table:
    grids = table.column("item_grids").combine_chunks()
    counts = np.asarray(grids.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64)
    shapes = np.asarray(grids.flatten().flatten().to_numpy(zero_copy_only=False), dtype=np.int64).reshape(-1, 3)
    # Format 1.0 knew one family only.
    sizes = shapes.prod(axis=1) * family(DEFAULT_FAMILY).patch_bytes
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    firsts = np.asarray(table.column("patches_offset").to_numpy(), dtype=np.int64)
    offsets = before[:-1] + np.repeat(firsts - before[np.cumsum(counts) - counts], counts)
    checksums = table.column("item_checksums").combine_chunks().flatten()
    names = (pa.repeat(IMAGE, len(sizes)), pa.repeat(RAW, len(sizes)))
    values = (pa.array(offsets), pa.array(sizes), checksums, *names)
    return _with_lists(table, grids, dict(zip(_NOT_IN_1_0, values, strict=True)))


def _with_lists(table: pa.Table, like: pa.ListArray, columns: Mapping[str, pa.Array]) -> pa.Table:
    """Adds columns of lists as long as those of ``like``."""
    lengths = like.value_lengths().to_numpy(zero_copy_only=False)
    bounds = pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), pa.int32())
    for name, values in columns.items():
        table = table.append_column(name, pa.ListArray.from_arrays(bounds, values))
    return table
