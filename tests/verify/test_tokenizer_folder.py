"""Faults of the tokenizer folder: missing, replaced and edited files, with and without hashes in the manifest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.verify.rewriting import rewrite_manifest, rotate_ids
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import TOKENIZER_DIR
from vlmdata.storage.folder import Folder
from vlmdata.storage.join_checks import small_file_problems
from vlmdata.verify.dataset import verify_dataset
from vlmdata.verify.fault import remedies

FILES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(params=[True, False], ids=["format 1.1", "format 1.0"])
def directory(damaged: Path, request: pytest.FixtureRequest) -> Path:
    """A sound dataset whose manifest has hashes of the tokenizer's files, or has none."""
    if not request.param:
        rewrite_manifest(damaged, tokenizer_files={})
        assert "tokenizer_files" not in json.loads((damaged / "manifest.json").read_text())
    assert found(damaged) == []
    return damaged


def found(directory: Path) -> list[tuple[str, str]]:
    return [(fault.file, fault.check) for fault in verify_dataset(directory).faults]


def test_every_file_has_its_hash_in_the_manifest(sound_dataset: Path) -> None:
    assert sorted(Manifest.read(sound_dataset).tokenizer_files) == sorted(FILES)


def test_a_missing_folder_is_found(directory: Path) -> None:
    shutil.rmtree(directory / TOKENIZER_DIR)
    assert sorted(found(directory)) == [(f"tokenizer/{name}", "missing") for name in FILES]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(directory: Path, name: str) -> None:
    (directory / TOKENIZER_DIR / name).unlink()
    assert (f"tokenizer/{name}", "missing") in found(directory)


@pytest.mark.parametrize("name", ["added_tokens.json", "special_tokens_map.json", "vocab.json", "sub/folder.py"])
def test_an_added_file_is_found_because_it_can_change_ids(directory: Path, name: str) -> None:
    path = directory / TOKENIZER_DIR / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"<|another|>": 6145}')
    faults = verify_dataset(directory).faults
    assert [(fault.file, fault.check) for fault in faults] == [(f"tokenizer/{name}", "stray")]
    assert remedies(str(directory), faults) == [f"Remove {directory}/tokenizer/{name}."]
    (problem,) = small_file_problems(Folder(directory), Manifest.read(directory))
    assert problem.startswith(f"tokenizer/{name}: ")


def test_a_further_chat_template_of_format_1_0_is_not_taken_for_an_added_file(damaged: Path) -> None:
    rewrite_manifest(damaged, tokenizer_files={})
    (damaged / TOKENIZER_DIR / "additional_chat_templates").mkdir()
    (damaged / TOKENIZER_DIR / "additional_chat_templates" / "tools.jinja").write_text("")
    assert ("tokenizer/additional_chat_templates/tools.jinja", "stray") not in found(damaged)


def test_files_that_harm_nobody_are_named_and_are_no_faults(directory: Path) -> None:
    for name in ("notes.txt", ".DS_Store", "tokenizer/.DS_Store", "photos/a.png"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).touch()
    audit = verify_dataset(directory)
    assert audit.faults == []
    assert audit.foreign == (".DS_Store", "notes.txt", "photos", "tokenizer/.DS_Store")


def test_rotated_ids_are_found(directory: Path) -> None:
    rotate_ids(directory)
    assert ("tokenizer/tokenizer.json", "tokenizer") in found(directory)


def test_an_edited_template_is_found(directory: Path) -> None:
    with open(directory / TOKENIZER_DIR / "chat_template.jinja", "a") as file:
        file.write(" ")
    assert found(directory) == [("tokenizer/chat_template.jinja", "tokenizer")]


@pytest.mark.parametrize("text", ["nonsense", "[]", "{}"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_replaced_file_is_found(directory: Path, name: str, text: str) -> None:
    (directory / TOKENIZER_DIR / name).write_text(text)
    assert (f"tokenizer/{name}", "tokenizer") in found(directory)


def test_another_pad_token_is_found(directory: Path) -> None:
    path = directory / TOKENIZER_DIR / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": "<|vision_pad|>"}))
    assert found(directory) == [("tokenizer/tokenizer_config.json", "tokenizer")]
