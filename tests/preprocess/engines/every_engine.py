"""What every engine guarantees: the same bytes, errors that are passed on, and no work that is left behind."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.conftest import tree_bytes
from vlmdata.errors import SourceError
from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.engines.base import Engine, ShardWork
from vlmdata.preprocess.run.dataset import Watcher, preprocess_dataset
from vlmdata.preprocess.shards.counters import Counters
from vlmdata.preprocess.shards.job import ShardJob
from vlmdata.preprocess.sources.open import open_source
from vlmdata.storage import open_store

CONFIG = PreprocessConfig(image=ImageConfig(1024, 65_536), rows_per_shard=6)


def work_of(source: Path, directory: Path, config: PreprocessConfig = CONFIG) -> ShardWork:
    (directory / ".progress").mkdir(parents=True, exist_ok=True)
    return ShardWork(
        open_source(str(source)), config, open_store(directory), load_tokenizer(config.tokenizer, None).info
    )


class EveryEngine:
    """The tests, with a fixture ``engine``."""

    @pytest.mark.parametrize("workers", [1, 3])
    def test_makes_the_same_bytes(
        self, engine: Engine, cord_parquet: Path, tmp_path: Path, reference: dict[str, bytes], workers: int
    ) -> None:
        counts: list[Counters] = []
        watcher = Watcher(started=lambda rows, shards, kept, counters: counts.append(counters))
        source = open_source(str(cord_parquet))
        preprocess_dataset(source, tmp_path, CONFIG, workers=workers, engine=engine, watcher=watcher)
        assert tree_bytes(tmp_path) == reference
        assert counts[0].table()[:, :2].tolist() == [[6, 6]] * 6 + [[4, 4]]

    def test_makes_again_what_a_dataset_lost(
        self, engine: Engine, cord_parquet: Path, tmp_path: Path, reference: dict[str, bytes]
    ) -> None:
        source = open_source(str(cord_parquet))
        preprocess_dataset(source, tmp_path, CONFIG)
        for number in (0, 3, 5):
            (tmp_path / f"shard-{number:06}.tar").unlink()
        assert preprocess_dataset(source, tmp_path, CONFIG, workers=2, engine=engine).made == 3
        assert tree_bytes(tmp_path) == reference

    def test_passes_errors_on(self, engine: Engine, cord_parquet: Path, tmp_path: Path) -> None:
        config = PreprocessConfig(recipe="tests.preprocess.engines.refusing:Refusing", rows_per_shard=6)
        with pytest.raises(SourceError, match="the word list is not installed"):
            preprocess_dataset(open_source(str(cord_parquet)), tmp_path, config, workers=2, engine=engine)

    def test_leaves_no_worker_when_it_is_closed(self, engine: Engine, cord_parquet: Path, tmp_path: Path) -> None:
        work, jobs = work_of(cord_parquet, tmp_path), [ShardJob(n, n, n + 1) for n in range(40)]
        engine.default_workers(CONFIG)  # connects an engine that has a connection, which outlasts its runs
        before = threading.active_count()
        with closing(engine.run(work, jobs, 2, Counters(40))) as made:
            next(made)
        written = len(list(tmp_path.glob("shard-*.tar")))
        time.sleep(0.2)
        assert len(list(tmp_path.glob("shard-*.tar"))) == written < 40
        assert threading.active_count() <= before
