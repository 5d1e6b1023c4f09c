"""Selected datasets: sound, the same samples, nothing copied, and read like any other."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat_rows import image_item, turn, write_jsonl
from tests.conftest import build_dataset
from tests.format.as_earlier import as_earlier
from tests.list_recipe import build_lists
from tests.loader.helpers import epoch_of
from tests.object_store import ObjectStore
from tests.preprocess.command_line import Ended
from tests.select.conftest import languages, receipts
from vlmdata.errors import ChangedDataError, ConfigMismatchError, DatasetFormatError, ResourceError, UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.manifest import Manifest
from vlmdata.inspect.sample import describe_sample
from vlmdata.preprocess.config import TrainTurns
from vlmdata.preprocess.recode.run import recode_dataset
from vlmdata.select.choice import Choice, Keys, choose, in_share
from vlmdata.select.compare import compare
from vlmdata.select.dataset import SelectResult, select_dataset
from vlmdata.select.duplicates import Duplicates
from vlmdata.storage import open_store
from vlmdata.storage.join import join_datasets
from vlmdata.storage.open import open_dataset
from vlmdata.storage.transfer import How
from vlmdata.verify.dataset import verify_dataset
from vlmdata.verify.fault import remedies


def select(place: Any, out: Any, **criteria: Any) -> SelectResult:
    dataset, choice = open_dataset(place), Choice(**criteria)
    return select_dataset(dataset, open_store(place), open_store(out), choice, choose(dataset, choice))


def keys(*names: str) -> Keys:
    return Keys("keys.txt", names)


def names_in(place: Path) -> list[str]:
    return [str(key) for key in VlmDataset(place).index.keys.to_pylist()]


def contents(place: Path) -> dict[str, tuple[bytes, ...]]:
    """What a reader gets of each sample, by key."""
    return {each.key: tuple(array.tobytes() for array in each.arrays().values()) for each in VlmDataset(place)}


def conversation(seed: int) -> dict[str, Any]:
    """Two turns about one picture: two samples that share it."""
    turns = [
        turn("user", image_item(seed=seed), "What?"),
        turn("assistant", "A."),
        turn("user", "And?"),
        turn("assistant", "B."),
    ]
    return {"messages": turns}


def test_the_samples_are_those_chosen_and_the_audit_is_clean(made: Path, tmp_path: Path) -> None:
    out, chosen = tmp_path / "out", ("000000000", "000000006", "000000008")
    result = select(made, out, keys=keys(*chosen))
    assert result.transferred == {How.LINKED: 2}
    whole = contents(made)
    assert contents(out) == {key: whole[key] for key in chosen}
    audit = verify_dataset(out)
    assert audit.faults == []
    assert (audit.samples, audit.manifest.totals.rows, audit.manifest.totals.rejected) == (3, 3, 0)
    assert (out / "shard-000001.tar").samefile(made / "shard-000002.tar")
    assert [info.unselected for info in audit.manifest.shards] == [1, 1]
    assert not (out / ".progress").exists()


def test_the_manifest_names_the_parent_and_the_choice_with_counts(made: Path, tmp_path: Path) -> None:
    select(made, tmp_path / "out", where="length > 0", exclude_keys=keys("000000000", "000000077"))
    source, parent = Manifest.read(tmp_path / "out").source, Manifest.read(made)
    assert source["kind"] == "selected"
    assert source["dataset"]["fingerprint"] == parent.fingerprint
    assert (source["dataset"]["samples"], source["dataset"]["tokens"]) == (8, parent.totals.tokens)
    assert source["dataset"]["source"] == parent.source
    assert source["choice"]["where"] == "length > 0"
    assert source["choice"]["exclude_keys"]["count"] == 2
    assert [step["left"] for step in source["steps"]] == [8, 7]
    assert str(made) not in json.dumps(source)


def test_a_selection_equals_another_of_the_same_samples_byte_for_byte(made: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        select(made, tmp_path / name, where="source_row in (0, 4)")
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "b" / "manifest.json").read_bytes()


@pytest.mark.parametrize("workers", [1, 2])
def test_one_sample_of_a_list_may_be_chosen(tmp_path: Path, workers: int) -> None:
    place = build_lists(tmp_path, rows_per_shard=3)
    select(place, tmp_path / "out", keys=keys("000000001-002", "000000005-000", "000000005-001"))
    audit = verify_dataset(tmp_path / "out", workers=workers)
    assert audit.faults == []
    assert (audit.manifest.totals.rows, audit.manifest.totals.extra_candidates) == (2, 1)


@pytest.mark.parametrize("pixels", ["raw", "zstd"])
def test_items_stored_with_samples_that_are_not_chosen(tmp_path: Path, pixels: str) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [conversation(seed) for seed in range(3)])
    place = build_dataset(
        source, tmp_path / "whole", recipe="chat", rows_per_shard=2, pixels=pixels, train_turns=TrainTurns.EACH
    )
    index = VlmDataset(place).index
    first = {int(offset): i for i, offset in reversed(list(enumerate(index.item_offsets)))}
    shared = [i for i, offset in enumerate(index.item_offsets) if first[int(offset)] != i]
    owner = np.repeat(np.arange(len(index)), index.item_counts)
    borrowing = sorted({index.key(int(owner[i])) for i in shared})
    assert borrowing
    select(place, tmp_path / "out", keys=keys(*borrowing))
    assert verify_dataset(tmp_path / "out").faults == []
    whole = contents(place)
    assert contents(tmp_path / "out") == {key: whole[key] for key in borrowing}
    recode_dataset(tmp_path / "out", tmp_path / "copy", "zstd" if pixels == "raw" else "raw")
    assert verify_dataset(tmp_path / "copy").faults == []
    assert contents(tmp_path / "copy") == contents(tmp_path / "out")


def test_a_recoded_selection_has_the_chosen_samples_only(made: Path, tmp_path: Path) -> None:
    select(made, tmp_path / "out", keys=keys("000000003", "000000008"))
    recode_dataset(tmp_path / "out", tmp_path / "copy", "zstd")
    audit = verify_dataset(tmp_path / "copy")
    assert audit.faults == []
    assert [info.unselected for info in audit.manifest.shards] == [0, 0]
    assert compare(VlmDataset(tmp_path / "out"), VlmDataset(tmp_path / "copy")).is_equal


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_earlier_schemas(made: Path, tmp_path: Path, version: str) -> None:
    old = Path(shutil.copytree(made, tmp_path / "old"))
    as_earlier(old, version)
    select(old, tmp_path / "out", where="source_row >= 4")
    audit = verify_dataset(tmp_path / "out")
    assert audit.faults == []
    assert audit.manifest.schema_version == "2.0"
    whole = contents(made)
    assert contents(tmp_path / "out") == {key: whole[key] for key in list(whole)[3:]}


def test_selections_of_selections_and_joins_and_joins_of_them(made: Path, tmp_path: Path) -> None:
    other = receipts(tmp_path / "other", 50, 5)
    select(made, tmp_path / "once", where="source_row >= 2")
    select(tmp_path / "once", tmp_path / "twice", where="source_row in (2, 7)")
    assert names_in(tmp_path / "twice") == ["000000002", "000000007"]
    join_datasets([open_store(tmp_path / "twice"), open_store(other)], open_store(tmp_path / "both"))
    assert names_in(tmp_path / "both") == [f"{n:09d}" for n in (2, 7, 9, 11, 12, 13)]
    select(tmp_path / "both", tmp_path / "again", where="source_row in (7, 12)")
    select(tmp_path / "again", tmp_path / "last", keys=keys("000000012"))
    join_datasets([open_store(tmp_path / "last"), open_store(made)], open_store(tmp_path / "all"))
    for name in ("once", "twice", "both", "again", "last", "all"):
        assert verify_dataset(tmp_path / name).faults == [], name
    found = list(contents(tmp_path / "again").values())
    assert found == [contents(made)["000000007"], contents(other)["000000003"]]
    sample = describe_sample(VlmDataset(tmp_path / "again"), 1)
    assert sample.source == ("selected from 2 joined datasets: row 3 of dataset 2, files: train.parquet")


def test_selections_of_one_dataset_are_joined_unless_they_share_a_sample(made: Path, tmp_path: Path) -> None:
    select(made, tmp_path / "a", where="source_row in (0, 3, 6)")
    select(made, tmp_path / "b", where="source_row in (2, 4, 8)")
    select(made, tmp_path / "c", where="source_row in (4, 7)")
    stores = {name: open_store(tmp_path / name) for name in "abc"}
    join_datasets([stores["a"], stores["b"]], open_store(tmp_path / "ab"))
    assert verify_dataset(tmp_path / "ab").faults == []
    with pytest.raises(UsageError, match=r"b and .*c have 1 sample in common\. .*--allow-duplicates"):
        join_datasets([stores["b"], stores["c"]], open_store(tmp_path / "bc"))
    with pytest.raises(UsageError, match="have 3 samples in common"):
        join_datasets([stores["a"], open_store(made)], open_store(tmp_path / "more"))


def test_the_loader_and_the_plan_read_it(made: Path, tmp_path: Path) -> None:
    select(made, tmp_path / "out", where="source_row in (0, 4, 5, 8)")
    seen = [key for batch in epoch_of(tmp_path / "out", global_batch=1) for key in batch.sample_keys]
    assert sorted(seen) == names_in(tmp_path / "out")


class TestWrongInputs:
    def test_nothing_selected_tells_what_each_criterion_left(self, made: Path) -> None:
        with pytest.raises(UsageError, match=r"Of 8 samples, 2 after --where .*, 0 after --keys keys\.txt"):
            choose(VlmDataset(made), Choice(where="source_row < 3", keys=keys("000000008")))

    def test_an_unknown_column_lists_the_columns(self, made: Path, texts: Path) -> None:
        with pytest.raises(UsageError, match=r"no column lenght\. Columns: key, source_row, length, .*source\.NAME"):
            choose(VlmDataset(made), Choice(where="lenght < 3"))
        with pytest.raises(UsageError, match=r"no column source\.lnag\. .*source\.lang, source\.score, source\.tags"):
            choose(VlmDataset(texts), Choice(where="source.lnag == 'de'"))
        with pytest.raises(UsageError, match="none: its recipe attached no columns"):
            choose(VlmDataset(made), Choice(where="source.lang == 'de'"))

    def test_a_column_of_several_types_names_them(self, tmp_path: Path) -> None:
        place = languages(tmp_path, [{"answer": "A.", "n": 1}, {"answer": "B.", "n": "one"}])
        with pytest.raises(UsageError, match=r"source\.n has numbers in some samples, text in others"):
            choose(VlmDataset(place), Choice(where="source.n == 1"))

    def test_unknown_keys(self, made: Path) -> None:
        dataset = VlmDataset(made)
        with pytest.raises(UsageError, match=r"1 key of 2 of --keys is not in .*: 000000001\. Its keys run from 0+ to"):
            choose(dataset, Choice(keys=keys("000000000", "000000001")))
        with pytest.raises(UsageError, match="2 keys of 2 of --exclude-keys are not in"):
            choose(dataset, Choice(exclude_keys=keys("x", "y")))
        assert choose(dataset, Choice(exclude_keys=keys("x", "000000000"))).unknown == 1

    @pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff\xfe\x00"])
    def test_a_file_without_keys(self, tmp_path: Path, content: bytes | None) -> None:
        if content is not None:
            (tmp_path / "keys.txt").write_bytes(content)
        with pytest.raises(UsageError, match=r"keys\.txt: (cannot be read|has no key)"):
            Keys.read(tmp_path / "keys.txt")

    @pytest.mark.parametrize("share", [0.0, 1.0, -1.0, 2.0, float("nan")])
    def test_a_share_outside_of_0_to_1(self, made: Path, share: float) -> None:
        with pytest.raises(UsageError, match="must be between 0 and 1"):
            choose(VlmDataset(made), Choice(share=share))

    def test_a_place_that_is_the_dataset_or_not_empty(self, made: Path, tmp_path: Path) -> None:
        for place in (made, made / "selected"):
            with pytest.raises(UsageError, match="it is the dataset to select from, or in it"):
                select(made, place, where="length > 0")
        (tmp_path / "notes.txt").write_text("x")
        with pytest.raises(ConfigMismatchError, match=r"has notes\.txt"):
            select(made, tmp_path, where="length > 0")

    def test_a_changed_or_moved_original(self, made: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(made, tmp_path / "copy"))
        dataset, choice = VlmDataset(copy), Choice(where="source_row >= 4")
        chosen = choose(dataset, choice)
        os.truncate(copy / "shard-000002.tar", 7000)
        with pytest.raises(DatasetFormatError, match=r"shard-000002.tar has 7000 bytes, .*then select again"):
            select_dataset(dataset, open_store(copy), open_store(tmp_path / "out"), choice, chosen)
        (copy / "shard-000002.tar").unlink()
        with pytest.raises(DatasetFormatError, match=r"shard-000002.tar is missing"):
            select_dataset(dataset, open_store(copy), open_store(tmp_path / "out"), choice, chosen)
        shutil.move(copy, tmp_path / "moved")
        with pytest.raises(DatasetFormatError, match="no such directory"):
            select_dataset(dataset, open_store(copy), open_store(tmp_path / "out"), choice, chosen)
        assert not (tmp_path / "out").exists()


def test_an_original_changed_or_removed_afterwards(made: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made, tmp_path / "copy"))
    select(copy, tmp_path / "out", where="source_row == 4")
    before = contents(tmp_path / "out")
    offset = int(VlmDataset(copy).index.data_offsets["input_ids"][3])
    with open(copy / "shard-000001.tar", "r+b") as file:
        file.seek(offset)
        file.write(b"\xff")
    with pytest.raises(ChangedDataError, match=r"out/shard-000000\.tar: row 4"):
        contents(tmp_path / "out")
    faults = verify_dataset(tmp_path / "out").faults
    assert {fault.file for fault in faults} == {"shard-000000.tar"}
    (step,) = remedies(str(tmp_path / "out"), faults, selected=True)
    assert step.endswith(f"then remove {tmp_path / 'out'} and select again.")
    shutil.rmtree(copy)
    shutil.rmtree(tmp_path / "out")
    copy = Path(shutil.copytree(made, copy))
    select(copy, tmp_path / "out", where="source_row == 4")
    shutil.rmtree(copy)
    assert contents(tmp_path / "out") == before


def test_an_interrupted_selection_is_continued_and_another_is_refused(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("vlmdata.select.dataset.close", lambda *given: (_ for _ in ()).throw(OSError("power cut")))
        with pytest.raises(ResourceError, match="selecting failed: power cut"):
            select(made, out, where="length > 0")
    with pytest.raises(DatasetFormatError):
        VlmDataset(out)
    with pytest.raises(ConfigMismatchError, match="an unfinished selection of another dataset or of other samples"):
        select(made, out, where="source_row == 0")
    select(made, out, where="length > 0")
    assert verify_dataset(out).faults == []


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("unselected", 5, "1 unselected sample.*says 5|unselected"),
        ("row_offset", 4, "row_offset is 4, which no dataset of source has"),
    ],
)
def test_the_audit_finds_wrong_counts_of_a_selection(
    made: Path, tmp_path: Path, field: str, value: int, words: str
) -> None:
    select(made, tmp_path / "out", where="source_row in (0, 4)")
    fields = json.loads((tmp_path / "out" / "manifest.json").read_text())
    fields["shards"][0][field] = value
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(fields))
    faults = verify_dataset(tmp_path / "out").faults
    assert any(re.search(words, fault.message) for fault in faults)


class TestShares:
    @given(st.floats(0.01, 0.98), st.integers(0, 5), st.lists(st.integers(0, 10**9), max_size=20, unique=True))
    def test_it_depends_on_the_key_alone_and_grows(self, share: float, seed: int, rows: list[int]) -> None:
        names = [f"{row:09d}" for row in rows]
        found = in_share(names, share, seed).tolist()
        assert found == [bool(in_share([name], share, seed)[0]) for name in names]
        assert all(more or not one for one, more in zip(found, in_share(names, share + 0.01, seed), strict=True))

    def test_its_size_and_its_independence_of_other_seeds(self) -> None:
        names = [f"{row:09d}" for row in range(40_000)]
        one, other = (in_share(names, 0.25, seed) for seed in (0, 1))
        assert abs(one.mean() - 0.25) < 0.01
        assert abs((one & other).mean() - 0.0625) < 0.006


class TestDuplicates:
    def test_of_equal_samples_the_first_is_kept(self, made: Path, tmp_path: Path) -> None:
        for name in ("a", "b"):
            shutil.copytree(made, tmp_path / name)
        stores = [open_store(tmp_path / name) for name in ("a", "b")]
        join_datasets(stores, open_store(tmp_path / "twice"), allow_duplicates=True)
        for kind in Duplicates:
            out = tmp_path / kind
            select(tmp_path / "twice", out, drop_duplicates=kind)
            assert names_in(out) == names_in(made)
            assert verify_dataset(out).faults == []
        select(tmp_path / "twice", tmp_path / "second", where="source_row > 8", drop_duplicates=Duplicates.SAMPLES)
        assert len(names_in(tmp_path / "second")) == 8

    def test_texts_and_samples_without_images(self, texts: Path) -> None:
        dataset = VlmDataset(texts)
        left = {kind: choose(dataset, Choice(drop_duplicates=kind)).kept.samples for kind in Duplicates}
        near = {Duplicates.NEAR_TEXTS: 4, Duplicates.NEAR_IMAGES: 5}
        assert left == {Duplicates.SAMPLES: 4, Duplicates.TEXTS: 4, Duplicates.IMAGES: 5} | near


def test_columns_of_the_source(texts: Path) -> None:
    dataset = VlmDataset(texts)
    for where, rows in (
        ("source.lang == 'de'", [0, 2]),
        ("source.score > 1", [1, 2, 3]),
        ("'b' in source.tags and length > 0", [0, 2]),
        ("source.lang is None and num_images == 0 and num_videos == 0", [3]),
    ):
        assert np.flatnonzero(choose(dataset, Choice(where=where)).mask).tolist() == rows, where


def test_an_object_store_copies_the_shards_itself(
    made: Path, object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMDATA_CACHE", str(tmp_path / "cache"))
    place, out = object_store.put(made, "made"), f"{object_store.url}/chosen"
    assert select(place, out, where="source_row in (0, 8)").transferred == {How.IN_STORE: 2}
    select(made, tmp_path / "linked", where="source_row in (0, 8)")
    remote = open_dataset(out)
    assert remote.manifest.fingerprint == Manifest.read(tmp_path / "linked").fingerprint
    assert [sample.key for sample in remote] == ["000000000", "000000008"]
    assert compare(remote, VlmDataset(tmp_path / "linked")).is_equal


def test_command(vlmdata: Callable[..., Ended], made: Path, tmp_path: Path) -> None:
    arguments = ("select", made, "--where", "source_row in (0, 4)")
    ended = vlmdata(*arguments, "--dry-run", "--out", tmp_path / "out")
    assert ended.code == 0, ended.stderr
    assert "2 left by --where 'source_row in (0, 4)'" in ended.stdout
    line = next(each for each in ended.stdout.splitlines() if each.startswith("samples"))
    assert line.split() == ["samples", "2", "(25.0%)", "6", "(75.0%)"]
    assert not (tmp_path / "out").exists()
    fields = json.loads(vlmdata(*arguments, "--dry-run", "--json").stdout)
    whole = Manifest.read(made).totals
    assert (fields["kept"]["samples"], fields["lost"]["samples"]) == (2, 6)
    for name in ("tokens", "targets"):
        assert fields["kept"][name] + fields["lost"][name] == getattr(whole, name)
    assert fields["kept"]["images"] + fields["lost"]["images"] == whole.items
    ended = vlmdata(*arguments, "--out", tmp_path / "out")
    assert ended.code == 0, ended.stderr
    assert "2 shards: hard links" in ended.stdout
    assert vlmdata("verify", tmp_path / "out").code == 0
    assert vlmdata("inspect", tmp_path / "out").code == 0
    (tmp_path / "out" / "shard-000001.tar").unlink()
    ended = vlmdata("verify", tmp_path / "out")
    assert (ended.code, "This dataset was selected" in ended.stdout) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--where", "length > 0"), "give --out for the new dataset"),
        (("--out", "x"), "give a criterion"),
        (("--where", "length < 0", "--dry-run"), "no sample is selected"),
    ],
)
def test_command_errors(vlmdata: Callable[..., Ended], made: Path, arguments: tuple[str, ...], words: str) -> None:
    ended = vlmdata("select", made, *arguments)
    assert (ended.code, words in " ".join(ended.stderr.split())) == (2, True)
