"""Datasets in an object store: the bytes of those on disk, whatever goes wrong on the way."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chat_rows import write_jsonl
from tests.conftest import cord_row, encoded_image, tree_bytes, write_cord_parquet
from tests.forked import Forked
from tests.loader.helpers import assert_same, epoch_of
from tests.object_store import ObjectStore
from tests.preprocess.command_line import SMALL_IMAGES, Ended, environment
from tests.proxy import Proxy, Request, Trouble
from vlmdata import open_dataset
from vlmdata.errors import ConfigMismatchError, ResourceError
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.run.dataset import RunResult, preprocess_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.storage import derive, open_store, upload
from vlmdata.verify.dataset import verify_dataset
from vlmdata.verify.remote import auditable

pytestmark = pytest.mark.slow

ROWS, ROWS_PER_SHARD, SHARDS = 12, 4, 3
CONFIG = PreprocessConfig(image=ImageConfig(1024, 2_000_000), rows_per_shard=ROWS_PER_SHARD)
#: So that a shard of some 10 MB has several parts; S3 takes none that is smaller.
PART = 5 * 1024 * 1024


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(upload, "PART_BYTES", PART)
    monkeypatch.setenv("VLMDATA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [cord_row(n, width=1024, height=1024) for n in range(ROWS)]
    rows[7]["ground_truth"] = "{"
    return write_cord_parquet(tmp_path_factory.mktemp("bucket") / "train.parquet", rows)


@pytest.fixture(scope="module")
def on_disk(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("disk") / "out"
    preprocess_dataset(open_source(str(source)), out, CONFIG)
    assert verify_dataset(out).faults == []
    return out


@pytest.fixture
def place(object_store: ObjectStore) -> str:
    return f"{object_store.url}/made/here"


def make(source: Path, place: str, **options: object) -> RunResult:
    return preprocess_dataset(open_source(str(source)), place, CONFIG, **options)


def in_bucket(bucket: ObjectStore, place: str) -> dict[str, bytes]:
    """All objects below a place, asked of the server itself."""
    files, root = bucket.file_system(), place.removeprefix("s3://")
    return {path.removeprefix(f"{root}/"): files.cat_file(path) for path in files.find(root)}


def uploads(bucket: ObjectStore) -> list[str]:
    """Uploads that were begun and neither completed nor ended."""
    found = bucket.file_system().call_s3("list_multipart_uploads", Bucket=bucket.bucket)
    return [upload["Key"] for upload in found.get("Uploads", ())]


def test_has_the_bytes_of_one_on_disk_and_is_read_alike(
    source: Path, on_disk: Path, place: str, object_store: ObjectStore
) -> None:
    result = make(source, place)
    assert (result.made, result.kept) == (SHARDS, 0)
    assert in_bucket(object_store, place) == tree_bytes(on_disk)
    assert make(source, place).made == 0
    assert in_bucket(object_store, place) == tree_bytes(on_disk)
    with auditable(place) as (folder, open_shard):
        assert verify_dataset(folder, open_shard=open_shard).faults == []
    assert open_dataset(place).manifest == open_dataset(on_disk).manifest
    assert_same(epoch_of(place, capacity=8192, max_patches=None), epoch_of(on_disk, capacity=8192, max_patches=None))
    assert uploads(object_store) == []
    with pytest.raises(ConfigMismatchError, match=f"{place}: contains a finished dataset of another"):
        preprocess_dataset(open_source(str(source)), place, PreprocessConfig(rows_per_shard=ROWS_PER_SHARD))
    object_store.file_system().pipe_file(f"{object_store.bucket}/full/other.txt", b"")
    with pytest.raises(ConfigMismatchError, match=r"contains other files \(other.txt\)"):
        make(source, f"{object_store.url}/full")


def program() -> None:
    """Preprocesses ``SOURCE PLACE`` in a process of its own, with small parts of uploads."""
    upload.PART_BYTES = PART
    make(Path(sys.argv[1]), sys.argv[2])


def test_killed_in_the_middle_of_an_upload_is_continued(
    source: Path, on_disk: Path, place: str, object_store: ObjectStore, proxy: Proxy
) -> None:
    reached, killed = threading.Event(), threading.Event()

    def hold_back(number: int, request: Request) -> Trouble | None:
        part = request.method == "PUT" and "shard-000001.tar" in request.path and "partNumber=2" in request.query
        if part and not killed.is_set():
            reached.set()
            killed.wait(60)
            return Trouble(status=503)
        return None

    proxy.trouble = hold_back
    with Forked(f"{__name__}:program", ["program", str(source), place], env=environment()) as process:
        try:
            assert reached.wait(120)
        finally:
            process.kill()
            killed.set()
    assert process.returncode == -signal.SIGKILL
    left = in_bucket(object_store, place)
    assert {name for name in left if name.endswith(".tar")} == {"shard-000000.tar"}
    assert uploads(object_store) == ["made/here/shard-000001.tar"]
    result = make(source, place)
    assert (result.made, result.kept) == (SHARDS - 1, 1)
    assert in_bucket(object_store, place) == tree_bytes(on_disk)
    assert uploads(object_store) == []


def test_a_store_that_answers_badly_and_cuts_connections_is_asked_again(
    source: Path, on_disk: Path, place: str, object_store: ObjectStore, proxy: Proxy
) -> None:
    troubles = [
        Trouble(status=503, code="SlowDown"),
        Trouble(status=500),
        Trouble(cut=True),
        Trouble(delay=0.2),
        Trouble(cut=True, delay=0.1),
    ]

    completed: set[str] = set()

    def every_fifth(number: int, request: Request) -> Trouble | None:
        if request.method == "POST" and "uploadId" in request.query and request.path not in completed:
            completed.add(request.path)
            return Trouble(cut=True)  # it is done, but nobody is told
        return troubles[number // 5 % len(troubles)] if number % 5 == 2 else None

    proxy.trouble = every_fifth
    make(source, place)
    assert in_bucket(object_store, place) == tree_bytes(on_disk)
    assert len(completed) == SHARDS
    assert uploads(object_store) == []


def test_a_store_that_stays_away_ends_the_run_clearly_and_resumably(
    source: Path, on_disk: Path, place: str, object_store: ObjectStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    proxy.trouble = lambda number, request: Trouble(status=500) if "shard-000001.tar" in request.path else None
    with pytest.raises(ResourceError) as caught:
        make(source, place)
    assert str(caught.value).startswith(f"{place}/shard-000001.tar: cannot be written: ")
    assert "Finished work is kept; run the same command again" in str(caught.value)
    assert "manifest.json" not in in_bucket(object_store, place)
    proxy.trouble = lambda number, request: None
    assert make(source, place).kept == 1
    assert in_bucket(object_store, place) == tree_bytes(on_disk)
    assert uploads(object_store) == []


class TestTheCommand:
    def test_makes_both_sides_of_a_holdout_in_a_bucket(
        self, vlmdata: Callable[..., Ended], source: Path, place: str, object_store: ObjectStore
    ) -> None:
        ended = vlmdata(
            "preprocess",
            source,
            "--out",
            place,
            "--holdout",
            0.3,
            "-j",
            1,
            "--max-reject-rate",
            1,
            *SMALL_IMAGES,
            "--json",
        )
        assert ended.code == 0, ended.stderr
        made = json.loads(ended.stdout)
        assert {side: made[side]["directory"] for side in made} == {
            "train": f"{place}/train",
            "validation": f"{place}/validation",
        }
        rows = {side: open_dataset(f"{place}/{side}").manifest.totals.rows for side in made}
        assert sum(rows.values()) == ROWS
        assert min(rows.values()) > 0
        assert vlmdata("verify", f"{place}/train", "-j", 1).code == 0
        again = vlmdata("preprocess", source, "--out", place, "-j", 1, *SMALL_IMAGES)
        assert again.code == 2
        assert f"{place}: contains other files (train, validation)" in again.said

    def test_names_bucket_and_remedy_if_it_is_missing(
        self, vlmdata: Callable[..., Ended], source: Path, object_store: ObjectStore
    ) -> None:
        ended = vlmdata("preprocess", source, "--out", "s3://no-such-bucket/data", "-j", 1, *SMALL_IMAGES)
        assert ended.code == 3
        assert "s3://no-such-bucket/data/.progress/lock/1: cannot be written" in ended.said
        assert "Is there a bucket s3://no-such-bucket? Create it, or give another one." in ended.said

    def test_names_place_and_remedy_if_rights_are_missing(
        self, vlmdata: Callable[..., Ended], source: Path, place: str, proxy: Proxy
    ) -> None:
        proxy.trouble = lambda number, request: (
            Trouble(status=403, code="AccessDenied") if request.method == "PUT" else None
        )
        ended = vlmdata("preprocess", source, "--out", place, "-j", 1, *SMALL_IMAGES)
        assert ended.code == 3
        assert f"{place}/.progress/lock/1: cannot be written: PermissionError" in ended.said
        assert "Give credentials that may list, read, write and delete there" in ended.said


def test_two_runs_at_once_are_refused(source: Path, place: str) -> None:
    with open_store(place).lock(".progress/lock"), pytest.raises(ResourceError) as caught:
        make(source, place)
    assert str(caught.value).startswith(f"{place}: another `vlmdata preprocess` is using it (process ")


def test_a_run_that_was_taken_over_completes_nothing_and_leaves_the_others_uploads(
    source: Path, place: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run took over while this one was merging the index, and is uploading now."""
    writing, (bucket, key) = derive.writing_ledger, place.removeprefix("s3://").split("/", 1)

    def taken_over(*given: Any) -> Any:
        store = open_store(place)
        store.put(".progress/lock/2", b"{}")
        store.delete(f".progress/lock/{name}" for name in store.listing(".progress/lock") if name != "2")
        object_store.file_system().call_s3("create_multipart_upload", Bucket=bucket, Key=f"{key}/shard-000000.tar")
        return writing(*given)

    monkeypatch.setattr(derive, "writing_ledger", taken_over)
    with pytest.raises(ResourceError, match="took over while this one was stopped or could not reach the store"):
        make(source, place)
    assert open_store(place).size("manifest.json") is None
    assert uploads(object_store) == [f"{key}/shard-000000.tar"]
    assert list(open_store(place).listing(".progress/lock")) == ["2"]


