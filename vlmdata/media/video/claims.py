"""Compares how many samples the header of an MP4 file claims with its bytes, before FFmpeg builds an index of them.

FFmpeg allocates an entry for each sample, and a header needs no bytes for most: 1,574 bytes may claim 40 million.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from io import SEEK_END, BytesIO
from typing import IO

import numpy as np
import numpy.typing as npt

#: Boxes with boxes in them, and the bytes before these.
_CONTAINERS = {
    **dict.fromkeys((b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf", b"mvex", b"edts", b"udta"), 0),
    **dict.fromkeys((b"dinf", b"wave", b"clip", b"tapt", b"cmov", b"rmra", b"rmda"), 0),
    b"meta": 4,
}
#: FFmpeg goes no deeper.
_DEPTH = 10
#: The most bytes of a compressed header that are looked at.
_MOST_HEADER = 64 * 1024 * 1024
#: Where boxes have a number of samples or entries.
_COUNTS = {b"stsz": 8, b"stz2": 8, b"stss": 4, b"stco": 4, b"co64": 4, b"trun": 4, b"sbgp": 8, b"saiz": 5}
#: Tables of runs of samples: the numbers of an entry.
_RUNS = {b"stts": 2, b"ctts": 2, b"stsc": 3}
#: Old audio codecs count sounds, of which a byte holds several.
_SOUNDS = 64

Table = npt.NDArray[np.int64]


def excess(file: IO[bytes]) -> str:
    """Describes a claim of more samples than a file has bytes; "" if there is none, or it is no MP4 file.

    Args:
        file: The file, seekable; its position changes.
    """
    size, total = file.seek(0, SEEK_END), Counter[str]()
    for name, count in _claims(file, 0, size, 0):
        total[name] += count
        if total[name] > size:
            return f"its header claims {total[name]:,} samples ({name}), and it has {size:,} bytes"
    return ""


def _boxes(file: IO[bytes], at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yields type, begin of the content and end of each box. A box that is too long ends where the file does."""
    while at + 8 <= end:
        file.seek(at)
        head = file.read(16)
        length, start = int.from_bytes(head[:4]), at + 8
        if length == 1:
            length, start = int.from_bytes(head[8:16]), at + 16
        stop = end if length == 0 else min(at + length, end)
        if stop < start:
            return
        yield head[4:8], start, stop
        at = stop


def _claims(file: IO[bytes], at: int, end: int, depth: int) -> Iterator[tuple[str, int]]:
    """Yields the numbers of samples that boxes claim, by the type of the box."""
    counts, tables = Counter[bytes](), dict[bytes, Table]()
    for kind, start, stop in _boxes(file, at, end) if depth <= _DEPTH else ():
        if kind in _CONTAINERS:
            yield from _claims(file, start + _CONTAINERS[kind], stop, depth + 1)
        elif kind == b"cmvd":
            file.seek(start + 4)
            header = _decompressed(file.read(stop - start))
            yield from _claims(BytesIO(header), 0, len(header), depth + 1)
        elif kind in _COUNTS:
            file.seek(start + _COUNTS[kind])
            counts[kind] += int.from_bytes(file.read(4))
        elif kind in _RUNS:
            tables[kind] = np.concatenate([tables.get(kind, _table(b"", kind)), _read_table(file, kind, start, stop)])
    # FFmpeg takes sound whose samples all last one unit by its chunks, 1,024 samples at a time.
    times = tables.get(b"stts", _table(b"", b"stts"))
    many = _SOUNDS if times.shape[0] == 1 and times[0, 1] == 1 else 1
    if b"stsc" in tables and many > 1:
        chunks, runs = counts[b"stco"] + counts[b"co64"], tables[b"stsc"]
        spans = np.diff(runs[:, 0], append=max(chunks + 1, int(runs[-1:, 0].max(initial=0))))
        counts[b"stsc"] = int((spans.clip(0).astype(float) * runs[:, 1]).sum())
    for kind in (b"stts", b"ctts"):
        if kind in tables:
            counts[kind] = int(tables[kind][:, 0].sum())
    for kind, count in counts.items():
        yield kind.decode(), count // (many if kind in (b"stsz", b"stz2", b"stts", b"stsc") else 1)


def _read_table(file: IO[bytes], kind: bytes, start: int, stop: int) -> Table:
    file.seek(start + 4)
    entries = int.from_bytes(file.read(4))
    return _table(file.read(min(entries * 4 * _RUNS[kind], max(stop - start - 8, 0))), kind)


def _table(content: bytes, kind: bytes) -> Table:
    width = _RUNS[kind]
    numbers = np.frombuffer(content[: len(content) // (4 * width) * 4 * width], ">u4")
    return numbers.astype(np.int64).reshape(-1, width)


def _decompressed(content: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(content, _MOST_HEADER)
    except zlib.error:
        return b""
