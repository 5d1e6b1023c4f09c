"""Model families: what a kind of model fixes about its data. One file each; docs/extend/family.md adds one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module

from vlmdata.families.base import Family

#: Families by name. A new one is a file beside this with a constant ``FAMILY``, and a line here.
REGISTRY: Mapping[str, str] = {
    "qwen3_5": "vlmdata.families.qwen3_5",
    "qwen3_vl": "vlmdata.families.qwen3_vl",
    "qwen2_5_vl": "vlmdata.families.qwen2_5_vl",
}
#: The family of datasets whose manifest names none (format 1.0), and of tokenizers that do not say.
DEFAULT_FAMILY = "qwen3_5"

__all__ = ["DEFAULT_FAMILY", "REGISTRY", "Family", "family"]


@cache
def family(name: str) -> Family:
    """The family of a name.

    Raises:
        ValueError: If there is none.
    """
    if name not in REGISTRY:
        raise ValueError(f"no family {name!r}; known families: {', '.join(REGISTRY)}")
    found: Family = import_module(REGISTRY[name]).FAMILY
    return found
