"""A small source of documents: text, images between texts, a long one that is split, and rejected rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.chat_rows import data_uri, write_jsonl
from tests.conftest import build_dataset
from vlmdata.preprocess.config import ImageConfig, Overlong

#: Row 0 is plain, row 1 interleaved, row 2 is split into three pieces, row 3 is empty, row 4 is weighted.
DOCUMENT_ROWS: list[dict[str, Any]] = [
    {"text": "A short document."},
    {"text": "Before.<image>Between.<image>", "images": [data_uri(seed=1), data_uri(seed=2, width=96)]},
    {"text": " ".join(f"word{n}" for n in range(60)) + "<image> and more.", "images": [data_uri(seed=3)]},
    {"text": " "},
    {"text": "A weighted document.", "weight": 0.5},
]
SPLIT_KEYS = ["000000002-000", "000000002-001", "000000002-002"]


def build_documents(folder: Path, **options: Any) -> Path:
    """A dataset of :data:`DOCUMENT_ROWS`."""
    source = write_jsonl(folder / "documents.jsonl", DOCUMENT_ROWS)
    settings: dict[str, Any] = {"image": ImageConfig(1024, 16_384), "max_length": 64, "overlong": Overlong.SPLIT}
    return build_dataset(source, folder / "dataset", recipe="text", **(settings | options))
