"""Datasets of a stranger: whatever their files say, nothing outside the output and the cache changes, and no code of
theirs runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.chat_rows import build_mixed
from tests.conftest import tree_bytes
from tests.web import serving_files
from vlmdata import StreamingLoader, open_dataset
from vlmdata.errors import DatasetFormatError, VlmdataError
from vlmdata.format.manifest import Manifest
from vlmdata.format.stored_names import file_path, path_inside, shard_path
from vlmdata.storage.folder import Folder
from vlmdata.storage.objects import Objects

PAYLOAD = b"echo owned\n"
SHA256 = hashlib.sha256(PAYLOAD).hexdigest()
#: What a stranger's file must not change.
MINE = b"mine\n"
#: Each leads out of its folder, or is no name of a file.
NAMES = (
    "../../.profile",
    "/etc/passwd",
    "C:/x",
    "c:x",
    "a/../../b",
    "a\\..\\b",
    "..",
    ".",
    "",
    "a//b",
    "/",
    "a\0b",
    "a\n",
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset that nobody changes."""
    return build_mixed(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    """A copy of it two folders below one with a file that is nobody else's."""
    (tmp_path / ".profile").write_bytes(MINE)
    return Path(shutil.copytree(sound, tmp_path / "downloads" / "dataset"))


def edit(dataset: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest of a dataset."""
    path = dataset / "manifest.json"
    fields = json.loads(path.read_bytes())
    change(fields)
    path.write_text(json.dumps(fields))


def commands(location: str, other: Path, out: Path) -> Iterator[list[str]]:
    """The commands that read datasets, as a user gives them."""
    yield ["inspect", location]
    yield ["verify", location]
    yield ["diff", location, str(other)]
    yield ["plan", location, "--capacity", "512"]
    yield ["recode", location, "--pixels", "zstd", "--out", str(out / "recode")]
    yield ["retokenize", location, "--keep-rejected", "--out", str(out / "retokenize")]
    yield ["select", location, "--where", "length > 0", "--out", str(out / "select")]
    yield ["join", location, str(other), "--allow-duplicates", "--out", str(out / "join")]
    yield ["preprocess", str(other.parent / "mixed.jsonl"), "--tokenizer", "embedded", "--out", location]


class TestNamesOfFiles:
    @pytest.mark.parametrize("name", NAMES)
    def test_a_name_that_leaves_its_folder_is_refused_where_it_is_read(self, sound, name):
        fields = json.loads((sound / "manifest.json").read_bytes())
        fields["tokenizer_files"][name] = "0" * 64
        with pytest.raises(DatasetFormatError, match=r"manifest\.json: a name in tokenizer_files is"):
            Manifest.from_json(json.dumps(fields).encode(), "manifest.json")
        for version in ({}, {"number": 2}):
            fields = json.loads((sound / "manifest.json").read_bytes())
            fields["shards"][0]["name"], fields["version"] = name, version
            with pytest.raises(DatasetFormatError, match=r"manifest\.json: shards\.0.name is"):
                Manifest.from_json(json.dumps(fields).encode(), "manifest.json")

    def test_versions_name_shards_of_earlier_ones_and_nothing_else(self):
        for name in ("shard-000000.tar", "../../shard-000000.tar", "../2/shard-000000.tar"):
            assert shard_path(name, "", of_version=True) == name
        for name in ("../../id_rsa", "../../../shard-000000.tar", "../../a/shard-000000.tar", "../x/shard-000000.tar"):
            with pytest.raises(DatasetFormatError):
                shard_path(name, "", of_version=True)
        with pytest.raises(DatasetFormatError):
            shard_path("../../shard-000000.tar", "", of_version=False)
        assert file_path("additional_chat_templates/tool use.jinja", "")

    def test_a_sha256_names_no_file_of_the_cache(self, copy):
        edit(copy, lambda fields: fields["shards"][0].update(sha256="/../../../../.profile"))
        with pytest.raises(DatasetFormatError, match="not a sha256"):
            open_dataset(copy)

    def test_no_command_changes_a_file_that_a_local_copy_names(self, vlmdata, sound, copy, tmp_path):
        edit(
            copy,
            lambda fields: fields["tokenizer_files"].update({"../../.profile": hashlib.sha256(PAYLOAD).hexdigest()}),
        )
        (copy.parent / ".profile").write_bytes(PAYLOAD)  # what a command would copy
        out = tmp_path / "mine" / "out"
        out.mkdir(parents=True)
        (out / ".profile").write_bytes(MINE)
        (out.parent / ".profile").write_bytes(MINE)
        before = tree_bytes(tmp_path)
        for command in commands(str(copy), sound, out):
            ended = vlmdata(*command)
            assert (ended.code, "tokenizer_files is '../../.profile'" in ended.said) == (2, True), command
            shutil.rmtree(out / command[0], ignore_errors=True)
        with pytest.raises(DatasetFormatError, match="tokenizer_files"):
            StreamingLoader(copy, capacity=512, global_batch=1)
        assert tree_bytes(tmp_path) == before

    def test_no_command_changes_a_file_that_a_url_names(self, vlmdata, sound, copy, tmp_path, monkeypatch):
        edit(
            copy,
            lambda fields: fields["tokenizer_files"].update(
                {"../../../../.profile": hashlib.sha256(PAYLOAD).hexdigest()}
            ),
        )
        monkeypatch.setenv("VLMDATA_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(SimpleHTTPRequestHandler, "translate_path", self._sent)
        (copy / "payload").write_bytes(PAYLOAD)
        out = tmp_path / "out"
        with serving_files(copy) as web:
            for command in list(commands(web.url, sound, out))[:-2]:  # join and preprocess take no web address
                ended = vlmdata(*command)
                assert (ended.code, "tokenizer_files is" in ended.said) == (2, True), command
        assert not any(path.endswith("profile") for path in web.asked)
        assert [path.read_bytes() for path in tmp_path.rglob(".profile")] == [MINE]

    @staticmethod
    def _sent(handler: SimpleHTTPRequestHandler, path: str) -> str:
        """A server of a stranger sends what it likes for a name."""
        return os.path.join(handler.directory, "payload" if path.endswith(".profile") else path.lstrip("/"))

    def test_a_store_writes_and_removes_nothing_through_a_link(self, tmp_path):
        home, store = tmp_path / "home", Folder(tmp_path / "dataset")
        for folder in (home / "2", store.directory):
            folder.mkdir(parents=True)
        (home / "2" / "index.parquet").write_bytes(MINE)
        (store.directory / "versions").symlink_to(home)
        name = "versions/2/index.parquet"
        for use in (
            lambda: store.put(name, PAYLOAD),
            lambda: store.create("versions/2/new", PAYLOAD),
            lambda: store.delete([name]),
            lambda: store.move("versions", name),
            lambda: store.delete_folder("versions/2"),
            lambda: store.tidy("versions/2"),
            lambda: store.within("versions/2"),
            lambda: store.writing(name).__enter__(),
            lambda: store.writing_folder("versions/3").__enter__(),
            lambda: store.put("../other", PAYLOAD),
        ):
            with pytest.raises(DatasetFormatError, match=r"is a link to|does not lead to a file"):
                use()
        assert tree_bytes(home) == {"2/index.parquet": MINE}
        assert path_inside(tmp_path, "a/b") == tmp_path / "a" / "b"

    def test_an_object_store_fetches_into_its_temporary_folder_alone(self, object_store, tmp_path):
        store = Objects.at(f"{object_store.url}/names")
        store.put("versions/2/manifest.json", b"two")
        store.put("shard-000000.tar", b"shard")
        with store.below("versions/2").local("../../shard-000000.tar", "manifest.json") as folder:
            assert (folder / "../../shard-000000.tar").read_bytes() == b"shard"
            assert (folder / "manifest.json").read_bytes() == b"two"
        with pytest.raises(DatasetFormatError, match="does not lead"), store.local("../../../evil"):
            pass
        secret = tmp_path / "secret"
        secret.write_bytes(MINE)
        with store.writing_folder("tokenizer") as folder:
            (folder / "notes.txt").symlink_to(secret)
            (folder / "a").write_bytes(b"a")
        assert set(store.listing("tokenizer")) == {"a"}

    def test_a_link_is_the_shard_or_refused(self, vlmdata, copy, tmp_path):
        shard = copy / "shard-000000.tar"
        moved = shard.rename(tmp_path / "blob")
        shard.symlink_to(moved)
        ended = vlmdata("select", copy, "--where", "length > 0", "--out", tmp_path / "out")
        assert ended.code == 0, ended.said
        taken = tmp_path / "out" / "shard-000000.tar"
        assert (taken.is_symlink(), taken.read_bytes()) == (False, moved.read_bytes())
        secret = tmp_path / "secret"
        secret.write_bytes(b"s" * moved.stat().st_size)
        shard.unlink()
        shard.symlink_to(secret)
        ended = vlmdata("select", copy, "--where", "length > 0", "--out", tmp_path / "other")
        assert (ended.code, "is a link to a file that is not the shard" in ended.said) == (2, True)
        assert b"sss" not in b"".join(tree_bytes(tmp_path / "other").values())


class TestNamesOfCode:
    def test_no_command_runs_what_a_dataset_names(self, vlmdata, copy, tmp_path, monkeypatch):
        canary = tmp_path / "canary.py"
        canary.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass R: pass\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        for place in ("recipe", "family", "pixels", "video"):
            for name in (f"{canary}:R", "canary:R"):
                options = {place: {"pixels": name} if place == "video" else name}
                edit(copy, lambda fields, options=options: fields["config"]["options"].update(options))
                for command in (["recode", copy, "--video-pixels", "zstd"], ["retokenize", copy, "--keep-rejected"]):
                    ended = vlmdata(*command, "--out", tmp_path / "out")
                    assert ended.code == 2, command
                assert "what a dataset names is not run" in ended.said
        assert not (tmp_path / "ran").exists()
        assert not {module for module in sys.modules if module.startswith("canary")}

    def test_code_runs_that_the_user_names_too(self, copy, tmp_path, monkeypatch):
        from vlmdata.preprocess.config import PreprocessConfig

        options = json.loads((copy / "manifest.json").read_bytes())["config"]["options"]
        (tmp_path / "own.py").write_text("class R: pass\n")
        options["recipe"] = f"{tmp_path}/own.py:R"
        with pytest.raises(VlmdataError, match="VLMDATA_RECIPES="):
            PreprocessConfig.from_json(options)
        monkeypatch.setenv("VLMDATA_RECIPES", f"{tmp_path}/../{tmp_path.name}/own.py:R")
        assert PreprocessConfig.from_json(options).recipe == options["recipe"]
