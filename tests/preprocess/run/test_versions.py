"""A finished dataset takes the changes of its source as a new version: only what differs is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.changing_source import REJECTED, Team, row
from tests.chat_rows import write_jsonl
from tests.conftest import tree_bytes
from vlmdata import open_dataset
from vlmdata.errors import ConfigMismatchError, DatasetFormatError, UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.ledger import read_ledger
from vlmdata.preprocess.recipes import image_files
from vlmdata.preprocess.row import Row, Struct
from vlmdata.preprocess.run import next_version
from vlmdata.preprocess.run.dataset import RunResult, Watcher
from vlmdata.preprocess.run.versions import _matched
from vlmdata.preprocess.sources.open import open_source
from vlmdata.preprocess.sources.row_digests import row_digest, row_digests, row_digests_by
from vlmdata.verify.dataset import verify_dataset


@pytest.fixture
def team(tmp_path: Path) -> Team:
    team = Team(tmp_path)
    team.run()
    return team


def content(dataset: VlmDataset) -> Counter[bytes]:
    """What a dataset has, without keys."""
    return Counter(b"".join(each.tobytes() for each in sample.arrays().values()) for sample in dataset)


def shards(result: RunResult) -> list[str]:
    return [info.name for info in result.manifest.shards]


def test_appended_rows_are_made_and_all_others_kept(team: Team) -> None:
    first = tree_bytes(team.out)
    result = team.run([*team.rows, row("Row 8"), row("Row 9", "0.png")])
    assert result.version is not None
    assert result.version.changes == {"kept": 8, "made": 2, "removed": 0}
    assert (result.made, shards(result)[-1]) == (1, "shard-000000.tar")
    assert shards(result)[:-1] == [f"../../shard-{n:06d}.tar" for n in range(3)]
    now = tree_bytes(team.out)
    assert {name: now[name] for name in first} == first, "the first version stays as it was"
    assert team.version().index.keys.to_pylist() == [f"{n:09d}" for n in range(10) if n != 4]
    assert verify_dataset(Path(team.version().name)).faults == []
    assert verify_dataset(team.out).faults == []
    assert verify_dataset(team.out).foreign == ()


def test_one_edited_image_makes_one_row(team: Team) -> None:
    old = team.version()
    team.paint(1, seed=77)
    result = team.run()
    assert result.version is not None
    assert result.version.changes == {"kept": 7, "made": 1, "removed": 1}
    new = team.version()
    assert set(old.index.keys.to_pylist()) - set(new.index.keys.to_pylist()) == {"000000001"}
    assert new.index.keys.to_pylist()[-1] == "000000008"
    assert not np.array_equal(new.sample("000000008").patches, old.sample("000000001").patches)
    assert verify_dataset(Path(new.name)).faults == []
    assert team.run().version is None


def test_an_image_that_changes_while_rows_are_compared_is_noticed(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the comparison lasts: at the end, and by the next run if it ends before."""
    monkeypatch.setattr(image_files, "_MARGIN_NS", 0)
    rows, compared, seeds = [*team.rows, row("new")], list[int](), iter((50, 51))

    def paint(done: int) -> None:
        if not compared:
            team.paint(0, seed=next(seeds))
            compared.append((team.file.parent / "images" / "0.png").stat().st_mtime_ns)

    with pytest.raises(ConfigMismatchError, match="image files changed while the version was made"):
        team.run(rows, watcher=Watcher(rows_compared=paint))
    result = team.run(rows)
    assert result.version is not None
    assert result.version.changes == {"kept": 7, "made": 2, "removed": 1}
    # What changes after the look at the end counts from the time before the comparison.
    compared.clear()
    monkeypatch.setattr(next_version, "_require_unchanged", lambda *given: None)
    team.run([*rows, row("newer")], watcher=Watcher(rows_compared=paint))
    assert (Path(team.version().name) / "image_files.parquet").stat().st_mtime_ns <= compared[0]
    assert team.run().version.changes == {"kept": 9, "made": 1, "removed": 1}  # type: ignore[union-attr]


