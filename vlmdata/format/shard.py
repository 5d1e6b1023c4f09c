"""Writing and reading shards: uncompressed tar files whose arrays can be memory-mapped in place.

A member is a 512-byte ustar header, the data, and zeros to the next multiple of 512. An ``.npy`` member starts
with a header that numpy pads to a multiple of 64 bytes, so array data is 64-byte aligned in the file. Headers
contain no time, user or host, so a shard's bytes depend only on its samples.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import tarfile
from collections.abc import Buffer, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from vlmdata.format.schema import ALL_MEMBERS, ITEMS_MEMBER, METADATA_MEMBER
from vlmdata.format.writing import FileWriting, Writing
from vlmdata.media.codecs import IMAGE, RAW, ItemShape

BLOCK = tarfile.BLOCKSIZE
_END_OF_ARCHIVE = bytes(2 * BLOCK)
#: Smaller pieces are joined before they are hashed and written: a sample has a dozen of them.
_SMALL = 64 * 1024
_MODE = 0o644
_NAME = slice(0, tarfile.LENGTH_NAME)
_SIZE = slice(124, 135)
_CHECKSUM = slice(148, 154)
_LARGEST = 8 ** len(range(*_SIZE.indices(tarfile.BLOCKSIZE))) - 1


@dataclass(frozen=True)
class ArrayPlace:
    """Place of the array of a member."""

    offset: int  # offset of its data in the shard, in bytes
    checksum: int  # xxh3-64 of its data


#: Column values of a member for a sample without it.
ABSENT = ArrayPlace(offset=-1, checksum=0)


@dataclass(frozen=True)
class ItemPlace:
    """Place and storage form of an item."""

    shape: ItemShape  # kind, grid and copies
    offset: int  # offset of its stored bytes in the shard
    bytes: int  # number of stored bytes
    checksum: int  # xxh3-64 of the stored bytes
    pixel_checksum: int  # xxh3-64 of its decoded patches
    codec: str = RAW  # name of the codec that decodes it


@dataclass(frozen=True, eq=False)
class EncodedItem:
    """An item encoded by a codec."""

    payload: Buffer  # the bytes to store
    shape: ItemShape  # kind, grid and copies
    codec: str  # name of the codec
    pixel_checksum: int  # xxh3-64 of its patches


@dataclass(frozen=True)
class ItemName:
    """An item of a shard: its sample's key, and its number among the items of the sample."""

    key: str
    number: int


def item_metadata(item: ItemPlace | EncodedItem, same_as: ItemName | None = None) -> dict[str, Any]:
    """Returns the entry of ``items`` in a sample's metadata, so that a shard can be read without the index.

    Args:
        item: The item.
        same_as: An earlier item of the shard with the same stored bytes, which this item shares; None without one.
    """
    size = item.bytes if isinstance(item, ItemPlace) else memoryview(item.payload).nbytes
    # The checksum is text, because many readers limit JSON numbers to 2**53.
    fields: dict[str, Any] = {
        "kind": item.shape.kind,
        "codec": item.codec,
        "bytes": size,
        "pixel_checksum": f"{item.pixel_checksum:016x}",
    }
    if item.shape.copies != 1:
        fields["copies"] = item.shape.copies
    return fields if same_as is None else fields | {"same_as": {"key": same_as.key, "image": same_as.number}}


@dataclass(frozen=True)
class Placement:
    """Place of a sample in its shard. All numbers are bytes.

    Attributes:
        offset: Start of the sample's first tar header.
        size: Bytes of all its members, including headers and padding.
        checksum: xxh3-64 of those bytes.
        json_offset: Start of the metadata JSON text.
        json_size: Length of the metadata JSON text.
        arrays: Places of its members by name, without ``patches``, whose items have their own checksums. Optional
            members only if the sample has them.
        patches_offset: Start of the data of ``patches``; -1 if ``items.bin`` replaces it.
        items: All items, in order.
    """

    offset: int
    size: int
    checksum: int
    json_offset: int
    json_size: int
    arrays: Mapping[str, ArrayPlace]
    patches_offset: int
    items: tuple[ItemPlace, ...] = ()


def metadata_bytes(metadata: Mapping[str, Any]) -> bytes:
    """Returns canonical JSON of a sample's metadata: sorted keys, no spaces, UTF-8."""
    return json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


