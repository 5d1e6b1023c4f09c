"""The same clips by path, by URL, from a bucket, and as bytes in rows: one dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.chat_rows import write_jsonl
from tests.media.video.clips import clip
from tests.object_store import ObjectStore
from tests.web import serving_files
from vlmdata import open_dataset
from vlmdata.format.dataset import VlmDataset
from vlmdata.preprocess.config import ImageConfig, MediaConfig, PreprocessConfig, VideoConfig
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.verify.dataset import verify_dataset

NAMES = ("a.mp4", "b.mkv")


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    folder = tmp_path / "clips"
    folder.mkdir()
    for name, count in zip(NAMES, (30, 9), strict=True):
        (folder / name).write_bytes(clip("libx264", count, 5, container="matroska" if name == "b.mkv" else None))
    return folder


@pytest.fixture
def address(clips: Path) -> Iterator[str]:
    with serving_files(clips) as web:
        yield web.url


def rows(folder: Path, named: list[Any]) -> Path:
    turns = [
        [
            {"role": "user", "content": [{"type": "video", "video": video}, {"text": "So?"}]},
            {"role": "assistant", "content": "Yes."},
        ]
        for video in named
    ]
    return write_jsonl(folder, [{"messages": messages} for messages in turns])


def made(source: Path, out: Path, **media: Any) -> VlmDataset:
    config = PreprocessConfig(
        recipe="chat",
        image=ImageConfig(1024, 65536),
        video=VideoConfig(max_pixels=65536),
        media=MediaConfig(**media),
    )
    result = preprocess_dataset(open_source(str(source)), out, config)
    assert result.manifest.totals.rejected == 0
    assert verify_dataset(out).faults == []
    return open_dataset(out)


def test_a_clip_is_the_same_wherever_it_comes_from(
    clips: Path, address: str, object_store: ObjectStore, tmp_path: Path
) -> None:
    files = [(clips / name).read_bytes() for name in NAMES]
    there = object_store.put(clips, "some/clips")
    table = {"query": ["<video>So?"] * 2, "response": ["Yes."] * 2, "videos": [[{"bytes": data}] for data in files]}
    pq.write_table(pa.table(table), tmp_path / "bytes.parquet")
    by_path = rows(tmp_path / "paths.jsonl", list(NAMES))
    datasets = {
        "path": made(by_path, tmp_path / "path", image_root=str(clips)),
        "bucket": made(by_path, tmp_path / "bucket", image_root=there),
        "bytes": made(tmp_path / "bytes.parquet", tmp_path / "bytes"),
        "url": made(
            rows(tmp_path / "urls.jsonl", [f"{address}/{name}" for name in NAMES]),
            tmp_path / "url",
            allow_urls=True,
            private_hosts=("127.0.0.1",),
        ),
    }
    wanted = datasets.pop("path")
    assert len(wanted) == len(NAMES)
    for name, dataset in datasets.items():
        for one, other in zip(wanted, dataset, strict=True):
            assert np.array_equal(one.input_ids, other.input_ids), name
            assert np.array_equal(one.patches, other.patches), name
        for number in range(len(NAMES)):
            assert dataset.metadata(number)["images"] == wanted.metadata(number)["images"], name
