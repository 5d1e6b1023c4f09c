"""The columns that an expression may name: those of the index, and those that recipes attached to samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from vlmdata.errors import UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.source_columns import source_fields
from vlmdata.media.codecs import IMAGE, VIDEO
from vlmdata.select.where import SOURCE

#: Columns of the index, with what they mean.
INDEX_COLUMNS = {
    "key": "the sample's key, text",
    "source_row": "source row",
    "length": "tokens without padding",
    "padded_length": "tokens with padding",
    "num_targets": "targets",
    "target_turns": "assistant turns that are targets; 0 for a document",
    "truncated": "whether the end was truncated",
    "num_patches": "vision patches",
    "num_images": "images",
    "num_videos": "videos",
    "size": "bytes in the shard",
}


def columns_of(dataset: VlmDataset, names: Iterable[str]) -> dict[str, pa.Array]:
    """Returns columns by name, each with a value per sample. Reads metadata only if a column of the source is named.

    Raises:
        UsageError: If there is no such column; lists those that there are.
    """
    wanted = set(names)
    columns = {name: _of_index(dataset, name) for name in INDEX_COLUMNS if name in wanted}
    kept = {field.name for field in source_fields(dataset.index.table.schema)}
    columns |= {name: dataset.index.table.column(name).combine_chunks() for name in sorted(kept & wanted)}
    attached = {name for name in wanted - kept if name.startswith(f"{SOURCE}.")}
    found = _attached(dataset) if attached else {}
    columns |= {name: _array(name, found[name]) for name in attached if name in found}
    if unknown := sorted(wanted - set(columns)):
        known = ", ".join(INDEX_COLUMNS)
        if attached:
            listed = (
                ", ".join(sorted({*found, *kept})) or "none: its recipe attached no columns, --keep-columns named none"
            )
            known += f". Columns of the source: {listed}"
        else:
            known += f", and {SOURCE}.NAME for columns that --keep-columns named or the recipe attached"
        raise UsageError(f"{dataset.name}: no column {', '.join(unknown)}. Columns: {known}")
    return columns


def _of_index(dataset: VlmDataset, name: str) -> pa.Array:
    index = dataset.index
    kinds = {"num_images": IMAGE, "num_videos": VIDEO}
    if name not in kinds:
        return index.table.column(name).combine_chunks()
    of = np.repeat(np.arange(len(index)), index.item_counts)
    return pa.array(np.bincount(of[index.item_kinds == kinds[name]], minlength=len(index)))


def _attached(dataset: VlmDataset) -> dict[str, list[Any]]:
    """Reads all columns that recipes attached; None for samples without one."""
    found: dict[str, list[Any]] = {}
    for i in range(len(dataset)):
        for name, value in (dataset.metadata(i).get("columns") or {}).items():
            found.setdefault(f"{SOURCE}.{name}", [None] * len(dataset))[i] = value
    return found


def _array(name: str, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError) as error:
        kinds = sorted({_KINDS.get(type(value), "lists") for value in values if value is not None})
        what = f"has {' in some samples, '.join(kinds)} in others" if len(kinds) > 1 else f"cannot be read: {error}"
        raise UsageError(f"{name} {what}; give its values one type in the recipe") from None


_KINDS: dict[type, str] = {str: "text", int: "numbers", float: "numbers", bool: "true or false"}
