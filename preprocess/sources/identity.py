"""What local source files are, by content."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from vlmdata.format.manifest import canonical_hash

_CHUNK = 1 << 22
#: More files than this are identified by one hash over their listing.
_LISTED_FILES = 256


def identify(files: Sequence[Path], root: Path) -> dict[str, Any]:
    """Names, sizes and content hashes (xxh3-128): a moved copy is the same source, a changed one is not."""
    base = root.resolve()
    identities = []
    for file in sorted(files):
        full = file.resolve()
        name = full.relative_to(base).as_posix() if full.is_relative_to(base) else full.name
        identities.append({"name": name, "bytes": full.stat().st_size, "xxh3_128": file_digest(file)})
    if len(identities) <= _LISTED_FILES:
        return {"files": identities}
    return {
        "num_files": len(identities),
        "bytes": sum(entry["bytes"] for entry in identities),
        "listing_sha256": canonical_hash(identities),
    }


def file_digest(file: Path) -> str:
    """xxh3-128 of a file's bytes, as hexadecimal text."""
    digest = xxhash.xxh3_128()
    with open(file, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
