"""Families of model data formats, one file each. docs/extend/family.md shows how to add one."""

from __future__ import annotations

from vlmdata.families.base import Family, View
from vlmdata.registry import Registry
from vlmdata.wording import with_article

#: Families by name. To add one, add a file here with a constant ``FAMILY``, and a line below.
REGISTRY = Registry[Family](
    "family",
    "vlmdata.families",
    "--family",
    lambda found: "" if isinstance(found, Family) else f"it is {with_article(type(found).__name__)}, not a Family",
    {
        "qwen3_5": "vlmdata.families.qwen3_5:FAMILY",
        "qwen3_vl": "vlmdata.families.qwen3_vl:FAMILY",
        "qwen2_5_vl": "vlmdata.families.qwen2_5_vl:FAMILY",
        "internvl": "vlmdata.families.internvl:FAMILY",
        "gemma4": "vlmdata.families.gemma4:FAMILY",
        "processor": "vlmdata.families.processor:FAMILY",
    },
)
#: The family of datasets whose manifest has none (format 1.0), and of tokenizers that do not specify one.
DEFAULT_FAMILY = "qwen3_5"

__all__ = ["DEFAULT_FAMILY", "REGISTRY", "Family", "View", "family"]


def family(name: str) -> Family:
    """Returns the family of a name: built in, installed, or given by the user (see :class:`Registry`).

    Raises:
        UsageError: If the name is unknown.
    """
    return REGISTRY.named(name)
