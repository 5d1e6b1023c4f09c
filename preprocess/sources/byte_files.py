"""Opening a plain or gzip-compressed file for reading from any offset."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from vlmdata.errors import SourceError

_LEAST_SPACING = 8 << 20
#: Restart points of all files of a source together, each a window of 32 KiB: what workers are sent stays small.
_MOST_POINTS = 512
#: Text compresses to about a sixth; the spacing is measured in uncompressed bytes.
_EXPANSION = 6


@dataclass(frozen=True)
class ByteFile:
    """A file whose uncompressed bytes can be read from any offset.

    Attributes:
        path: The file.
        restart_points: Where decompression can begin (an index of ``indexed_gzip``); empty if there is nothing to
            decompress, None for a plain file.
    """

    path: str
    restart_points: bytes | None = None

    def open(self, offset: int = 0) -> BinaryIO:
        """A stream of the uncompressed bytes that stands at an offset."""
        if self.restart_points is None:
            stream = cast(BinaryIO, open(self.path, "rb"))  # noqa: SIM115
        elif not self.restart_points:
            return io.BytesIO()
        else:
            from indexed_gzip import IndexedGzipFile

            stream = IndexedGzipFile(self.path)
            stream.import_index(fileobj=io.BytesIO(self.restart_points))
        stream.seek(offset)
        return stream


def byte_files(files: Sequence[Path]) -> list[ByteFile]:
    """The files; compressed ones are decompressed once, to check them and to find restart points.

    Raises:
        SourceError: If a compressed file is damaged or cut off.
    """
    compressed = sum(os.path.getsize(file) for file in files if _is_gzip(file))
    spacing = max(_LEAST_SPACING, compressed * _EXPANSION // _MOST_POINTS)
    return [ByteFile(str(file), _restart_points(file, spacing) if _is_gzip(file) else None) for file in files]


def _is_gzip(file: Path) -> bool:
    return file.name.lower().endswith(".gz")


def _restart_points(file: Path, spacing: int) -> bytes:
    from indexed_gzip import IndexedGzipFile

    try:
        # The standard library checks the file: indexed_gzip takes one that is cut off or damaged for another one.
        with gzip.open(file) as stream:
            length = 0
            while chunk := stream.read(1 << 20):
                length += len(chunk)
        if length == 0:
            return b""
        with IndexedGzipFile(str(file), spacing=spacing) as indexed:
            indexed.build_full_index()
            points = io.BytesIO()
            indexed.export_index(fileobj=points)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SourceError(f"SOURCE {file}: the gzip file is damaged or cut off: {error}") from error
    return points.getvalue()
