"""Versions are made in parts, in buckets, and by runs that are killed: the same bytes, and old versions stay whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.changing_source import Rows, Team, row
from tests.conftest import tree_bytes
from tests.object_store import ObjectStore
from tests.preprocess.run.runs import StopRun, stopping
from vlmdata import open_dataset
from vlmdata.errors import ConfigMismatchError, DatasetFormatError
from vlmdata.preprocess.run.finish import Missing, finish_dataset
from vlmdata.preprocess.run.versions import Newest
from vlmdata.storage import open_store
from vlmdata.storage.prune import prune
from vlmdata.verify.dataset import verify_dataset


def changed(rows: Rows) -> Rows:
    """Without the first row, and with four more: two shards to make."""
    return [*rows[1:], row("new", "0.png"), *(row(f"newer {n}") for n in range(3))]


@pytest.fixture
def team(tmp_path: Path) -> Team:
    team = Team(tmp_path)
    team.run()
    return team


@pytest.fixture
def whole(team: Team, tmp_path: Path) -> dict[str, bytes]:
    """Both versions, made by runs without interruption."""
    copy = shutil.copytree(team.out, tmp_path / "whole")
    rows = team.rows
    team.run(changed(rows), out=copy)
    team.rows = rows
    return tree_bytes(copy)


@contextmanager
def killed_at(write: int, place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Ends the process's work at its n-th rename or link below a folder; yields the names before."""
    done: list[str] = []
    replace, link = os.replace, os.link

    def count(to: Any) -> None:
        if str(to).startswith(str(place)):
            if len(done) == write:
                raise StopRun
            done.append(str(to))

    def counted_replace(source: Any, to: Any, **options: Any) -> None:
        count(to)
        replace(source, to, **options)

    def counted_link(source: Any, to: Any, **options: Any) -> None:
        count(to)
        link(source, to, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", counted_replace)
        patch.setattr(os, "link", counted_link)
        yield done


def test_killed_at_any_write_leaves_the_old_version_whole(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    first, rows, write = tree_bytes(team.out), [*team.rows[1:], row("new", "0.png")], 0
    fresh, whole = team.out.with_name("fresh"), team.out.with_name("whole")
    shutil.copytree(team.out, fresh)
    shutil.copytree(team.out, whole)
    team.run(rows, out=whole)
    while True:
        with killed_at(write, team.out, monkeypatch) as done:
            try:
                team.run(rows)
                break
            except StopRun:
                pass
        assert open_dataset(team.out).manifest.version == {}, done[-1:]
        now = tree_bytes(team.out)
        assert {name: now[name] for name in first} == first, done[-1:]
        if write % 3 == 0:
            team.run(rows)
            assert tree_bytes(team.out) == tree_bytes(whole), done[-1:]
        shutil.rmtree(team.out)
        shutil.copytree(fresh, team.out)
        write += 1
    assert "versions.json" in done[-1]
    assert write == len(done) > 15


def test_an_unfinished_version_is_continued_and_starts_over_with_other_rows(
    team: Team, whole: dict[str, bytes]
) -> None:
    rows = team.rows
    with pytest.raises(StopRun):
        team.run(changed(rows), watcher=stopping(1))
    result = team.run(changed(rows))
    assert result.made == 1, "the other shard was kept"
    assert tree_bytes(team.out) == whole
    with pytest.raises(StopRun):
        team.run([*rows, row("a")], watcher=stopping(1))
    result = team.run([*rows, row("b")])
    assert result.manifest.version["number"] == 3
    assert verify_dataset(Path(team.version().name)).faults == []
    assert team.version().index.keys.to_pylist()[-1] == "000000013"


class TestParts:
    def test_give_the_same_bytes(self, team: Team, whole: dict[str, bytes]) -> None:
        rows = changed(team.rows)
        assert team.run_part("2/3", rows).made == 1
        missing = finish_dataset(team.out)
        assert isinstance(missing, Missing)
        assert missing.shards == (0,)
        assert team.version().manifest.version == {}
        assert [team.run_part(f"{number}/3").made for number in (1, 3)] == [1, 0]
        found = finish_dataset(team.out)
        assert not isinstance(found, Missing)
        assert found.version is not None
        assert found.version.changes == {"kept": 7, "made": 4, "removed": 1}
        assert tree_bytes(team.out) == whole
        assert team.run_part("1/3").finished
        assert finish_dataset(team.out).folder == "versions/2"  # type: ignore[union-attr]

    def test_of_other_rows_are_refused(self, team: Team) -> None:
        rows = team.rows
        team.run_part("1/2", changed(rows))
        with pytest.raises(ConfigMismatchError, match="other parts of this version were begun with other rows"):
            team.run_part("2/2", [*rows, row("other")])
        assert team.run([*rows, row("other")]).version is not None


def test_a_bucket_has_versions_that_share_shards(object_store: ObjectStore, tmp_path: Path) -> None:
    team, store = Team(tmp_path), open_store(f"{object_store.url}/data")
    team.run(out=store)
    rows = team.rows
    result = team.run(changed(rows), out=store)
    assert result.manifest.shards[0].name == "../../shard-000000.tar"
    assert store.listing("versions/2").keys() >= {"shard-000000.tar", "shard-000001.tar", "manifest.json"}
    local = Team(tmp_path_of(tmp_path, "local"))
    local.run()
    local.run(changed(local.rows))
    expected = {sample.key: sample.patches.tobytes() for sample in local.version()}
    found = open_dataset(f"{object_store.url}/data")
    assert {sample.key: sample.patches.tobytes() for sample in found} == expected
    assert len(open_dataset(f"{object_store.url}/data@1")) == 7
    assert team.run(changed(rows), out=store).version is None
    prune(store, [1])
    assert len(list(open_dataset(f"{object_store.url}/data"))) == len(expected)
    assert store.size("index.parquet") is None
    # The third version has shards of the folder beside its own.
    more = [*changed(rows), *(row(f"third {n}") for n in range(3))]
    assert team.run(more, out=store).version.number == 3  # type: ignore[union-attr]
    assert team.run(more, out=store).version is None
    names = [shard.name for shard in Newest.read(store).manifest.shards]  # type: ignore[union-attr]
    assert {name.rpartition("/")[0] for name in names} == {"../..", "../2", ""}
    store.delete(["versions/2/shard-000000.tar"])
    with pytest.raises(DatasetFormatError, match=r"shard-000000.tar: missing(.|\n)*`vlmdata verify") as refused:
        team.run(more, out=store)
    assert "--overwrite" not in str(refused.value)


def tmp_path_of(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name
