"""Versions of the libraries inside Pillow, which can change the pixels of a decoded file."""

from __future__ import annotations

from PIL import features

_DECODERS = ("jpg", "jpg_2000", "libtiff", "webp", "zlib", "libjpeg_turbo", "avif")


def decoder_versions() -> dict[str, str]:
    """Version by name of the decoders that this Pillow has."""
    return {name: found for name in _DECODERS if (found := _version(name)) is not None}


def _version(name: str) -> str | None:
    try:
        found = features.version(name)
    except ValueError:  # a name this Pillow does not know
        return None
    return None if found is None else str(found)