class ShardWriter:
    """Writes one tar, hashing as it goes.

    Use as a context manager; leaving it by an exception leaves the archive unfinished.

    Args:
        to: Destination: an open file of a store, which the caller finishes, or a local path.
    """

    def __init__(self, to: Writing | Path):
        self._own = None
        if isinstance(to, Path):
            to = self._own = FileWriting(to)
        self._file: Writing = to
        self._position = 0
        self._small: list[Buffer] = []  # appended, but not yet written
        self._sha256 = hashlib.sha256()
        self._sample_hash = xxhash.xxh3_64()
        self._first_items: dict[tuple[str, bytes], ItemName] = {}
        self._item_offsets: dict[ItemName, int] = {}

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
            metadata: JSON-able facts of the sample. For encoded items, ``items`` is added.
            arrays: For every member of :data:`MEMBERS` the pieces that, joined along axis 0, are its array. Pieces
                are C-contiguous, so several images are written without being copied together first. ``patches`` has
                one piece per row of ``image_grid_thw``, each an image; a sample without items has one empty piece.
                All other members, those of :data:`OPTIONAL_MEMBERS` too, have one piece.
            encoded: The sample's items if a codec encoded them, or if they are not images; ``arrays`` then lacks
                ``patches``. Bytes equal to those of an earlier item of the shard are not written again.

        Returns:
            Place of the sample.
        """
        start = self._position
        self._sample_hash.reset()
        firsts = [self._first_item(ItemName(key, number), item) for number, item in enumerate(encoded)]
        if encoded:
            metadata = {**metadata, "items": _described(key, encoded, firsts)}
        text = metadata_bytes(metadata)
        json_offset = self._member(f"{key}.{METADATA_MEMBER}", b"", [memoryview(text)])
        places: dict[str, ArrayPlace] = {}
        patches_offset = ABSENT.offset
        items: tuple[ItemPlace, ...] = ()
        for member in ALL_MEMBERS:
            if member.name == "patches" and encoded:
                items = self._items(key, encoded, firsts)
                continue
            if member.feature is not None and member.name not in arrays:
                continue
            pieces = arrays[member.name]
            shape = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
            for piece in pieces:
                assert piece.dtype == member.dtype, (member.name, piece.dtype)
                assert piece.flags.c_contiguous, member.name
            views = [memoryview(piece).cast("B") for piece in pieces if piece.size]
            offset = self._member(f"{key}.{member.suffix}", npy_header_for(member.dtype, shape), views)
            if member.name == "patches":
                patches_offset, items = offset, _images(offset, arrays["image_grid_thw"][0], pieces)
            else:
                (piece,) = pieces
                places[member.name] = ArrayPlace(offset, xxhash.xxh3_64_intdigest(piece))
        self._write_small()
        return Placement(
            offset=start,
            size=self._position - start,
            checksum=self._sample_hash.intdigest(),
            json_offset=json_offset,
            json_size=len(text),
            arrays=places,
            patches_offset=patches_offset,
            items=items,
        )

    def _first_item(self, name: ItemName, item: EncodedItem) -> ItemName:
        """Returns the first item of the shard with the same stored bytes: an earlier one or this one."""
        # Images come from others, who must not be able to construct two with the same hash.
        content = (item.codec, hashlib.sha256(item.payload).digest())
        return self._first_items.setdefault(content, name)

    def _items(self, key: str, encoded: Sequence[EncodedItem], firsts: Sequence[ItemName]) -> tuple[ItemPlace, ...]:
        """Writes the member ``items.bin``. Returns the places of the sample's items."""
        views = [memoryview(item.payload).cast("B") for item in encoded]
        own = {
            ItemName(key, number): view for number, view in enumerate(views) if firsts[number] == ItemName(key, number)
        }
        offset = self._member(f"{key}.{ITEMS_MEMBER}", b"", list(own.values()))
        for name, view in own.items():
            self._item_offsets[name] = offset
            offset += view.nbytes
        return tuple(
            ItemPlace(
                shape=item.shape,
                offset=self._item_offsets[first],
                bytes=view.nbytes,
                checksum=xxhash.xxh3_64_intdigest(view),
                pixel_checksum=item.pixel_checksum,
                codec=item.codec,
            )
            for item, view, first in zip(encoded, views, firsts, strict=True)
        )

    def _member(self, name: str, header: bytes, views: Sequence[memoryview]) -> int:
        """Writes one tar member and returns the offset of its data after ``header``."""
        size = len(header) + sum(view.nbytes for view in views)
        self._append(memoryview(tar_header(name, size) + header))
        data_offset = self._position
        for view in views:
            self._append(view)
        if filling := -self._position % BLOCK:
            self._append(memoryview(bytes(filling)))
        return data_offset

    def _append(self, view: memoryview) -> None:
        self._position += view.nbytes
        if view.nbytes < _SMALL:
            self._small.append(view)
        else:
            self._write_small()
            self._write(view)

    def _write_small(self) -> None:
        if self._small:
            self._write(b"".join(self._small))
            self._small.clear()

    def _write(self, data: Buffer) -> None:
        self._sha256.update(data)
        self._sample_hash.update(data)
        self._file.write(data)

    def close(self) -> tuple[int, str]:
        """Ends the archive, waits until all of it is stored, and returns (bytes, sha256)."""
        padding = -(self._position + len(_END_OF_ARCHIVE)) % tarfile.RECORDSIZE
        tail = _END_OF_ARCHIVE + bytes(padding)
        self._position += len(tail)
        self._write(tail)
        self._file.finish()
        self._close_file()
        return self._position, self._sha256.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_file()

    def _close_file(self) -> None:
        if self._own is not None:
            self._own.close()


