"""Finds image files that had different contents for different shards of a dataset."""

from __future__ import annotations

import io
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

#: Size of a missing file.
ABSENT = -1
_ENTRY = np.dtype([("path", np.uint64), ("content", np.uint64)])


class FileVersions:
    """Collects hashes of paths and contents, 16 bytes for each file of a shard."""

    def __init__(self) -> None:
        self._entries: list[npt.NDArray[np.void]] = []

    def add(self, table: pa.Table) -> None:
        """Adds the list of a shard's files."""
        entries = [
            (xxhash.xxh3_64_intdigest(path.encode()), xxhash.xxh3_64_intdigest(f"{size} {digest}".encode()))
            for path, size, digest in _known(table)
        ]
        self._entries.append(np.unique(np.array(entries, _ENTRY)))

    def several(self) -> set[int]:
        """Returns the hashes of paths with more than one content."""
        if not self._entries:
            return set()
        distinct = np.unique(np.concatenate(self._entries))
        paths = distinct["path"]
        return set(paths[1:][paths[1:] == paths[:-1]].tolist())


def shards_of_paths(lists: Iterable[bytes], hashes: set[int]) -> dict[str, list[int]]:
    """Returns the shards that name each of some files, by path.

    Args:
        lists: The lists of the shards' files.
        hashes: Result of :meth:`FileVersions.several`.
    """
    found: dict[str, list[int]] = {}
    for content in lists:
        table = pq.read_table(io.BytesIO(content))
        for path, shard in zip(table["path"].to_pylist(), table["shard"].to_pylist(), strict=True):
            if xxhash.xxh3_64_intdigest(path.encode()) in hashes:
                found.setdefault(path, []).append(shard)
    return found


def _known(table: pa.Table) -> Iterable[tuple[str, int, str]]:
    """Yields path, size and hash of the files that were read or found missing."""
    columns = (table[name].to_pylist() for name in ("path", "bytes", "xxh3_128"))
    return (row for row in zip(*columns, strict=True) if row[2] or row[1] == ABSENT)