def test_removed_rows_leave_the_index_and_keys_are_not_used_again(team: Team) -> None:
    rows = team.rows
    assert team.run(rows[1:]).made == 0
    assert "000000000" not in team.version().index.keys.to_pylist()
    result = team.run(rows)  # the row comes back, under a new key
    assert team.version().index.keys.to_pylist()[-1] == "000000008"
    assert result.manifest.shards[-1].name == "shard-000000.tar"
    assert team.run(rows[:-1]).version is not None
    assert team.run([*rows[:-1], row("new")]).manifest.version["number"] == 5
    assert team.version().index.keys.to_pylist()[-1] == "000000009"
    assert [verify_dataset(Path(team.version(n).name)).faults for n in range(2, 6)] == [[]] * 4


def test_a_shard_without_rows_is_left_out(team: Team) -> None:
    result = team.run(team.rows[3:])
    assert shards(result) == ["../../shard-000001.tar", "../../shard-000002.tar"]
    assert [(info.row_start, info.row_stop) for info in result.manifest.shards] == [(0, 3), (3, 5)]


def test_rejected_rows_are_kept_and_removed_like_others(team: Team) -> None:
    result = team.run([*team.rows, REJECTED])
    assert [each.row for each in read_ledger(team.out / "versions/2/rejected.jsonl")] == [4, 8]
    assert result.manifest.totals.rejected == 2
    result = team.run([each for each in team.rows if each is not REJECTED])
    assert (result.manifest.totals.rejected, result.made) == (0, 0)
    assert verify_dataset(Path(team.version().name)).faults == []


def test_another_order_is_no_change(team: Team) -> None:
    before = tree_bytes(team.out)
    result = team.run(team.rows[::-1])
    assert (result.version, result.made) == (None, 0)
    assert tree_bytes(team.out) == before


@settings(max_examples=4, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=7), min_size=2, max_size=3))
def test_a_version_has_what_preprocessing_anew_gives(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[str]]
) -> None:
    team, keys = Team(tmp_path_factory.mktemp("team")), dict[str, bytes]()
    for texts in [["a", *"hgf"], *(["a", *step] for step in steps)]:
        team.run([REJECTED if text == "h" else row(text, "0.png" if text < "c" else None) for text in texts])
        found = team.version()
        assert verify_dataset(Path(found.name)).faults == []
        for sample in found:  # a key always means the same sample
            said = b"".join(each.tobytes() for each in sample.arrays().values())
            assert keys.setdefault(sample.key, said) == said
    fresh = Team(tmp_path_factory.mktemp("fresh"))
    fresh.run(team.rows)
    assert content(found) == content(fresh.version())
    assert found.manifest.totals.rejected == fresh.version().manifest.totals.rejected


def test_counts_of_keys_and_turns_follow_the_rows(team: Team) -> None:
    odd = {**row("odd"), "mood": "good"}
    assert team.run([*team.rows, odd, odd]).manifest.unknown_keys == {"mood": 2}
    assert team.run(team.rows[:-1]).manifest.unknown_keys == {"mood": 1}
    assert team.run(team.rows[:-1]).manifest.unknown_keys == {}


class TestNames:
    def test_of_versions(self, team: Team) -> None:
        team.run(team.rows[1:])
        assert len(team.version()) == len(team.version(2)) == len(open_dataset(f"{team.out}@2")) == 6
        assert len(team.version(1)) == len(open_dataset(f"{team.out}@1")) == len(VlmDataset(team.out)) == 7
        assert team.version().name == str(team.out / "versions/2")
        assert len(open_dataset(open_dataset(f"{team.out}@1").name)) == 7
        with pytest.raises(UsageError, match=r"has no version 3\. It has 1, 2;"):
            team.version(3)
        with pytest.raises(UsageError, match="names version 1, but version 2 is asked for"):
            open_dataset(f"{team.out}@1", version=2)

    def test_a_folder_may_have_such_a_name(self, team: Team) -> None:
        place = team.out.parent / "versions" / "2"
        place.parent.mkdir()
        team.out.rename(place)
        assert len(open_dataset(place)) == 7
        place.rename(team.out.parent / "out@3")
        assert len(open_dataset(team.out.parent / "out@3")) == 7

    def test_a_damaged_list_is_an_error(self, team: Team) -> None:
        team.run(team.rows[1:])
        (team.out / "versions.json").write_text("{}")
        with pytest.raises(DatasetFormatError, match=r"versions.json: is not a list of versions: 'format'"):
            team.version()


