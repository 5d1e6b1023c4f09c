"""Runs in a directory that has a dataset already: continued, refused or overwritten."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import cord_row, tree_bytes, write_cord_parquet
from tests.preprocess.run.runs import StopRun, begin, config, preprocess, stopping
from vlmdata.errors import ConfigMismatchError
from vlmdata.preprocess.config import ImageConfig
from vlmdata.verify.dataset import verify_dataset


class _ClearedError(Exception):
    pass


def _never(*_: Any) -> Any:
    raise _ClearedError


class TestRunningAgain:
    def test_a_finished_dataset_is_left_as_it_is_without_work(
        self, cord_parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "out"
        before = preprocess(cord_parquet, out).manifest
        stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
        calls: list[Any] = []
        monkeypatch.setattr("vlmdata.preprocess.run.making.make_shards", lambda *given: calls.append(given))
        monkeypatch.setattr("vlmdata.preprocess.engines.local.start_worker_server", lambda: calls.append("server"))
        result = preprocess(cord_parquet, out, workers=2)
        assert (result.made, result.kept, result.manifest) == (0, 7, before)
        assert not calls
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == stamps

    def test_an_unfinished_run_is_continued_shard_by_shard(self, cord_parquet: Path, tmp_path: Path) -> None:
        preprocess(cord_parquet, tmp_path / "whole")
        out = tmp_path / "out"
        for stop_after in (1, 2, 1):
            with pytest.raises(StopRun):
                preprocess(cord_parquet, out, watcher=stopping(stop_after))
            assert not (out / "manifest.json").exists()
        result = preprocess(cord_parquet, out)
        assert (result.made, result.kept) == (3, 4)
        assert tree_bytes(out) == tree_bytes(tmp_path / "whole")

    @pytest.mark.parametrize("damage", ["cut", "gone"])
    def test_a_shard_that_lost_bytes_since_is_made_anew(self, cord_parquet: Path, tmp_path: Path, damage: str) -> None:
        preprocess(cord_parquet, tmp_path / "whole")
        out = tmp_path / "out"
        with pytest.raises(StopRun):
            preprocess(cord_parquet, out, watcher=stopping(3))
        shard = out / "shard-000001.tar"
        if damage == "gone":
            shard.unlink()
        else:
            os.truncate(shard, shard.stat().st_size - 512)
        result = preprocess(cord_parquet, out)
        assert (result.made, result.kept) == (5, 2)
        assert tree_bytes(out) == tree_bytes(tmp_path / "whole")

    @pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
    def test_other_options_may_follow_a_run_that_accepted_nothing(self, tmp_path: Path, finished: bool) -> None:
        bad = [{**cord_row(n), "ground_truth": "{" if n < 12 or finished else '{"gt_parse": "x"}'} for n in range(18)]
        source, out = write_cord_parquet(tmp_path / "source" / "train.parquet", bad), tmp_path / "out"
        begin(source, out, finished)
        other = config(pad_multiple=64)
        assert preprocess(source, out, config=other).kept == 0
        preprocess(source, tmp_path / "fresh", config=other)
        assert tree_bytes(out) == tree_bytes(tmp_path / "fresh")

    @pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
    def test_other_options_are_refused_with_each_option_and_both_values_named(
        self, cord_parquet: Path, tmp_path: Path, finished: bool
    ) -> None:
        out = tmp_path / "out"
        begin(cord_parquet, out, finished)
        before = tree_bytes(out)
        other = config(
            image=ImageConfig(min_pixels=2048, max_pixels=65_536),
            recipe_options={"prompt": "Read it.", "target": "json"},
            max_length=77,
        )
        with pytest.raises(ConfigMismatchError) as caught:
            preprocess(cord_parquet, out, config=other)
        message = str(caught.value)
        assert ("a finished dataset" if finished else "an unfinished run") in message
        lines = sorted(re.findall(r"^  (.*)$", message, re.MULTILINE))
        assert lines == [
            "config.options.image.min_pixels: 1024 there, 2048 now",
            "config.options.max_length: 8192 there, 77 now",
            'config.options.recipe_options.prompt: "Describe this image." there, "Read it." now',
            'config.options.recipe_options.target: "donut" there, "json" now',
        ]
        # A finished dataset is sound, so nothing advises to remove it.
        assert ("--overwrite" in message) is not finished
        assert tree_bytes(out) == before

    def test_a_source_of_other_content_is_refused(self, tmp_path: Path) -> None:
        source = write_cord_parquet(tmp_path / "source" / "train.parquet", [cord_row(n) for n in range(12)])
        out = tmp_path / "out"
        begin(source, out, finished=False)
        write_cord_parquet(source, [cord_row(n) for n in range(11)] + [cord_row(99)])
        with pytest.raises(ConfigMismatchError, match=r"source\.files: .*xxh3_128"):
            preprocess(source, out)

    def test_the_same_content_from_another_folder_is_the_same_source(self, rows: Path, tmp_path: Path) -> None:
        preprocess(rows, tmp_path / "out")
        moved = tmp_path / "moved" / rows.name
        moved.parent.mkdir()
        shutil.copy(rows, moved)
        assert preprocess(moved, tmp_path / "out").kept == 2

    def test_another_limit_is_another_version(self, rows: Path, tmp_path: Path) -> None:
        preprocess(rows, tmp_path / "out", limit=7)
        found = preprocess(rows, tmp_path / "out").version
        assert found is not None
        assert found.changes == {"kept": 7, "made": 1, "removed": 0}

    def test_a_changed_recipe_is_another_configuration(
        self, rows: Path, tmp_path: Path, recipe_module: Callable[[str], str]
    ) -> None:
        recipe = recipe_module("class Custom(CordV2):\n    pass\n")
        preprocess(rows, tmp_path / "out", config=config(recipe=recipe))
        module = sys.modules[recipe.partition(":")[0]]
        Path(str(module.__file__)).write_text("from vlmdata.preprocess.recipes.cord_v2 import CordV2 as Custom\n")
        del sys.modules[module.__name__]
        import linecache

        linecache.checkcache()
        with pytest.raises(ConfigMismatchError, match=r"config\.fingerprints\.recipe"):
            preprocess(rows, tmp_path / "out", config=config(recipe=recipe))


class TestOverwrite:
    @pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
    def test_starts_anew_and_leaves_nothing_of_the_old_dataset(
        self, cord_parquet: Path, tmp_path: Path, finished: bool
    ) -> None:
        preprocess(cord_parquet, tmp_path / "fresh", config=config(rows_per_shard=20))
        out = tmp_path / "out"
        begin(cord_parquet, out, finished)
        result = preprocess(cord_parquet, out, config=config(rows_per_shard=20), overwrite=True)
        assert (result.made, result.kept) == (2, 0)
        assert tree_bytes(out) == tree_bytes(tmp_path / "fresh")

    def test_copes_with_a_run_that_died_while_it_saved_the_tokenizer(self, rows: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        begin(rows, out, finished=False)
        (out / ".progress" / "tokenizer").mkdir()
        (out / ".progress" / "tokenizer" / "tokenizer.json").write_text("{")
        preprocess(rows, out, overwrite=True)
        assert verify_dataset(out).faults == []

    @pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
    def test_dying_in_the_middle_of_it_never_mixes_two_configurations(
        self, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
    ) -> None:
        """Stops the removal before each of its steps; then a run without --overwrite refuses or is right."""
        other = config(pad_multiple=64, rows_per_shard=20)
        preprocess(rows, tmp_path / "fresh", config=other)
        fresh = tree_bytes(tmp_path / "fresh")
        begin(rows, tmp_path / "old", finished)
        remove = Path.unlink
        refused = steps = 0
        while True:
            out = tmp_path / "out"
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(tmp_path / "old", out)
            left = steps

            def dying(path: Path, missing_ok: bool = False) -> None:
                nonlocal left
                if left == 0:
                    raise StopRun
                left -= 1
                remove(path, missing_ok)

            with monkeypatch.context() as patch:
                patch.setattr(Path, "unlink", dying)
                patch.setattr("vlmdata.preprocess.run.making.make_shards", _never)
                try:
                    preprocess(rows, out, config=other, overwrite=True)
                except StopRun:
                    died = True
                except _ClearedError:
                    died = False
            if not died:
                break
            steps += 1
            try:
                preprocess(rows, out, config=other)
            except ConfigMismatchError:
                refused += 1
            else:
                assert tree_bytes(out) == fresh
            preprocess(rows, out, config=other, overwrite=True)
            assert tree_bytes(out) == fresh
        assert steps >= 5  # the files of the old dataset and its records
        assert refused >= (4 if finished else 2)  # an unfinished run whose shard and record are gone is continued
