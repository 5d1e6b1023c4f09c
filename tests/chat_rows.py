"""A small chat source with every shape of sample: no image, one, several, adjacent, several turns, rejected rows."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tests.conftest import build_dataset, encoded_image

MIXED_ROWS_PER_SHARD = 3
#: Source rows of the mixed source that give a sample, shard by shard.
MIXED_ACCEPTED = ((0, 1, 2), (), (6, 8), (9,))


def data_uri(**image_options: Any) -> str:
    """A data URI of a small noisy image."""
    return "data:image/png;base64," + base64.b64encode(encoded_image(**image_options)).decode()


def turn(role: str, *content: Any) -> dict[str, Any]:
    """A message; strings are text items and mappings go in as they are."""
    return {"role": role, "content": [{"type": "text", "text": c} if isinstance(c, str) else c for c in content]}


def image_item(**image_options: Any) -> dict[str, Any]:
    """An image item holding its file as a data URI."""
    return {"type": "image", "image": data_uri(**image_options)}


def mixed_rows() -> list[dict[str, Any]]:
    """Ten rows; :data:`MIXED_ACCEPTED` says which give a sample."""
    no_answer = {"messages": [turn("user", "Nobody answers.")]}
    return [
        {"messages": [turn("user", image_item(seed=1), "What is this?"), turn("assistant", "Noise, nothing more.")]},
        {"messages": [turn("user", "What is two and two?"), turn("assistant", "Four.")]},
        {
            "messages": [
                turn("system", "Be brief."),
                turn("user", "Compare ", image_item(seed=2, width=96), image_item(seed=3, height=128), " please."),
                turn("assistant", "The second is taller."),
                turn("user", "By how much?"),
                turn("assistant", "Twice as tall."),
            ]
        },
        no_answer,
        no_answer,
        no_answer,
        {"messages": [turn("system", "Be kind."), turn("user", "Hello?"), turn("assistant", "Good day to you.")]},
        {"messages": [turn("user", {"type": "image", "image": "missing.png"}, "?"), turn("assistant", "A cat.")]},
        {
            "messages": [
                turn("user", "Look at this."),
                turn("assistant", "I see nothing yet."),
                turn("user", image_item(seed=4, width=100, height=70), "And now?"),
                turn("assistant", "Now I see noise, and it is wider than tall."),
            ]
        },
        {"messages": [turn("user", "Count to forty."), turn("assistant", " ".join(map(str, range(1, 41))))]},
    ]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def build_mixed(folder: Path) -> Path:
    """The mixed source as a dataset of four shards, the second of which holds no sample."""
    source = write_jsonl(folder / "mixed.jsonl", mixed_rows())
    return build_dataset(source, folder / "dataset", recipe="chat", rows_per_shard=MIXED_ROWS_PER_SHARD)