class TestRefusals:
    def test_another_option_is_no_version(self, team: Team) -> None:
        with pytest.raises(ConfigMismatchError, match=r"config.options.pixels: \"raw\" there, \"zstd\" now"):
            team.run(team.rows[1:], config={"pixels": "zstd"})
        team.run(team.rows[1:])
        with pytest.raises(ConfigMismatchError, match="Repeat the earlier options and restore the source"):
            team.run(team.rows[1:], config={"pixels": "zstd"})

    def test_another_source_is_no_version(self, team: Team) -> None:
        with pytest.raises(ConfigMismatchError, match="None of its 8 rows is in the source"):
            team.run([row("other")])

    @pytest.mark.parametrize("harm", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:-99])])
    def test_without_the_record_of_rows(self, team: Team, harm: Callable[[Path], None]) -> None:
        harm(team.out / "rows.parquet")
        first = team.rows
        before = tree_bytes(team.out)
        with pytest.raises(ConfigMismatchError, match=r"rows.parquet: (not there|cannot be read)(.|\n)*another --out"):
            team.run(team.rows[1:])
        team.paint(0, seed=50)
        with pytest.raises(ConfigMismatchError, match=r"image files .* have changed:\n  shard-000000.tar: 0.png\n"):
            team.run(first)
        assert tree_bytes(team.out) == before

    def test_a_lost_file_of_a_version(self, team: Team) -> None:
        result = team.run([*team.rows, row("new")])
        (team.out / "versions/2" / shards(result)[-1]).unlink()
        with pytest.raises(DatasetFormatError, match=r"versions/2/shard-000000.tar: missing(.|\n)*not made again"):
            team.run()

    def test_overwrite_removes_all_versions(self, team: Team) -> None:
        team.run(team.rows[1:])
        team.run(team.rows, overwrite=True)
        assert not (team.out / "versions").exists()
        assert not (team.out / "versions.json").exists()
        assert team.version().name == str(team.out)


class TestDigests:
    def test_tell_values_apart(self) -> None:
        values: list[Any] = [1, 1.0, "1", True, b"1", [1], [[1]], {"a": 1}, {"a": None}, {}, [], "", {"a": [1, 2]}]
        digests = {row_digest(Row(0, {"x": value})) for value in values}
        assert len(digests) == len(values)

    def test_ignore_what_other_rows_determine(self) -> None:
        assert row_digest(Row(0, {"x": 1})) == row_digest(Row(9, {"x": 1, "y": None}))
        assert row_digest(Row(0, {"x": Struct(a=1)})) == row_digest(Row(0, {"x": Struct(a=1, b=None)}))

    def test_do_not_depend_on_workers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("vlmdata.preprocess.sources.row_digests._ROWS_PER_JOB", 2)
        source = open_source(str(write_jsonl(tmp_path / "a.jsonl", [row(str(n)) for n in range(5)])))
        alone = row_digests(source).content
        monkeypatch.setattr("vlmdata.preprocess.sources.row_digests._SECONDS_ALONE", 0)
        assert np.array_equal(row_digests(source, workers=2).content, alone)
        assert len(set(alone.tolist())) == 5


@given(st.lists(st.integers(0, 4)), st.lists(st.integers(0, 4)), st.data())
def test_equal_rows_are_paired_in_order(known: list[int], found: list[int], data: st.DataObject) -> None:
    usable = np.array(data.draw(st.lists(st.booleans(), min_size=len(known), max_size=len(known))), np.bool_)
    waiting: dict[int, list[int]] = {}
    for at, value in enumerate(known):
        if usable[at]:
            waiting.setdefault(value, []).append(at)
    expected = [(waiting[value].pop(0), at) for at, value in enumerate(found) if waiting.get(value)]

    def hashes(values: Sequence[int]) -> Any:
        return np.array([bytes([value]) * 15 + b"\0" for value in values], "S16")

    old, new = _matched(hashes(known), hashes(found), usable)
    assert sorted(zip(old.tolist(), new.tolist(), strict=True)) == sorted(expected)


def test_kept_columns_of_the_source_follow_the_rows(team: Team) -> None:
    rows = [{**each, "n": number} for number, each in enumerate(team.rows)]
    config = {"keep_columns": ("n", "lang")}
    team.run(rows, config=config, overwrite=True)
    team.run([*rows[2:], {**row("new"), "n": 0.5, "lang": "de"}], config=config)
    table = team.version().index.table
    assert table["source.n"].to_pylist() == [2.0, 3.0, 5.0, 6.0, 7.0, 0.5]
    assert table["source.lang"].to_pylist() == [None] * 5 + ["de"]
    assert verify_dataset(Path(team.version().name)).faults == []


