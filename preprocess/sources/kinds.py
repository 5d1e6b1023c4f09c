"""Which kind of data a file holds, by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

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


def kind_of(file: Path) -> Kind | None:
    """The kind of a file, or None if its name is not that of a data file."""
    name = file.name.lower()
    return next((kind for ending, kind in ENDINGS.items() if name.endswith(ending)), None)


def is_image(file: Path) -> bool:
    """True if the file's name is that of an image."""
    return file.name.lower().endswith(IMAGE_ENDINGS)


def the_kind(what: str, files: Sequence[Path]) -> Kind:
    """The one kind of several files that the user named.

    Raises:
        SourceError: If a file is of no known kind, or they are of several.
    """
    kinds = {kind_of(file) for file in files}
    if len(kinds) == 1 and (kind := kinds.pop()) is not None:
        return kind
    unknown = [file for file in files if kind_of(file) is None]
    if unknown:
        raise SourceError(f"{what}: {unknown[0].name} is no data file; these are read: {', '.join(ENDINGS)}")
    raise SourceError(f"{what}: files of several kinds: {listing(files)}. Name files of one kind.")


def listing(files: Sequence[Path], folder: Path | None = None) -> str:
    """Files by kind for a message: ``2 parquet (a.parquet, b.parquet), 1 JSON lines (c.jsonl)``.

    Args:
        files: The files.
        folder: Where their shown paths begin; None shows names alone.
    """
    by_kind: dict[Kind, list[str]] = {}
    for file in sorted(files):
        if (kind := kind_of(file)) is not None:
            by_kind.setdefault(kind, []).append(file.name if folder is None else file.relative_to(folder).as_posix())
    parts = []
    for kind, names in by_kind.items():
        more = ", …" if len(names) > _SHOWN else ""
        parts.append(f"{len(names):,} {kind} ({', '.join(names[:_SHOWN])}{more})")
    return ", ".join(parts)
