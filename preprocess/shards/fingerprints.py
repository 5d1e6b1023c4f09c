"""Fingerprints of what determines a dataset's bytes besides options: code and library versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from preprocess.config import PreprocessConfig
from preprocess.own_options import make_options
from preprocess.recipes.base import REGISTRY as RECIPES
from preprocess.shards.source_code import recipe_fingerprint, source_fingerprint
from vlmdata.families import REGISTRY as FAMILIES
from vlmdata.format.schema import SCHEMA_VERSION
from vlmdata.format.tokenizer_info import TokenizerInfo, tokenizer_to_json
from vlmdata.media.codecs import RAW, libraries_of
from vlmdata.media.codecs import REGISTRY as CODECS
from vlmdata.media.versions import decoder_versions
from vlmdata.version import __version__

#: Libraries that can change pixels (decoders, resize) or tokens (tokenizer, template engine).
_LIBRARIES = ("jinja2", "pillow", "tokenizers", "torch", "torchvision", "transformers")

_FAMILY_SOURCE, _CODEC, _CODEC_SOURCE = "family_source", "codec", "codec_source"
#: Fingerprints that earlier versions did not record.
_LATER = (_FAMILY_SOURCE, _CODEC_SOURCE)


def fingerprints(config: PreprocessConfig, tokenizer: TokenizerInfo) -> dict[str, Any]:
    """Returns fingerprints as JSON values. Equal fingerprints, options and source guarantee equal bytes."""
    made = config.model_family
    return {
        "vlmdata": __version__,
        "schema": SCHEMA_VERSION,
        "tokenizer": tokenizer.fingerprint,
        "chat_template": tokenizer.chat_template,
        "recipe": recipe_fingerprint(config.recipe),
        _FAMILY_SOURCE: source_fingerprint(FAMILIES.target(config.family), made),
        "processor": {
            "patch_size": made.patch_size,
            "merge_size": made.merge_size,
            "temporal_patch_size": made.temporal_patch_size,
            "resize": f"torchvision {made.resample} antialias uint8",
            "image_mean": list(made.image_mean),
            "image_std": list(made.image_std),
        },
        "libraries": {name: version(name) for name in _LIBRARIES},
        "decoders": decoder_versions(),
    } | codec_fingerprints(config.pixels)


def codec_fingerprints(name: str) -> dict[str, Any]:
    """Returns the versions of the libraries that encode pixels, if any, and the hash of the codec's source code.

    Empty for ``raw``, whose items are written without it.
    """
    if name == RAW:
        return {}
    made = CODECS.find(name)
    libraries = libraries_of(made)
    return ({_CODEC: libraries} if libraries else {}) | {_CODEC_SOURCE: source_fingerprint(CODECS.target(name), made)}


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
    return config.to_json() | {"recipe_options": asdict(make_options(RECIPES, config.recipe, config.recipe_options))}


def tokenizer_identity(tokenizer: TokenizerInfo) -> dict[str, Any]:
    """Returns the tokenizer data that can change a dataset, besides the fingerprints: ids and named tokens.

    ``special_tokens`` is absent for datasets of format 1.0, whose manifest does not record it.
    """
    told_elsewhere = ("name", "fingerprint", "chat_template")
    fields = tokenizer_to_json(tokenizer, SCHEMA_VERSION)
    return {name: value for name, value in fields.items() if name not in told_elsewhere}


def as_recorded(config: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run's ``config`` without fingerprints that an earlier version did not record in ``before``."""
    known = before.get("fingerprints", {})
    left_out = {name for name in _LATER if name not in known}
    found = {name: value for name, value in config["fingerprints"].items() if name not in left_out}
    return {**config, "fingerprints": found}