class TestAddedColumns:
    """A row is known by the columns that were read of it."""

    def test_an_unused_column_makes_nothing(self, team: Team) -> None:
        before = tree_bytes(team.out)
        result = team.run([{**each, "week": 1} for each in team.rows])
        assert (result.version, result.made) == (None, 0)
        assert tree_bytes(team.out) == before

    def test_new_rows_have_it(self, team: Team) -> None:
        grown = [{**each, "week": 1} for each in team.rows]
        result = team.run([*grown[1:], {**row("new"), "week": 2}])
        assert result.version is not None
        assert result.version.changes == {"kept": 7, "made": 1, "removed": 1}
        assert verify_dataset(Path(team.version().name)).faults == []
        # Rows are known by their content of now: another column is added, and a row has another value in an unused one.
        again = [{**each, "place": "x"} for each in team.rows]
        assert team.run([{**again[0], "week": 5}, *again[1:]]).version is None

    @pytest.mark.parametrize("column", ["system", "loss_weight", "tools", "image"])
    def test_a_column_that_the_recipe_would_have_read_makes_the_row_again(self, team: Team, column: str) -> None:
        values = {"system": "Be brief.", "loss_weight": 0.5, "tools": [{"type": "function"}], "image": "5.png"}
        result = team.run([{**team.rows[0], column: values[column]}, *team.rows[1:]])
        assert result.version is not None
        assert result.version.changes == {"kept": 7, "made": 1, "removed": 1}

    @pytest.mark.parametrize(
        ("options", "kept"), [({"strict": True}, 0), ({"keep_columns": ("week",)}, 0), ({"variants": 2}, 0), ({}, 7)]
    )
    def test_options_that_read_it_make_all_rows_again(self, team: Team, options: dict[str, Any], kept: int) -> None:
        rows = [each for each in team.rows if each is not REJECTED]
        team.run(rows, config=options, overwrite=True)
        grown = [*({**each, "week": 1, "id": n} for n, each in enumerate(rows)), row("new")]
        if kept:
            assert team.run(grown, config=options).version.changes["kept"] == kept  # type: ignore[union-attr]
        else:
            with pytest.raises(ConfigMismatchError, match="None of its 7 rows is in the source"):
                team.run(grown, config=options)

    def test_rows_of_earlier_datasets_are_known_by_all_columns(self, team: Team) -> None:
        table = pq.read_table(team.out / "rows.parquet")
        pq.write_table(table.drop_columns(["columns", "read"]), team.out / "rows.parquet")
        rows = team.rows
        with pytest.raises(ConfigMismatchError, match="None of its 8 rows is in the source"):
            team.run([{**each, "week": 1} for each in rows])
        assert team.run([*rows, row("new")]).version.changes["kept"] == 8  # type: ignore[union-attr]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2)), st.data())
def test_rows_that_are_equal_in_what_was_read_give_the_same(values: dict[str, int], data: st.DataObject) -> None:
    """Whatever a recipe does with its columns: a row that differs in others alone cannot be told from the first."""
    steps = data.draw(st.lists(st.tuples(st.sampled_from("gcnulek"), st.sampled_from("abcdef")), max_size=5))

    def recipe(row: Row) -> list[Any]:
        columns, found = row.values, list[Any]()
        for what, name in steps:
            looks: dict[str, Callable[[], Any]] = {
                "g": lambda name=name: columns.get(name),
                "c": lambda name=name: name in columns,
                "n": lambda name=name: name in row.present,
                "u": lambda name=name: columns.get(name) and columns.get(chr(ord(name) + 1)),  # depends on what it read
                "l": lambda: len(columns),
                "e": lambda: columns == {"a": 1},
                "k": lambda name=name: sorted(columns.keys() & {name, "a"}),
            }
            found.append(looks[what]())
        return found

    read, reads = Row(0, values).recorded()
    made = recipe(read)
    changes = data.draw(st.dictionaries(st.sampled_from("abcdef"), st.none() | st.integers(0, 2), max_size=2))
    other = {name: value for name, value in {**values, **changes}.items() if value is not None}
    if reads.columns is None:
        chosen = other == values
    else:
        ours, theirs = (row_digests_by(Row(0, each), [reads.columns])[1] for each in (values, other))
        chosen = ours == theirs
    if chosen:
        assert recipe(Row(0, other).recorded()[0]) == made
