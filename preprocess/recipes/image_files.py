"""Lists the image and video files of a shard, and detects later changes.

Rows may name files by path. Their content is recorded by hash, since the dataset depends on it and it is the same
for every copy of the source. Reading all files again to compare them is slow. So a file counts as unchanged if its size
is the same and, according to the file system, it was not modified since the start of the run. Only other files are
read.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from vlmdata.preprocess.recipes.file_kinds import VIDEOS
from vlmdata.preprocess.recipes.remote_root import FetchProblem, RemoteRoot
from vlmdata.preprocess.sources.identity import file_digest
from vlmdata.storage import Store, Writing

SCHEMA = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("xxh3_128", pa.string(), nullable=False),
    ]
)
#: Clocks of file servers and this machine may differ, so files modified shortly before the run are read too.
_MARGIN_NS = 60 * 10**9
_THREADS = 16
#: Size of a missing file.
ABSENT = -1
_ENTRY = np.dtype([("path", np.uint64), ("content", np.uint64)])


@dataclass(frozen=True)
class RecordedFile:
    """An image or video file used by a shard."""

    path: str  # path relative to the image root, or absolute
    bytes: int  # size in bytes; -1 if the file was missing
    xxh3_128: str  # hash of the content; empty if not read


def recorded_file(path: str, size: int | None, data: bytes | None) -> RecordedFile:
    """Returns the entry of a file; ``size`` is None if it is missing, ``data`` if it was not read."""
    digest = "" if data is None else xxhash.xxh3_128_hexdigest(data)
    return RecordedFile(path.encode("utf-8", "backslashreplace").decode(), ABSENT if size is None else size, digest)


def recorded_path(root: Path, path: str, full: Path | None) -> str:
    """Returns the path of a local file as recorded: relative to the root if it is inside, as in any copy of the source.

    Args:
        root: The image root, with links resolved.
        path: Path in the data.
        full: The file in the root, with links resolved; None if missing.
    """
    absolute = full or Path(path)
    if Path(path).is_absolute() and absolute.is_relative_to(root):
        return absolute.relative_to(root).as_posix()
    return path


def write_files(store: Store, name: str, shard: int, files: Mapping[str, RecordedFile]) -> None:
    """Writes the list of a shard's files, ascending by path. Writes nothing if there are none."""
    if not files:
        store.delete([name])
        return
    rows = [{"shard": shard, **vars(files[path])} for path in sorted(files)]
    with store.writing(name) as unfinished:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), unfinished)


def merge_files(lists: Iterable[pa.Table], merged: Writing, versions: FileVersions) -> dict[str, int]:
    """Joins lists of files, one row group each.

    Args:
        lists: Tables of :func:`write_files`, in the order of shards.
        merged: Destination of the joined list.
        versions: Collects their contents.

    Returns:
        Number of ``files``, number of ``missing`` ones, and total ``bytes`` of the others.
    """
    counts = {"files": 0, "missing": 0, "bytes": 0}
    with pq.ParquetWriter(merged, SCHEMA, compression="zstd") as writer:
        for table in lists:
            writer.write_table(table)
            versions.add(table)
            sizes = table.column("bytes").to_pylist()
            counts["files"] += len(sizes)
            counts["missing"] += sizes.count(ABSENT)
            counts["bytes"] += sum(size for size in sizes if size != ABSENT)
    return counts


def changed_files(recorded: Path, root: Path | RemoteRoot, since_ns: int | None) -> dict[int, list[str]]:
    """Compares recorded files with the current ones.

    Args:
        recorded: List of :func:`write_files` or :func:`merge_files`.
        root: The image root.
        since_ns: Start of the run, by the clock of the file system: files not modified since are not read. None reads
            all files.

    Returns:
        Paths of changed, removed or added files, by shard.
    """
    changed: dict[int, list[str]] = {}
    with pq.ParquetFile(recorded) as file, ThreadPoolExecutor(_THREADS) as threads:
        for batch in file.iter_batches():
            rows = batch.to_pylist()
            files = [RecordedFile(row["path"], row["bytes"], row["xxh3_128"]) for row in rows]
            for row, differs in zip(rows, threads.map(partial(_is_changed, root, since_ns), files), strict=True):
                if differs:
                    changed.setdefault(row["shard"], []).append(row["path"])
    return changed


def _is_changed(root: Path | RemoteRoot, since_ns: int | None, file: RecordedFile) -> bool:
    size, touched_ns = _state(root, file.path)
    if size is None or file.bytes == ABSENT:
        return (size is None) != (file.bytes == ABSENT)
    if not file.xxh3_128 and isinstance(root, RemoteRoot):
        return False  # too large, and recorded with the size of its beginning
    if size != file.bytes:
        return True
    is_old = since_ns is not None and touched_ns is not None and touched_ns < since_ns - _MARGIN_NS
    if not file.xxh3_128 or is_old:
        return False
    try:
        return _digest(root, file.path) != file.xxh3_128
    except (OSError, FetchProblem):
        return True


def _state(root: Path | RemoteRoot, path: str) -> tuple[int | None, float | None]:
    """Returns a file's size and last change in nanoseconds; None if it is missing, or the store does not know."""
    if isinstance(root, RemoteRoot):
        size, seconds = root.state(path)
        return size, None if seconds is None else seconds * 10**9
    try:
        status, link = (root / path).stat(), (root / path).lstat()
        is_file = (root / path).is_file()
    except (OSError, ValueError):
        return None, None
    # A copy with the old modification time, or a new file with the old name, still has a new change time.
    touched = max(status.st_mtime_ns, status.st_ctime_ns, link.st_ctime_ns)
    return (status.st_size, touched) if is_file else (None, None)


def _digest(root: Path | RemoteRoot, path: str) -> str:
    if isinstance(root, RemoteRoot):
        return xxhash.xxh3_128_hexdigest(root.fetch(root.name_of(path), VIDEOS))
    return file_digest(root / path)


def listed(changed: Mapping[int, Sequence[str]], shown: int = 3) -> str:
    """Formats changed files for a message: ``a.png, b.png, … (7 in total)``."""
    paths = sorted({path for paths in changed.values() for path in paths})
    return ", ".join(paths[:shown]) + (f", … ({len(paths):,} in total)" if len(paths) > shown else "")


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
    """Returns the shards that name each of the files in :meth:`FileVersions.several`, by path."""
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
