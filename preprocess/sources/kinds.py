"""Determines the kind of data in a file by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from vlmdata.errors import SourceError


class Kind(StrEnum):
    """Kinds of data files. Files of one source are all of one kind."""

    PARQUET = "parquet"
    ARROW = "arrow"
    JSON = "json"
    JSON_LINES = "JSON lines"
    DELIMITED = "CSV or TSV"
    TAR = "WebDataset tar"


#: By file name ending, in lower case.
ENDINGS: Mapping[str, Kind] = {
    ".parquet": Kind.PARQUET,
    ".arrow": Kind.ARROW,
    ".json": Kind.JSON,
    ".jsonl": Kind.JSON_LINES,
    ".ndjson": Kind.JSON_LINES,
    ".jsonl.gz": Kind.JSON_LINES,
    ".ndjson.gz": Kind.JSON_LINES,
    ".csv": Kind.DELIMITED,
    ".tsv": Kind.DELIMITED,
    ".csv.gz": Kind.DELIMITED,
    ".tsv.gz": Kind.DELIMITED,
    ".tar": Kind.TAR,
}
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif", ".jp2")
_SHOWN = 3


def kind_of(name: str) -> Kind | None:
    """Returns the kind of a file; None if its name is not that of a data file."""
    return next((kind for ending, kind in ENDINGS.items() if name.lower().endswith(ending)), None)


def is_image(name: str) -> bool:
    """Returns whether the file name is that of an image."""
    return name.lower().endswith(IMAGE_ENDINGS)


def the_kind(what: str, names: Sequence[str]) -> Kind:
    """Returns the common kind of several files that the user gave; a SourceError if there is none."""
    kinds = {kind_of(name) for name in names}
    if len(kinds) == 1 and (kind := kinds.pop()) is not None:
        return kind
    unknown = [name for name in names if kind_of(name) is None]
    if unknown:
        raise SourceError(f"{what}: {unknown[0]} is no data file; these are read: {', '.join(ENDINGS)}")
    raise SourceError(f"{what}: files of several kinds: {listing(names)}. Name files of one kind.")


def listing(names: Iterable[str]) -> str:
    """Lists files by kind for a message: ``2 parquet (a.parquet, b.parquet), 1 JSON lines (c.jsonl)``."""
    by_kind: dict[Kind, list[str]] = {}
    for name in sorted(names):
        if (kind := kind_of(name)) is not None:
            by_kind.setdefault(kind, []).append(name)
    parts = []
    for kind, names in by_kind.items():
        more = ", …" if len(names) > _SHOWN else ""
        parts.append(f"{len(names):,} {kind} ({', '.join(names[:_SHOWN])}{more})")
    return ", ".join(parts)
