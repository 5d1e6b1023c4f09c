"""Checksums of a checkpoint's files, which detect bytes that changed on disk before training on them.

Each rank that wrote binary files adds a ``checksums-00003.json`` (3 is its rank). It maps file names to sizes in bytes
and xxh3 hashes (128 bits, hex). This way ranks need not wait for each other to write or check. ``run.json`` holds the
checksum of its own values, so it has one from the beginning and may be formatted anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

#: Per-rank files: megatron-core's shards and random states.
_OWNED = re.compile(r"__(\d+)_.*\.distcp|random-(\d+)\.pt")
_TABLE, _TABLES = "checksums-{:05d}.json", "checksums-*.json"
#: Files that people may edit, such as ``config.toml``, the checksum tables themselves, and ``run.json``.
_TEXTS = (".json", ".toml")
_BLOCK = 16 << 20


#: Name of the checksum of a JSON object's other values.
_OF_VALUES = "checksum"


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON object with the checksum of its values."""
    plain = json.loads(json.dumps(values))
    return {**plain, _OF_VALUES: _checksum_of(plain)}


def require_unchanged(values: Mapping[str, Any]) -> None:
    """Raises a ValueError if the values of a JSON object differ from the checksum in it. Older ones may have none."""
    if (wanted := values.get(_OF_VALUES)) is not None and (now := _checksum_of(values)) != wanted:
        raise ValueError(
            f"its values changed after they were written: xxh3 is {now}, expected {wanted!r} (if you changed them on "
            f"purpose, remove the entry {_OF_VALUES!r})"
        )


def write_checksums(folder: Path, rank: int = 0) -> None:
    """Reads back the files of a rank and records their checksums; rank 0 also those of shared files."""
    table = {name: _checksum(folder / name) for name in _names(folder) if _owner(name) == rank}
    temporary = folder / f".{_TABLE.format(rank)}"
    temporary.write_text(json.dumps(table, indent=1) + "\n")
    temporary.replace(folder / _TABLE.format(rank))


def damaged_files(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Returns a line for each file that differs from its checksum, of one of several shares of the files.

    An unreadable file is an OSError, and a malformed checksum table a ValueError.
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
    """Names of files without a checksum. The run was killed before writing it, or another program wrote the file."""
    known = _tables(folder)
    return [name for name in _names(folder) if name not in known]


def require_sound(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Checks one of several shares of a checkpoint's files. Returns the names of all files without a checksum.

    A ValueError names damaged files. A file that cannot be read is an OSError.
    """
    if damaged := damaged_files(folder, part, parts):
        raise ValueError("; ".join(damaged))
    return unchecked_files(folder)


def without_checksum(folder: Path, names: list[str]) -> list[str]:
    """Returns a line about files that could not be checked, if there are any."""
    more = ", …" if len(names) > 3 else ""
    return [f"{folder}: not checked, for lack of a checksum: {', '.join(names[:3])}{more}"] if names else []


def _checksum_of(values: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in values.items() if name != _OF_VALUES}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode())


def _names(folder: Path) -> list[str]:
    """Lists the binary files."""
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
            raise ValueError(f"{file.name} is not a checksum table")
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
