"""Families of model data formats, one file each. docs/extend/family.md shows how to add one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module

from vlmdata.families.base import Family

#: Families by name. To add one, add a file here with a constant ``FAMILY``, and a line below.
REGISTRY: Mapping[str, str] = {
    "qwen3_5": "vlmdata.families.qwen3_5",
    "qwen3_vl": "vlmdata.families.qwen3_vl",
    "qwen2_5_vl": "vlmdata.families.qwen2_5_vl",
}
#: The family of datasets whose manifest has none (format 1.0), and of tokenizers that do not specify one.
DEFAULT_FAMILY = "qwen3_5"

__all__ = ["DEFAULT_FAMILY", "REGISTRY", "Family", "family"]


@cache
def family(name: str) -> Family:
    """Returns the family of a name.

    Raises:
        ValueError: If the name is unknown.
    """
    if name not in REGISTRY:
        raise ValueError(f"unknown family {name!r}; known families: {', '.join(REGISTRY)}")
    found: Family = import_module(REGISTRY[name]).FAMILY
    return found
