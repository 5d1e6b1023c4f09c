"""What, beside the options, decides the bytes of a dataset: code and library versions."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from PIL import features

from preprocess.config import PreprocessConfig
from preprocess.recipes.base import recipe_fingerprint
from vlmdata import __version__
from vlmdata.format.manifest import TokenizerInfo
from vlmdata.format.schema import MERGE_SIZE, PATCH_SIZE, SCHEMA_VERSION, TEMPORAL_PATCH_SIZE

#: Can change pixels (decoders, resize) or tokens (tokenizer, template engine).
_LIBRARIES = ("jinja2", "pillow", "tokenizers", "torch", "torchvision", "transformers")
_DECODERS = ("jpg", "jpg_2000", "libtiff", "webp", "zlib", "libjpeg_turbo", "avif")


def fingerprints(config: PreprocessConfig, tokenizer: TokenizerInfo) -> dict[str, Any]:
    """JSON-able fingerprints; equal ones, with equal options and source, promise equal bytes."""
    return {
        "vlmdata": __version__,
        "schema": SCHEMA_VERSION,
        "tokenizer": tokenizer.fingerprint,
        "chat_template": tokenizer.chat_template,
        "recipe": recipe_fingerprint(config.recipe),
        "processor": {
            "patch_size": PATCH_SIZE,
            "merge_size": MERGE_SIZE,
            "temporal_patch_size": TEMPORAL_PATCH_SIZE,
            "resize": "torchvision bicubic antialias uint8",
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "libraries": {name: version(name) for name in _LIBRARIES},
        "decoders": {name: found for name in _DECODERS if (found := _decoder(name)) is not None},
    }


def _decoder(name: str) -> str | None:
    try:
        found = features.version(name)
    except ValueError:  # a name this Pillow does not know
        return None
    return None if found is None else str(found)
