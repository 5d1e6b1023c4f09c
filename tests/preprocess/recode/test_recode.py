"""A recoded dataset is the one that preprocessing with that codec makes, whatever happened on the way."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

import vlmdata
from tests.conftest import tree_bytes as all_bytes
from tests.forked import ROOT, run_forked
from tests.format.as_earlier import as_earlier
from tests.preprocess.command_line import Ended, environment
from tests.preprocess.recode.rows import build, write_source
from vlmdata.errors import ConfigMismatchError, DatasetFormatError, ResourceError, UsageError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import IMAGE_FILES_NAME, INDEX_NAME, MANIFEST_NAME, ROWS_NAME, SCHEMA_VERSION
from vlmdata.inspect.dataset import describe_dataset
from vlmdata.inspect.terminal.card import print_card
from vlmdata.media.codecs import REGISTRY
from vlmdata.preprocess.recode.run import recode_dataset
from vlmdata.storage import open_store
from vlmdata.storage.join import join_datasets
from vlmdata.verify.dataset import verify_dataset

pytestmark = pytest.mark.slow

ZLIB = "shuffled-zlib"
CODECS = [*REGISTRY, ZLIB]
#: Codecs that patches alone can be stored by.
MADE = [name for name in CODECS if name != "source"]


def tree_bytes(folder: Path) -> dict[str, bytes]:
    """All files but that of the source's rows, which a copy does not have."""
    return {name: content for name, content in all_bytes(folder).items() if name != ROWS_NAME}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REGISTRY, ZLIB, "tests.media.shuffled_zlib:CODEC")
        yield


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory, _registered: None) -> dict[str, Path]:
    """The same rows preprocessed under every codec."""
    source = write_source(tmp_path_factory.mktemp("recode"))
    return {name: build(source, f"as-{name}", name) for name in CODECS}


@pytest.fixture(name="command")
def _command(request: pytest.FixtureRequest) -> Callable[..., Ended]:
    """The ``vlmdata`` fixture, whose name is that of the package here."""
    call: Callable[..., Ended] = request.getfixturevalue("vlmdata")
    return call


@pytest.fixture
def raw_copy(datasets: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(datasets["raw"], tmp_path / "copy"))


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where that is possible: waiting for a disk would take a minute."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else tmp_path))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(("was", "pixels"), [(was, new) for was in CODECS for new in MADE if was != new])
def test_it_is_what_preprocessing_with_that_codec_makes(
    datasets: dict[str, Path], tmp_path: Path, was: str, pixels: str
) -> None:
    result = recode_dataset(datasets[was], tmp_path / "out", pixels)
    assert (result.was, result.made, result.kept) == (was, 4, 0)
    assert tree_bytes(tmp_path / "out") == tree_bytes(datasets[pixels])
    times = {(folder / IMAGE_FILES_NAME).stat().st_mtime_ns for folder in (datasets[was], tmp_path / "out")}
    assert len(times) == 1  # since when changes of image files count
    again = recode_dataset(datasets[was], tmp_path / "out", pixels)
    assert (again.made, again.kept) == (0, 4)


def test_the_rows_have_every_shape_and_the_result_is_sound(datasets: dict[str, Path], tmp_path: Path) -> None:
    recode_dataset(datasets["raw"], tmp_path / "out", ZLIB)
    assert verify_dataset(tmp_path / "out").faults == []
    manifest = Manifest.read(tmp_path / "out")
    assert manifest.features == ("images", "loss-weights", f"patches-{ZLIB}")
    assert manifest.rejects
    assert manifest.totals.file_bytes == Manifest.read(datasets["raw"]).totals.file_bytes > 0
    assert [shard.samples for shard in manifest.shards].count(0) == 1
    assert set(vlmdata.open_dataset(tmp_path / "out").index.item_counts.tolist()) == {0, 1, 2}
    assert not (tmp_path / "out" / ".progress").exists()


