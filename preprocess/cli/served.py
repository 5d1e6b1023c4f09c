"""Compares the image bounds of a run with those of the model's own processor, with which it may be served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vlmdata.families import Family
from vlmdata.families.gemma4 import TOKEN
from vlmdata.families.internvl import TILE
from vlmdata.preprocess.chat.template_files import read_json
from vlmdata.preprocess.config import EMBEDDED, PreprocessConfig

#: Smallest and largest area of a resized image, in pixels.
Bounds = tuple[int, int]


def served_bounds(config: PreprocessConfig) -> Bounds | None:
    """Returns the bounds of the image processor beside the tokenizer; None if there is none, or it tells none."""
    if config.tokenizer == EMBEDDED:
        return None
    name, revision = config.tokenizer, config.tokenizer_revision
    fields = read_json(name, "processor_config.json", revision).get("image_processor")
    fields = fields or read_json(name, "preprocessor_config.json", revision)
    least, most = _told_bounds(config.model_family, fields) if isinstance(fields, Mapping) else (None, None)
    return (least, most) if isinstance(least, int) and isinstance(most, int) else None


def _told_bounds(family: Family, fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the bounds in the settings of an image processor of transformers, in pixels; None is not told.

    Not a method of the family: its source code is a fingerprint of each dataset.
    """
    if family.name == "internvl":
        tiles = fields.get("min_patches", 1), fields.get("max_patches")
        return tiles[0] * TILE, tiles[1] and tiles[1] * TILE
    if family.name == "gemma4":
        budget = fields.get("max_soft_tokens")
        return family.min_pixels, budget and budget * TOKEN
    size = fields.get("size") or {}
    return fields.get("min_pixels", size.get("shortest_edge")), fields.get("max_pixels", size.get("longest_edge"))


def bounds_lines(options: Mapping[str, Any], family: Family, served: Bounds) -> Iterator[str]:
    """Yields lines of the summary if the bounds of a dataset are others than those of the model's processor.

    Args:
        options: The options of the dataset.
        family: Its family.
        served: Bounds of the processor.
    """
    used = options["image"]["min_pixels"], options["image"]["max_pixels"]
    if used == served:
        return
    yield f"images have {_told(used, family)}; the model's own processor makes {_told(served, family)} of them"
    needed = served[1] // family.factor**2
    room = f" --max-length {2 * needed}" if needed >= options["max_length"] else ""
    least = "" if served[0] == used[0] else f" --min-pixels {served[0]}"
    yield (
        "  serve the model with the bounds of this dataset, or repeat the command with"
        f"{least} --max-pixels {served[1]}{room} for those of the processor"
    )


def _told(bounds: Bounds, family: Family) -> str:
    least, most = bounds
    return f"{least:,} to {most:,} pixels (up to {most // family.factor**2:,} tokens)"
