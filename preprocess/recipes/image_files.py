"""Records the image files of a shard, and detects later changes.

Rows may name image files by path. Their content is recorded by hash, since the dataset depends on it and it is the same
for every copy of the source. Reading all files again to compare them is slow. So a file counts as unchanged if its size
is the same and, according to the file system, it was not modified since the start of the run. Only other files are
read.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from preprocess.recipes.file_versions import ABSENT, FileVersions
from preprocess.recipes.remote_root import FetchProblem, RemoteRoot
from preprocess.sources.identity import file_digest
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

_reading: ContextVar[dict[str, ImageFile] | None] = ContextVar("image files read", default=None)


@dataclass(frozen=True)
class ImageFile:
    """An image file used by a shard.

    Attributes:
        path: Path relative to the image root, or absolute.
        bytes: Size in bytes; -1 if the file was missing.
        xxh3_128: Hash of the content; empty if not read.
    """

    path: str
    bytes: int
    xxh3_128: str


@contextmanager
def recording() -> Iterator[Mapping[str, ImageFile]]:
    """Collects the image files read in the block, by path."""
    files: dict[str, ImageFile] = {}
    token = _reading.set(files)
    try:
        yield files
    finally:
        _reading.reset(token)


def record(root: Path, path: str, full: Path | None, size: int | None, data: bytes | None) -> None:
    """Records a file that a row names, inside :func:`recording`.

    Args:
        root: The image root, with links resolved.
        path: Path in the data.
        full: The file in the root, with links resolved; None if missing.
        size: Size of the file; None if missing.
        data: Content of the file; None if not read.
    """
    files = _reading.get()
    if files is None:
        return
    if Path(path).is_absolute():  # a copy of the source elsewhere has the same files
        absolute = full or Path(path)
        path = absolute.relative_to(root).as_posix() if absolute.is_relative_to(root) else path
    path = path.encode("utf-8", "backslashreplace").decode()
    digest = "" if data is None else xxhash.xxh3_128_hexdigest(data)
    files[path] = ImageFile(path, ABSENT if size is None else size, digest)


def record_remote(name: str, size: int | None, data: bytes | None) -> None:
    """Notes that a row names a file below a URL, if somebody collects them.

    Args:
        name: Below the image root, as the data names it.
        size: Its size; None if there is no such file.
        data: Its content; None if it was not read.
    """
    files = _reading.get()
    if files is not None:
        name = name.encode("utf-8", "backslashreplace").decode()
        digest = "" if data is None else xxhash.xxh3_128_hexdigest(data)
        files[name] = ImageFile(name, ABSENT if size is None else size, digest)


def write_files(store: Store, name: str, shard: int, files: Mapping[str, ImageFile]) -> None:
    """Writes the list of a shard's files, ascending by path. Writes nothing if there are none."""
    if not files:
        store.delete([name])
        return
    rows = [{"shard": shard, **vars(files[path])} for path in sorted(files)]
    with store.writing(name) as unfinished:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), unfinished)


def merge_files(lists: Iterable[bytes], merged: Writing, versions: FileVersions) -> dict[str, int]:
    """Joins lists of files, one row group each.

    Args:
        lists: Lists of :func:`write_files`, in the order of shards.
        merged: Destination of the joined list.
        versions: Collects their contents.

    Returns:
        Number of ``files``, number of ``missing`` ones, and total ``bytes`` of the others.
    """
    counts = {"files": 0, "missing": 0, "bytes": 0}
    with pq.ParquetWriter(merged, SCHEMA, compression="zstd") as writer:
        for content in lists:
            table = pq.read_table(io.BytesIO(content), schema=SCHEMA)
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
    is_changed: Callable[[ImageFile], bool]
    if isinstance(root, RemoteRoot):
        is_changed = partial(_is_changed_remote, root, since_ns)
    else:
        is_changed = partial(_is_changed, root, since_ns)
    with pq.ParquetFile(recorded) as file, ThreadPoolExecutor(_THREADS) as threads:
        for batch in file.iter_batches():
            rows = batch.to_pylist()
            files = [ImageFile(row["path"], row["bytes"], row["xxh3_128"]) for row in rows]
            for row, differs in zip(rows, threads.map(is_changed, files), strict=True):
                if differs:
                    changed.setdefault(row["shard"], []).append(row["path"])
    return changed


def _is_changed(root: Path, since_ns: int | None, file: ImageFile) -> bool:
    path = root / file.path
    try:
        status, link = path.stat(), path.lstat()
        is_file = path.is_file()
    except (OSError, ValueError):
        is_file = False
    if not is_file or file.bytes == ABSENT:
        return is_file != (file.bytes != ABSENT)
    if status.st_size != file.bytes:
        return True
    # A copy with the old modification time, or a new file with the old name, still has a new change time.
    touched = max(status.st_mtime_ns, status.st_ctime_ns, link.st_ctime_ns)
    if not file.xxh3_128 or (since_ns is not None and touched < since_ns - _MARGIN_NS):
        return False
    try:
        return file_digest(path) != file.xxh3_128
    except OSError:
        return True


def _is_changed_remote(root: RemoteRoot, since_ns: int | None, file: ImageFile) -> bool:
    size, seconds = root.state(file.path)
    if size is None or file.bytes == ABSENT:
        return (size is None) != (file.bytes == ABSENT)
    if not file.xxh3_128:
        return False
    if size != file.bytes:
        return True
    if since_ns is not None and seconds is not None and seconds * 10**9 < since_ns - _MARGIN_NS:
        return False
    try:
        return xxhash.xxh3_128_hexdigest(root.fetch(root.name_of(file.path))) != file.xxh3_128
    except FetchProblem:
        return True


def listed(changed: Mapping[int, Sequence[str]], shown: int = 3) -> str:
    """Formats changed files for a message: ``a.png, b.png, … (7 in total)``."""
    paths = sorted({path for paths in changed.values() for path in paths})
    return ", ".join(paths[:shown]) + (f", … ({len(paths):,} in total)" if len(paths) > shown else "")
