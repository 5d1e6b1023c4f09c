"""Sources in a bucket: the rows of the same files on disk, read in few requests, whatever the network does."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import cord_row, tree_bytes, write_cord_parquet
from tests.object_store import ObjectStore, forget_file_systems
from tests.preprocess.command_line import SMALL_IMAGES
from tests.proxy import FAULTS, Request, Trouble
from vlmdata import attempts
from vlmdata.errors import SourceError
from vlmdata.format.schema import MANIFEST_NAME
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources import counting, data_files, webdataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.preprocess.sources.rows import Source

pytestmark = pytest.mark.slow

ROWS = [{"n": n, "text": "é" * n, "list": [{"a": n}]} for n in range(60)]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_tar(path: Path, rows: list[dict[str, Any]], *, index: bool) -> None:
    """A tar of samples; its index as Megatron-Energon writes it: where samples and the end begin."""
    offsets = []
    with tarfile.open(path, "w") as tar:
        for row in rows:
            offsets.append(tar.offset)
            for ending, data in (("json", json.dumps(row).encode()), ("jpg", b"\xff\xd8" + b"x" * 700 * row["n"])):
                member = tarfile.TarInfo(f"{row['n']:06d}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        offsets.append(tar.offset)
    if index:
        path.with_name(f"{path.name}.idx").write_bytes(np.array(offsets, "<u8").tobytes())


def write(folder: Path, kind: str) -> Path:
    """The rows as two files of a kind."""
    folder.mkdir()
    for name, rows in (("train-a", ROWS[:25]), ("train-b", ROWS[25:])):
        path = folder / f"{name}.{kind.split()[0]}"
        match kind:
            case "parquet":
                pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)
            case "arrow":
                table = pa.Table.from_pylist(rows)
                with pa.ipc.new_stream(path, table.schema) as writer:
                    writer.write_table(table, max_chunksize=10)
            case "jsonl":
                path.write_bytes(lines(rows)[:-1])  # without an end of the last line
            case "json":
                path.write_text(json.dumps(rows))
            case "jsonl.gz":
                path.write_bytes(gzip.compress(lines(rows)))
            case "csv":
                path.write_text("n,text\n" + "".join(f'{row["n"]},"{row["text"]}\n2"\n' for row in rows))
            case _:
                write_tar(path, rows, index="index" in kind)
    return folder


def values(source: Source) -> list[dict[str, Any]]:
    return [dict(source.row(number).values) for number in source.numbers]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "PAUSES", (0.01, 0.02))
    monkeypatch.setattr(counting, "_RANGE_BYTES", 1 << 10)
    monkeypatch.setattr(counting, "_BLOCK_BYTES", 1 << 8)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "json", "jsonl", "jsonl.gz", "csv", "tar", "tar with index"])
def test_rows_of_a_bucket_are_those_on_disk(tmp_path, object_store, kind):
    folder = write(tmp_path / "data", kind)
    here, there = open_source(str(folder)), open_source(object_store.put(folder, "some/data"))
    assert values(there) == values(here)
    assert [there.row(n).values for n in (59, 3, 30)] == [here.row(n).values for n in (59, 3, 30)]
    again = pickle.loads(pickle.dumps(there))
    assert again.row(40).values == here.row(40).values
    assert [{"name": file["name"], "bytes": file["bytes"]} for file in there.identity["files"]] == [
        {"name": file["name"], "bytes": file["bytes"]} for file in here.identity["files"]
    ]
    assert {"etag"} == {name for file in there.identity["files"] for name in file} - {"name", "bytes"}
    pattern = f"{object_store.url}/some/data/*.{kind.split()[0]}"
    assert values(open_source(pattern)) == values(here)
    hashed = [open_source(str(place), hash_source=True).identity for place in (folder, f"{object_store.url}/some/data")]
    assert hashed[0] == hashed[1]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "tar"])
def test_rows_behind_a_web_address_are_those_on_disk(tmp_path, object_store, kind):
    folder = write(tmp_path / "data", kind)
    object_store.put(folder)
    object_store.file_system().chmod(f"{object_store.bucket}/train-a.{kind}", "public-read")
    address = f"{object_store.endpoint}/{object_store.bucket}/train-a.{kind}?token=secret"
    there = open_source(address)
    assert values(there) == values(open_source(f"{folder}/train-a.{kind}"))
    assert there.identity["files"][0]["name"] == f"train-a.{kind}", "without the query, which may hold secrets"


def test_splits_and_what_is_passed_over(tmp_path, object_store):
    for name, rows in (("train/x.jsonl", ROWS[:3]), ("val/x.jsonl", ROWS[3:4]), (".hidden/y.csv", ROWS[:1])):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lines(rows))
    url = object_store.put(tmp_path / "data", "some")
    assert values(open_source(url)) == ROWS[:3]
    source = open_source(f"{url}/", split="validation")
    assert (values(source), source.image_root) == (ROWS[3:4], url)
    assert source.identity["files"][0]["name"] == "val/x.jsonl"
    with pytest.raises(SourceError, match="it has no split test; choose with --split one of: train, validation"):
        open_source(url, split="test")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("s3://{bucket}/nothing.jsonl", "there is no such object"),
        ("s3://{bucket}/nothing", "there is no such object"),
        ("s3://{bucket}/*.jsonl", "no file matches"),
        ("nosuch://place/rows.jsonl", "nosuch:// cannot be opened here"),
    ],
)
def test_refusals(object_store, place, message):
    with pytest.raises(SourceError, match=message):
        open_source(place.format(bucket=object_store.bucket))


def test_a_missing_package_is_named():
    # gcsfs is no dependency of ours, nor of the tests.
    with pytest.raises(SourceError, match=r"pip install 'vlmdata\[gs\]'"):
        open_source("gs://bucket/rows.jsonl")


class TestRequests:
    def test_counting_reads_footers_and_a_job_its_row_groups(self, tmp_path, object_store, proxy):
        folder = tmp_path / "data"
        folder.mkdir()
        for n in range(12):
            noise = [np.random.default_rng(row).bytes(3000) for row in range(100)]
            pq.write_table(pa.table({"x": noise}), folder / f"{n:02d}.parquet", row_group_size=20)
        size = (folder / "00.parquet").stat().st_size
        url = object_store.put(folder)
        source = open_source(url)
        assert source.num_rows == 1200
        assert len(proxy.requests) <= 2 + 12 + 1, "a listing, and a read of each footer"
        assert sum(request.sent for request in proxy.requests) < 12 * (data_files_tail() + 4000)
        proxy.requests.clear()
        worker: Source = pickle.loads(pickle.dumps(source))
        forget_file_systems()
        for number in range(330, 350):  # in the row groups 1 and 2 of the fourth file
            worker.row(number)
        assert {request.path.rpartition("/")[2] for request in proxy.requests} == {"03.parquet"}
        assert sum(each.sent for each in proxy.gets("03.parquet")) < 0.75 * size + data_files_tail()
        proxy.requests.clear()
        assert open_source(url).identity == source.identity
        assert not proxy.gets(".parquet"), "what was counted is kept"

    def test_a_line_is_reached_without_reading_the_object(self, tmp_path, object_store, proxy, monkeypatch):
        rows = [{"n": n, "text": "x" * 1000} for n in range(3000)]
        (tmp_path / "rows.jsonl").write_bytes(lines(rows))
        monkeypatch.setattr(data_files, "STREAM_BYTES", 1 << 16)
        monkeypatch.setattr(counting, "_RANGE_BYTES", 1 << 20)
        source = open_source(object_store.put(tmp_path / "rows.jsonl"))
        assert source.num_rows == 3000
        proxy.requests.clear()
        assert source.rows.values(2500)["n"] == 2500
        assert sum(each.sent for each in proxy.gets("rows.jsonl")) <= 8 << 20


def data_files_tail() -> int:
    from vlmdata.preprocess.sources import parquet

    return parquet._TAIL


class TestFaults:
    @pytest.mark.parametrize("kind", ["parquet", "jsonl"])
    def test_that_pass_cost_time_alone(self, tmp_path, object_store, proxy, kind):
        folder = write(tmp_path / "data", kind)
        here, url = open_source(str(folder)), object_store.put(folder)
        met = []

        def trouble(number: int, request: Request) -> Trouble | None:
            if number % 2 != 1:
                return None
            met.append(FAULTS[number // 2 % len(FAULTS)])
            return met[-1]

        proxy.trouble = trouble
        assert values(open_source(url)) == values(here)
        assert set(met) == set(FAULTS)

    @pytest.mark.parametrize("trouble", [Trouble(status=503), Trouble(cut=True)])
    def test_that_stay_are_an_error_that_names_the_object(self, tmp_path, object_store, proxy, trouble, monkeypatch):
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore waits for seconds between its own
        forget_file_systems()
        source = open_source(object_store.put(write(tmp_path / "data", "parquet")))
        proxy.trouble = lambda number, request: trouble if request.path.endswith("train-b.parquet") else None
        assert source.row(0).values["n"] == 0
        with pytest.raises(SourceError, match=r"/train-b.parquet: bytes .* cannot be read: 3 attempts failed"):
            source.row(30)

    def test_an_object_replaced_while_it_is_read_is_not_mixed(self, tmp_path, object_store):
        source = open_source(object_store.put(write(tmp_path / "data", "parquet")))
        assert source.row(0).values["n"] == 0
        (tmp_path / "other").mkdir()
        table = pa.Table.from_pylist([{**row, "n": row["n"] + 1} for row in ROWS[:25]])
        pq.write_table(table, tmp_path / "other" / "train-a.parquet", row_group_size=10)
        object_store.put(tmp_path / "other")
        forget_file_systems()
        with pytest.raises(SourceError, match=r"train-a.parquet: the object was replaced or removed while it"):
            source.row(20)


def test_an_object_that_changed_between_runs_makes_its_rows_for_a_new_version(tmp_path, object_store):
    url = object_store.put(write(tmp_path / "data", "jsonl"))
    preprocess_dataset(open_source(url), tmp_path / "out", PreprocessConfig(recipe="text"))
    text = ROWS[7]["text"]
    data = lines([{**row, "text": "other"} if row["text"] == text else row for row in ROWS[:25]])[:-1]
    object_store.file_system().pipe_file(f"{object_store.bucket}/train-a.jsonl", data)
    found = preprocess_dataset(open_source(url), tmp_path / "out", PreprocessConfig(recipe="text"))
    assert found.version is not None
    assert found.version.changes == {"kept": len(ROWS) - 1, "made": 1, "removed": 1}
    assert found.manifest.source["files"] == open_source(url).identity["files"]


@pytest.fixture
def new_workers(object_store: ObjectStore) -> Iterator[None]:
    """Workers started from now on have the bucket in their environment."""
    forkserver._forkserver._stop()  # that of earlier tests keeps their environment
    yield
    forkserver._forkserver._stop()


def test_the_command_makes_the_dataset_of_the_same_files_on_disk(tmp_path, object_store, vlmdata, new_workers):
    """With two workers, which know the bucket by their environment alone."""
    folder = tmp_path / "data"
    for split, numbers in (("train", range(14)), ("test", range(14, 18))):
        write_cord_parquet(folder / "data" / f"{split}-00000-of-00001.parquet", [cord_row(n) for n in numbers])
    config = PreprocessConfig(image=ImageConfig(1024, 65_536), rows_per_shard=4)
    for split in ("train", "test"):
        preprocess_dataset(open_source(str(folder), split=split), tmp_path / "disk" / split, config)
    options = ("--split", "train,test", "-j", 2, "--rows-per-shard", 4, *SMALL_IMAGES)
    ended = vlmdata("preprocess", object_store.put(folder, "cord"), "--out", tmp_path / "bucket", *options)
    assert ended.code == 0, ended.stderr
    made = {
        name: {path: data for path, data in tree_bytes(tmp_path / name).items() if not path.endswith(MANIFEST_NAME)}
        for name in ("disk", "bucket")
    }
    assert made["bucket"] == made["disk"]
    assert len([path for path in made["disk"] if path.endswith(".tar")]) == 5


class TestIndex:
    def test_saves_reading_headers(self, tmp_path, object_store, proxy, monkeypatch):
        url = object_store.put(write(tmp_path / "data", "tar with index"))
        monkeypatch.setattr(webdataset, "_HEADER_BYTES", 4 << 10)
        assert open_source(url).num_rows == len(ROWS)
        assert (
            sum(each.sent for each in proxy.gets(".tar")) < 100_000 < (tmp_path / "data" / "train-b.tar").stat().st_size
        )

    @pytest.mark.parametrize("damage", ["longer", "odd", "unordered", "unaligned", "empty", "end alone"])
    def test_of_another_tar_is_refused(self, tmp_path, damage):
        write_tar(tmp_path / "a.tar", ROWS[:9], index=True)
        index = tmp_path / "a.tar.idx"
        offsets = np.frombuffer(index.read_bytes(), "<u8").copy()
        match damage:
            case "longer":
                offsets[-1] += 1 << 20
            case "unordered":
                offsets[3] = offsets[4]
            case "unaligned":
                offsets[3] += 1
            case "empty":
                offsets = offsets[:0]
            case "end alone":
                offsets = offsets[-1:]
        index.write_bytes(offsets.tobytes() + (b"x" if damage == "odd" else b""))
        with pytest.raises(SourceError, match=self.WRONG):
            open_source(str(tmp_path / "a.tar"))

    WRONG = r"a.tar.idx: it is not the index of \S*a.tar \(\d+ bytes\): .*\. Remove the index, or make it again with"

    @pytest.mark.parametrize(
        "kept", [slice(0, None, 2), slice(1, None), slice(None, -2), slice(0, 0)], ids=["half", "late", "early", "none"]
    )
    def test_that_lacks_samples_is_refused(self, tmp_path, kept):
        """Its end is right. Each offset has a header."""
        write_tar(tmp_path / "a.tar", ROWS[:40], index=True)
        index = tmp_path / "a.tar.idx"
        offsets = np.frombuffer(index.read_bytes(), "<u8")
        index.write_bytes(np.append(offsets[:-1][kept], offsets[-1]).tobytes())
        with pytest.raises(SourceError, match=self.WRONG):
            open_source(str(tmp_path / "a.tar"))

    @pytest.mark.parametrize(("before", "now"), [(10, 40), (40, 10), (0, 10), (10, 0)])
    def test_of_the_tar_before_rows_were_added_or_removed_is_refused(self, tmp_path, before, now):
        write_tar(tmp_path / "a.tar", ROWS[:before], index=True)
        write_tar(tmp_path / "a.tar", ROWS[:now], index=False)
        with pytest.raises(SourceError, match=self.WRONG):
            open_source(str(tmp_path / "a.tar"))

    def test_of_a_tar_of_equal_size_is_refused(self, tmp_path):
        write_tar(tmp_path / "a.tar", ROWS[:9], index=True)
        write_tar(tmp_path / "a.tar", ROWS[8::-1], index=False)
        with pytest.raises(SourceError, match=self.WRONG):
            open_source(str(tmp_path / "a.tar"))

    def test_that_points_between_headers_is_refused(self, tmp_path):
        write_tar(tmp_path / "a.tar", ROWS[:9], index=True)
        index = tmp_path / "a.tar.idx"
        offsets = np.frombuffer(index.read_bytes(), "<u8").copy()
        offsets[-2] += 512
        index.write_bytes(offsets.tobytes())
        with pytest.raises(SourceError, match=r"damaged or cut off, or the index \S*a.tar.idx is of another tar: "):
            open_source(str(tmp_path / "a.tar"))

    @pytest.mark.parametrize("at", range(1, 39))
    def test_that_lacks_one_sample_is_noticed_when_it_is_read(self, tmp_path, at):
        write_tar(tmp_path / "a.tar", ROWS[:40], index=True)
        index = tmp_path / "a.tar.idx"
        offsets = np.frombuffer(index.read_bytes(), "<u8")
        index.write_bytes(np.delete(offsets, at).tobytes())
        with pytest.raises(SourceError, match=self.WRONG):
            values(open_source(str(tmp_path / "a.tar")))

    def test_of_a_tar_with_files_that_are_no_samples(self, tmp_path):
        """Energon passes over them, and so do its offsets."""
        offsets = []
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            for name in ("README", "0.txt", "folder", "0.json", "LICENSE", "1.txt", "NOTICE"):
                if name in ("0.txt", "1.txt"):
                    offsets.append(tar.offset)
                info = tarfile.TarInfo(name)
                info.size = 2
                tar.addfile(info, io.BytesIO(b"{}"))
            offsets.append(tar.offset)
        (tmp_path / "a.tar.idx").write_bytes(np.array(offsets, "<u8").tobytes())
        assert [row["txt"] for row in values(open_source(str(tmp_path / "a.tar")))] == ["{}", "{}"]