def test_a_dataset_of_format_1_0_is_recoded(datasets: dict[str, Path], raw_copy: Path, tmp_path: Path) -> None:
    """Its index has no columns of items, its options no codec."""
    as_earlier(raw_copy, "1.0")
    manifest = json.loads((raw_copy / MANIFEST_NAME).read_bytes())
    del manifest["config"]["options"]["pixels"]
    (raw_copy / MANIFEST_NAME).write_text(json.dumps(manifest))
    recode_dataset(raw_copy, tmp_path / "out", ZLIB)
    made, expected = tree_bytes(tmp_path / "out"), tree_bytes(datasets[ZLIB])
    assert {name for name in expected if made.get(name) != expected[name]} <= {MANIFEST_NAME, ROWS_NAME}
    assert verify_dataset(tmp_path / "out").faults == []


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("pixels", [None, "raw"])
def test_an_earlier_dataset_is_brought_up_with_its_shards(
    datasets: dict[str, Path], raw_copy: Path, tmp_path: Path, version: str, pixels: str | None
) -> None:
    as_earlier(raw_copy, version)
    result = recode_dataset(raw_copy, tmp_path / "out", pixels)
    assert (result.old.schema_version, result.manifest.schema_version, result.was) == (version, SCHEMA_VERSION, "raw")
    expected = {name: found for name, found in tree_bytes(datasets["raw"]).items() if name != ROWS_NAME}
    assert tree_bytes(tmp_path / "out") == expected  # earlier datasets have no record of their rows
    with pytest.raises(UsageError, match=r"out: already has the format 2\.0; give the codec of the copy as --pixels"):
        recode_dataset(tmp_path / "out", tmp_path / "again", None)


def test_a_damaged_shard_is_not_brought_up(raw_copy: Path, tmp_path: Path) -> None:
    as_earlier(raw_copy, "1.1")
    shard = raw_copy / "shard-000000.tar"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(DatasetFormatError, match=r"shard-000000\.tar: its sha256 is \w+, the manifest says"):
        recode_dataset(raw_copy, tmp_path / "out", None)
    assert not (tmp_path / "out" / shard.name).exists()


def test_files_of_others_are_not_copied(datasets: dict[str, Path], raw_copy: Path, tmp_path: Path) -> None:
    for name in ("notes.txt", "tokenizer/.DS_Store"):
        (raw_copy / name).touch()
    recode_dataset(raw_copy, tmp_path / "out", ZLIB)
    assert tree_bytes(tmp_path / "out") == tree_bytes(datasets[ZLIB])


def test_a_dataset_at_a_url_is_recoded(datasets: dict[str, Path], tmp_path: Path) -> None:
    url = f"memory://{tmp_path}"
    put(datasets["raw"], url)
    recode_dataset(url, tmp_path / "out", ZLIB)
    assert tree_bytes(tmp_path / "out") == tree_bytes(datasets[ZLIB])
    # The time of the download says nothing about the image files: all count as changed since.
    assert (tmp_path / "out" / IMAGE_FILES_NAME).stat().st_mtime_ns == 0


