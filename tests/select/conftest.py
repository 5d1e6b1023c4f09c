"""Datasets to select from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chat_rows import write_jsonl
from tests.conftest import cord_row, write_cord_parquet
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.open import open_source

NAME = "tests.select.conftest:Languages"


class Languages:
    """Questions and answers, with the columns of the row that are given."""

    def __call__(self, row: Any) -> Any:
        from vlmdata.preprocess.conversation import Conversation, Message, TextPart

        turns = (Message("user", (TextPart("What?"),)), Message("assistant", (TextPart(row.values["answer"]),)))
        return Conversation(turns, columns={k: v for k, v in row.values.items() if k != "answer" and v is not None})


def receipts(folder: Path, first: int = 0, rows: int = 9, **options: Any) -> Path:
    """A dataset of receipts in shards of three rows, the second of which is rejected."""
    drawn = [cord_row(first + n, width=64, height=64) for n in range(rows)]
    drawn[1]["ground_truth"] = "{"
    source = write_cord_parquet(folder / "source" / "train.parquet", drawn)
    config = PreprocessConfig(**{"image": ImageConfig(1024, 65_536), "rows_per_shard": 3, **options})
    preprocess_dataset(open_source(str(source)), folder / "out", config)
    return folder / "out"


def languages(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A dataset of texts with columns, two rows per shard."""
    source = write_jsonl(folder / "rows.jsonl", rows)
    preprocess_dataset(open_source(str(source)), folder / "out", PreprocessConfig(recipe=NAME, rows_per_shard=2))
    return folder / "out"


ROWS: list[dict[str, Any]] = [
    {"answer": "One.", "lang": "de", "score": 0.5, "tags": ["a", "b"]},
    {"answer": "Two and a half.", "lang": "en", "score": 2, "tags": []},
    {"answer": "Three.", "lang": "de", "score": 3, "tags": ["b"]},
    {"answer": "Four.", "lang": None, "score": 4},
    {"answer": "One.", "lang": "fr", "score": None},
]


@pytest.fixture(scope="package")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return receipts(tmp_path_factory.mktemp("select"))


@pytest.fixture(scope="package")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return languages(tmp_path_factory.mktemp("texts"), ROWS)
