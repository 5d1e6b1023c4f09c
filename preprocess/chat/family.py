"""Determines the model family of a tokenizer from the files next to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlmdata.errors import SourceError
from vlmdata.families import DEFAULT_FAMILY, REGISTRY, family

#: Files that identify a family, and their field: the model type in a config, else the processor class.
_FILES = (("config.json", "model_type"), ("preprocessor_config.json", "processor_class"),
          ("processor_config.json", "processor_class"), ("tokenizer_config.json", "processor_class"))  # fmt: skip
#: Ends the model type of the language model in a model, whose tokenizer is the model's.
_TEXT_PART = "_text"


def family_of(tokenizer: str, revision: str | None = None) -> str:
    """Returns the family in a tokenizer's files, or :data:`DEFAULT_FAMILY` if they specify none.

    Raises:
        SourceError: If the files are those of a model of no family.
    """
    known = {name: family(name) for name in REGISTRY.names()}
    types = {kind: name for name, each in known.items() for kind in (*each.model_types, *each.processors)}
    for file, field in _FILES:
        value = _read(tokenizer, file, revision).get(field)
        if not isinstance(value, str):
            continue
        found = types.get(value) or types.get(value.removesuffix(_TEXT_PART))
        if found is not None:
            return found
        raise SourceError(
            f"--tokenizer {tokenizer}: its {file} says {field} {value!r}, which is of none of the families "
            f"{', '.join(REGISTRY.names())}, so samples may not fit the model. If the model takes the images and "
            "positions of one of them, or rows without images, give it as --family; else add a family "
            "(docs/extend/family.md)."
        )
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
