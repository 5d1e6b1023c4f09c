"""Fingerprints of what determines a dataset's bytes besides options: code and library versions."""

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
from vlmdata.media.codecs import codec
from vlmdata.media.versions import decoder_versions

#: Libraries that can change pixels (decoders, resize) or tokens (tokenizer, template engine).
_LIBRARIES = ("jinja2", "pillow", "tokenizers", "torch", "torchvision", "transformers")

_TOUCHED = (
    "(source files were touched since the run began; whether their bytes changed is known only of runs that began with "
    "--hash-source. Copies that keep the times, as cp -p and rsync -t make them, do.)"
)
_OTHER_MARKS = "(runs of earlier versions, and with --hash-source, know a source by its bytes: give --hash-source)"


def fingerprints(config: PreprocessConfig, tokenizer: TokenizerInfo) -> dict[str, Any]:
    """Returns fingerprints as JSON values. Equal fingerprints, options and source guarantee equal bytes."""
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
    } | codec_fingerprints(config.pixels)


def codec_fingerprints(name: str) -> dict[str, Any]:
    """Versions of the libraries that encode pixels; empty for a codec without libraries."""
    libraries = codec(name).libraries()
    return {"codec": dict(libraries)} if libraries else {}


def run_identity(
    config: PreprocessConfig, tokenizer: TokenizerInfo, source: Mapping[str, Any], times: Mapping[str, str]
) -> dict[str, Any]:
    """Returns what a run must share with the run that it continues, as JSON values.

    Args:
        config: The options.
        tokenizer: The current tokenizer.
        source: Identity of the source.
        times: Modification times of source files whose bytes the identity does not tell. They say nothing of a
            finished dataset, whose shards are known by hash.
    """
    return {
        **({"source_times": dict(times)} if times else {}),
        "config": {"options": _options(config), "fingerprints": fingerprints(config, tokenizer)},
        "source": dict(source),
        "tokenizer": tokenizer_identity(tokenizer),
    }


def _options(config: PreprocessConfig) -> dict[str, Any]:
    """Returns all options, including the recipe's own with defaults."""
    return config.to_json() | {"recipe_options": asdict(recipe_options(config.recipe, config.recipe_options))}


def tokenizer_identity(tokenizer: TokenizerInfo) -> dict[str, Any]:
    """Returns the tokenizer data that can change a dataset, besides the fingerprints: ids and named tokens.

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
    """Lists the differences between two runs' identities, one line each; empty if one can continue the other.

    Ignores tokenizer data that earlier versions did not record.
    """
    known = dict(now)
    if "source_times" not in before:
        known.pop("source_times", None)
    if "tokenizer" not in before:
        del known["tokenizer"]
    else:
        known["tokenizer"] = {name: value for name, value in now["tokenizer"].items() if name in before["tokenizer"]}
    found = differences(before, json.loads(json.dumps(known)))
    if before.get("source") == known["source"] and any(line.startswith("source_times") for line in found):
        found.append(_TOUCHED)
    elif any("xxh3_128" in line for line in found):
        found.append(_OTHER_MARKS)
    return found
