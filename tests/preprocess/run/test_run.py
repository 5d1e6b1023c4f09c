"""A run as a whole: what its result depends on, what it continues, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from preprocess.config import ImageConfig, PreprocessConfig
from preprocess.run.dataset import RunResult, Watcher, preprocess_dataset
from preprocess.sources.open import open_source
from tests.conftest import cord_row, encoded_image, tree_bytes, write_cord_parquet
from vlmdata import open_dataset
from vlmdata.errors import ConfigMismatchError, ResourceError, SourceError
from vlmdata.format.ledger import read_ledger
from vlmdata.format.manifest import Manifest
from vlmdata.verify.dataset import verify_dataset

IMAGES = ImageConfig(min_pixels=1024, max_pixels=65_536)


def config(**options: Any) -> PreprocessConfig:
    return PreprocessConfig(**{"image": IMAGES, "rows_per_shard": 6, **options})


def preprocess(spec: Path, directory: Path, *, limit: int | None = None, **options: Any) -> RunResult:
    resolved = options.pop("config", None) or config()
    return preprocess_dataset(open_source(str(spec), limit=limit), directory, resolved, **options)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Eight rows of which rows 2, 3 and 5 are bad, each in its own way."""
    rows = [cord_row(n) for n in range(8)]
    rows[2]["image"]["bytes"] = encoded_image(seed=2, width=200, height=200)[:2000]
    rows[3]["ground_truth"] = "{"
    rows[5]["image"]["bytes"] = b"no image at all"
    return write_cord_parquet(tmp_path / "source" / "train.parquet", rows)


