"""What the names of files say: whether they are images or videos, and their split, as the Hugging Face hub does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from vlmdata.errors import SourceError

_KEYWORDS: Mapping[str, Sequence[str]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
#: ``data/NAME-00000-of-00003.parquet``: any name.
_NUMBERED = re.compile(r"data/(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_SEPARATOR = "[-._ 0-9]"

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif", ".jp2")
VIDEO_ENDINGS = (
    ".mp4",
    ".m4v",
    ".mov",
    ".mkv",
    ".webm",
    ".avi",
    ".mpg",
    ".mpeg",
    ".ts",
    ".mts",
    ".m2ts",
    ".flv",
    ".wmv",
    ".ogv",
    ".3gp",
)


def is_image(name: str) -> bool:
    """Returns whether the file name is that of an image."""
    return name.lower().endswith(IMAGE_ENDINGS)


def is_video(name: str) -> bool:
    """Returns whether the file name is that of a video."""
    return name.lower().endswith(VIDEO_ENDINGS)


def splits_by_name(names: Iterable[str]) -> dict[str, list[str]]:
    """Sorts files, by paths below the folder, into splits. Those that fit none are left out if some fit one.

    The first rule that fits any file applies: numbered files in ``data/``; a folder named like a split (``train/``,
    ``val-images/``); a file named like one (``train.jsonl``, ``my-test.csv``); else all are ``train``.
    """
    names = sorted(names)
    numbered: dict[str, list[str]] = {}
    for name in names:
        if found := _NUMBERED.fullmatch(name):
            numbered.setdefault(found["split"], []).append(name)
    if numbered:
        first = [split for split in _KEYWORDS if split in numbered]
        return {split: numbered[split] for split in dict.fromkeys([*first, *numbered])}
    for place in (lambda path: path.parts[:-1], lambda path: path.parts[-1:]):
        splits = {
            split: [name for name in names if any(_is_named(part, split) for part in place(PurePosixPath(name)))]
            for split in _KEYWORDS
        }
        if any(splits.values()):
            return {split: files for split, files in splits.items() if files}
    return {"train": names} if names else {}


def _is_named(part: str, split: str) -> bool:
    """Returns whether a word of the part, between separators, is a keyword of the split."""
    return any(re.search(rf"(?:^|{_SEPARATOR}){word}(?:$|{_SEPARATOR})", part) for word in _KEYWORDS[split])


def choose_split(what: str, splits: Iterable[object], split: str | None) -> str:
    """Returns the requested split, or the default: ``train``, or the only one; a SourceError if there is none such."""
    names = [str(name) for name in splits]
    if split is None:
        split = "train" if "train" in names else names[0] if len(names) == 1 else None
    if split is None or split not in names:
        asked = "it has several splits" if split is None else f"it has no split {split}"
        raise SourceError(f"{what}: {asked}; choose with --split one of: {', '.join(names) or '(none found)'}")
    return split
