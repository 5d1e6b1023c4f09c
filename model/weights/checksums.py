"""Checksums of a checkpoint's binary files, so that a byte that changes on disk is noticed before it is trained on.

Whoever wrote files leaves a ``checksums-00003.json`` (3 its rank) beside them: from names to sizes in bytes and xxh3
(128 bits, hex). Like this neither writing nor checking needs ranks to wait for each other.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import xxhash

#: Files that ranks write for themselves: megatron-core's shards, and random states.
_OWNED = re.compile(r"__(\d+)_.*\.distcp|random-(\d+)\.pt")
_TABLE, _TABLES = "checksums-{:05d}.json", "checksums-*.json"
#: What people read and may change, such as ``config.toml``, and the tables themselves.
_TEXTS = (".json", ".toml")
_BLOCK = 16 << 20


def write_checksums(folder: Path, rank: int = 0) -> None:
    """Reads back what a rank wrote and notes its checksums; rank 0 answers for what is no rank's own.

    Args:
        folder: A checkpoint whose files are all there.
        rank: Whose files.

    Raises:
        OSError: If that fails; the checkpoint is as it was.
    """
    table = {name: _checksum(folder / name) for name in _names(folder) if _owner(name) == rank}
    temporary = folder / f".{_TABLE.format(rank)}"
    temporary.write_text(json.dumps(table, indent=1) + "\n")
    temporary.replace(folder / _TABLE.format(rank))


def damaged_files(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Compares a checkpoint's files with their checksums.

    Args:
        folder: The checkpoint.
        part: Which share of the files to read.
        parts: Number of shares.

    Returns:
        A line for every file of the share that is not what was written.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If a table of checksums is none.
    """
    expected = sorted(_tables(folder).items())
    found = []
    for name, wanted in expected[part::parts]:
        if not (folder / name).is_file():
            found.append(f"{name} is missing")
        elif (folder / name).stat().st_size != wanted["bytes"]:
            found.append(f"{name} has {(folder / name).stat().st_size} bytes, expected {wanted['bytes']}")
        elif (now := _checksum(folder / name)) != wanted:
            found.append(f"{name} changed after it was written: xxh3 is {now['xxh3']}, expected {wanted['xxh3']}")
    return found


def unchecked_files(folder: Path) -> list[str]:
    """Names of files without a checksum: the run was killed before it was made, or another program wrote them."""
    known = _tables(folder)
    return [name for name in _names(folder) if name not in known]


def without_checksum(folder: Path, names: list[str]) -> str:
    """A line on files that could not be checked."""
    more = ", …" if len(names) > 3 else ""
    return f"{folder}: without a checksum, so not checked: {', '.join(names[:3])}{more}"


def _names(folder: Path) -> list[str]:
    """Files of tensors and other bytes."""
    return sorted(file.name for file in folder.iterdir() if file.is_file() and file.suffix not in _TEXTS)


def _tables(folder: Path) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for file in sorted(folder.glob(_TABLES)):
        try:
            table = json.loads(file.read_text())
            whole = all(isinstance(each["bytes"], int) and isinstance(each["xxh3"], str) for each in table.values())
        except (ValueError, KeyError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise ValueError(f"{file.name} holds no table of checksums")
        tables |= table
    return tables


def _owner(name: str) -> int:
    match = _OWNED.fullmatch(name)
    return int(match[1] or match[2]) if match else 0


def _checksum(file: Path) -> dict[str, Any]:
    digest, block, count = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK)), 0
    with file.open("rb", buffering=0) as stream:
        while read := stream.readinto(block):
            digest.update(block[:read])
            count += read
    return {"bytes": count, "xxh3": digest.hexdigest()}
