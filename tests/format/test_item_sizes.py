"""The size of images in words, against the files of a source and the bytes in the shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

import vlmdata
from tests.chat_rows import turn, write_jsonl
from tests.conftest import build_dataset, encoded_image
from vlmdata.format.manifest import Manifest, Totals, item_sizes
from vlmdata.format.schema import MANIFEST_NAME
from vlmdata.inspect.dataset import describe_dataset
from vlmdata.inspect.terminal.card import print_card
from vlmdata.verify.dataset import verify_dataset


@pytest.mark.parametrize("pixels", ["raw", "zstd", "source"])
def test_totals_count_stored_bytes_and_files(tmp_path: Path, pixels: str) -> None:
    files = [encoded_image(seed=seed, width=64 + 32 * seed) for seed in range(3)]
    for number, data in enumerate(files):
        (tmp_path / f"{number}.png").write_bytes(data)
    named = [0, 1, 2, 1]  # the last row shares its image; only encoded images are then stored once
    rows = [
        {"messages": [turn("user", {"type": "image", "image": f"{n}.png"}, "?"), turn("assistant", "Noise.")]}
        for n in named
    ]
    directory = build_dataset(
        write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out", recipe="chat", pixels=pixels
    )
    totals = Manifest.read(directory).totals
    assert totals.file_bytes == sum(len(files[n]) for n in named)
    stored = vlmdata.open_dataset(directory).index.item_bytes.tolist()
    assert totals.item_bytes == sum(stored if pixels == "raw" else stored[:3])
    assert verify_dataset(directory).faults == []
    with Console(width=160, record=True, quiet=False, file=open("/dev/null", "w")) as console:
        print_card(console, describe_dataset(vlmdata.open_dataset(directory)))
    assert item_sizes(totals, pixels) in console.export_text()
    edited = json.loads((directory / MANIFEST_NAME).read_bytes())
    edited["totals"]["item_bytes"] += 1
    (directory / MANIFEST_NAME).write_text(json.dumps(edited))
    assert [fault.check for fault in verify_dataset(directory).faults] == ["totals"]


def test_words() -> None:
    sums = dict.fromkeys(Totals.__dataclass_fields__, 0) | {"items": 10, "item_bytes": 3_570_000}
    assert item_sizes(Totals(**sums), "zstd") == "zstd: 357 KB each"
    with_files = Totals(**sums | {"file_bytes": 2_930_000})
    assert item_sizes(with_files, "zstd") == "zstd: 357 KB each, 1.22 times the 293 KB of its file"
    assert item_sizes(Totals(**sums | {"item_bytes": 27_000_000}), "raw") == "raw: 2.7 MB each"
    assert item_sizes(Totals(**sums | {"item_bytes": 0}), "raw") == ""
