"""What a run that began over a source says when the source is not the same any more."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import tree_bytes
from vlmdata.errors import ConfigMismatchError, ResourceError
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.engines.base import ShardWork
from vlmdata.preprocess.engines.local import Local
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.shards.counters import Counters
from vlmdata.preprocess.shards.job import ShardJob, ShardRecord
from vlmdata.preprocess.sources.open import open_source


class Stopped(Local):
    """Makes one shard."""

    def run(
        self, work: ShardWork, jobs: Sequence[ShardJob], workers: int, counters: Counters
    ) -> Generator[ShardRecord]:
        yield from super().run(work, jobs[:1], 1, counters)
        raise ResourceError("stopped")


def write(path: Path, labels: str) -> Path:
    rows = {"text": [f"row {n} is {label}" for n, label in enumerate(labels)]}
    pq.write_table(pa.table(rows), path, compression="none", use_dictionary=False)
    return path


def run(source: Path, out: Path, *, stop: bool = False, hash_source: bool = False) -> dict[str, bytes]:
    opened = open_source(str(source), hash_source=hash_source)
    config = PreprocessConfig(recipe="text", rows_per_shard=2)
    preprocess_dataset(opened, out, config, hash_source=hash_source, engine=Stopped() if stop else Local())
    return tree_bytes(out)


def stopped(source: Path, out: Path, *, hash_source: bool = False) -> None:
    with pytest.raises(ResourceError, match="stopped"):
        run(source, out, stop=True, hash_source=hash_source)


def test_an_edit_that_no_footer_shows_is_not_mixed_into_an_unfinished_run(tmp_path):
    source = write(tmp_path / "rows.parquet", "aaba")
    before = open_source(str(source)).identity
    stopped(source, tmp_path / "out")
    os.utime(write(source, "abba"), (1, 1))
    assert open_source(str(source)).identity == before, "or this test would show nothing"
    with pytest.raises(ConfigMismatchError, match=r"source_times.rows.parquet: .*\n.*touched since the run began"):
        run(source, tmp_path / "out")


def test_a_copy_with_its_times_continues_an_unfinished_run(tmp_path):
    source = write(tmp_path / "rows.parquet", "abcd")
    whole = run(source, tmp_path / "whole")
    stopped(source, tmp_path / "out")
    (tmp_path / "copy").mkdir()
    copy = Path(shutil.copy2(source, tmp_path / "copy"))
    assert run(copy, tmp_path / "out") == whole
    # For a finished dataset, times say nothing.
    os.utime(copy, (1, 1))
    assert run(copy, tmp_path / "out") == whole


def test_runs_that_know_files_by_their_bytes_continue_with_hash_source(tmp_path):
    """Those of earlier versions do."""
    source = write(tmp_path / "rows.parquet", "abcd")
    whole = run(source, tmp_path / "whole", hash_source=True)
    stopped(source, tmp_path / "out", hash_source=True)
    with pytest.raises(ConfigMismatchError, match=r"xxh3_128(.|\n)*: give --hash-source"):
        run(source, tmp_path / "out")
    os.utime(source, (1, 1))
    assert run(source, tmp_path / "out", hash_source=True) == whole
    os.utime(write(source, "abca"), (1, 1))
    changed = run(source, tmp_path / "out", hash_source=True)
    assert {name: changed[name] for name in whole} == whole
    assert "versions/2/manifest.json" in changed
