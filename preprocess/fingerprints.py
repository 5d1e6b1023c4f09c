"""What, beside the options, decides the bytes of a dataset: code and library versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from preprocess.config import PreprocessConfig
from preprocess.recipes.base import recipe_fingerprint, recipe_options
from vlmdata import __version__
from vlmdata.format.manifest import TokenizerInfo, differences
from vlmdata.format.schema import SCHEMA_VERSION
from vlmdata.media.versions import decoder_versions

#: Can change pixels (decoders, resize) or tokens (tokenizer, template engine).
_LIBRARIES = ("jinja2", "pillow", "tokenizers", "torch", "torchvision", "transformers")


def fingerprints(config: PreprocessConfig, tokenizer: TokenizerInfo) -> dict[str, Any]:
    """JSON-able fingerprints; equal ones, with equal options and source, promise equal bytes."""
    made = config.model_family
    return {
        "vlmdata": __version__,
        "schema": SCHEMA_VERSION,
        "tokenizer": tokenizer.fingerprint,
        "chat_template": tokenizer.chat_template,
        "recipe": recipe_fingerprint(config.recipe),
        "processor": {
            "patch_size": made.patch_size,
            "merge_size": made.merge_size,
            "temporal_patch_size": made.temporal_patch_size,
            "resize": "torchvision bicubic antialias uint8",
            "image_mean": list(made.image_mean),
            "image_std": list(made.image_std),
        },
        "libraries": {name: version(name) for name in _LIBRARIES},
        "decoders": decoder_versions(),
    }


def run_identity(config: PreprocessConfig, tokenizer: TokenizerInfo, source: Mapping[str, Any]) -> dict[str, Any]:
    """What a run must share with the one that it continues; JSON-able.

    Args:
        config: The options.
        tokenizer: The tokenizer as it is now.
        source: Identity of the source.
    """
    return {
        "config": {"options": _options(config), "fingerprints": fingerprints(config, tokenizer)},
        "source": dict(source),
        "tokenizer": tokenizer_identity(tokenizer),
    }


def _options(config: PreprocessConfig) -> dict[str, Any]:
    """All options, the recipe's own with their defaults."""
    return config.to_json() | {"recipe_options": asdict(recipe_options(config.recipe, config.recipe_options))}


def tokenizer_identity(tokenizer: TokenizerInfo) -> dict[str, Any]:
    """What of a tokenizer can change a dataset beside its fingerprint and its template's: ids and named tokens.

    ``special_tokens`` is absent for datasets of format 1.0, whose manifest does not record it.
    """
    told_elsewhere = ("name", "fingerprint", "chat_template")
    fields = {name: value for name, value in asdict(tokenizer).items() if name not in told_elsewhere}
    if not fields["special_tokens"]:
        del fields["special_tokens"]
    if fields["end_of_text"] < 0:
        del fields["end_of_text"]
    return fields


def identity_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Where the identity of a run differs from an earlier one's, one line each; empty if one can continue the other.

    What earlier versions did not record of the tokenizer is not compared.
    """
    known = dict(now)
    if "tokenizer" not in before:
        del known["tokenizer"]
    else:
        known["tokenizer"] = {name: value for name, value in now["tokenizer"].items() if name in before["tokenizer"]}
    return differences(before, json.loads(json.dumps(known)))
