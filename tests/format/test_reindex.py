"""Index rows from shards alone, against the index that was written with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.chat_rows import build_mixed, image_item, turn, write_jsonl
from tests.conftest import build_dataset
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.format.index_row import index_table
from vlmdata.format.reindex import index_rows_of
from vlmdata.format.schema import supported_features
from vlmdata.storage.open import open_dataset


def weighted_rows() -> list[Any]:
    """Rows with and without loss weights, images and forced system prompts."""
    return [
        {"messages": [turn("user", "a"), {**turn("assistant", "b"), "weight": 0.5}]},
        {"messages": [turn("user", image_item(), "a"), turn("assistant", "b")]},
        {"messages": [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]},
    ]


@pytest.fixture(scope="module", params=["mixed", "weighted"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mixed":
        return build_mixed(folder)
    source = write_jsonl(folder / "rows.jsonl", weighted_rows())
    return build_dataset(source, folder / "dataset", recipe="chat", rows_per_shard=2)


def test_the_rows_are_those_of_the_index(directory: Path) -> None:
    dataset = open_dataset(directory)
    info = dataset.manifest.tokenizer
    found = [
        row
        for number, shard in enumerate(dataset.manifest.shards)
        for row in index_rows_of(directory, number, shard, info.placeholders, FAMILY) or ()
    ]
    written = [dataset.index.row(i) for i in range(len(dataset))]
    assert [row.key for row in found] == [row.key for row in written]
    assert index_table(found, supported_features()) == index_table(written, supported_features())


def test_a_shard_that_is_not_the_manifests_gives_none(directory: Path, tmp_path: Path) -> None:
    info = open_dataset(directory).manifest.shards[0]
    data = (directory / info.name).read_bytes()
    assert index_rows_of(tmp_path, 0, info, {"image": (0,)}, FAMILY) is None
    (tmp_path / info.name).write_bytes(data)
    assert index_rows_of(tmp_path, 0, info, open_dataset(directory).manifest.tokenizer.placeholders, FAMILY)
    (tmp_path / info.name).write_bytes(data[:-1] + b"x")
    assert index_rows_of(tmp_path, 0, info, {"image": (0,)}, FAMILY) is None
    os.truncate(tmp_path / info.name, len(data) - 512)
    assert index_rows_of(tmp_path, 0, info, {"image": (0,)}, FAMILY) is None
