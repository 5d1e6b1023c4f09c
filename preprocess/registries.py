"""Recipes and engines by name. To add one, add its file, and a line here."""

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
