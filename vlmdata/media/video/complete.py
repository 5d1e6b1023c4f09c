"""Tells whether a file is as long as its own structure says, for containers that say so."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO

#: First bytes of a Matroska file, and the id of the element that holds all of it.
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", 0x18538067


def incomplete(file: IO[bytes], container: str) -> str:
    """Describes what a file lacks at its end; "" if it is complete or its container does not tell.

    Args:
        file: The file, seekable; its position changes.
        container: FFmpeg's name of the container.
    """
    size = file.seek(0, io.SEEK_END)
    check = next((check for name, check in _CHECKS.items() if container.startswith(name)), None)
    end = size if check is None else check(file, size)
    return f"{end - size:,} of its {end:,} bytes are missing" if end > size else ""


@dataclass(frozen=True)
class Unread:
    """What FFmpeg passes over in an MP4 file, without an error.

    Attributes:
        at: The byte where it begins.
        damage: What is wrong there.
    """

    at: int
    damage: str


def unread(file: IO[bytes], container: str) -> Unread | None:
    """Finds the first part of an MP4 file that FFmpeg passes over: another file, or a fragment with a damaged header.

    FFmpeg reads what follows files of other containers.

    Args:
        file: The file, seekable; its position changes.
        container: FFmpeg's name of the container.
    """
    if not container.startswith("mov"):
        return None
    headers, fragmented = 0, False
    for at, kind, length in _boxes(file):
        headers += kind == b"moov"  # fragments have headers of another kind
        fragmented |= kind == b"moof"
        if headers > 1:
            return Unread(
                at,
                f"another MP4 file follows with its header at byte {at:,}, and is not read. Parts of one video are "
                "joined by ffmpeg -f concat",
            )
        if fragmented and length is None:
            return Unread(at, f"byte {at:,} should begin a fragment or another box, and does not")
    return None


def _iso(file: IO[bytes], size: int) -> int:
    """Returns the end of the last box of an MP4 file; its size if something else follows the boxes."""
    end = 0
    for at, _, length in _boxes(file):
        if length is None:
            return size
        end = at + length
    return end if end >= size else size + 8 - (size - end)


def _boxes(file: IO[bytes]) -> Iterator[tuple[int, bytes, int | None]]:
    """Yields where each outer box of an MP4 file begins, its type and its length.

    The length is None for bytes that begin no box, which are the last that are yielded.
    """
    size, at = file.seek(0, io.SEEK_END), 0
    while at + 8 <= size:
        file.seek(at)
        head = file.read(16)
        kind, length = head[4:8], int.from_bytes(head[:4])
        if length == 1:
            length = int.from_bytes(head[8:16])
        elif length == 0:  # to the end of the file
            length = size - at
        if length < 8 or not (kind.isascii() and kind.decode("ascii").isprintable()):
            yield at, kind, None
            return
        yield at, kind, length
        at += length


def _riff(file: IO[bytes], size: int) -> int:
    """Returns the end of the last chunk of an AVI file."""
    at = 0
    while at + 12 <= size:
        file.seek(at)
        head = file.read(8)
        length = int.from_bytes(head[4:], "little")
        if head[:4] != b"RIFF" or length == 0:  # 0 in files whose writer did not finish: it is not known
            return size
        at += 8 + length + length % 2
    return at - 1 if at == size + 1 else max(at, size)


def _matroska(file: IO[bytes], size: int) -> int:
    """Returns the end of the segment of a Matroska file."""
    file.seek(0)
    head = file.read(4096)
    if not head.startswith(_EBML):
        return size
    at, length = _element_size(head, 4)
    if length is None or int.from_bytes(head[at + length : at + length + 4]) != _SEGMENT:
        return size
    begin, length = _element_size(head, at + length + 4)
    return size if length is None else max(begin + length, size)


def _element_size(head: bytes, at: int) -> tuple[int, int | None]:
    """Reads the size of an element. Returns where its content begins, and the size; None if it is not known."""
    first = head[at] if at < len(head) else 0
    width = 9 - first.bit_length() if first else 0
    if not width or at + width > len(head):
        return at, None
    value = int.from_bytes(head[at : at + width]) & ((1 << (7 * width)) - 1)
    return at + width, None if value == (1 << (7 * width)) - 1 else value


def _gif(file: IO[bytes], size: int) -> int:
    """Returns one byte more than there are if the last byte is not that which ends GIF files."""
    file.seek(-min(size, 64), os.SEEK_END)
    return size if file.read().rstrip(b"\0")[-1:] == b"\x3b" else size + 1


_CHECKS: Mapping[str, Callable[[IO[bytes], int], int]] = {
    "mov": _iso,
    "avi": _riff,
    "matroska": _matroska,
    "gif": _gif,
}
