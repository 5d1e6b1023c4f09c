"""Image files that rows name by path: changes between runs are found, shards made of them are made again or refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.chat_rows import write_jsonl
from tests.conftest import encoded_image, tree_bytes
from vlmdata.errors import ConfigMismatchError, DatasetFormatError
from vlmdata.format.manifest import Manifest
from vlmdata.preprocess.config import ImageConfig, MediaConfig, PreprocessConfig
from vlmdata.preprocess.recipes import image_files
from vlmdata.preprocess.recipes.image_files import changed_files, write_files
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.run.claim import Part
from vlmdata.preprocess.run.dataset import RunResult, Watcher, preprocess_dataset, preprocess_part
from vlmdata.preprocess.run.finish import finish_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.storage import open_store
from vlmdata.verify.dataset import verify_dataset

ROWS = 8


class Stopped(Exception):
    """The run is stopped."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Eight chat rows with an image file each; that of row 5 is missing. Two rows are a shard."""
    folder = tmp_path / "source"
    (folder / "images").mkdir(parents=True)
    for n in range(ROWS):
        (folder / "images" / f"{n}.png").write_bytes(encoded_image(seed=n))
    (folder / "images" / "5.png").unlink()
    rows = [
        {
            "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": f"{n}."}],
            "image": f"{n}.png",
        }
        for n in range(ROWS)
    ]
    return write_jsonl(folder / "chats.jsonl", rows)


def preprocess(source: Path, out: Path, **options: Any) -> RunResult:
    root = MediaConfig(image_root=str(source.parent / "images"))
    config = PreprocessConfig(recipe="chat", rows_per_shard=2, image=ImageConfig(1024, 65536), media=root)
    return preprocess_dataset(open_source(str(source)), out, config, **options)


def stop_after(shards: int, source: Path, out: Path) -> None:
    made = []

    def shard_done(record: Any) -> None:
        made.append(record)
        if len(made) == shards:
            raise Stopped

    with pytest.raises(Stopped):
        preprocess(source, out, watcher=Watcher(shard_done=shard_done))


def repaint(source: Path, n: int | str, seed: int = 99) -> None:
    """Another picture; of noise, so that its file has another size."""
    (source.parent / "images" / f"{n}.png").write_bytes(encoded_image(seed=seed, width=32))


def continued(source: Path, out: Path, **options: Any) -> tuple[RunResult, dict[int, list[str]]]:
    said: list[Mapping[int, Sequence[str]]] = [{}]
    result = preprocess(source, out, watcher=Watcher(files_changed=said.append), **options)
    return result, {shard: list(paths) for shard, paths in said[-1].items()}


