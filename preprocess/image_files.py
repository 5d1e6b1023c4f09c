"""Which image files a shard was made of, and noticing that they have changed since.

Rows may name image files by path. Their content is recorded by hash: it is what the dataset was made of, and it is the
same for every copy of the source. Reading all files again in order to compare them is slow, so a file counts as
unchanged if its size is the same and the file system says that it was not touched since the run began. Only the others
are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from preprocess.sources.identity import file_digest
from vlmdata.format.atomic import atomic_path

SCHEMA = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("xxh3_128", pa.string(), nullable=False),
    ]
)
#: Size of a file that is not there.
_ABSENT = -1
#: Clocks of file servers and of this machine may differ; files touched shortly before the run are read too.
_MARGIN_NS = 60 * 10**9
_THREADS = 16

_reading: ContextVar[dict[str, ImageFile] | None] = ContextVar("image files read", default=None)


@dataclass(frozen=True)
class ImageFile:
    """An image file as a shard found it.

    Attributes:
        path: Below the image root, or absolute.
        bytes: Its size; -1 if there was no such file.
        xxh3_128: Hash of its content; empty if it was not read.
    """

    path: str
    bytes: int
    xxh3_128: str


@contextmanager
def recording() -> Iterator[Mapping[str, ImageFile]]:
    """Collects the image files that are read inside the block, by path."""
    files: dict[str, ImageFile] = {}
    token = _reading.set(files)
    try:
        yield files
    finally:
        _reading.reset(token)


def record(root: Path, path: str, full: Path | None, size: int | None, data: bytes | None) -> None:
    """Notes that a row names a file, if somebody collects them.

    Args:
        root: The image root, links resolved.
        path: As the data names it.
        full: The file below the root, links resolved; None if there is none.
        size: Its size; None if there is no such file.
        data: Its content; None if it was not read.
    """
    files = _reading.get()
    if files is None:
        return
    if Path(path).is_absolute():  # a copy of the source elsewhere has the same files
        absolute = full or Path(path)
        path = absolute.relative_to(root).as_posix() if absolute.is_relative_to(root) else path
    path = path.encode("utf-8", "backslashreplace").decode()
    digest = "" if data is None else xxhash.xxh3_128_hexdigest(data)
    files[path] = ImageFile(path, _ABSENT if size is None else size, digest)


def write_files(path: Path, shard: int, files: Mapping[str, ImageFile]) -> None:
    """Writes the files of a shard, ascending by path; without files there is no file."""
    if not files:
        path.unlink(missing_ok=True)
        return
    rows = [{"shard": shard, **vars(files[name])} for name in sorted(files)]
    with atomic_path(path) as unfinished:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), unfinished)


def merge_files(paths: Sequence[Path], merged: Path) -> dict[str, int]:
    """Joins lists of files, one row group each.

    Args:
        paths: What :func:`write_files` wrote, shard by shard.
        merged: Where the joined list goes.

    Returns:
        Number of ``files``, how many of them are ``missing``, and the ``bytes`` of the others.
    """
    counts = {"files": 0, "missing": 0, "bytes": 0}
    with pq.ParquetWriter(merged, SCHEMA, compression="zstd") as writer:
        for path in paths:
            table = pq.read_table(path, schema=SCHEMA)
            writer.write_table(table)
            sizes = table.column("bytes").to_pylist()
            counts["files"] += len(sizes)
            counts["missing"] += sizes.count(_ABSENT)
            counts["bytes"] += sum(size for size in sizes if size != _ABSENT)
    return counts


def changed_files(recorded: Path, root: Path, since_ns: int | None) -> dict[int, list[str]]:
    """Compares recorded files with those that are there now.

    Args:
        recorded: What :func:`write_files` or :func:`merge_files` wrote.
        root: The image root.
        since_ns: When the run began, by the clock of the file system: files untouched since are not read. None
            reads all.

    Returns:
        Shard to paths of its files that have changed, have gone or have come.
    """
    changed: dict[int, list[str]] = {}
    with pq.ParquetFile(recorded) as file, ThreadPoolExecutor(_THREADS) as threads:
        for batch in file.iter_batches():
            rows = batch.to_pylist()
            files = [ImageFile(row["path"], row["bytes"], row["xxh3_128"]) for row in rows]
            found = threads.map(partial(_is_changed, root, since_ns), files)
            for row, is_changed in zip(rows, found, strict=True):
                if is_changed:
                    changed.setdefault(row["shard"], []).append(row["path"])
    return changed


def _is_changed(root: Path, since_ns: int | None, file: ImageFile) -> bool:
    path = root / file.path
    try:
        status, link = path.stat(), path.lstat()
        is_file = path.is_file()
    except (OSError, ValueError):
        is_file = False
    if not is_file or file.bytes == _ABSENT:
        return is_file != (file.bytes != _ABSENT)
    if status.st_size != file.bytes:
        return True
    # A copy that keeps the old modification time, or a new file under the old name, still has a new change time.
    touched = max(status.st_mtime_ns, status.st_ctime_ns, link.st_ctime_ns)
    if not file.xxh3_128 or (since_ns is not None and touched < since_ns - _MARGIN_NS):
        return False
    try:
        return file_digest(path) != file.xxh3_128
    except OSError:
        return True


def listed(changed: Mapping[int, Sequence[str]], shown: int = 3) -> str:
    """Changed files for a message: ``a.png, b.png, … (7 in all)``."""
    paths = sorted({path for paths in changed.values() for path in paths})
    return ", ".join(paths[:shown]) + (f", … ({len(paths):,} in all)" if len(paths) > shown else "")
