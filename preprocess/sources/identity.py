"""Identifies the files of a source by names, sizes, and hashes or versions of their content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from vlmdata.format.manifest import canonical_hash
from vlmdata.preprocess.sources.data_files import STREAM_BYTES, DataFile

#: With more files, one hash over their listing identifies them.
LISTED_FILES = 256
#: Kinds of marks that identify a file, in addition to name and size: a hash of its bytes, a hash of its metadata
#: (Parquet footer, headers of Arrow messages and tar members), or the store's checksum or version.
CONTENT, METADATA, STORE = "xxh3_128", "metadata_xxh3_128", "etag"


@dataclass(frozen=True)
class Mark:
    """Identifies a file, in addition to name and size: a hash or version, and its kind.

    The kind is :data:`CONTENT`, :data:`METADATA` or :data:`STORE`.
    """

    kind: str
    value: str


def identify(files: Sequence[tuple[str, int, Mark]]) -> dict[str, Any]:
    """Returns an identity of files by name below the source's folder, size in bytes and mark.

    A moved copy is the same source, a changed one is not.
    """
    identities = [
        {"name": name, "bytes": size, mark.kind: mark.value}
        for name, size, mark in sorted(files, key=lambda file: file[0].split("/"))
    ]
    if len(identities) <= LISTED_FILES:
        return {"files": identities}
    size, listing = sum(size for _, size, _ in files), canonical_hash(identities)
    return {"num_files": len(identities), "bytes": size, "listing_sha256": listing}


def mark_of(file: DataFile, content: str | None, metadata: str | None, hash_source: bool) -> Mark:
    """Returns the mark of a file, given a hash of its bytes, if known from counting its rows, and of its metadata.

    With ``hash_source``, all its bytes are read.
    """
    if hash_source:
        return Mark(CONTENT, content or stream_digest(file))
    if file.is_remote and file.version is not None:
        return Mark(STORE, file.version)
    if content is not None:
        return Mark(CONTENT, content)
    return Mark(METADATA, metadata) if metadata is not None else Mark(CONTENT, stream_digest(file))


def stream_digest(file: DataFile) -> str:
    """Returns the xxh3-128 of a file's bytes, as hexadecimal text."""
    if file.web is not None and file.web.content is not None:
        return file.web.content
    with file.open(0, counting=True) as stream:
        return _digest(stream)


def file_digest(file: Path) -> str:
    """Returns the same hash of a file on disk, regardless of its time."""
    with open(file, "rb") as stream:
        return _digest(stream)


def _digest(stream: BinaryIO) -> str:
    digest = xxhash.xxh3_128()
    while chunk := stream.read(STREAM_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
