"""Byte ranges of remote shards: the batches of the folder, from few bytes, whatever servers do."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat_rows import write_jsonl
from tests.conftest import build_dataset
from tests.loader.helpers import assert_same, epoch_of, stream
from tests.loader.rows import chat_rows
from tests.object_store import ObjectStore, forget_file_systems
from tests.proxy import FAULTS, Proxy, Trouble
from tests.web import serving_files
from vlmdata.errors import ChangedDataError, DatasetFormatError, UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.config import LoaderConfig, Reading
from vlmdata.media.codecs import RAW, REGISTRY
from vlmdata.preprocess.config import ImageConfig
from vlmdata.storage import download as remote
from vlmdata.storage.download import Extents, RemoteRanges
from vlmdata.storage.open import fetched_as_chosen, open_for_loading

CODECS = [name for name in REGISTRY if name != RAW]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMDATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_PAUSES", (0.0, 0.0, 0.0))
    # The shards of these tests are smaller than what is read to save a request.
    monkeypatch.setattr(remote, "_READ_THROUGH", 4096)


@pytest.fixture(scope="module")
def stored(chat: Path, object_store_server: ObjectStore) -> str:
    """The URL of the chats in a bucket that tests of this file read; they ask for ``object_store``, to find it."""
    store = replace(object_store_server, bucket="chats-read-by-ranges")
    store.file_system().mkdir(store.bucket)
    return store.put(chat)


def shard_reads(proxy: Proxy) -> list[Any]:
    return [each for each in proxy.requests if each.method == "GET" and each.path.endswith(".tar")]


@pytest.mark.usefixtures("object_store")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2, "parts": ["labels"]},
        {"parts": []},
        {"parts": ["tokens"], "on_damage": "mask"},
        {"context_parallel": 2, "context_parallel_rank": 1},
        {"context_parallel": 2, "context_parallel_rank": 0, "on_damage": "mask"},
    ],
    ids=str,
)
def test_batches_are_those_of_the_folder(chat: Path, stored: str, tmp_path: Path, options: dict[str, Any]) -> None:
    assert_same(epoch_of(stored, fetch="ranges", **options), epoch_of(chat, **options))
    assert not list((tmp_path / "cache").rglob("*.tar"))


def test_a_rank_fetches_little_more_than_it_uses(chat: Path, stored: str, proxy: Proxy) -> None:
    shards = sum(path.stat().st_size for path in chat.glob("*.tar"))
    with stream(stored, fetch="ranges", dp_size=4, parts=["tokens", "pixels"]) as loader:
        batches = list(loader)
        used = loader.stats.bytes_read
    reads = shard_reads(proxy)
    assert all(each.range for each in reads)
    assert sum(each.sent for each in reads) < 1.5 * used < 0.4 * shards
    samples = sum(len(batch.sample_keys) for batch in batches)
    assert len(reads) <= samples, "the parts of a sample are fetched together"


@pytest.mark.parametrize("fault", FAULTS)
def test_requests_that_fail_are_repeated(chat: Path, stored: str, proxy: Proxy, fault: Trouble) -> None:
    proxy.trouble = lambda number, request: fault if request.path.endswith(".tar") and number % 3 == 0 else None
    assert_same(epoch_of(stored, fetch="ranges"), epoch_of(chat))
    assert len(shard_reads(proxy)) > 8


def test_a_server_that_stays_away_is_named(
    chat: Path, stored: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore waits for seconds between its own
    forget_file_systems()
    with stream(stored, fetch="ranges") as loader:
        proxy.trouble = lambda number, request: Trouble(status=503)
        message = rf"{stored}/shard-\d+\.tar: bytes \d+ to \d+ cannot be fetched, 4 attempts: \w+"
        with pytest.raises(DatasetFormatError, match=message):
            next(iter(loader))
        proxy.trouble = lambda number, request: None
        assert_same(loader, epoch_of(chat))  # the loader goes on from there


class TestDamage:
    def test_a_flipped_byte(self, chat_copy: Path, damage: Any, object_store: ObjectStore) -> None:
        damage("patches", 3)
        place = object_store.put(chat_copy)
        message = rf"^{place}/shard-000000\.tar: row \d+ key \d+ patches of image 0: the data changed"
        with pytest.raises(ChangedDataError, match=message):
            epoch_of(place, fetch="ranges")
        masked = epoch_of(place, fetch="ranges", on_damage="mask")
        assert_same(masked, epoch_of(chat_copy, on_damage="mask"))
        assert sum(len(batch.masked) for batch in masked) == 1

    @pytest.mark.parametrize("on_damage", ["raise", "mask"])
    def test_bytes_that_arrive_damaged_are_fetched_again(
        self, chat: Path, stored: str, proxy: Proxy, on_damage: str
    ) -> None:
        """What is damaged on the way and not in the store ends no run, and masks nothing."""
        at = itertools.cycle(share / 7 for share in range(7))
        flips = itertools.count()
        proxy.trouble = lambda number, request: (
            Trouble(flipped=next(at)) if request.path.endswith(".tar") and next(flips) % 3 == 0 else None
        )
        assert_same(epoch_of(stored, fetch="ranges", on_damage=on_damage), epoch_of(chat))
        assert next(flips) > 8

    def test_a_damaged_store_is_asked_twice(
        self, chat_copy: Path, damage: Any, object_store: ObjectStore, proxy: Proxy
    ) -> None:
        damage("patches", 3)
        with pytest.raises(ChangedDataError):
            epoch_of(object_store.put(chat_copy), fetch="ranges")
        ranges = Counter((each.path, each.range) for each in shard_reads(proxy))
        # The first time among its neighbours.
        assert max(ranges.values()) <= 2

    @pytest.mark.parametrize("size", [0, 5000])
    def test_a_cut_shard(self, chat_copy: Path, object_store: ObjectStore, size: int) -> None:
        with open(chat_copy / "shard-000002.tar", "r+b") as file:
            file.truncate(size)
        place = object_store.put(chat_copy)
        with pytest.raises(DatasetFormatError, match=rf"{place}/shard-000002\.tar: bytes \d+ to \d+ cannot be"):
            epoch_of(place, fetch="ranges")

    def test_a_missing_shard(self, chat_copy: Path, object_store: ObjectStore) -> None:
        (chat_copy / "shard-000002.tar").unlink()
        place = object_store.put(chat_copy)
        with pytest.raises(DatasetFormatError, match=rf"{place}/shard-000002\.tar: no such remote file"):
            epoch_of(place, fetch="ranges")


class TestWebServers:
    def test_one_that_sends_no_ranges_is_told_at_its_first_answer(self, chat: Path) -> None:
        pytest.importorskip("aiohttp")
        message = r'shard-\d+\.tar: .*cannot send ranges: use fetch="shards"'
        with serving_files(chat) as web, pytest.raises(DatasetFormatError, match=message):
            epoch_of(web.url, fetch="ranges")
        assert len([path for path in web.asked if path.endswith(".tar")]) == 1

    def test_one_that_sends_ranges_will_do(self, chat: Path, object_store: ObjectStore) -> None:
        pytest.importorskip("aiohttp")
        object_store.put(chat)
        files = object_store.file_system()
        files.call_s3("put_bucket_acl", Bucket=object_store.bucket, ACL="public-read")
        for path in files.find(object_store.bucket):
            files.chmod(path, "public-read")
        assert_same(epoch_of(f"{object_store.endpoint}/{object_store.bucket}", fetch="ranges"), epoch_of(chat))


class TestChoice:
    @pytest.mark.usefixtures("object_store")
    @pytest.mark.parametrize(
        ("scheme", "options", "by_ranges"),
        [
            ("s3", {}, False),
            ("s3", {"cache_bytes": 1000}, True),
            ("s3", {"context_parallel": 2, "context_parallel_rank": 0}, True),
            ("s3", {"cache_bytes": 1000, "fetch": "shards"}, False),
            ("s3", {"fetch": "ranges"}, True),
            ("http", {"cache_bytes": 1000}, False),
            ("http", {"fetch": "ranges"}, True),
            ("file", {"cache_bytes": 1000, "fetch": "ranges"}, False),
        ],
        ids=str,
    )
    def test_auto_is_by_the_cache_and_the_slice(
        self, chat: Path, stored: str, scheme: str, options: dict[str, Any], by_ranges: bool
    ) -> None:
        config = LoaderConfig.of(capacity=832, global_batch=4, **options)
        _, shards = open_for_loading(chat if scheme == "file" else stored, None, 1)
        if scheme == "http":
            shards.source.__dict__["url"] = "http://example.org/data"
        slices = config.parallelism.context_parallel_rank is not None
        (chosen,) = fetched_as_chosen([shards], config.reading.fetch, config.reading.cache_bytes, slices=slices)
        assert isinstance(chosen.source, RemoteRanges) == by_ranges
        assert chosen.name == shards.name

    def test_other_words_are_refused(self) -> None:
        with pytest.raises(UsageError, match="fetch is 'range'; it must be one of auto, shards, ranges"):
            Reading(fetch="range")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CODECS)
def test_datasets_of_every_codec_are_read_at_urls(name: str, object_store: ObjectStore, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "chat.jsonl", chat_rows(12))
    data = build_dataset(
        source, tmp_path / "data", recipe="chat", image=ImageConfig(1024, 16384), rows_per_shard=6, pixels=name
    )
    place = object_store.put(data)
    expected = epoch_of(data)
    for fetch in ("shards", "ranges"):
        assert_same(epoch_of(place, fetch=fetch), expected)
    sliced = {"context_parallel": 2, "context_parallel_rank": 1}
    assert_same(epoch_of(place, fetch="ranges", **sliced), epoch_of(data, **sliced))
    opened = VlmDataset(data)
    from vlmdata import open_dataset

    assert all((a.patches == b.patches).all() for a, b in zip(open_dataset(place), opened, strict=True))


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 40_000), st.integers(1, 9000)), max_size=20)
)
def test_joined_ranges_hold_the_bytes_and_little_else(found: list[tuple[int, int, int, int]]) -> None:
    columns = np.array(found, np.int64).reshape(-1, 4).T
    joined = Extents(columns[0], columns[1], columns[2], columns[2] + columns[3]).joined()
    pieces = list(zip(*(c.tolist() for c in (joined.dataset, joined.shard, joined.start, joined.stop)), strict=True))
    assert pieces == sorted(pieces)
    for dataset, shard, start, size in found:
        assert any((d, s) == (dataset, shard) and a <= start and start + size <= b for d, s, a, b in pieces)
    for one, other in itertools.pairwise(pieces):
        if one[:2] == other[:2]:
            assert other[2] - one[3] > remote._READ_THROUGH, "near ranges are one"
    for dataset, shard, start, stop in pieces:
        own = sorted((a, a + n) for d, s, a, n in found if (d, s) == (dataset, shard) and start <= a < stop)
        assert (start, stop) == (own[0][0], max(b for _, b in own))
