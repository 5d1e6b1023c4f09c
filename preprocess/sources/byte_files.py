"""Opens plain and gzip-compressed files for reading from any offset."""

from __future__ import annotations

import gzip
import io
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO

from vlmdata.errors import ResourceError, SourceError
from vlmdata.preprocess.sources.data_files import STREAM_BYTES, DataFile
from vlmdata.preprocess.sources.kept import cache_dir

_LEAST_SPACING = 8 << 20
#: Largest number of restart points of a source. Each is a window of 32 KiB that is sent to workers.
_MOST_POINTS = 512
#: Text compresses to about a sixth; the spacing is measured in uncompressed bytes.
_EXPANSION = 6


@dataclass(frozen=True)
class ByteFile:
    """A file whose uncompressed bytes can be read from any offset."""

    file: DataFile
    #: Where decompression can start (an index of ``indexed_gzip``); empty for an empty file, None for a plain file.
    restart_points: bytes | None = None

    @property
    def path(self) -> str:
        """Location of the file, for messages."""
        return self.file.place

    def open(self, offset: int = 0, buffered: int = STREAM_BYTES, *, counting: bool = False) -> BinaryIO:
        """Opens a stream of the uncompressed bytes at an offset; options as in :meth:`DataFile.open`."""
        if self.restart_points is None:
            stream = self.file.open(buffered, counting=counting)
        elif not self.restart_points:
            return io.BytesIO()
        else:
            from indexed_gzip import IndexedGzipFile

            if self.file.is_remote:
                stream = IndexedGzipFile(fileobj=self.file.open(buffered, counting=counting))
            else:
                self.file.require_unchanged()
                stream = IndexedGzipFile(self.file.place)
            stream.import_index(fileobj=io.BytesIO(self.restart_points))
        stream.seek(offset)
        return stream


def is_gzip(file: DataFile) -> bool:
    """Returns whether a file is compressed, by its name."""
    return file.place.lower().endswith(".gz")


def spacing_of(files: list[DataFile]) -> int:
    """Returns the number of uncompressed bytes between restart points."""
    compressed = sum(file.size for file in files if is_gzip(file))
    return max(_LEAST_SPACING, compressed * _EXPANSION // _MOST_POINTS)


@contextmanager
def on_disk(file: DataFile) -> Iterator[DataFile]:
    """Provides the file, or a temporary copy of a remote one; a ResourceError if there is no space for the copy."""
    if not file.is_remote:
        yield file
        return
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder) as copy:
            with file.open(buffered=0, counting=True) as stream:
                shutil.copyfileobj(stream, copy, STREAM_BYTES)
            copy.flush()
            yield DataFile.local(copy.name)
    except OSError as error:
        raise ResourceError(
            f"{folder}: a copy of {file.place} ({file.size} bytes) cannot be kept there while its rows are counted: "
            f"{error}. Make room, or set VLMDATA_CACHE to another folder."
        ) from error


def restart_points(file: DataFile, spacing: int, name: str) -> bytes:
    """Decompresses a file on disk once, to check it and to find restart points ``spacing`` uncompressed bytes apart.

    A damaged or truncated file is a SourceError with the user's name for it.
    """
    from indexed_gzip import IndexedGzipFile

    try:
        # The standard library checks the file, because indexed_gzip misreports truncated or damaged files.
        with gzip.open(Path(file.place)) as stream:
            length = 0
            while chunk := stream.read(1 << 20):
                length += len(chunk)
        if length == 0:
            return b""
        with IndexedGzipFile(file.place, spacing=spacing) as indexed:
            indexed.build_full_index()
            points = io.BytesIO()
            indexed.export_index(fileobj=points)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SourceError(f"SOURCE {name}: the gzip file is damaged or cut off: {error}") from error
    return points.getvalue()
