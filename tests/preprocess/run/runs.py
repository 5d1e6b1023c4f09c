"""Runs of preprocessing that tests start, stop after some shards, or leave half done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.run.dataset import RunResult, Watcher, preprocess_dataset
from vlmdata.preprocess.sources.open import open_source

IMAGES = ImageConfig(min_pixels=1024, max_pixels=65_536)


def config(**options: Any) -> PreprocessConfig:
    return PreprocessConfig(**{"image": IMAGES, "rows_per_shard": 6, **options})


def preprocess(spec: Path, directory: Path, *, limit: int | None = None, **options: Any) -> RunResult:
    resolved = options.pop("config", None) or config()
    return preprocess_dataset(open_source(str(spec), limit=limit), directory, resolved, **options)


class StopRun(Exception):
    pass


def stopping(after: int) -> Watcher:
    """A watcher that ends the run once so many shards are made."""
    done = []

    def shard_done(record: Any) -> None:
        done.append(record)
        if len(done) == after:
            raise StopRun

    return Watcher(shard_done=shard_done)


def begin(source: Path, directory: Path, finished: bool) -> None:
    if finished:
        preprocess(source, directory)
        return
    with pytest.raises(StopRun):
        preprocess(source, directory, watcher=stopping(1))
    assert (directory / "shard-000000.tar").exists()