def _described(key: str, encoded: Sequence[EncodedItem], firsts: Sequence[ItemName]) -> list[dict[str, Any]]:
    return [
        item_metadata(item, None if first == ItemName(key, number) else first)
        for number, (item, first) in enumerate(zip(encoded, firsts, strict=True))
    ]


def _images(
    offset: int, grids: npt.NDArray[np.generic], pieces: Sequence[npt.NDArray[np.generic]]
) -> tuple[ItemPlace, ...]:
    """The images of ``patches``, one after another from ``offset``. Without images, there is one empty piece."""
    places = []
    for (t, h, w), piece in zip(grids.tolist(), pieces, strict=False):
        checksum = xxhash.xxh3_64_intdigest(piece)
        places.append(ItemPlace(ItemShape(IMAGE, (t, h, w)), offset, piece.nbytes, checksum, checksum))
        offset += piece.nbytes
    return tuple(places)


def tar_header(name: str, size: int) -> bytes:
    """Builds the ustar header of a regular file.

    Equals the header of :class:`tarfile.TarInfo`, which takes ten times as long.
    """
    encoded = name.encode()
    if len(encoded) > tarfile.LENGTH_NAME or size > _LARGEST:
        return _slow_header(name, size)
    blank, total = _blank()
    digits = b"%011o" % size
    header = bytearray(blank)
    header[: len(encoded)] = encoded
    header[_SIZE] = digits
    # The checksum is the sum of all bytes, its own counted as spaces.
    header[_CHECKSUM] = b"%06o" % (total + sum(encoded) + sum(digits))
    return bytes(header)


def _slow_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, _MODE
    return info.tobuf(tarfile.USTAR_FORMAT)


@lru_cache(maxsize=1)
def _blank() -> tuple[bytes, int]:
    """Returns a header without a name, and the sum of its bytes but for the size's digits."""
    header = _slow_header("", 0)
    return header, int(header[_CHECKSUM], 8) - sum(header[_SIZE])


@lru_cache(maxsize=1024)
def read_npy(content: bytes) -> npt.NDArray[Any]:
    """Reads the array of an ``.npy`` file. numpy's own reader allocates what the header tells before it looks.

    Raises:
        ValueError: If it is none, or has fewer bytes than its header tells.
    """
    file, known = io.BytesIO(content), np.lib.format
    version = known.read_magic(file)
    read = {(1, 0): known.read_array_header_1_0, (2, 0): known.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"version {version} of the format")
    try:
        shape, in_columns, dtype = read(file)
    except (TokenError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error
    size, left = math.prod(shape) * dtype.itemsize, len(content) - file.tell()
    if dtype.hasobject or min(shape, default=0) < 0 or size > left:
        raise ValueError(f"its header tells {size:,} bytes, an array {shape} of {dtype}; {left:,} follow")
    array = np.frombuffer(content, dtype, math.prod(shape), file.tell())
    return array.reshape(shape, order="F" if in_columns else "C")


def npy_header_for(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Builds the ``.npy`` header of a dtype and shape, without an array."""
    buffer = io.BytesIO()
    description = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(buffer, {"descr": description, "fortran_order": False, "shape": shape})
    return buffer.getvalue()
