"""A run as a whole: what its result holds, and which directories it refuses."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.conftest import cord_row, tree_bytes, write_cord_parquet
from tests.preprocess.run.runs import StopRun, begin, config, preprocess, stopping
from vlmdata import open_dataset
from vlmdata.errors import ConfigMismatchError, ResourceError, SourceError
from vlmdata.format.ledger import read_ledger
from vlmdata.format.manifest import Manifest
from vlmdata.preprocess.run.dataset import Watcher
from vlmdata.verify.dataset import verify_dataset


class TestResult:
    def test_is_byte_identical_for_any_number_of_workers(self, cord_parquet: Path, tmp_path: Path) -> None:
        trees = []
        for workers in (1, 2, 3):
            result = preprocess(cord_parquet, tmp_path / f"{workers}", workers=workers)
            assert (result.made, result.kept) == (7, 0)
            trees.append(tree_bytes(tmp_path / f"{workers}"))
        assert trees[0] == trees[1] == trees[2]
        assert verify_dataset(tmp_path / "3").faults == []

    def test_depends_on_rows_per_shard_only_in_how_samples_lie_in_files(
        self, cord_parquet: Path, tmp_path: Path
    ) -> None:
        directories = {size: tmp_path / f"{size}" for size in (1, 7, 40, 1000)}
        for size, directory in directories.items():
            preprocess(cord_parquet, directory, config=config(rows_per_shard=size))
        datasets = {size: open_dataset(directory) for size, directory in directories.items()}
        manifests = {size: Manifest.read(directory) for size, directory in directories.items()}
        assert {size: len(manifest.shards) for size, manifest in manifests.items()} == {1: 40, 7: 6, 40: 1, 1000: 1}

        first = datasets[1]
        for size in (7, 40, 1000):
            assert len(datasets[size]) == len(first) == 40
            for ours, theirs in zip(datasets[size], first, strict=True):
                assert ours.key == theirs.key
                assert ours.length == theirs.length
                arrays = zip(ours.arrays().values(), theirs.arrays().values(), strict=True)
                assert all((mine == yours).all() for mine, yours in arrays)
            files = tree_bytes(directories[size]), tree_bytes(directories[1])
            same = {name for name in files[0] if files[0][name] == files[1].get(name)}
            assert same >= {"rejected.jsonl", "tokenizer/tokenizer.json", "tokenizer/chat_template.jinja"}
            totals = [vars(manifests[n].totals) for n in (size, 1)]
            assert {name for name in totals[0] if totals[0][name] != totals[1][name]} == {"bytes"}
        # The same files but for the option itself: a shard larger than the source is the source.
        trees = tree_bytes(directories[40]), tree_bytes(directories[1000])
        assert {name for name in trees[0] if trees[0][name] != trees[1][name]} == {"manifest.json"}

    def test_names_no_time_host_process_or_path_of_the_output_in_any_file(
        self, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trees = []
        for moment, home in ((1_000_000_000.0, "elsewhere/deep/out"), (2_000_000_000.0, "somewhere")):
            monkeypatch.setattr(time, "time", lambda moment=moment: moment)
            preprocess(rows, tmp_path / home)
            trees.append(tree_bytes(tmp_path / home))
        assert trees[0] == trees[1]
        texts = {socket.gethostname(), str(tmp_path), "elsewhere", str(Path.home()), os.environ.get("USER") or "root:"}
        for name, content in trees[0].items():
            for text in texts - {"root", "localhost", "/"}:
                assert text.encode() not in content, (name, text)

    def test_holds_exactly_the_files_of_the_format_when_finished(self, rows: Path, tmp_path: Path) -> None:
        preprocess(rows, tmp_path / "out")
        assert {entry.name for entry in (tmp_path / "out").iterdir()} == {
            "shard-000000.tar",
            "shard-000001.tar",
            "index.parquet",
            "manifest.json",
            "rejected.jsonl",
            "rows.parquet",
            "tokenizer",
        }


class TestRejects:
    def test_accepted_and_rejected_rows_are_all_rows(self, rows: Path, tmp_path: Path) -> None:
        manifest = preprocess(rows, tmp_path / "out", config=config(rows_per_shard=3)).manifest
        ledger = list(read_ledger(tmp_path / "out" / "rejected.jsonl"))
        assert [(entry.row, entry.reason.value) for entry in ledger] == [
            (2, "truncated_image"),
            (3, "malformed_ground_truth"),
            (5, "not_an_image"),
        ]
        accepted = open_dataset(tmp_path / "out").index.source_row.tolist()
        assert sorted([*accepted, *(entry.row for entry in ledger)]) == list(range(8))
        assert dict(manifest.rejects) == dict(Counter(entry.reason.value for entry in ledger))
        assert [(shard.samples, shard.rejected) for shard in manifest.shards] == [(2, 1), (1, 2), (2, 0)]

    def test_a_shard_of_nothing_but_bad_rows_is_an_empty_shard(self, tmp_path: Path) -> None:
        rows = [cord_row(n) for n in range(4)]
        for n in (2, 3):
            rows[n]["ground_truth"] = "nonsense"
        source = write_cord_parquet(tmp_path / "source.parquet", rows)
        manifest = preprocess(source, tmp_path / "out", config=config(rows_per_shard=2)).manifest
        assert [(shard.samples, shard.rejected) for shard in manifest.shards] == [(2, 0), (0, 2)]
        assert verify_dataset(tmp_path / "out").faults == []

    def test_a_source_of_nothing_but_bad_rows_is_a_complete_dataset_of_none(self, tmp_path: Path) -> None:
        source = write_cord_parquet(tmp_path / "source.parquet", [{**cord_row(n), "ground_truth": ""} for n in (0, 1)])
        manifest = preprocess(source, tmp_path / "out").manifest
        assert (manifest.totals.samples, manifest.totals.rejected) == (0, 2)
        assert len(open_dataset(tmp_path / "out")) == 0

    @pytest.mark.parametrize("workers", [1, 2])
    def test_an_unforeseen_error_in_a_recipe_is_a_ledger_line_and_other_rows_survive(
        self, rows: Path, tmp_path: Path, recipe_module: Callable[[str], str], workers: int
    ) -> None:
        recipe = recipe_module(
            "class Custom(CordV2):\n"
            "    def __call__(self, row):\n"
            "        if row.number in (1, 6):\n"
            "            raise ZeroDivisionError(f'no luck with {row.number}')\n"
            "        return super().__call__(row)\n"
        )
        out = tmp_path / "out"
        preprocess(rows, out, config=config(recipe=recipe, rows_per_shard=2), workers=workers)
        lines = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
        unforeseen = [line for line in lines if line["reason"] == "unexpected_error"]
        assert [(line["row"], line["message"]) for line in unforeseen] == [
            (1, f"ZeroDivisionError: no luck with 1 (in __call__, {recipe.partition(':')[0]}.py:8)"),
            (6, f"ZeroDivisionError: no luck with 6 (in __call__, {recipe.partition(':')[0]}.py:8)"),
        ]
        assert open_dataset(out).index.source_row.tolist() == [0, 4, 7]

    @pytest.mark.parametrize("workers", [1, 2])
    def test_running_out_of_memory_ends_the_run_instead_of_rejecting_good_rows(
        self, rows: Path, tmp_path: Path, recipe_module: Callable[[str], str], workers: int
    ) -> None:
        recipe = recipe_module(
            "class Custom(CordV2):\n"
            "    def __call__(self, row):\n"
            "        if row.number == 7:\n"
            "            raise MemoryError\n"
            "        return super().__call__(row)\n"
        )
        with pytest.raises(ResourceError, match=r"shard 3 \(rows 6 to 7\) failed: out of memory.*fewer --workers"):
            preprocess(rows, tmp_path / "out", config=config(recipe=recipe, rows_per_shard=2), workers=workers)
        assert not list((tmp_path / "out").glob("**/*.tmp"))

    @pytest.mark.parametrize("workers", [1, 2])
    def test_a_recipe_that_cannot_start_says_why(
        self, rows: Path, tmp_path: Path, recipe_module: Callable[[str], str], workers: int
    ) -> None:
        recipe = recipe_module("def Custom():\n    raise SourceError('the word list is not installed')\n")
        with pytest.raises(SourceError, match="the word list is not installed"):
            preprocess(rows, tmp_path / "out", config=config(recipe=recipe, rows_per_shard=2), workers=workers)


class TestTheDirectory:
    def test_of_something_else_is_refused_and_left_untouched(self, rows: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "thesis.txt").write_text("years of work")
        (out / ".draft.tmp").write_text("more of it")
        (out / "photos").mkdir()
        before = tree_bytes(out)
        for overwrite in (False, True):
            with pytest.raises(
                ConfigMismatchError, match=r"contains other files \(\.draft\.tmp, photos, thesis\.txt\)"
            ):
                preprocess(rows, out, overwrite=overwrite)
        assert tree_bytes(out) == before
        assert sorted(entry.name for entry in out.iterdir()) == [".draft.tmp", "photos", "thesis.txt"]

    def test_of_another_projects_shards_is_refused_and_left_untouched(self, rows: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "shard-000000.tar").write_bytes(b"a webdataset of somebody else")
        before = tree_bytes(out)
        with pytest.raises(ConfigMismatchError, match=r"contains shard-000000\.tar, but no manifest"):
            preprocess(rows, out)
        assert tree_bytes(out) == before
        assert [entry.name for entry in out.iterdir()] == ["shard-000000.tar"]

    def test_that_is_a_file_is_refused(self, rows: Path, tmp_path: Path) -> None:
        (tmp_path / "out").write_text("a file")
        with pytest.raises(ResourceError, match="cannot be written"):
            preprocess(rows, tmp_path / "out")
        assert (tmp_path / "out").read_text() == "a file"

    def test_is_held_against_a_second_run(self, rows: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        second: list[BaseException] = []

        def try_again(*_: Any) -> None:
            for overwrite in (False, True):
                with pytest.raises(ResourceError, match="another `vlmdata preprocess` is using it") as caught:
                    preprocess(rows, out, overwrite=overwrite)
                second.append(caught.value)

        preprocess(rows, out, watcher=Watcher(started=try_again))
        assert len(second) == 2
        assert verify_dataset(out).faults == []

    def test_is_free_again_after_a_run_that_failed(self, rows: Path, tmp_path: Path) -> None:
        with pytest.raises(StopRun):
            preprocess(rows, tmp_path / "out", watcher=stopping(1))
        lock = FileLock(tmp_path / "out" / ".progress" / "lock")
        with lock.acquire(timeout=0):
            pass
        assert preprocess(rows, tmp_path / "out").kept == 1

    def test_is_cleaned_of_temporary_files_of_killed_processes(self, rows: Path, tmp_path: Path) -> None:
        preprocess(rows, tmp_path / "whole")
        out = tmp_path / "out"
        begin(rows, out, finished=False)
        leftovers = [
            out / ".shard-000001.tar.4711.tmp",
            out / ".index.parquet.4711.tmp",
            out / ".progress" / ".shard-000001.parquet.4711.tmp",
        ]
        for leftover in leftovers:
            leftover.write_bytes(b"half a file")
        preprocess(rows, out)
        assert tree_bytes(out) == tree_bytes(tmp_path / "whole")