def test_image_files_are_recorded_and_compared(place: str, tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / f"{n}.png").write_bytes(encoded_image(seed=n))
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "."}]
    rows = [{"conversations": turns, "image": f"{n}.png"} for n in range(3)]
    chats = write_jsonl(tmp_path / "chats.jsonl", rows)
    config = PreprocessConfig(recipe="chat", rows_per_shard=2, image=ImageConfig(1024, 65536))
    for _ in range(2):
        result = preprocess_dataset(open_source(str(chats)), place, config)
    assert result.made == 0
    with auditable(place) as (folder, open_shard):
        assert verify_dataset(folder, open_shard=open_shard).faults == []
    (tmp_path / "1.png").write_bytes(encoded_image(seed=9))
    found = preprocess_dataset(open_source(str(chats)), place, config).version
    assert found is not None
    assert found.changes == {"kept": 2, "made": 1, "removed": 1}


@pytest.mark.parametrize("overwrite", [False, True], ids=["repaired", "overwritten"])
def test_what_is_lost_is_made_again(
    source: Path, on_disk: Path, place: str, object_store: ObjectStore, overwrite: bool
) -> None:
    object_store.put(on_disk, "made/here")
    store = open_store(place)
    store.delete(["shard-000001.tar", "tokenizer/tokenizer.json", "rejected.jsonl"])
    store.put("index.parquet", b"x")
    result = make(source, place, overwrite=overwrite)
    assert in_bucket(object_store, place) == tree_bytes(on_disk)
    if overwrite:
        assert (result.made, result.repaired) == (SHARDS, ())
    else:
        assert result.repaired == ("shard-000001.tar", "index.parquet", "rejected.jsonl", "tokenizer")
