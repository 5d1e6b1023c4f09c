"""A checkpoint's files against their checksums: what changed is named, whoever wrote it and whoever reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xxhash

from vlmdata.model.weights.checksums import damaged_files, unchecked_files, write_checksums

FILES = {
    ".metadata": b"meta",
    "__0_0.distcp": b"zero" * 9_000_000,  # more than a block
    "__1_0.distcp": b"one",
    "__1_1.distcp": b"",
    "__10_0.distcp": b"ten",
    "random-00001.pt": b"dice",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_every_file_has_one_owner(folder: Path) -> None:
    assert unchecked_files(folder) == sorted(FILES)
    # People may change these; and a table may be under way.
    for name in ("run.json", "config.toml", ".checksums-00010.json"):
        (folder / name).write_text("")
    for rank in (1, 0):
        write_checksums(folder, rank)
    assert unchecked_files(folder) == ["__10_0.distcp"]
    write_checksums(folder, 10)
    assert unchecked_files(folder) == damaged_files(folder) == []
    tables = [json.loads((folder / f"checksums-{rank:05d}.json").read_text()) for rank in (0, 1, 10)]
    assert [sorted(table) for table in tables] == [
        [".metadata", "__0_0.distcp"],
        ["__1_0.distcp", "__1_1.distcp", "random-00001.pt"],
        ["__10_0.distcp"],
    ]
    for table in tables:
        for name, entry in table.items():
            assert entry == {"bytes": len(FILES[name]), "xxh3": xxhash.xxh3_128_hexdigest(FILES[name])}


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_what_changed_is_found_by_one_reader(folder: Path, parts: int) -> None:
    for rank in (0, 1, 10):
        write_checksums(folder, rank)
    changed = bytearray(FILES["__0_0.distcp"])
    changed[-1] ^= 1
    (folder / "__0_0.distcp").write_bytes(changed)
    (folder / "__1_0.distcp").write_bytes(b"on")
    (folder / "random-00001.pt").unlink()
    found = [line for part in range(parts) for line in damaged_files(folder, part, parts)]
    assert [line.split(":")[0] for line in sorted(found)] == [
        "__0_0.distcp changed after it was written",
        "__1_0.distcp has 2 bytes, expected 3",
        "random-00001.pt is missing",
    ]


@pytest.mark.parametrize("content", ["[]", "{", '{"__0_0.distcp": 1}', '{"__0_0.distcp": {"bytes": 1}}', '{"a": null}'])
def test_a_table_that_is_none(folder: Path, content: str) -> None:
    (folder / "checksums-00000.json").write_text(content)
    with pytest.raises(ValueError, match=r"checksums-00000\.json is not a checksum table"):
        damaged_files(folder)
