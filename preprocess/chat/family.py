"""Determines the model family of a tokenizer from the files next to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlmdata.families import DEFAULT_FAMILY, REGISTRY, family

#: Files that identify a family, and their field: the model type in a config, else the processor class.
_FILES = (("config.json", "model_type"), ("preprocessor_config.json", "processor_class"),
          ("processor_config.json", "processor_class"), ("tokenizer_config.json", "processor_class"))  # fmt: skip
#: Processors of one family only. Qwen3.5 and Qwen3-VL share one, and their images and positions are equal.
_PROCESSORS = {"Qwen2_5_VLProcessor": "qwen2_5_vl"}


def family_of(tokenizer: str, revision: str | None = None) -> str:
    """Returns the family in a tokenizer's files, or :data:`DEFAULT_FAMILY` if they specify none.

    Args:
        tokenizer: Hub id or folder.
        revision: Hub branch, tag or commit.
    """
    types = {kind: name for name in REGISTRY for kind in family(name).model_types}
    for file, field in _FILES:
        value = _read(tokenizer, file, revision).get(field)
        found = types.get(value) or _PROCESSORS.get(value) if isinstance(value, str) else None
        if found is not None:
            return found
    return DEFAULT_FAMILY


def _read(tokenizer: str, file: str, revision: str | None) -> dict[str, Any]:
    """Reads a JSON file of a folder or hub id; empty if there is none."""
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(
            tokenizer,
            file,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        values = json.loads(Path(found).read_text(encoding="utf-8")) if found else {}
    except (OSError, ValueError):  # loading the tokenizer reports if it is not available
        return {}
    return values if isinstance(values, dict) else {}
