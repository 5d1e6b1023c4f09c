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
        "cord_v2": "preprocess.recipes.cord_v2:CordV2",
        "chat": "preprocess.recipes.chat:Chat",
        "text": "preprocess.recipes.text:Text",
        "caption": "preprocess.recipes.caption:Caption",
        "vqa": "preprocess.recipes.vqa:Vqa",
        "grounding": "preprocess.recipes.grounding:GroundingRows",
    },
    SourceError,
)
ENGINES = Registry[Any](
    "engine",
    "vlmdata.engines",
    "--engine",
    not_callable,
    {"local": "preprocess.engines.local:Local", "ray": "preprocess.engines.ray:Ray"},
    SourceError,
)
