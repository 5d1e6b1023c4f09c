"""A source of chats that changes, and the dataset that is made of it, version by version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.chat_rows import turn, write_jsonl
from tests.conftest import encoded_image
from vlmdata import open_dataset
from vlmdata.format.dataset import VlmDataset
from vlmdata.preprocess.config import ImageConfig, MediaConfig, PreprocessConfig
from vlmdata.preprocess.run.claim import Part
from vlmdata.preprocess.run.dataset import PartResult, RunResult, preprocess_dataset, preprocess_part
from vlmdata.preprocess.sources.open import open_source
from vlmdata.preprocess.sources.rows import Source
from vlmdata.storage import Store

Rows = list[dict[str, Any]]


def row(text: str, image: str | None = None) -> dict[str, Any]:
    content = [f"{text}?"] if image is None else [{"type": "image", "image": image}, f"{text}?"]
    return {"messages": [turn("user", *content), turn("assistant", f"{text}.")]}


REJECTED = {"messages": [turn("user", "Nobody answers.")]}


class Team:
    """A source that changes, and the dataset that is made of it."""

    def __init__(self, folder: Path):
        self.file, self.out = folder / "rows.jsonl", folder / "out"
        (folder / "images").mkdir()
        for n in range(6):
            self.paint(n, seed=n)
        self.rows: Rows = [row(f"Row {n}", f"{n}.png" if n < 6 else None) for n in range(8)]
        self.rows[4] = REJECTED

    def paint(self, n: int, seed: int) -> None:
        (self.file.parent / "images" / f"{n}.png").write_bytes(encoded_image(seed=seed, width=32 + 32 * (seed % 3)))

    def run(self, rows: Rows | None = None, out: Path | Store | None = None, **options: Any) -> RunResult:
        """Writes the source with these rows, and preprocesses it."""
        config, source = self._opened(rows, options.pop("config", {}))
        return preprocess_dataset(source, self.out if out is None else out, config, **options)

    def run_part(self, part: str, rows: Rows | None = None, **options: Any) -> PartResult:
        """The same for a part of the shards."""
        config, source = self._opened(rows, {})
        return preprocess_part(Part.parse(part), source, self.out, config, **options)

    def _opened(self, rows: Rows | None, options: dict[str, Any]) -> tuple[PreprocessConfig, Source]:
        self.rows = self.rows if rows is None else rows
        write_jsonl(self.file, self.rows)
        given = {"recipe": "chat", "rows_per_shard": 3, "image": ImageConfig(1024, 65536), **options}
        media = MediaConfig(image_root=str(self.file.parent / "images"))
        return PreprocessConfig(media=media, **given), open_source(str(self.file))

    def version(self, number: int | None = None) -> VlmDataset:
        return open_dataset(self.out, version=number)
