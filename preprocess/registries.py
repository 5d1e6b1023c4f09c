"""Recipes, engines and readers of data files by name. To add one, add its file, and a line here."""

from __future__ import annotations

from typing import Any

from vlmdata.errors import SourceError
from vlmdata.registry import Registry, not_callable

RECIPES = Registry[Any](
    "recipe",
    "vlmdata.recipes",
    "--recipe",
    not_callable,
    {
        "cord_v2": "vlmdata.preprocess.recipes.cord_v2:CordV2",
        "chat": "vlmdata.preprocess.recipes.chat:Chat",
        "text": "vlmdata.preprocess.recipes.text:Text",
        "caption": "vlmdata.preprocess.recipes.caption:Caption",
        "vqa": "vlmdata.preprocess.recipes.vqa:Vqa",
        "grounding": "vlmdata.preprocess.recipes.grounding:GroundingRows",
    },
    SourceError,
)
ENGINES = Registry[Any](
    "engine",
    "vlmdata.engines",
    "--engine",
    not_callable,
    {"local": "vlmdata.preprocess.engines.local:Local", "ray": "vlmdata.preprocess.engines.ray:Ray"},
    SourceError,
)


def _no_reader(found: object) -> str:
    lacking = [name for name in ("name", "endings", "read") if not getattr(found, name, None)]
    return f"it has no `{lacking[0]}`; write a subclass of RecordFile or TableFile with one" if lacking else ""


#: The order is that of the endings of files in messages.
READERS = Registry[Any](
    "reader",
    "vlmdata.readers",
    "--reader",
    _no_reader,
    {
        "parquet": "vlmdata.preprocess.sources.parquet:ParquetReader",
        "arrow": "vlmdata.preprocess.sources.arrow_ipc:ArrowReader",
        "json": "vlmdata.preprocess.sources.json_file:JsonFile",
        "jsonl": "vlmdata.preprocess.sources.records:JsonLinesFile",
        "csv": "vlmdata.preprocess.sources.delimited:DelimitedFile",
        "tar": "vlmdata.preprocess.sources.webdataset:TarFile",
    },
    SourceError,
)
