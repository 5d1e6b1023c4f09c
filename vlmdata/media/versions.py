"""Versions of the libraries that can change decoded or resized pixels, and the check of pixels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from vlmdata.errors import DatasetFormatError
from vlmdata.wording import Text

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
    """Returns what determines the frames of a video: the versions of PyAV and its FFmpeg by name, and which is shown.

    Datasets without ``frames`` took, at uneven intervals, frames up to half a mean interval after the time.
    """
    import av  # only videos need it

    libraries = {name: ".".join(map(str, parts)) for name, parts in av.library_versions.items()}
    used = ("libavcodec", "libavformat", "libavutil", "libswscale")
    versions = {"av": av.__version__, "ffmpeg": av.ffmpeg_version_info} | {name: libraries[name] for name in used}
    return versions | {"frames": "last at or before the time"}


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


def require_pixels(patches: npt.NDArray[np.uint8], expected: int, made_with: Mapping[str, str], what: Text) -> None:
    """Compares the decoded patches of an item with their checksum.

    Args:
        patches: uint8 (P, bytes per patch), C-contiguous.
        expected: Their xxh3-64 at preprocessing.
        made_with: Versions of the libraries at preprocessing, by name.
        what: Shard, key and item, for messages.

    Raises:
        DatasetFormatError: If they differ; lists the libraries with different versions.
    """
    found = xxhash.xxh3_64_intdigest(patches)
    if found != expected:
        raise DatasetFormatError(
            f"{what}: decodes to other pixels than the dataset was made with: xxh3 of the patches is {found:016x}, "
            f"expected {expected:016x}. {_reason(made_with)}"
        )


def _reason(made_with: Mapping[str, str]) -> str:
    here = pixel_libraries()
    names = [name for name in made_with if made_with[name] != here.get(name)]
    if not names:
        return "It was made with the installed libraries. Run `vlmdata verify` on it to see how to repair it."
    listed = ", ".join(f"{name} {made_with[name]} (here {here.get(name, 'none')})" for name in names)
    return f"It was made with {listed}. Install these versions, or recreate it with the installed ones."
