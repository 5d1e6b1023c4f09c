"""Writing and reading shards: uncompressed tar files whose arrays can be memory-mapped in place.

A member is a 512-byte ustar header, the data, and zeros up to the next multiple of 512. An ``.npy`` member starts
with a header that numpy pads to a multiple of 64 bytes, so array data is 64-byte aligned in the file. Headers
carry no time, user or host: a shard's bytes depend on its samples alone.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Buffer, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from vlmdata.format.schema import ALL_MEMBERS, IMAGE, ITEMS_MEMBER, METADATA_MEMBER
from vlmdata.media.codecs import RAW

BLOCK = tarfile.BLOCKSIZE
_END_OF_ARCHIVE = bytes(2 * BLOCK)
#: Bytes written between two flushes to the disk.
_FLUSH_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class ArrayPlace:
    """Where the array of an optional member lies.

    Attributes:
        offset: First byte of its data in the shard.
        checksum: xxh3-64 of its data.
    """

    offset: int
    checksum: int


#: What stands in the columns of a member for a sample that lacks it.
ABSENT = ArrayPlace(offset=-1, checksum=0)


@dataclass(frozen=True)
class ItemPlace:
    """Where an item (an image) lies, and how it is stored.

    Attributes:
        offset: First of its stored bytes in the shard.
        bytes: How many there are.
        kind: What it is: ``image``.
        codec: Name of the codec that decodes it.
    """

    offset: int
    bytes: int
    kind: str = IMAGE
    codec: str = RAW


@dataclass(frozen=True, eq=False)
class EncodedItem:
    """An item as a codec encoded it.

    Attributes:
        payload: The bytes to store.
        codec: Name of the codec.
        kind: What it is.
    """

    payload: Buffer
    codec: str
    kind: str = IMAGE

    def describe(self) -> dict[str, Any]:
        """What the sample's metadata says of the item, so that the payloads can be told apart without the index."""
        return {"kind": self.kind, "codec": self.codec, "bytes": memoryview(self.payload).nbytes}


@dataclass(frozen=True)
class Placement:
    """Where a sample lies in its shard; all numbers are bytes.

    Attributes:
        offset: Start of the sample's first tar header.
        size: Bytes of all its members, headers and filling included.
        checksum: xxh3-64 of those bytes.
        json_offset: Start of the metadata JSON text.
        json_size: Length of the metadata JSON text.
        data_offsets: Start of each array's data, in the order of :data:`MEMBERS`; of ``patches`` -1 if ``items.bin``
            stands in for it.
        data_checksums: For each member, the xxh3-64 of each of the pieces it was written in: of the whole array, for
            ``patches`` of every item's stored bytes. So whatever a reader reads alone, it can check alone.
        optional: By name, the members of :data:`OPTIONAL_MEMBERS` that the sample has.
        items: Every item, in order. A sample without any has one empty piece here, as in ``data_checksums``.
    """

    offset: int
    size: int
    checksum: int
    json_offset: int
    json_size: int
    data_offsets: tuple[int, ...]
    data_checksums: tuple[tuple[int, ...], ...]
    optional: Mapping[str, ArrayPlace] = field(default_factory=dict)
    items: tuple[ItemPlace, ...] = ()


def npy_header(array: npt.NDArray[np.generic]) -> bytes:
    """The ``.npy`` version 1.0 header of a C-contiguous array, padded to a multiple of 64 bytes."""
    return npy_header_for(array.dtype, array.shape)


