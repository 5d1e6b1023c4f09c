"""Remote shards: fetched once, checked, bounded, shared by processes, and none the worse for a kill."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from tests.loader.helpers import assert_same, epoch_of, packs_of, stream, wait_until
from tests.loader.remote_fs import TroubledFileSystem
from tests.verify.rewriting import rewrite_manifest, sha256
from vlmdata.errors import DatasetFormatError, ResourceError
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.manifest import ShardInfo
from vlmdata.storage import cache as cache_module
from vlmdata.storage import download as remote
from vlmdata.storage.cache import CACHE_FOLDER, RemoteShards, cache_folder
from vlmdata.storage.open import open_dataset

PLENTY = 1 << 40


@pytest.fixture
def troubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[TroubledFileSystem]:
    """A file system without trouble so far; a second attempt comes at once."""
    TroubledFileSystem.reset(tmp_path / "opened.log")
    monkeypatch.setattr(remote, "_PAUSES", (0.0, 0.0, 0.0))
    return TroubledFileSystem


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def shards(chats: VlmDataset) -> list[ShardInfo]:
    return list(chats.manifest.shards)


def fetch(source: RemoteShards, shard: ShardInfo) -> bytes:
    file = source.open(shard)
    try:
        return os.pread(file, shard.bytes + 1, 0)
    finally:
        os.close(file)


def cached(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("*.tar")}


def temporaries(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.suffix == ".tmp"]


def in_child(work: Callable[[], object]) -> int:
    """Starts work in a forked process."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class TestLoading:
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_batches_are_those_of_the_folder(
        self, chat: Path, cache: Path, troubled: type[TroubledFileSystem], num_workers: int
    ) -> None:
        url = f"troubled://{chat}"
        assert_same(epoch_of(url, cache_dir=cache, num_workers=num_workers), epoch_of(chat))
        assert sorted(troubled.opened()) == sorted(path.name for path in chat.glob("*.tar"))  # once each
        epoch_of(url, cache_dir=cache, num_workers=num_workers)
        assert len(troubled.opened()) == 8
        assert len(troubled.opened("index.parquet")) == 1
        assert len(troubled.opened("manifest.json")) == 2  # always looked at

    def test_from_memory_and_file_urls(self, chat: Path, cache: Path) -> None:
        memory = fsspec.filesystem("memory")
        memory.put(str(chat), "/bucket/chat", recursive=True)
        try:
            assert_same(epoch_of("memory://bucket/chat/", cache_dir=cache), epoch_of(chat))
        finally:
            memory.rm("/bucket", recursive=True)
        assert_same(epoch_of(f"file://{chat}", cache_dir=cache), epoch_of(chat))

    def test_a_state_moves_between_a_folder_and_a_url(self, chat: Path, cache: Path) -> None:
        with stream(chat) as loader:
            next(iter(loader))
            state = loader.state_dict()
        with stream(f"file://{chat}", cache_dir=cache) as loader:
            loader.load_state_dict(state)
            assert packs_of(loader) == packs_of(epoch_of(chat))[1:]

    def test_a_cache_smaller_than_the_data_is_enough(
        self, chat: Path, cache: Path, shards: list[ShardInfo], troubled: type[TroubledFileSystem]
    ) -> None:
        size = max(shard.bytes for shard in shards)
        found = epoch_of(f"troubled://{chat}", cache_dir=cache, cache_bytes=2 * size, num_workers=2)
        assert_same(found, epoch_of(chat))
        assert 0 < sum(path.stat().st_size for path in (cache / CACHE_FOLDER).glob("*.tar")) <= 2 * size
        assert len(troubled.opened()) >= 8

    def test_a_dataset_made_anew_under_the_same_url_is_not_mistaken(
        self, chat: Path, receipts: Path, cache: Path, tmp_path: Path, troubled: type[TroubledFileSystem]
    ) -> None:
        place = tmp_path / "place"
        for data in (chat, receipts, chat):
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(data, place)
            assert_same(epoch_of(f"troubled://{place}", cache_dir=cache), epoch_of(data))

    def test_a_place_without_a_dataset_is_refused(
        self, chat_copy: Path, cache: Path, troubled: type[TroubledFileSystem]
    ) -> None:
        (chat_copy / "index.parquet").unlink()
        with pytest.raises(DatasetFormatError, match=r"has no index.parquet"):
            stream(f"troubled://{chat_copy}", cache_dir=cache)
        (chat_copy / "manifest.json").write_text("{")
        with pytest.raises(DatasetFormatError, match=f"troubled://{chat_copy}: .*not a readable manifest"):
            stream(f"troubled://{chat_copy}", cache_dir=cache)
        (chat_copy / "manifest.json").unlink()
        with pytest.raises(DatasetFormatError, match=r"has no manifest.json"):
            stream(f"troubled://{chat_copy}", cache_dir=cache)

    def test_an_index_that_is_not_the_manifests_is_refused(
        self, chat_copy: Path, cache: Path, troubled: type[TroubledFileSystem]
    ) -> None:
        with open(chat_copy / "index.parquet", "ab") as file:
            file.write(b"x")
        with pytest.raises(DatasetFormatError, match=r"index.parquet: cannot be fetched, 4 attempt.*sha256"):
            stream(f"troubled://{chat_copy}", cache_dir=cache)
        assert len(troubled.opened("index.parquet")) == 4

    def test_an_unknown_protocol_is_refused_at_once(self, cache: Path) -> None:
        with pytest.raises(DatasetFormatError, match=r"1 attempt.*nowhere"):
            stream("nowhere://bucket/chat", cache_dir=cache)

    def test_the_cache_lies_where_the_environment_says(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLMDATA_CACHE", str(tmp_path / "here"))
        assert cache_folder() == tmp_path / "here" / CACHE_FOLDER
        assert cache_folder(tmp_path / "there") == tmp_path / "there" / CACHE_FOLDER


class TestTrouble:
    @pytest.mark.parametrize(
        "failure",
        [
            ConnectionError("reset"),
            OSError(errno.EBUSY, "SlowDown: reduce your request rate"),  # what s3fs makes of a 503
            OSError(errno.EIO, "InternalError"),
            PermissionError(13, "expired token"),
            RuntimeError("whatever a back end has"),
        ],
        ids=repr,
    )
    def test_a_flaky_remote_is_tried_again(
        self,
        chat: Path,
        cache: Path,
        shards: list[ShardInfo],
        troubled: type[TroubledFileSystem],
        failure: Exception,
    ) -> None:
        troubled.failures, troubled.failure = 3, failure
        assert (
            fetch(RemoteShards(f"troubled://{chat}", cache, PLENTY), shards[0]) == (chat / shards[0].name).read_bytes()
        )

    def test_but_not_for_ever(
        self, chat: Path, cache: Path, shards: list[ShardInfo], troubled: type[TroubledFileSystem]
    ) -> None:
        troubled.failures = 4
        source = RemoteShards(f"troubled://{chat}", cache, PLENTY)
        with pytest.raises(DatasetFormatError, match=r"shard-000000.tar: .*4 attempt.*the line is down"):
            source.open(shards[0])
        assert cached(cache) == set()
        assert temporaries(cache) == []
        assert fetch(source, shards[0])  # and the next time it may be well again

    def test_a_corrupt_remote_is_named_with_both_hashes(
        self, chat: Path, cache: Path, shards: list[ShardInfo], troubled: type[TroubledFileSystem]
    ) -> None:
        troubled.forged = b"not what was written"
        with pytest.raises(DatasetFormatError) as found:
            epoch_of(f"troubled://{chat}", cache_dir=cache, num_workers=1)
        shard = next(shard for shard in shards if shard.name in str(found.value))
        assert f"troubled://{chat}/{shard.name}: cannot be fetched, 4 attempts" in str(found.value)
        assert f"the manifest says {shard.sha256}" in str(found.value)
        assert cached(cache / CACHE_FOLDER) == set()
        assert troubled.opened(shard.name) == [shard.name] * 4

    def test_a_missing_remote_shard_is_not_asked_for_again(
        self, chat_copy: Path, cache: Path, shards: list[ShardInfo], troubled: type[TroubledFileSystem]
    ) -> None:
        (chat_copy / shards[2].name).unlink()
        with pytest.raises(DatasetFormatError, match=r"shard-000002.tar: no such remote file"):
            RemoteShards(f"troubled://{chat_copy}", cache, PLENTY).open(shards[2])
        assert len(troubled.opened()) == 1

    def test_a_disk_that_takes_no_more_is_reported_as_ours(
        self, chat: Path, cache: Path, shards: list[ShardInfo], troubled: type[TroubledFileSystem]
    ) -> None:
        def open_on_a_full_disk() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            with pytest.raises(ResourceError, match=r"cannot cache .*File too large.*Free space"):
                RemoteShards(f"troubled://{chat}", cache, PLENTY).open(shards[0])

        assert exit_code(in_child(open_on_a_full_disk)) == 0
        assert len(troubled.opened()) == 1  # trying again would change nothing
        assert temporaries(cache) == []

    def test_a_copy_cut_short_is_fetched_again(self, chat: Path, cache: Path, shards: list[ShardInfo]) -> None:
        source = RemoteShards(f"file://{chat}", cache, PLENTY)
        fetch(source, shards[0])
        os.truncate(source.local_path(shards[0]), 100)
        assert fetch(source, shards[0]) == (chat / shards[0].name).read_bytes()


class TestRot:
    """Bytes of the copy in the cache that change, by a failing disk or a careless hand."""

    @pytest.fixture
    def rotten(self, chat: Path, chats: VlmDataset, cache: Path, troubled: type[TroubledFileSystem]) -> Path:
        """A shard in the cache that lost a byte, at an equal size."""
        epoch_of(f"troubled://{chat}", cache_dir=cache)
        path = RemoteShards("", cache / CACHE_FOLDER, PLENTY).local_path(chats.manifest.shards[2])
        with open(path, "r+b") as file:
            file.seek(int(chats.index.data_offsets["input_ids"][12]))
            file.write(b"\xff")
        troubled.log.write_text("")
        return path

    @pytest.mark.parametrize("on_damage", ["raise", "mask"])
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_is_found_and_the_shard_fetched_again_once(
        self,
        rotten: Path,
        chat: Path,
        cache: Path,
        troubled: type[TroubledFileSystem],
        on_damage: str,
        num_workers: int,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        options = {"cache_dir": cache, "num_workers": num_workers, "on_damage": on_damage}
        assert_same(epoch_of(f"troubled://{chat}", **options), epoch_of(chat))
        assert troubled.opened() == ["shard-000002.tar"]
        assert rotten.read_bytes() == (chat / "shard-000002.tar").read_bytes()
        if num_workers == 0:  # a worker logs to its own standard error
            assert f"{rotten}: the cached copy is damaged. troubled://{chat}/shard-000002.tar is fetched" in caplog.text

    def test_is_an_error_if_the_shard_cannot_be_fetched(
        self, rotten: Path, chat: Path, cache: Path, troubled: type[TroubledFileSystem]
    ) -> None:
        troubled.forged = b"not what was written"
        with pytest.raises(DatasetFormatError, match=r"shard-000002.tar: cannot be fetched, 4 attempts"):
            epoch_of(f"troubled://{chat}", cache_dir=cache, on_damage="mask")
        assert not rotten.exists()

    def test_of_the_dataset_itself_is_damage(
        self, chat_copy: Path, cache: Path, chats: VlmDataset, troubled: type[TroubledFileSystem]
    ) -> None:
        shard = chat_copy / "shard-000002.tar"
        with open(shard, "r+b") as file:
            file.seek(int(chats.index.data_offsets["input_ids"][12]))
            file.write(b"\xff")
        infos = list(chats.manifest.shards)
        infos[2] = replace(infos[2], sha256=sha256(shard))
        rewrite_manifest(chat_copy, shards=tuple(infos))
        with pytest.raises(
            DatasetFormatError, match=rf"troubled://{chat_copy}/shard-000002.tar \(read from .*\): row 12"
        ):
            epoch_of(f"troubled://{chat_copy}", cache_dir=cache)
        with stream(f"troubled://{chat_copy}", cache_dir=cache, on_damage="mask") as loader:
            list(loader)
            assert [each.row for each in loader.stats.damaged] == [12]
        assert troubled.opened("shard-000002.tar") == ["shard-000002.tar"]

    def test_that_the_disk_reports_is_the_same(
        self, rotten: Path, chat: Path, cache: Path, troubled: type[TroubledFileSystem], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read, bad = os.preadv, os.stat(rotten).st_ino

        def preadv(file: int, *rest: Any) -> int:
            if os.fstat(file).st_ino == bad:
                raise OSError(errno.EIO, "Input/output error")
            return read(file, *rest)

        monkeypatch.setattr(os, "preadv", preadv)
        assert_same(epoch_of(f"troubled://{chat}", cache_dir=cache), epoch_of(chat))
        assert troubled.opened() == ["shard-000002.tar"]

    def test_is_fetched_again_for_random_access(
        self,
        rotten: Path,
        chat: Path,
        chats: VlmDataset,
        cache: Path,
        troubled: type[TroubledFileSystem],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("VLMDATA_CACHE", str(cache))
        opened = open_dataset(f"troubled://{chat}")
        for i in (12, 13, 12):
            np.testing.assert_array_equal(opened[i].input_ids, chats[i].input_ids)
        assert troubled.opened() == ["shard-000002.tar"]

    def test_of_a_power_cut_is_prevented(
        self, chat: Path, cache: Path, shards: list[ShardInfo], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Content is on the disk before its name, and the name when the shard is used."""
        done: list[str] = []
        flush, rename = cache_module.sync, os.replace

        def sync(path: Path) -> None:
            done.append("content" if path.suffix == ".tmp" else "folder")
            flush(path)

        def renamed(old: Path, new: Path) -> None:
            done.append("name")
            rename(old, new)

        monkeypatch.setattr(cache_module, "sync", sync)
        monkeypatch.setattr(os, "replace", renamed)
        fetch(RemoteShards(f"file://{chat}", cache, PLENTY), shards[0])
        assert done == ["content", "name", "folder"]


class TestRoom:
    def source(self, chat: Path, cache: Path, shards: list[ShardInfo], count: float) -> RemoteShards:
        """A cache with room for so many shards."""
        return RemoteShards(f"file://{chat}", cache, int(count * max(shard.bytes for shard in shards)))

    def test_the_least_recently_used_goes_first(self, chat: Path, cache: Path, shards: list[ShardInfo]) -> None:
        source = self.source(chat, cache, shards, 3)
        names = [source.local_path(shard).name for shard in shards]
        for number in (0, 1, 2, 0, 3):  # 0 is used again, so 1 is the oldest
            fetch(source, shards[number])
            time.sleep(0.01)  # file times are coarse
        assert names[1] not in cached(cache)
        assert {names[0], names[3]} <= cached(cache)
        fetch(source, shards[4])
        assert names[2] not in cached(cache)
        assert {names[0], names[3], names[4]} == cached(cache)

    def test_there_is_always_room_for_one(self, chat: Path, cache: Path, shards: list[ShardInfo]) -> None:
        source = self.source(chat, cache, shards, 0.01)
        for shard in shards:
            assert fetch(source, shard) == (chat / shard.name).read_bytes()
            assert cached(cache) == {source.local_path(shard).name}

    def test_an_open_file_outlives_its_eviction(self, chat: Path, cache: Path, shards: list[ShardInfo]) -> None:
        source = self.source(chat, cache, shards, 1)
        file = source.open(shards[0])
        fetch(source, shards[1])
        assert not source.local_path(shards[0]).exists()
        assert os.pread(file, shards[0].bytes, 0) == (chat / shards[0].name).read_bytes()
        os.close(file)

    def test_nothing_is_removed_that_the_cache_did_not_make(
        self, chat: Path, cache: Path, shards: list[ShardInfo], troubled: type[TroubledFileSystem]
    ) -> None:
        """The user may name a folder that holds other things, such as a disk of tars."""
        own = cache / CACHE_FOLDER
        (own / "shard-0123.tar").mkdir(parents=True)
        names = ["cc3m-00000.tar", "shard-000000.tar", f"{shards[0].sha256[:32]}.tar", ".a.tar.17.tmp"]
        foreign = {folder / name: name.encode() * 1000 for name in names for folder in (cache, own)}
        for path, content in foreign.items():
            path.write_bytes(content)
            os.utime(path, (0, 0))
        size = max(shard.bytes for shard in shards)
        assert_same(epoch_of(f"troubled://{chat}", cache_dir=cache, cache_bytes=size), epoch_of(chat))
        assert {path: path.read_bytes() for path in foreign} == foreign
        assert {path.name for path in cache.iterdir()} == {*names, CACHE_FOLDER}
        assert len(cached(own) - {*names, "shard-0123.tar"}) == 1


class TestManyProcesses:
    def test_four_at_once_fetch_each_shard_once(
        self, chat: Path, cache: Path, shards: list[ShardInfo], troubled: type[TroubledFileSystem]
    ) -> None:
        troubled.delay = 0.001
        source = RemoteShards(f"troubled://{chat}", cache, PLENTY)

        def fetch_all(first: int) -> None:
            for shard in shards[first:] + shards[:first]:
                assert fetch(source, shard) == (chat / shard.name).read_bytes()

        children = [in_child(lambda first=first: fetch_all(first)) for first in (0, 0, 3, 5)]
        assert [exit_code(child) for child in children] == [0] * 4
        assert sorted(troubled.opened()) == sorted(shard.name for shard in shards)
        assert temporaries(cache) == []

    def test_four_at_once_in_a_cache_that_is_too_small(
        self, chat: Path, cache: Path, shards: list[ShardInfo], troubled: type[TroubledFileSystem]
    ) -> None:
        size = max(shard.bytes for shard in shards)
        source = RemoteShards(f"troubled://{chat}", cache, size)  # each evicts what the others fetch

        def fetch_all(first: int) -> None:
            for shard in 2 * (shards[first:] + shards[:first]):
                assert fetch(source, shard) == (chat / shard.name).read_bytes()

        children = [in_child(lambda first=first: fetch_all(first)) for first in (0, 2, 4, 6)]
        assert [exit_code(child) for child in children] == [0] * 4
        assert sum(path.stat().st_size for path in cache.glob("*.tar")) <= size


class TestKilledDownload:
    @pytest.fixture
    def killed(
        self, chat: Path, cache: Path, shards: list[ShardInfo], troubled: type[TroubledFileSystem]
    ) -> RemoteShards:
        """A cache whose first shard a killed process was fetching."""
        source = RemoteShards(f"troubled://{chat}", cache, PLENTY, lock_timeout=5)
        troubled.delay = 0.05
        child = in_child(lambda: source.open(shards[0]))
        assert wait_until(lambda: any(path.stat().st_size for path in cache.glob(".*.tmp")), 60)
        with pytest.raises(ResourceError, match=r"another process has been downloading this shard for 0 s"):
            RemoteShards(source.url, cache, PLENTY, lock_timeout=0.2).open(shards[0])
        fetch(RemoteShards(f"file://{chat}", cache, PLENTY), shards[1])  # what makes room leaves a living one alone
        assert len(temporaries(cache)) == 1
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL
        troubled.delay = 0
        assert len(temporaries(cache)) == 1
        return source

    def test_holds_no_lock(self, killed: RemoteShards, chat: Path, cache: Path, shards: list[ShardInfo]) -> None:
        assert fetch(killed, shards[0]) == (chat / shards[0].name).read_bytes()
        assert temporaries(cache) == []

    def test_is_cleaned_away_with_the_next_download(
        self, killed: RemoteShards, cache: Path, shards: list[ShardInfo]
    ) -> None:
        fetch(killed, shards[5])
        assert temporaries(cache) == []
        assert len(cached(cache)) == 2
