"""Damage in the copy of one server: another server has the batch. Damage everywhere: as a local loader."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.service.servers import Server, assert_equal, serving
from vlmdata import PackedBatch, StreamingLoader
from vlmdata.errors import ChangedDataError, DatasetFormatError, ResourceError, UnreadableDataError
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.config import Service
from vlmdata.loader.fill.filler import Filled
from vlmdata.service.address import parse_address
from vlmdata.service.client import filler
from vlmdata.service.client.connection import Connection
from vlmdata.service.client.servers import Servers
from vlmdata.service.server.config import ServerConfig
from vlmdata.service.server.server import CollationServer
from vlmdata.storage.cache import CACHE_FOLDER
from vlmdata.storage.open import open_for_loading
from vlmdata.storage.shards import ShardStore

OPTIONS: dict[str, Any] = {"capacity": 1024, "global_batch": 2, "timeout": 240.0, "hedge": 240.0}


@pytest.fixture(scope="module")
def copies(chat: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two copies of the chats."""
    folder = tmp_path_factory.mktemp("copies")
    return Path(shutil.copytree(chat, folder / "one" / "chat")), Path(shutil.copytree(chat, folder / "two" / "chat"))


@pytest.fixture(scope="module")
def two(copies: tuple[Path, Path]) -> Iterator[tuple[Server, Server]]:
    """A server of each copy. They keep packs, so each test has a seed of its own."""
    with serving(copies[0], "-j", 1) as one, serving(copies[1], "-j", 1) as other:
        yield one, other


@contextmanager
def flipped(copy: Path, sample: int) -> Iterator[None]:
    """One bit of a sample's tokens is wrong."""
    index = VlmDataset(copy).index
    path = VlmDataset(copy).shard_path(int(index.shard[sample]))
    at = int(index.data_offsets["input_ids"][sample])

    def flip() -> None:
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))

    flip()
    try:
        yield
    finally:
        flip()


def both(two: tuple[Server, Server]) -> str:
    return f"grpc://127.0.0.1:{two[0].port},127.0.0.1:{two[1].port}"


def local(copy: Path, **options: Any) -> list[PackedBatch]:
    with StreamingLoader(copy, **OPTIONS | options) as loader:
        return list(loader)


@pytest.mark.parametrize("on_damage", ["raise", "mask"])
def test_of_one_copy_is_asked_of_the_other_server(
    two: tuple[Server, Server],
    copies: tuple[Path, Path],
    chat: Path,
    caplog: pytest.LogCaptureFixture,
    on_damage: str,
) -> None:
    options = {"seed": 11, "on_damage": on_damage}
    with flipped(copies[0], 5), flipped(copies[0], 4), flipped(copies[0], 40):
        with StreamingLoader(both(two), **OPTIONS | options) as loader:
            for one, other in zip(local(chat, **options), loader, strict=True):
                assert_equal(one, other)
            assert loader.stats.damaged == ()
        with pytest.raises(ChangedDataError):
            local(copies[0])
    lines = [each.getMessage() for each in caplog.records if "copy is damaged" in each.getMessage()]
    shards = [f"server 127.0.0.1:{two[0].port}: {copies[0]}/shard-{n:06}.tar: row " for n in (0, 6)]
    assert len(lines) == 2
    assert {shard for shard in shards for line in lines if line.startswith(shard)} == set(shards)


