"""Versions of a dataset: old ones are removed with what only they have, and other commands take any of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.changing_source import Team, row
from tests.conftest import tree_bytes
from vlmdata import open_dataset
from vlmdata.cli import diff, select, verify
from vlmdata.cli.prune import prune as prune_command
from vlmdata.errors import UsageError
from vlmdata.inspect.dataset import describe_dataset
from vlmdata.preprocess.recode.run import recode_dataset
from vlmdata.select.compare import compare
from vlmdata.storage import open_store
from vlmdata.storage.folder import Folder
from vlmdata.storage.join import join_datasets
from vlmdata.storage.prune import plan_prune
from vlmdata.storage.prune import prune as remove
from vlmdata.verify.dataset import verify_dataset


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three versions: eight rows in shards 0 to 2, without those of shard 1, and with two more."""
    team = Team(tmp_path_factory.mktemp("team"))
    team.run()
    team.run([*team.rows[:3], *team.rows[6:]])
    team.run([*team.rows[1:], row("new", "5.png"), row("newer")])
    return team.out


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    for name, content in tree_bytes(made).items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "data"


def command(function: Callable[..., Any], *arguments: object) -> Any:
    app = typer.Typer()
    app.command()(function)
    return CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)


def sound(data: Path, *numbers: int) -> bool:
    return all(verify_dataset(Path(open_dataset(data, version=n).directory)).faults == [] for n in numbers)


class TestPrune:
    def test_removes_what_no_other_version_has(self, data: Path) -> None:
        before = tree_bytes(data)
        plan = plan_prune(open_store(data), [1, 2])
        assert tree_bytes(data) == before
        assert sorted(plan.files) == [
            *("image_files.parquet", "index.parquet", "rejected.jsonl", "rows.parquet", "shard-000001.tar"),
            *(f"versions/2/{name}.parquet" for name in ("image_files", "index")),
            *("versions/2/manifest.json", "versions/2/rejected.jsonl", "versions/2/rows.parquet"),
        ]
        assert plan.bytes == sum(len(before[name]) for name in plan.files)
        assert remove(open_store(data), [1, 2]) == plan
        assert [path.name for path in (data / "versions").iterdir()] == ["3"]
        assert sound(data, 3)
        assert len(open_dataset(data)) == len(open_dataset(data, version=3)) == 6
        with pytest.raises(UsageError, match=r"has no version 1\. It was pruned\. It has 3;"):
            open_dataset(data, version=1)

    def test_of_a_middle_version_keeps_its_shards_that_others_have(self, data: Path) -> None:
        remove(open_store(data), [2])
        assert sound(data, 1, 3)

    def test_refuses_the_newest_and_what_never_was(self, data: Path) -> None:
        before = tree_bytes(data)
        with pytest.raises(UsageError, match="version 3 is the newest, which is not pruned"):
            remove(open_store(data), [1, 3])
        with pytest.raises(UsageError, match=r"has no version 4\. It has 1, 2, 3\."):
            remove(open_store(data), [4])
        assert {name: found for name, found in tree_bytes(data).items() if "progress" not in name} == before

    @pytest.mark.parametrize("deaths", range(4))
    def test_killed_at_any_point_leaves_the_others_whole(
        self, data: Path, deaths: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        left = deaths

        def dying(self: Folder, names: Iterable[str]) -> None:
            nonlocal left
            for name in names:
                if left == 0:
                    raise KeyboardInterrupt
                left -= 1
                (self.directory / name).unlink(missing_ok=True)

        with monkeypatch.context() as patch:
            patch.setattr(Folder, "delete", dying)
            with pytest.raises(KeyboardInterrupt):
                remove(open_store(data), [1, 2])
        assert sound(data, 3)
        remove(open_store(data), [1, 2])
        assert sound(data, 3)
        assert not (data / "versions" / "2").exists()
        assert not (data / "shard-000001.tar").exists()

    def test_command(self, data: Path) -> None:
        shown = command(prune_command, data, "--keep", 1, "--dry-run")
        assert "versions 1, 2 would be removed: 10 files" in shown.output
        assert (data / "versions/2/index.parquet").exists()
        found = json.loads(command(prune_command, data, 1, "--json").output)
        assert (found["removed"], found["left"], found["dry_run"]) == ([1], [2, 3], False)
        with pytest.raises(UsageError, match="give the versions to remove"):
            command(prune_command, data)

    def test_preprocess_goes_on_after_it(self, tmp_path: Path) -> None:
        team = Team(tmp_path)
        team.run()
        team.run(team.rows[1:])
        remove(open_store(team.out), [1])
        result = team.run([*team.rows, row("new")])
        assert (result.manifest.version["number"], result.made) == (3, 1)
        assert sound(team.out, 2, 3)
        team.run(overwrite=True)
        assert sound(team.out, 1)


class TestOtherCommands:
    def test_diff(self, made: Path) -> None:
        found = compare(open_dataset(made, version=1), open_dataset(made))
        assert found.only_first == ("000000000", "000000003", "000000005")
        assert found.only_second == ("000000008", "000000009")
        assert (found.equal, found.changed) == (4, ())
        assert command(diff.diff, f"{made}@1", f"{made}@1").exit_code == 0
        assert f"3 only in {made}@1" in command(diff.diff, f"{made}@1", made).output

    def test_select_and_join(self, made: Path, tmp_path: Path) -> None:
        done = command(select.select, made, "--where", "source_row >= 2", "--out", tmp_path / "selected")
        assert done.exit_code == 0
        assert open_dataset(tmp_path / "selected").index.keys.to_pylist() == [f"{n:09d}" for n in (2, 6, 7, 8, 9)]
        rows = Path(open_dataset(made, version=2).directory)
        join_datasets([open_store(rows), open_store(made)], open_store(tmp_path / "joined"), allow_duplicates=True)
        assert verify_dataset(tmp_path / "selected").faults == verify_dataset(tmp_path / "joined").faults == []

    def test_recode(self, made: Path, tmp_path: Path) -> None:
        recode_dataset(made, tmp_path / "zstd", "zstd")
        assert verify_dataset(tmp_path / "zstd").faults == []
        assert compare(open_dataset(made), open_dataset(tmp_path / "zstd")).is_equal

    def test_verify_and_inspect(self, data: Path) -> None:
        assert command(verify.verify, data, "-j", 1).exit_code == 0
        card = describe_dataset(open_dataset(data))
        assert (card.version["number"], card.version["rows"]) == (3, {"kept": 4, "made": 2, "removed": 1})
        shard = data / "shard-000002.tar"
        shard.write_bytes(shard.read_bytes()[:-1])
        broken = command(verify.verify, data, "-j", 1)
        assert broken.exit_code == 1
        assert f"Files of a version after the first are not made again. Restore these from a copy: {shard}" in (
            broken.output.replace("\n", " ")
        )
        assert command(verify.verify, f"{data}@2", "-j", 1).exit_code == 1
