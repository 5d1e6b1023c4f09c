"""Turns a dataset of the current schema into one of schema 1.0 or 1.1, to test its readers on any dataset."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from tests.verify.rewriting import rewrite_manifest, sha256
from vlmdata.format.schema import INDEX_NAME

_RENAMED = {"item_grids": "image_grid_thw", "item_starts": "image_starts", "item_checksums": "image_checksums"}
_NOT_IN_1_0 = ["item_offsets", "item_bytes", "pixel_checksums", "item_kinds", "item_codecs"]


def as_earlier(directory: Path, version: str) -> None:
    """Rewrites index and manifest. For 1.0, all items must be raw images."""
    table = pq.read_table(directory / INDEX_NAME)
    table = table.rename_columns([_RENAMED.get(name, name) for name in table.column_names])
    table = table.drop_columns(["item_copies", *(_NOT_IN_1_0 if version == "1.0" else ())])
    pq.write_table(table, directory / INDEX_NAME)
    rewrite_manifest(directory, schema_version=version, index_sha256=sha256(directory / INDEX_NAME))