@pytest.fixture
def shared(source: Path) -> Path:
    """The rows of shard 0 and of shard 3 name one picture, and those of 1 and 2 one that is missing."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    for number, name in ((0, "shared.png"), (7, "shared.png"), (2, "later.png"), (4, "later.png")):
        rows[number]["image"] = name
    (source.parent / "images" / "shared.png").write_bytes(encoded_image(seed=50))
    return write_jsonl(source, rows)


class TestFilesThatChangeWhileShardsAreMade:
    def make(self, source: Path, out: Path, number: int) -> None:
        root = MediaConfig(image_root=str(source.parent / "images"))
        config = PreprocessConfig(recipe="chat", rows_per_shard=2, image=ImageConfig(1024, 65536), media=root)
        preprocess_part(Part(number, 4), open_source(str(source)), out, config)

    @pytest.mark.parametrize("changed", ["shared.png", "later.png"])
    def test_finish_names_them_and_the_parts_to_make_again(self, tmp_path: Path, shared: Path, changed: str) -> None:
        out = tmp_path / "out"
        for number in (1, 2):
            self.make(shared, out, number)
        (shared.parent / "images" / changed).write_bytes(encoded_image(seed=51))
        for number in (3, 4):
            self.make(shared, out, number)
        before = tree_bytes(out)
        shards, parts = ("0 and 3", "1,4") if changed == "shared.png" else ("1 and 2", "2-3")
        with pytest.raises(ConfigMismatchError) as caught:
            finish_dataset(out)
        assert f"{changed} had different contents for shards {shards}. Run the parts {parts} of 4" in str(caught.value)
        assert str(caught.value).endswith("again: shards of earlier contents are recreated, then `vlmdata finish`.")
        assert tree_bytes(out).keys() - before.keys() == {".progress/lock"}
        for number in (1, 2, 3, 4):
            self.make(shared, out, number)
        assert isinstance(finish_dataset(out), RunResult)
        preprocess(shared, tmp_path / "fresh")
        assert tree_bytes(out) == tree_bytes(tmp_path / "fresh")

    def test_a_run_without_parts_names_them_too(self, tmp_path: Path, shared: Path) -> None:
        watcher = Watcher(shard_done=lambda record: repaint(shared, "shared"))
        with pytest.raises(ConfigMismatchError, match=r"for shards 0 and 3\. Run the same command again: shards of"):
            preprocess(shared, tmp_path / "out", watcher=watcher)
        assert not (tmp_path / "out" / "manifest.json").exists()
        assert preprocess(shared, tmp_path / "out").made == 1
        assert verify_dataset(tmp_path / "out").faults == []


class TestAnUnfinishedRun:
    def test_makes_shards_of_repainted_pictures_again(self, tmp_path, source):
        stop_after(3, source, tmp_path / "out")
        repaint(source, 1)
        repaint(source, 7)
        result, changed = continued(source, tmp_path / "out")
        assert changed == {0: ["1.png"]}
        assert (result.made, result.kept) == (2, 2)
        preprocess(source, tmp_path / "fresh")
        assert tree_bytes(tmp_path / "out") == tree_bytes(tmp_path / "fresh")
        assert verify_dataset(tmp_path / "out").faults == []

    def test_keeps_shards_of_pictures_that_are_the_same(self, tmp_path, source):
        stop_after(3, source, tmp_path / "out")
        for path in (source.parent / "images").iterdir():
            path.write_bytes(path.read_bytes())
            os.utime(path)
        result, changed = continued(source, tmp_path / "out")
        assert (result.made, result.kept, changed) == (1, 3, {})

    def test_makes_shards_again_when_pictures_go_or_come(self, tmp_path, source):
        stop_after(3, source, tmp_path / "out")
        (source.parent / "images" / "2.png").unlink()
        (source.parent / "images" / "5.png").write_bytes(encoded_image(seed=5))
        result, changed = continued(source, tmp_path / "out")
        assert changed == {1: ["2.png"], 2: ["5.png"]}
        assert (result.manifest.totals.samples, result.manifest.totals.rejected) == (7, 1)

    def test_that_dies_while_it_makes_a_shard_again_does_not_mix(self, tmp_path, source):
        stop_after(3, source, tmp_path / "out")
        repaint(source, 1)
        stop_after(1, source, tmp_path / "out")
        repaint(source, 0)
        _, changed = continued(source, tmp_path / "out")
        assert changed == {0: ["0.png"]}
        preprocess(source, tmp_path / "fresh")
        assert tree_bytes(tmp_path / "out") == tree_bytes(tmp_path / "fresh")


class TestAFinishedDataset:
    def test_of_unchanged_files_is_done(self, tmp_path, source):
        preprocess(source, tmp_path / "out")
        assert preprocess(source, tmp_path / "out").made == 0
        assert preprocess(source, tmp_path / "out", hash_source=True).made == 0

    def test_of_changed_files_makes_their_rows_for_a_new_version(self, tmp_path, source):
        preprocess(source, tmp_path / "out")
        before = tree_bytes(tmp_path / "out")
        repaint(source, 0)
        (source.parent / "images" / "5.png").write_bytes(encoded_image())
        result = preprocess(source, tmp_path / "out")
        assert result.version.changes == {"kept": 6, "made": 2, "removed": 2}
        now = tree_bytes(tmp_path / "out")
        assert {name: now[name] for name in before} == before
        recorded = pq.read_table(tmp_path / "out" / "versions" / "2" / "image_files.parquet").to_pylist()
        assert [(row["shard"], row["path"]) for row in recorded] == [
            *((0, "1.png"), (1, "2.png"), (1, "3.png"), (2, "4.png"), (3, "6.png"), (3, "7.png")),
            *((4, "0.png"), (4, "5.png")),
        ]
        assert preprocess(source, tmp_path / "out").version is None
        assert preprocess(source, tmp_path / "out", hash_source=True).version is None

    def test_lists_the_files_it_was_made_of(self, tmp_path, source):
        manifest = preprocess(source, tmp_path / "out").manifest
        rows = pq.read_table(tmp_path / "out" / "image_files.parquet").to_pylist()
        files = {n: (source.parent / "images" / f"{n}.png") for n in range(ROWS)}
        assert rows == [
            {
                "shard": n // 2,
                "path": f"{n}.png",
                "bytes": files[n].stat().st_size if n != 5 else -1,
                "xxh3_128": xxhash.xxh3_128_hexdigest(files[n].read_bytes()) if n != 5 else "",
            }
            for n in range(ROWS)
        ]
        recorded = manifest.source["image_files"]
        assert (recorded["files"], recorded["missing"]) == (8, 1)
        assert recorded["bytes"] == sum(row["bytes"] for row in rows if row["bytes"] > 0)

    def test_is_the_same_for_every_copy_of_the_source(self, tmp_path, source):
        copy = shutil.copytree(source.parent, tmp_path / "copy", copy_function=shutil.copyfile) / source.name
        for path in (copy.parent / "images").iterdir():
            os.utime(path, (1, 1))
        trees = []
        for path, out in ((source, tmp_path / "a"), (copy, tmp_path / "b")):
            preprocess(path, out)
            trees.append(tree_bytes(out))
            config = json.loads(trees[-1].pop("manifest.json"))
            trees[-1]["source"] = json.dumps(config["source"]).encode()
        assert trees[0] == trees[1], "but for the image root among the options, which is a path"

    @pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b"")])
    def test_gets_a_lost_list_again_if_the_files_are_the_same(self, tmp_path, source, harm):
        preprocess(source, tmp_path / "out")
        before = tree_bytes(tmp_path / "out")
        harm(tmp_path / "out" / "image_files.parquet")
        assert [fault.file for fault in verify_dataset(tmp_path / "out").faults] == ["image_files.parquet"]
        assert preprocess(source, tmp_path / "out").repaired == ("image_files.parquet",)
        assert tree_bytes(tmp_path / "out") == before
        harm(tmp_path / "out" / "image_files.parquet")
        repaint(source, 0)
        with pytest.raises(DatasetFormatError, match=r"shard-000000\.tar: recreated .*image files"):
            preprocess(source, tmp_path / "out")

    def test_without_image_files_has_no_list(self, make_dataset, cord_parquet):
        out = make_dataset(cord_parquet, limit=2)
        assert not (out / "image_files.parquet").exists()
        assert "image_files" not in Manifest.read(out).source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "a.png").write_bytes(b"first")
    (root / "sub" / "b.png").write_bytes(b"other")
    (root / "link.png").symlink_to("a.png")
    return root


def recorded(folder: Path, *paths: str) -> Path:
    """The list of the files after these paths were loaded."""
    loader = MediaLoader(str(folder), False)
    with loader.row() as files:
        for path in paths:
            try:
                loader.load(path, "image")
            except RowRejected:
                continue
    write_files(open_store(folder.parent), "list", 3, files)
    return folder.parent / "list"


class TestCost:
    """Which files are read in order to compare them."""

    @pytest.fixture
    def read(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        names: list[str] = []
        original: Callable[[Path], str] = image_files.file_digest

        def file_digest(path: Path) -> str:
            names.append(path.name)
            return original(path)

        monkeypatch.setattr(image_files, "file_digest", file_digest)
        return names

    def test_untouched_files_are_not_read(self, folder, read):
        files = recorded(folder, "a.png", "sub/b.png", "link.png", "missing.png")
        later = (folder / "a.png").stat().st_ctime_ns + 3600 * 10**9
        assert (changed_files(files, folder, later), read) == ({}, [])
        assert changed_files(files, folder, None) == {}
        assert sorted(read) == ["a.png", "b.png", "link.png"]

    def test_another_size_needs_no_reading(self, folder, read):
        files = recorded(folder, "a.png", "link.png")
        (folder / "a.png").write_bytes(b"longer than it was")
        assert (changed_files(files, folder, None), read) == ({3: ["a.png", "link.png"]}, [])

    @pytest.mark.parametrize("touched", ["times kept", "replaced", "link"])
    def test_a_change_of_the_same_size_is_found_by_its_change_time(self, folder, read, touched, monkeypatch):
        files = recorded(folder, "a.png", "link.png", "sub/b.png")
        status = (folder / "a.png").stat()
        if touched == "link":
            (folder / "link.png").unlink()
            (folder / "link.png").symlink_to("sub/b.png")
        else:
            target = folder / ("new.png" if touched == "replaced" else "a.png")
            target.write_bytes(b"FIRST")
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
            target.rename(folder / "a.png")
        monkeypatch.setattr(image_files, "_MARGIN_NS", 0)
        expected = {3: ["link.png"] if touched == "link" else ["a.png", "link.png"]}
        assert changed_files(files, folder, status.st_mtime_ns) == expected
        # The reference is the beginning of the run: what was touched before it is taken for the same.
        assert changed_files(files, folder, status.st_mtime_ns + 3600 * 10**9) == {}
        assert changed_files(files, folder, None) == expected

    def test_the_finished_list_has_the_time_at_which_the_run_began(self, tmp_path, source):
        stop_after(2, source, tmp_path / "out")
        run = tmp_path / "out" / ".progress" / "run.json"
        os.utime(run, ns=(10**18, 10**18))
        preprocess(source, tmp_path / "out")
        assert (tmp_path / "out" / "image_files.parquet").stat().st_mtime_ns == 10**18


NAMES = (
    "a.png",
    "sub/b.png",
    "./a.png",
    "sub/../a.png",
    "link.png",
    "none.png",
    "sub",
    "x\0y",
    "\ud800",
    "{root}/a.png",
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(NAMES), max_size=6), st.sets(st.sampled_from(["a.png", "sub/b.png", "none.png"])))
def test_changes_are_exactly_those_of_the_files_behind_the_names(folder, names, rewritten):
    contents = {
        name: (folder / name).read_bytes() if (folder / name).exists() else None for name in ("a.png", "sub/b.png")
    }
    names = [name.replace("{root}", str(folder)) for name in names]
    files = recorded(folder, *names)
    try:
        for name in rewritten:
            (folder / name).write_bytes(b"again")
        found = changed_files(files, folder, None).get(3, []) if files.exists() else []
        behind = {"./a.png": "a.png", "sub/../a.png": "a.png", "link.png": "a.png", f"{folder}/a.png": "a.png"}
        expected = {name.replace(f"{folder}/", "") for name in names if behind.get(name, name) in rewritten}
        assert set(found) == expected
        assert found == sorted(found)
    finally:
        (folder / "none.png").unlink(missing_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)


def test_each_row_has_its_own_files(folder):
    loader = MediaLoader(str(folder), False)
    assert loader.load("link.png", "image") == b"first"
    with loader.row() as first:
        loader.load("a.png", "image")
    with loader.row() as second:
        loader.load("sub/b.png", "image")
    assert (list(first), list(second)) == (["a.png"], ["sub/b.png"])