@pytest.fixture
def recipe_module(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Writes a recipe module; gives the name for ``--recipe``."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    sys.path.insert(0, str(folder))
    names = []

    def write(body: str) -> str:
        names.append(f"recipe_of_{tmp_path.name}_{len(names)}".replace("-", "_"))
        header = "from preprocess.recipes.cord_v2 import CordV2\nfrom vlmdata.errors import SourceError\n\n\n"
        (folder / f"{names[-1]}.py").write_text(header + body)
        return f"{names[-1]}:Custom"

    yield write
    sys.path.remove(str(folder))
    for name in names:
        sys.modules.pop(name, None)


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


class TestRunningAgain:
    def test_a_finished_dataset_is_left_as_it_is_without_work(
        self, cord_parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "out"
        before = preprocess(cord_parquet, out).manifest
        stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
        calls: list[Any] = []
        monkeypatch.setattr("preprocess.run.dataset.make_shards", lambda *given: calls.append(given))
        monkeypatch.setattr("preprocess.engines.local.start_worker_server", lambda: calls.append("server"))
        result = preprocess(cord_parquet, out, workers=2)
        assert (result.made, result.kept, result.manifest) == (0, 7, before)
        assert not calls
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == stamps

    def test_an_unfinished_run_is_continued_shard_by_shard(self, cord_parquet: Path, tmp_path: Path) -> None:
        preprocess(cord_parquet, tmp_path / "whole")
        out = tmp_path / "out"
        for stop_after in (1, 2, 1):
            with pytest.raises(_Stop):
                preprocess(cord_parquet, out, watcher=_stopping(stop_after))
            assert not (out / "manifest.json").exists()
        result = preprocess(cord_parquet, out)
        assert (result.made, result.kept) == (3, 4)
        assert tree_bytes(out) == tree_bytes(tmp_path / "whole")

    @pytest.mark.parametrize("damage", ["cut", "gone"])
    def test_a_shard_that_lost_bytes_since_is_made_anew(self, cord_parquet: Path, tmp_path: Path, damage: str) -> None:
        preprocess(cord_parquet, tmp_path / "whole")
        out = tmp_path / "out"
        with pytest.raises(_Stop):
            preprocess(cord_parquet, out, watcher=_stopping(3))
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
        _begin(source, out, finished)
        other = config(pad_multiple=64)
        assert preprocess(source, out, config=other).kept == 0
        preprocess(source, tmp_path / "fresh", config=other)
        assert tree_bytes(out) == tree_bytes(tmp_path / "fresh")

    @pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
    def test_other_options_are_refused_with_each_option_and_both_values_named(
        self, cord_parquet: Path, tmp_path: Path, finished: bool
    ) -> None:
        out = tmp_path / "out"
        _begin(cord_parquet, out, finished)
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
        assert "--overwrite" in message
        assert tree_bytes(out) == before

    @pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
    def test_a_source_of_other_content_is_refused(self, tmp_path: Path, finished: bool) -> None:
        source = write_cord_parquet(tmp_path / "source" / "train.parquet", [cord_row(n) for n in range(12)])
        out = tmp_path / "out"
        _begin(source, out, finished)
        write_cord_parquet(source, [cord_row(n) for n in range(11)] + [cord_row(99)])
        with pytest.raises(ConfigMismatchError, match=r"source\.files: .*xxh3_128"):
            preprocess(source, out)

    def test_the_same_content_from_another_folder_is_the_same_source(self, rows: Path, tmp_path: Path) -> None:
        preprocess(rows, tmp_path / "out")
        moved = tmp_path / "moved" / rows.name
        moved.parent.mkdir()
        shutil.copy(rows, moved)
        assert preprocess(moved, tmp_path / "out").kept == 2

    def test_another_limit_is_another_source(self, rows: Path, tmp_path: Path) -> None:
        preprocess(rows, tmp_path / "out", limit=7)
        with pytest.raises(ConfigMismatchError, match=r"source\.rows: 7 there, 8 now"):
            preprocess(rows, tmp_path / "out")

    def test_a_changed_recipe_is_another_configuration(
        self, rows: Path, tmp_path: Path, recipe_module: Callable[[str], str]
    ) -> None:
        recipe = recipe_module("class Custom(CordV2):\n    pass\n")
        preprocess(rows, tmp_path / "out", config=config(recipe=recipe))
        module = sys.modules[recipe.partition(":")[0]]
        Path(str(module.__file__)).write_text("from preprocess.recipes.cord_v2 import CordV2 as Custom\n")
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
        _begin(cord_parquet, out, finished)
        result = preprocess(cord_parquet, out, config=config(rows_per_shard=20), overwrite=True)
        assert (result.made, result.kept) == (2, 0)
        assert tree_bytes(out) == tree_bytes(tmp_path / "fresh")

    def test_copes_with_a_run_that_died_while_it_saved_the_tokenizer(self, rows: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        _begin(rows, out, finished=False)
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
        _begin(rows, tmp_path / "old", finished)
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
                    raise _Stop
                left -= 1
                remove(path, missing_ok)

            with monkeypatch.context() as patch:
                patch.setattr(Path, "unlink", dying)
                patch.setattr("preprocess.run.dataset.make_shards", _never)
                try:
                    preprocess(rows, out, config=other, overwrite=True)
                except _Stop:
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
        with pytest.raises(_Stop):
            preprocess(rows, tmp_path / "out", watcher=_stopping(1))
        lock = FileLock(tmp_path / "out" / ".progress" / "lock")
        with lock.acquire(timeout=0):
            pass
        assert preprocess(rows, tmp_path / "out").kept == 1

    def test_is_cleaned_of_temporary_files_of_killed_processes(self, rows: Path, tmp_path: Path) -> None:
        preprocess(rows, tmp_path / "whole")
        out = tmp_path / "out"
        _begin(rows, out, finished=False)
        leftovers = [
            out / ".shard-000001.tar.4711.tmp",
            out / ".index.parquet.4711.tmp",
            out / ".progress" / ".shard-000001.parquet.4711.tmp",
        ]
        for leftover in leftovers:
            leftover.write_bytes(b"half a file")
        preprocess(rows, out)
        assert tree_bytes(out) == tree_bytes(tmp_path / "whole")


class _Stop(Exception):
    pass


class _ClearedError(Exception):
    pass


def _never(*_: Any) -> Any:
    raise _ClearedError


def _stopping(after: int) -> Watcher:
    """A watcher that ends the run once so many shards are made."""
    done = []

    def shard_done(record: Any) -> None:
        done.append(record)
        if len(done) == after:
            raise _Stop

    return Watcher(shard_done=shard_done)


def _begin(source: Path, directory: Path, finished: bool) -> None:
    if finished:
        preprocess(source, directory)
        return
    with pytest.raises(_Stop):
        preprocess(source, directory, watcher=_stopping(1))
    assert (directory / "shard-000000.tar").exists()