def test_of_a_truncated_shard_is_asked_of_the_other_server(
    two: tuple[Server, Server], copies: tuple[Path, Path], chat: Path
) -> None:
    path = copies[1] / "shard-000003.tar"
    whole = path.read_bytes()
    options = {"seed": 12, "dp_rank": 1, "dp_size": 2, "on_damage": "mask"}
    try:
        os.truncate(path, len(whole) // 2)
        with StreamingLoader(both(two), **OPTIONS | options) as loader:
            for one, other in zip(local(chat, **options), loader, strict=True):
                assert_equal(one, other)
    finally:
        path.write_bytes(whole)


def test_of_all_copies_names_all(two: tuple[Server, Server], copies: tuple[Path, Path]) -> None:
    with (
        flipped(copies[0], 5),
        flipped(copies[1], 5),
        StreamingLoader(both(two), seed=13, num_workers=2, **OPTIONS) as loader,
        pytest.raises(ChangedDataError, match="no server has a sound copy of the data for this batch") as caught,
    ):
        list(loader)
    for server, copy in zip(two, copies, strict=True):
        assert f"\n  server 127.0.0.1:{server.port}: {copy}/shard-000000.tar: row 5 key " in str(caught.value)
    assert "Run `vlmdata verify`" in str(caught.value)
    assert "Repair one copy, or replace it by a sound one" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_of_the_only_copy_is_the_error_of_its_server(
    two: tuple[Server, Server], copies: tuple[Path, Path], workers: int
) -> None:
    with (
        flipped(copies[0], 5),
        StreamingLoader(f"grpc://127.0.0.1:{two[0].port}", seed=17, num_workers=workers, **OPTIONS) as loader,
        pytest.raises(ChangedDataError) as caught,
    ):
        list(loader)
    assert str(caught.value).startswith(f"server 127.0.0.1:{two[0].port}: {copies[0]}/shard-000000.tar: row 5 key ")


def test_of_all_copies_is_masked_as_a_local_loader_does(two: tuple[Server, Server], copies: tuple[Path, Path]) -> None:
    """Copies may be damaged in other samples, too: these are whole, since one server has them."""
    options = {"seed": 14, "on_damage": "mask"}
    with flipped(copies[0], 5), flipped(copies[1], 5):
        expected = local(copies[0], **options)
        with flipped(copies[0], 40), StreamingLoader(both(two), **OPTIONS | options) as loader:
            for one, other in zip(expected, loader, strict=True):
                assert_equal(one, other)
            assert [each.row for each in loader.stats.damaged] == [5]
            assert loader.state_dict()["damaged"] == [[0, 5]]


def test_a_server_that_is_gone_may_have_a_sound_copy(
    two: tuple[Server, Server], copies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without masks, the batch is no batch. With masks, it is taken after a while."""
    place = f"grpc://127.0.0.1:{two[0].port},127.0.0.1:1"
    options = OPTIONS | {"seed": 15}
    with flipped(copies[0], 5):
        with monkeypatch.context() as patch, StreamingLoader(place, **options) as loader:
            patch.setattr(filler.Race, "is_late", property(lambda self: len(self._problems) == 2))
            with pytest.raises(ResourceError, match="no server answered within 240 s") as caught:
                list(loader)
            assert f"{copies[0]}/shard-000000.tar: row 5 key " in str(caught.value)
            assert "server 127.0.0.1:1: " in str(caught.value)
        asked = []
        failed = Servers.failed
        monkeypatch.setattr(Servers, "failed", lambda *given: (asked.append(given[1]), failed(*given)))
        monkeypatch.setattr(filler, "_SECONDS_FOR_A_SOUND_COPY", 0.5)
        with StreamingLoader(place, on_damage="mask", **options) as loader:
            before = len(asked)
            for one, other in zip(local(copies[0], seed=15, on_damage="mask"), loader, strict=True):
                assert_equal(one, other)
            assert [each.row for each in loader.stats.damaged] == [5]
            assert len(asked) > before


def test_the_choice_between_masked_answers_is_the_same_for_all_ranks() -> None:
    answers = [Filled(1, {3: "a", 4: "b"}), Filled(1, {5: "c"}), Filled(1, {2: "d"})]
    assert sorted(answers, key=filler._rank) == [answers[2], answers[1], answers[0]]


def test_an_index_that_one_server_damages_is_asked_of_the_other(
    two: tuple[Server, Server], copies: tuple[Path, Path], tmp_path: Path
) -> None:
    index = copies[0] / "index.parquet"
    sound = index.read_bytes()
    try:
        index.write_bytes(sound[:-100] + bytes(100))
        with StreamingLoader(both(two), cache_dir=tmp_path / "one", **OPTIONS) as loader:
            assert len(loader.datasets[0]) == len(VlmDataset(copies[1]))
        alone = f"grpc://127.0.0.1:{two[0].port}"
        with pytest.raises(DatasetFormatError, match=r"server 127.0.0.1:\d+: index.parquet of chat has sha256"):
            StreamingLoader(alone, cache_dir=tmp_path / "two", **OPTIONS)
    finally:
        index.write_bytes(sound)


def test_a_server_keeps_its_cache_in_a_folder_of_its_own(chat: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(chat), "/bucket/chat", recursive=True)
    foreign = tmp_path / "cc3m-00000.tar"
    foreign.write_bytes(b"not ours")
    config = ServerConfig(port=0, workers=1, drain=1.0, cache_dir=tmp_path, cache_bytes=1)
    try:
        with closing(CollationServer(["memory://bucket/chat"], config)):
            _, shards = open_for_loading("memory://bucket/chat", config.cache_dir, config.cache_bytes)
            ShardStore([shards], "stored").read(0, 0, 512, memoryview(bytearray(8)), None, "row 3")
    finally:
        memory.rm("/bucket", recursive=True)
    assert foreign.read_bytes() == b"not ours"
    assert {path.name for path in tmp_path.iterdir()} == {foreign.name, CACHE_FOLDER}


def test_a_bad_sector_is_damage(chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, shards = open_for_loading(chat, None, 0)

    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(UnreadableDataError, match=r"shard-000000.tar: row 3: cannot be read at byte 512: Input/output"):
        ShardStore([shards], "stored").read(0, 0, 512, memoryview(bytearray(8)), None, "row 3")


def test_the_status_names_damaged_files(two: tuple[Server, Server], copies: tuple[Path, Path]) -> None:
    import json

    address = parse_address(f"grpc://127.0.0.1:{two[0].port}")
    with flipped(copies[0], 5):
        with StreamingLoader(address.text, seed=16, on_damage="mask", **OPTIONS) as loader:
            list(loader)
        status = json.loads(Connection(address.servers()[0], address, Service()).action("status"))
    assert f"{copies[0]}/shard-000000.tar" in status["damaged"]
