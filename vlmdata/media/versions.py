"""Versions of the libraries that can change the pixels of a decoded or resized file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_LIBRARIES = ("pillow", "torch", "torchvision")
_DECODERS = ("jpg", "jpg_2000", "libtiff", "webp", "zlib", "libjpeg_turbo", "avif")


def decoder_versions() -> dict[str, str]:
    """Returns the versions of this Pillow's decoders, by name."""
    return {name: found for name in _DECODERS if (found := _version(name)) is not None}


def _version(name: str) -> str | None:
    from PIL import features  # a loader needs it for one message only

    try:
        found = features.version(name)
    except ValueError:  # a name that this Pillow does not know
        return None
    return None if found is None else str(found)


def video_versions() -> dict[str, str]:
    """Returns the versions of PyAV and of the FFmpeg in it, by name."""
    import av  # only videos need it

    libraries = {name: ".".join(map(str, parts)) for name, parts in av.library_versions.items()}
    used = ("libavcodec", "libavformat", "libavutil", "libswscale")
    return {"av": av.__version__, "ffmpeg": av.ffmpeg_version_info} | {name: libraries[name] for name in used}


@cache
def pixel_libraries() -> Mapping[str, str]:
    """Returns the versions of all libraries that can change pixels on this machine, by name."""
    return {name: found for name in _LIBRARIES if (found := _package(name)) is not None} | decoder_versions()


def recorded_pixel_libraries(fingerprints: Any) -> dict[str, str]:
    """Returns the versions in a manifest's fingerprints; empty if malformed."""
    if not isinstance(fingerprints, Mapping):
        return {}
    libraries, decoders = fingerprints.get("libraries"), fingerprints.get("decoders")
    known = libraries if isinstance(libraries, Mapping) else {}
    found = {name: str(known[name]) for name in _LIBRARIES if name in known}
    return found | (dict(decoders) if isinstance(decoders, Mapping) else {})


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
