"""Joined datasets: sound, the same samples, and nothing copied where a link does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import cord_row, tree_bytes, write_cord_parquet
from tests.object_store import ObjectStore
from tests.preprocess.command_line import Ended
from vlmdata.errors import ConfigMismatchError, DatasetFormatError, ResourceError, UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect.sample import describe_sample
from vlmdata.inspect.trace import describe_row
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.recode.run import recode_dataset
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.holdout import hold_out
from vlmdata.preprocess.sources.open import open_source
from vlmdata.storage import open_store
from vlmdata.storage.folder import Folder
from vlmdata.storage.join import join_datasets
from vlmdata.storage.transfer import How
from vlmdata.verify.dataset import verify_dataset
from vlmdata.verify.fault import remedies

CONFIG = PreprocessConfig(image=ImageConfig(1024, 65_536), rows_per_shard=3)


def made(folder: Path, first: int, rows: int, **options: Any) -> Path:
    """A dataset of receipts, the second of which is rejected."""
    drawn = [cord_row(first + n, width=64, height=64) for n in range(rows)]
    drawn[1]["ground_truth"] = "{"
    source = write_cord_parquet(folder / "source" / "train.parquet", drawn)
    config = PreprocessConfig(**{"image": CONFIG.image, "rows_per_shard": 3, **options})
    preprocess_dataset(open_source(str(source)), folder / "out", config)
    return folder / "out"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("join")
    return made(folder / "a", 0, 7), made(folder / "b", 50, 5, max_length=4096)


def join(*places: Path, out: Path) -> Path:
    join_datasets([open_store(place) for place in places], open_store(out))
    return out


def contents(place: Path) -> list[tuple[Any, ...]]:
    """What a reader gets of each sample."""
    dataset = VlmDataset(place)
    samples = [dataset[i] for i in range(len(dataset))]
    return [(each.input_ids.tobytes(), each.loss_mask.tobytes(), each.patches.tobytes()) for each in samples]


def test_the_samples_are_those_of_the_datasets_and_the_audit_is_clean(two: tuple[Path, Path], tmp_path: Path) -> None:
    out = join(*two, out=tmp_path / "out")
    assert contents(out) == contents(two[0]) + contents(two[1])
    audit = verify_dataset(out)
    assert audit.faults == []
    assert (audit.manifest.totals.rows, audit.manifest.totals.rejected) == (12, 2)
    index = VlmDataset(out).index
    assert index.source_row.tolist() == [0, 2, 3, 4, 5, 6, 7, 9, 10, 11]
    assert index.key(6) == "000000007"
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*(f"shard-{n:06}.tar" for n in range(5)), "index.parquet", "manifest.json", "rejected.jsonl", "tokenizer"]
    )
    assert (out / "shard-000003.tar").samefile(two[1] / "shard-000000.tar")
    assert describe_row(VlmDataset(out), 8).candidates[0].reason == "malformed_ground_truth"


def test_a_row_of_a_joined_dataset_is_traced_to_the_row_of_its_source(two: tuple[Path, Path], tmp_path: Path) -> None:
    once = join(*two, out=tmp_path / "once")
    again = join(made(tmp_path / "c", 90, 4), once, out=tmp_path / "again")
    for place, i, words in (
        (once, 0, "2 joined datasets: row 0 of dataset 1, files: train.parquet"),
        (once, 6, "2 joined datasets: row 0 of dataset 2, files: train.parquet"),
        (once, 8, "2 joined datasets: row 3 of dataset 2, files: train.parquet"),
        (
            again,
            11,
            "2 joined datasets: row 10 of dataset 2, 2 joined datasets: row 3 of dataset 2, files: train.parquet",
        ),
    ):
        sample = describe_sample(VlmDataset(place), i)
        assert (sample.source, sample.source_row) == (words, VlmDataset(place).index.source_row[i])


def test_a_changed_shard_is_found_as_in_any_dataset(two: tuple[Path, Path], tmp_path: Path) -> None:
    out = join(*two, out=tmp_path / "out")
    shard = out / "shard-000003.tar"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.unlink()  # not the file that the other dataset has
    shard.write_bytes(data)
    faults = verify_dataset(out).faults
    assert {fault.file for fault in faults} == {"shard-000003.tar"}
    (step,) = remedies(str(out), faults, joined=True)
    assert step.endswith(f"then remove {out} and join them again.")
    assert verify_dataset(two[1]).faults == []


def test_joined_datasets_and_sides_of_a_holdout_can_be_joined(two: tuple[Path, Path], tmp_path: Path) -> None:
    drawn = [cord_row(n, width=64, height=64) for n in range(30)]
    source = open_source(str(write_cord_parquet(tmp_path / "held" / "train.parquet", drawn)))
    sides = hold_out(source, 0.3, workers=1, preload=[], on_rows=lambda _: None)
    for side, rows in sides.items():
        preprocess_dataset(rows, tmp_path / side, CONFIG)
    once = join(*two, out=tmp_path / "once")
    again = join(tmp_path / "validation", once, tmp_path / "train", out=tmp_path / "again")
    assert verify_dataset(again).faults == []
    expected = [contents(place) for place in (tmp_path / "validation", *two, tmp_path / "train")]
    assert contents(again) == [sample for each in expected for sample in each]


def test_an_interrupted_join_is_continued_and_another_is_refused(
    two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("vlmdata.storage.join.close", lambda *given: (_ for _ in ()).throw(OSError("power cut")))
        with pytest.raises(ResourceError, match="power cut"):
            join(*two, out=out)
    assert not (out / "manifest.json").exists()
    with pytest.raises(ConfigMismatchError, match="an unfinished join of other datasets"):
        join(two[1], two[0], out=out)
    (out / "tokenizer").mkdir(exist_ok=True)
    left = out / "tokenizer" / ".tokenizer.json.123.tmp"  # of a join that was killed there
    left.write_text("half")
    join(*two, out=out)
    assert not left.exists()
    assert verify_dataset(out).faults == []
    with pytest.raises(ConfigMismatchError, match=r"has index\.parquet, manifest\.json"):
        join(*two, out=out)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"family": "qwen2_5_vl"}, r"family: qwen3_5 in .*a/out, qwen2_5_vl in .*other/out"),
        ({"pad_multiple": 32}, r"--pad-multiple: 16 in .*a/out, 32 in"),
    ],
)
def test_datasets_that_do_not_go_together_are_refused_with_both_values(
    two: tuple[Path, Path], tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    other = made(tmp_path / "other", 0, 2, **options)
    with pytest.raises(ConfigMismatchError, match=words):
        join(two[0], other, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_tokenizer_or_version_is_refused(two: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(two[1], other)
    manifest = json.loads((other / "manifest.json").read_text())
    for path, value, words in ((("tokenizer", "turns", "end"), 7, "tokenizer.turns.end"),):
        changed = json.loads(json.dumps(manifest))
        place = changed
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        (other / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigMismatchError, match=f"{words}.*{value} in .*other"):
            join(two[0], other, out=tmp_path / "out")
    (other / "manifest.json").write_text(json.dumps(manifest | {"schema_version": "1.0"}))
    with pytest.raises(ConfigMismatchError, match=r"other: format version 1\.0 cannot be joined. Run `vlmdata recode"):
        join(two[0], other, out=tmp_path / "out")


def test_a_join_needs_two_and_a_place_of_its_own(two: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="at least two"):
        join(two[0], out=two[1])
    with pytest.raises(UsageError, match="it is one of the datasets"):
        join(*two, out=two[1])
    with pytest.raises(UsageError, match=r"or in one \(.*b/out\)"):
        join(*two, out=two[1] / "joined")
    assert not (two[1] / "joined").exists()


class TestDuplicates:
    """Datasets that repeat each other's samples are refused, with both names, unless that is asked for."""

    def test_the_same_dataset_by_any_path(self, two: tuple[Path, Path], tmp_path: Path) -> None:
        link = tmp_path / "link"
        link.symlink_to(two[0])
        for other in (link, two[0] / ".." / "out"):
            with pytest.raises(UsageError, match=rf"{two[0]} and {other} are one\. .*--allow-duplicates"):
                join(two[0], two[1], other, out=tmp_path / "out")
        with pytest.raises(UsageError, match=rf"{two[0]} is given twice"):
            join(two[0], two[0], out=tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_copy_and_a_join_that_has_it(self, two: tuple[Path, Path], tmp_path: Path) -> None:
        copy, both = Path(shutil.copytree(two[1], tmp_path / "copy")), join(*two, out=tmp_path / "both")
        for one, other, shard in ((two[1], copy, 0), (two[1], both, 3)):
            words = (
                rf"{one} and {other} have 2 equal shards with 4 samples, such as shard-000000.tar of the first and "
                rf"shard-00000{shard}.tar of the second"
            )
            with pytest.raises(UsageError, match=words):
                join(one, other, out=tmp_path / "out")

    def test_the_same_rows_in_another_codec(self, two: tuple[Path, Path], tmp_path: Path) -> None:
        recode_dataset(two[0], tmp_path / "zstd", "zstd")
        with pytest.raises(UsageError, match="were made of the same rows with the same options"):
            join(two[0], tmp_path / "zstd", out=tmp_path / "out")

    def test_they_are_joined_on_demand(
        self,
        vlmdata: Callable[..., Ended],
        two: tuple[Path, Path],
        tmp_path: Path,
    ) -> None:
        ended = vlmdata("join", two[0], two[0], "--out", tmp_path / "out")
        assert (ended.code, "is given twice" in ended.stderr) == (2, True)
        ended = vlmdata("join", two[0], two[0], "--out", tmp_path / "out", "--allow-duplicates")
        assert ended.code == 0, ended.stderr
        assert contents(tmp_path / "out") == 2 * contents(two[0])
        assert verify_dataset(tmp_path / "out").faults == []


class TestDamagedInputs:
    @pytest.fixture
    def copy(self, two: tuple[Path, Path], tmp_path: Path) -> Path:
        return Path(shutil.copytree(two[1], tmp_path / "copy"))

    @pytest.mark.parametrize("name", ["index.parquet", "rejected.jsonl", "tokenizer/tokenizer.json"])
    def test_a_changed_file_is_found_before_anything_is_written(
        self, two: tuple[Path, Path], copy: Path, tmp_path: Path, name: str
    ) -> None:
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(DatasetFormatError, match=rf"^{copy}: {name}.* sha256 .*`vlmdata verify {copy}`"):
            join(two[0], copy, out=tmp_path / "out")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        "name", ["index.parquet", "rejected.jsonl", "shard-000001.tar", "tokenizer/tokenizer.json"]
    )
    def test_a_missing_file_is_named(self, two: tuple[Path, Path], copy: Path, tmp_path: Path, name: str) -> None:
        (copy / name).unlink()
        with pytest.raises(DatasetFormatError, match=rf"^{copy}: {name}.* (missing|not found)\. Run `vlmdata verify"):
            join(two[0], copy, out=tmp_path / "out")

    def test_a_short_shard_is_named(self, two: tuple[Path, Path], copy: Path, tmp_path: Path) -> None:
        size = (copy / "shard-000000.tar").stat().st_size
        os.truncate(copy / "shard-000000.tar", 7000)
        with pytest.raises(DatasetFormatError, match=rf"shard-000000.tar has 7000 bytes, but the manifest says {size}"):
            join(two[0], copy, out=tmp_path / "out")

    def test_an_unreadable_file_is_no_lack_of_space(
        self, two: tuple[Path, Path], copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def denied(self: Folder, name: str) -> str:
            raise PermissionError(13, "Permission denied", self.path(name))

        monkeypatch.setattr(Folder, "sha256", denied)
        with pytest.raises(ResourceError, match=r"a/out: cannot be read: .*index\.parquet.* Fix its permissions"):
            join(two[0], copy, out=tmp_path / "out")


def test_an_object_store_copies_the_shards_itself(
    two: tuple[Path, Path], object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMDATA_CACHE", str(tmp_path / "cache"))
    places = [open_store(object_store.put(place, name)) for place, name in zip(two, "ab", strict=True)]
    out = f"{object_store.url}/joined"
    assert join_datasets(places, open_store(out)).transferred == {How.IN_STORE: 5}
    assert join_datasets(places, open_store(tmp_path / "down")).transferred == {How.COPIED: 5}
    files, root = object_store.file_system(), out.removeprefix("s3://")
    found = {path.removeprefix(f"{root}/"): files.cat_file(path) for path in files.find(root)}
    assert found == tree_bytes(tmp_path / "down") == tree_bytes(join(*two, out=tmp_path / "linked"))
    assert verify_dataset(tmp_path / "down").faults == []


def test_command(vlmdata: Callable[..., Ended], two: tuple[Path, Path], tmp_path: Path) -> None:
    ended = vlmdata("join", *two, "--out", tmp_path / "out", "--json")
    assert ended.code == 0, ended.stderr
    assert json.loads(ended.stdout)["shards"] == {How.LINKED.name.lower(): 5}
    ended = vlmdata("join", *two, "--out", tmp_path / "other")
    assert "10 samples of 12 rows" in ended.stdout
    assert "5 shards: hard links" in ended.stdout
    (tmp_path / "other" / "shard-000003.tar").unlink()
    ended = vlmdata("verify", tmp_path / "other")
    assert ended.code == 1
    assert "next: This dataset was joined" in ended.stdout
    assert "vlmdata preprocess" not in ended.stdout