def npy_header_for(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """As :func:`npy_header`, from dtype and shape alone."""
    buffer = io.BytesIO()
    description = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(buffer, {"descr": description, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def metadata_bytes(metadata: Mapping[str, Any]) -> bytes:
    """Canonical JSON of a sample's metadata: sorted keys, no spaces, UTF-8."""
    return json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


class ShardWriter:
    """Writes one tar, hashing as it goes. The caller chooses a temporary path and renames after :meth:`close`.

    A thread flushes what is written while more is being made, so that the end does not wait for a whole shard. Use as
    a context manager; leaving it by an exception closes the file without finishing it.
    """

    def __init__(self, path: Path):
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (held over the object's life)
        self._position = 0
        self._sha256 = hashlib.sha256()
        self._sample_hash = xxhash.xxh3_64()
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="vlmdata-flush")
        self._flush: Future[None] | None = None
        self._next_flush = _FLUSH_BYTES

    def add(
        self,
        key: str,
        metadata: Mapping[str, Any],
        arrays: Mapping[str, Sequence[npt.NDArray[np.generic]]],
        encoded: Sequence[EncodedItem] = (),
    ) -> Placement:
        """Appends a sample.

        Args:
            key: Stem of the member names.
            metadata: JSON-able facts of the sample.
            arrays: For every member of :data:`MEMBERS` the pieces that, joined along axis 0, are its array. Pieces
                are C-contiguous, so several images are written without being copied together first. ``patches`` has
                one piece per image; a sample without images has one empty piece. A member of
                :data:`OPTIONAL_MEMBERS`, if it is given, has one piece.
            encoded: The sample's items if a codec encoded them; ``arrays`` then lacks ``patches``.

        Returns:
            Where everything lies.
        """
        start = self._position
        self._sample_hash.reset()
        text = metadata_bytes(metadata)
        json_offset = self._member(f"{key}.{METADATA_MEMBER}", b"", [memoryview(text)])
        offsets: list[int] = []
        checksums: list[tuple[int, ...]] = []
        optional: dict[str, ArrayPlace] = {}
        items: tuple[ItemPlace, ...] = ()
        for member in ALL_MEMBERS:
            if member.feature is not None and member.name not in arrays:
                continue
            if member.name == "patches" and encoded:
                items, hashes = self._items(key, encoded)
                offsets.append(ABSENT.offset)
                checksums.append(hashes)
                continue
            pieces = arrays[member.name]
            shape = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
            for piece in pieces:
                assert piece.dtype == member.dtype, (member.name, piece.dtype)
                assert piece.flags.c_contiguous, member.name
            views = [memoryview(piece).cast("B") for piece in pieces if piece.size]
            offset = self._member(f"{key}.{member.suffix}", npy_header_for(member.dtype, shape), views)
            hashes = tuple(xxhash.xxh3_64_intdigest(piece) for piece in pieces)
            if member.name == "patches":
                sizes = [piece.nbytes for piece in pieces]
                items = tuple(ItemPlace(offset + sum(sizes[:i]), size) for i, size in enumerate(sizes))
            if member.feature is None:
                offsets.append(offset)
                checksums.append(hashes)
            else:
                optional[member.name] = ArrayPlace(offset, *hashes)
        return Placement(
            offset=start,
            size=self._position - start,
            checksum=self._sample_hash.intdigest(),
            json_offset=json_offset,
            json_size=len(text),
            data_offsets=tuple(offsets),
            data_checksums=tuple(checksums),
            optional=optional,
            items=items,
        )

    def _items(self, key: str, encoded: Sequence[EncodedItem]) -> tuple[tuple[ItemPlace, ...], tuple[int, ...]]:
        """Writes the member ``items.bin``; returns where its items lie, and their checksums."""
        views = [memoryview(item.payload).cast("B") for item in encoded]
        offset = self._member(f"{key}.{ITEMS_MEMBER}", b"", views)
        places = []
        for item, view in zip(encoded, views, strict=True):
            places.append(ItemPlace(offset, view.nbytes, item.kind, item.codec))
            offset += view.nbytes
        return tuple(places), tuple(xxhash.xxh3_64_intdigest(view) for view in views)

    def _member(self, name: str, header: bytes, views: Sequence[memoryview]) -> int:
        """Writes one tar member and returns where its data (after ``header``) begins."""
        info = tarfile.TarInfo(name)
        info.size = len(header) + sum(view.nbytes for view in views)
        info.mode = 0o644
        self._write(memoryview(info.tobuf(tarfile.USTAR_FORMAT) + header))
        data_offset = self._position
        for view in views:
            self._write(view)
        if filling := -self._position % BLOCK:
            self._write(memoryview(bytes(filling)))
        return data_offset

    def _write(self, view: memoryview) -> None:
        self._sha256.update(view)
        self._sample_hash.update(view)
        self._write_through(view)

    def _write_through(self, view: memoryview) -> None:
        written = 0
        while written < view.nbytes:  # an unbuffered write may be short, on a nearly full disk above all
            written += self._file.write(view[written:])
        self._position += view.nbytes
        if self._position >= self._next_flush and (self._flush is None or self._flush.done()):
            self._flushed()
            self._flush = self._flusher.submit(os.fsync, self._file.fileno())
            self._next_flush = self._position + _FLUSH_BYTES

    def _flushed(self) -> None:
        """Waits for the flush under way. The system tells of a failed write once, and perhaps to that flush."""
        flush, self._flush = self._flush, None
        if flush is not None:
            flush.result()

    def close(self) -> tuple[int, str]:
        """Ends the archive, flushes it to disk, and returns (bytes, sha256)."""
        padding = -(self._position + len(_END_OF_ARCHIVE)) % tarfile.RECORDSIZE
        tail = memoryview(_END_OF_ARCHIVE + bytes(padding))
        self._sha256.update(tail)
        self._write_through(tail)
        self._flushed()
        os.fsync(self._file.fileno())
        self._close_file()
        return self._position, self._sha256.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_file()

    def _close_file(self) -> None:
        self._flusher.shutdown(wait=True)  # else the number of the closed file may be another one's
        self._file.close()
