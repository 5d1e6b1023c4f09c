"""Every command and function that reads a dataset takes a URL as it takes a folder."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from typer.testing import CliRunner, Result

from tests.loader.helpers import assert_same, epoch_of
from tests.loader.remote_fs import TroubledFileSystem
from tests.object_store import ObjectStore
from tests.web import serving_files
from vlmdata import open_dataset
from vlmdata.cli.main import app
from vlmdata.errors import DatasetFormatError
from vlmdata.format.dataset import VlmDataset
from vlmdata.storage import download as remote


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMDATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.chdir(tmp_path)
    TroubledFileSystem.reset(tmp_path / "opened.log")


@pytest.fixture
def memory() -> Iterator[Callable[[Path], str]]:
    """Puts a dataset into fsspec's memory and gives its URL."""
    files = fsspec.filesystem("memory")

    def put(data: Path) -> str:
        files.put(str(data), "/bucket/data", recursive=True)
        return "memory://bucket/data"

    yield put
    if files.exists("/bucket"):
        files.rm("/bucket", recursive=True)


@pytest.fixture(params=["file", "file-localhost", "memory", "remote"])
def url(request: pytest.FixtureRequest, chat: Path, memory: Callable[[Path], str]) -> str:
    """The chats at a URL."""
    forms = {"file": f"file://{chat}", "file-localhost": f"file://localhost{chat}/", "remote": f"troubled://{chat}"}
    return memory(chat) if request.param == "memory" else forms[request.param]


def test_a_replaced_dataset_is_opened_after_its_folder_was_listed(
    object_store: ObjectStore, chat: Path, receipts: Path
) -> None:
    """fsspec gives the caller the file system that we use, with the listings that it keeps."""
    url = object_store.put(chat, "data")
    assert len(open_dataset(url)) == len(VlmDataset(chat))
    fsspec.filesystem("s3").ls(f"{object_store.bucket}/data", detail=True)
    object_store.put(receipts, "data")
    opened = open_dataset(url)
    assert [sample.key for sample in opened] == [sample.key for sample in VlmDataset(receipts)]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def printed(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_dataset_is_opened_and_every_sample_is_there(url: str, chats: VlmDataset) -> None:
    dataset = open_dataset(url)
    assert len(dataset) == len(chats)
    for number, expected in enumerate(chats):
        found = dataset[number]
        assert found.key == expected.key
        for name, array in expected.arrays().items():
            assert (found.arrays()[name] == array).all()
        assert dataset.metadata(number) == chats.metadata(number)
    again = pickle.loads(pickle.dumps(dataset))
    assert again[3].input_ids.tolist() == chats[3].input_ids.tolist()
    assert again.name == dataset.name
    assert repr(dataset).startswith(f"VlmDataset({dataset.name!r}, samples={len(chats)}")


def test_a_loader_reads_it(url: str, chat: Path) -> None:
    assert_same(epoch_of(url), epoch_of(chat))


def test_verify_finds_it_sound(url: str, chats: VlmDataset) -> None:
    found = printed("verify", url, "-j", "1")
    assert found["sound"]
    assert (found["samples"], found["shards"]) == (len(chats), 8)


@pytest.mark.parametrize(
    "options", [[], ["--sample", "3"], ["--find", "patches>100"], ["--row", "5"], ["--step", "0:0"], ["--pack", "0"]]
)
def test_inspect_shows_the_same(chat: Path, memory: Callable[[Path], str], options: list[str]) -> None:
    place = memory(chat)
    found, expected = printed("inspect", place, *options), printed("inspect", str(chat), *options)
    # rows.parquet, which names the file and row of a sample, is not fetched.
    text = re.sub(r"(chat.jsonl), row \d+", r"\1", json.dumps(expected))
    assert json.loads(json.dumps(found).replace(place, str(chat))) == json.loads(text)


def test_inspect_writes_the_page(chat: Path, memory: Callable[[Path], str], tmp_path: Path) -> None:
    assert run("inspect", memory(chat), "--html", "page.html", "--samples", "2", "--packs", "1").exit_code == 0
    assert "bucket" not in [path.name for path in tmp_path.iterdir()], "no folder is made of the URL"
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_plan_reports_the_same(url: str, chat: Path) -> None:
    found, expected = (printed("plan", place, "--capacity", "900") for place in (url, str(chat)))
    assert {**found, "data": 0} == {**expected, "data": 0}


def test_a_web_server_without_range_requests_is_enough(chat: Path) -> None:
    pytest.importorskip("aiohttp")
    with serving_files(chat.parent) as web:
        assert_same(epoch_of(f"{web.url}/{chat.name}"), epoch_of(chat))


class TestVerify:
    def test_faults_are_those_of_the_folder(
        self, chat_copy: Path, damage: Callable[[str, int], None], memory: Callable[[Path], str]
    ) -> None:
        damage("patches", 3)
        (chat_copy / "shard-000004.tar").unlink()
        (chat_copy / "tokenizer" / "chat_template.jinja").unlink()
        with open(chat_copy / "rejected.jsonl", "a") as file:
            file.write("x\n")
        shutil.copy(chat_copy / "shard-000001.tar", chat_copy / "shard-000099.tar")
        place = memory(chat_copy)
        here = str(chat_copy)
        found, expected = (json.loads(run("verify", each, "-j", "1", "--json").stdout) for each in (place, here))
        assert json.loads(json.dumps(found["faults"]).replace(place, here)) == expected["faults"]
        assert {
            "shard-000000.tar",
            "shard-000004.tar",
            "shard-000099.tar",
            "rejected.jsonl",
            "tokenizer/chat_template.jinja",
        } <= {fault["file"] for fault in found["faults"]}
        removed, remedy = found["remedies"]
        assert removed == f"Remove {place}/shard-000099.tar."
        assert remedy == f"Copy the dataset to {place} again, from a copy without faults in `vlmdata verify`."

    def test_a_place_that_cannot_be_listed_is_audited_without(
        self, chat: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError("AccessDenied")

        monkeypatch.setattr(TroubledFileSystem, "ls", refuse)
        place = f"troubled://{chat}"
        result = run("verify", place, "-j", "1")
        assert result.exit_code == 0
        assert f"{place}: cannot be listed: PermissionError: AccessDenied. Shards that are not" in result.stderr

    def test_it_looks_at_what_is_there_now(
        self, chat_copy: Path, damage: Callable[[str, int], None], tmp_path: Path
    ) -> None:
        place = f"troubled://{chat_copy}"
        epoch_of(place)  # all shards are cached
        damage("patches", 3)
        result = run("verify", place, "-j", "1")
        assert result.exit_code == 1
        assert "shard-000000.tar: sha256" in " ".join(result.stdout.split())
        assert [path for path in (tmp_path / "cache" / "vlmdata-cache").iterdir() if path.name.startswith("tmp")] == []


@pytest.mark.parametrize("command", [["verify"], ["inspect"], ["plan", "--capacity", "900"]])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("memory://bucket/nothing", "memory://bucket/nothing: has no manifest.json"),
        ("nowhere://bucket/data", "nowhere://bucket/data/versions.json: cannot be fetched, 1 attempt"),
    ],
)
def test_a_place_without_a_dataset_is_refused_in_a_line(command: list[str], place: str, message: str) -> None:
    result = run(command[0], place, *command[1:])
    assert isinstance(result.exception, DatasetFormatError)  # `main` prints it and exits with 2
    assert str(result.exception).startswith(message)
    assert "\n" not in str(result.exception)