class TestJoined:
    """A join of two codecs has one codec afterwards, in all its records."""

    @pytest.fixture
    def joined(self, datasets: dict[str, Path], tmp_path: Path) -> Path:
        places = [open_store(datasets[name]) for name in ("raw", ZLIB)]
        join_datasets(places, open_store(tmp_path / "joined"), allow_duplicates=True)
        return tmp_path / "joined"

    @pytest.mark.parametrize("pixels", ["raw", ZLIB])
    def test_it_equals_the_join_of_recoded_datasets(
        self, datasets: dict[str, Path], joined: Path, tmp_path: Path, pixels: str
    ) -> None:
        assert recode_dataset(joined, tmp_path / "out", pixels).was == f"raw and {ZLIB}"
        both = [open_store(datasets[pixels])] * 2
        join_datasets(both, open_store(tmp_path / "expected"), allow_duplicates=True)
        assert verify_dataset(tmp_path / "out").faults == []
        made, expected = (tree_bytes(tmp_path / name) for name in ("out", "expected"))
        # Row groups of the index are shards here, datasets there. The manifest names the datasets that were joined.
        assert {name for name in expected if made.get(name) != expected[name]} == {INDEX_NAME, MANIFEST_NAME}
        indexes = [pq.read_table(tmp_path / name / INDEX_NAME) for name in ("out", "expected")]
        assert indexes[0].equals(indexes[1])
        manifests = [json.loads(each[MANIFEST_NAME]) for each in (made, expected)]
        for manifest in manifests:
            del manifest["index_sha256"]
            for each in manifest["source"]["datasets"]:
                del each["fingerprint"]
        assert manifests[0] == manifests[1]
        with pytest.raises(UsageError, match=f"out: already stores its images with {pixels}"):
            recode_dataset(tmp_path / "out", tmp_path / "again", pixels)

    def test_a_third_codec_and_a_join_of_joins(self, datasets: dict[str, Path], joined: Path, tmp_path: Path) -> None:
        places = [open_store(place) for place in (joined, datasets[ZLIB])]
        join_datasets(places, open_store(tmp_path / "more"), allow_duplicates=True)
        assert recode_dataset(tmp_path / "more", tmp_path / "out", "zstd").was == f"raw and {ZLIB}"
        assert verify_dataset(tmp_path / "out").faults == []
        config = json.dumps(Manifest.read(tmp_path / "out").config)
        assert ZLIB not in config
        assert config.count('"pixels": "zstd"') == 5

    def test_inspect_names_both_codecs(self, joined: Path) -> None:
        console = Console(record=True, width=200, file=io.StringIO())
        print_card(console, describe_dataset(vlmdata.open_dataset(joined)))
        assert f"raw and {ZLIB}: " in console.export_text()

    def test_source_has_a_remedy_that_helps(self, joined: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="commands of the joined datasets with --pixels source, and join"):
            recode_dataset(joined, tmp_path / "out", "source")


def test_dying_at_any_step_on_disk_leaves_no_trace_in_the_result(in_memory: Path) -> None:
    driver = ROOT / "tests" / "preprocess" / "recode" / "crash_driver.py"
    done = run_forked(str(driver), in_memory, env=environment())
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 25


class TestRefused:
    def test_codecs_that_cannot_be(self, datasets: dict[str, Path], tmp_path: Path) -> None:
        for pixels, message in {
            "webp": "--pixels webp: unknown codec. Known: raw, ",
            "raw": "already stores its images with raw",
            "source": "--pixels source: ",
        }.items():
            with pytest.raises(UsageError, match=message):
                recode_dataset(datasets["raw"], tmp_path / "out", pixels)
        with pytest.raises(UsageError, match=r"already stores its images with source; .*--pixels \(raw, "):
            recode_dataset(datasets["source"], tmp_path / "out", "source")
        assert not (tmp_path / "out").exists()

    def test_the_dataset_itself_as_the_place(self, raw_copy: Path) -> None:
        before = tree_bytes(raw_copy)
        with pytest.raises(UsageError, match="is the dataset to read"):
            recode_dataset(raw_copy, f"{raw_copy}/../copy", ZLIB, overwrite=True)
        assert tree_bytes(raw_copy) == before

    def test_other_content_in_the_place(self, datasets: dict[str, Path], tmp_path: Path, raw_copy: Path) -> None:
        with pytest.raises(ConfigMismatchError, match=r"contains another finished dataset:\n  config.options.pixels: "):
            recode_dataset(datasets["raw"], raw_copy, ZLIB)
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "notes.txt").write_text("mine")
        with pytest.raises(ConfigMismatchError, match=r"contains other files \(notes.txt\)"):
            recode_dataset(datasets["raw"], tmp_path / "notes", ZLIB)
        recode_dataset(datasets["raw"], raw_copy, ZLIB, overwrite=True)
        assert tree_bytes(raw_copy) == tree_bytes(datasets[ZLIB])

    def test_a_shard_that_a_finished_copy_lost(self, datasets: dict[str, Path], tmp_path: Path) -> None:
        out = tmp_path / "out"
        recode_dataset(datasets["raw"], out, ZLIB)
        (out / "shard-000002.tar").unlink()
        with pytest.raises(DatasetFormatError, match=r"shard-000002.tar: missing or truncated in .* --overwrite"):
            recode_dataset(datasets["raw"], out, ZLIB)


