"""Datasets of every shape of sample under any codec, for the tests of ``vlmdata recode``."""

from __future__ import annotations

from pathlib import Path

from tests.chat_rows import mixed_rows, turn, write_jsonl
from tests.conftest import build_dataset, encoded_image
from tests.weighted import RECIPE, with_weights


def write_source(folder: Path) -> Path:
    """Chats with no, one and two images, weights, rejected rows, an empty shard, and images named by path."""
    named = {"messages": [turn("user", {"type": "image", "image": "it.png"}, "?"), turn("assistant", "Noise.")]}
    source = write_jsonl(folder / "rows.jsonl", with_weights([*mixed_rows(), named]))
    (folder / "it.png").write_bytes(encoded_image(seed=9))
    return source


def build(source: Path, name: str, pixels: str, limit: int | None = None) -> Path:
    """Preprocesses the rows into a folder beside them."""
    return build_dataset(source, source.with_name(name), recipe=RECIPE, rows_per_shard=3, pixels=pixels, limit=limit)
