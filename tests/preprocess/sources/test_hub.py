"""Hub datasets: Parquet files are read where they are, at the commit. The hub is a file system in memory here."""

from __future__ import annotations

import io
import json
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Features, Value
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub import constants

from tests.object_store import forget_file_systems
from vlmdata.errors import SourceError
from vlmdata.preprocess import hub as hub_module
from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.sources.open import open_source

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FOLDER = f"datasets/someone/rows@{COMMIT}/data"


class HubInMemory(MemoryFileSystem):
    """Stands in for ``huggingface_hub.HfFileSystem``: the same addresses, and blobs known by an id."""

    protocol = "hf"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs: list[str] = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("hf://"))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = super().info(path, **options)
        return {**found, "name": found["name"].lstrip("/"), "blob_id": f"blob of {path.rpartition('/')[2]}"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubInMemory]:
    monkeypatch.setattr(HubInMemory, "store", {})
    fsspec.register_implementation("hf", HubInMemory, clobber=True)
    forget_file_systems()
    try:
        yield HubInMemory()
    finally:
        sys.modules["fsspec.registry"]._registry.pop("hf")  # type: ignore[attr-defined]
        HubInMemory.clear_instance_cache()
        forget_file_systems()


def builder(monkeypatch: pytest.MonkeyPatch, files: dict[str, list[str]], features: Features | None = None) -> None:
    """What ``datasets`` makes of the hub's answer: the files of each split, with the commit in their addresses."""
    made = SimpleNamespace(
        config=SimpleNamespace(data_files=files, field=None), info=SimpleNamespace(splits=None, features=features)
    )
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *arguments, **options: made)
    monkeypatch.delattr(datasets, "load_dataset")  # nothing may be downloaded as a whole


def put(hub: HubInMemory, name: str, numbers: list[int]) -> str:
    data = io.BytesIO()
    pq.write_table(pa.table({"n": pa.array(numbers, pa.int32())}), data, row_group_size=2)
    hub.pipe_file(f"/{FOLDER}/{name}", data.getvalue())
    return f"hf://{FOLDER}/{name}"


def test_parquet_files_are_read_at_the_commit(hub, monkeypatch):
    train = [put(hub, f"train-0000{n}-of-00002.parquet", [3 * n, 3 * n + 1, 3 * n + 2]) for n in range(2)]
    builder(monkeypatch, {"train": train, "test": [put(hub, "test.parquet", [9])]})
    source = open_source("someone/rows")
    assert [source.row(n).values["n"] for n in range(6)] == list(range(6))
    assert (source.is_remote, source.image_root) == (True, None)
    assert source.identity == {
        "kind": "hub", "id": "someone/rows", "config": None, "split": "train", "files": train, "rows": 6,
    }  # fmt: skip
    assert open_source("someone/rows", split="test").num_rows == 1
    with pytest.raises(SourceError, match="no split dev; choose with --split one of: train, test"):
        open_source("someone/rows", split="dev")


def test_columns_are_those_of_the_dataset_card(hub, monkeypatch):
    builder(monkeypatch, {"train": [put(hub, "a.parquet", [1])]}, Features({"n": Value("string"), "m": Value("int8")}))
    assert open_source("someone/rows").row(0).values == {"n": "1", "m": None}


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_json_is_read_as_json_at_the_commit(hub, monkeypatch, name):
    rows = [{"n": 1, "at": "2024-01-01"}, {"n": 2.5, "at": 7}]
    data = json.dumps(rows) if name == "rows.json" else "\n".join(map(json.dumps, rows))
    hub.pipe_file(f"/{FOLDER}/{name}", data.encode())
    builder(monkeypatch, {"train": [f"hf://{FOLDER}/{name}"]})
    source = open_source("someone/rows")
    assert [source.row(n).values for n in range(2)] == rows
    assert (source.identity["kind"], source.identity["reader"], source.identity["rows"]) == ("hub", "json", 2)
    assert (source.image_root, source.is_remote) == (None, True)


def test_a_file_by_its_address(hub):
    address = put(hub, "a.parquet", [1, 2, 3])
    source = open_source(address)
    assert [source.row(n).values["n"] for n in range(3)] == [1, 2, 3]
    assert source.identity["files"][0]["etag"] == "blob of a.parquet"


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(hub_module, "_SECONDS", 0.2)
        for _ in range(2):
            with pytest.raises(SourceError, match=r"cannot be reached \(no answer of http://127.0.0.1:\d+ in 0.2 s;"):
                open_source("someone/rows")
        with pytest.raises(SourceError, match="--tokenizer someone/model: cannot load it from the hub"):
            load_tokenizer("someone/model")
        server.accept()[0].close()
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not constants.HF_HUB_OFFLINE


def test_a_mistyped_path_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.delattr(datasets, "load_dataset_builder")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for spec in ("data/chats", f"{tmp_path}/x", "./x", "data/", "~/x", "a/b/c"):
        message = "no such file or folder in the folder data. Correct the name" if spec == "data/chats" else "SOURCE"
        with pytest.raises(SourceError, match=message):
            open_source(spec)