class TestDamage:
    def test_a_damaged_shard_names_the_sample_and_what_to_do(
        self, datasets: dict[str, Path], raw_copy: Path, tmp_path: Path
    ) -> None:
        dataset = vlmdata.open_dataset(raw_copy)
        last = dataset.index.row(len(dataset) - 1)
        path = dataset.shard_path(last.shard)
        flipped = bytearray(path.read_bytes())
        flipped[last.items[0].offset + 5] ^= 1
        whole, out = path.read_bytes(), tmp_path / "out"
        path.write_bytes(flipped)
        with pytest.raises(
            DatasetFormatError, match=rf"{path.name}: row {last.source_row} key {last.key}: .* Run `vlmdata verify`"
        ):
            recode_dataset(raw_copy, out, ZLIB)
        assert not list(out.glob("**/*.tmp"))
        assert not (out / MANIFEST_NAME).exists()
        path.write_bytes(whole)
        assert recode_dataset(raw_copy, out, ZLIB).kept == 3
        assert tree_bytes(out) == tree_bytes(datasets[ZLIB])

    def test_a_shard_cut_short_and_a_lost_ledger(self, raw_copy: Path, tmp_path: Path) -> None:
        shard = raw_copy / "shard-000000.tar"
        shard.write_bytes(shard.read_bytes()[:-512])
        with pytest.raises(DatasetFormatError, match=r"shard-000000.tar: .* bytes, but the manifest says"):
            recode_dataset(raw_copy, tmp_path / "out", ZLIB)
        (raw_copy / "rejected.jsonl").unlink()
        with pytest.raises(DatasetFormatError, match=r"copy: rejected.jsonl is missing. Run `vlmdata verify`"):
            recode_dataset(raw_copy, tmp_path / "out", ZLIB)

    def test_a_full_disk_ends_it_clearly_and_it_continues(
        self, datasets: dict[str, Path], small_disk, tmp_path: Path
    ) -> None:
        out = small_disk(120) / "out"
        with pytest.raises(
            ResourceError, match=r"out: shard-00000.* failed: No space left on device. Finished shards are"
        ):
            recode_dataset(datasets[ZLIB], out, "raw")
        assert not list(out.glob("**/*.tmp"))
        small_disk(20_000)
        assert recode_dataset(datasets[ZLIB], out, "raw").made > 0
        assert tree_bytes(out) == tree_bytes(datasets["raw"])


def test_the_command_recodes_in_workers_and_summarises(
    command: Callable[..., Ended], datasets: dict[str, Path], tmp_path: Path
) -> None:
    pixels = next((name for name in REGISTRY if name not in ("raw", "source", ZLIB)), None)
    if pixels is None:
        pytest.skip("only one codec")
    done = command("recode", datasets["raw"], "--pixels", pixels, "--out", tmp_path / "out", "-j", 2, "--json")
    assert done.code == 0, done.stderr
    summary = json.loads(done.stdout)
    totals = Manifest.read(tmp_path / "out").totals
    stored = totals.bytes
    assert summary["bytes_per_image"] == pytest.approx(totals.item_bytes / totals.items)
    assert (summary["was"], summary["pixels"], summary["bytes"], summary["shards_made"]) == ("raw", pixels, stored, 4)
    assert tree_bytes(tmp_path / "out") == tree_bytes(datasets[pixels])
    refused = command("recode", datasets["raw"], "--pixels", "raw", "--out", tmp_path / "other")
    assert refused.code == 2
    assert "already stores its images with raw" in refused.stderr
    assert "Traceback" not in refused.stderr


def put(folder: Path, url: str) -> None:
    """Copies a dataset to a URL."""
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    for name, content in tree_bytes(folder).items():
        system.pipe_file(f"{path}/{name}", content)


def sha256(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()
