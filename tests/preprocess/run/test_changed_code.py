"""A run is not continued with other code of its family or codec, and says what helps if it is refused."""

from __future__ import annotations

import importlib
import json
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chat_rows import turn, write_jsonl
from tests.conftest import cord_row, write_cord_parquet
from tests.preprocess.extend_pages import write_named_file
from tests.preprocess.run.runs import StopRun, begin, config, preprocess, stopping
from vlmdata import families
from vlmdata.errors import ConfigMismatchError
from vlmdata.format.manifest import Manifest, canonical_hash
from vlmdata.media import codecs
from vlmdata.preprocess.shards.fingerprints import identity_changes
from vlmdata.verify.dataset import verify_dataset

FAMILY = """
from dataclasses import dataclass, fields

from vlmdata.families.base import Family
from vlmdata.families.qwen3_5 import FAMILY as OTHER


class Rounded(Family):
    def image_size(self, height, width, least, most, *, least_side=0):
        return {side}, 64


FAMILY = Rounded(**{{f.name: getattr(OTHER, f.name) for f in fields(OTHER)}} | {{"name": "rounded"}})
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder of modules that registries may name."""
    folder = tmp_path / "modules"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    for name in ("rounded_rules", "rounded_family", "zlib_patches"):
        sys.modules.pop(name, None)


def rewrite(file: Path, text: str) -> None:
    """Changes a module as if in another process."""
    file.write_text(text)
    sys.modules.pop(file.stem, None)
    sys.modules.pop("rounded_family", None)
    importlib.invalidate_caches()
    linecache.checkcache()


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
@pytest.mark.parametrize("module", ["rounded_family", "rounded_rules"])
def test_other_rules_of_a_family_are_refused(
    cord_parquet: Path,
    tmp_path: Path,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    finished: bool,
    module: str,
) -> None:
    monkeypatch.setitem(families.REGISTRY, "rounded", "rounded_family:FAMILY")
    (place / "rounded_family.py").write_text("from rounded_rules import FAMILY\n")
    rewrite(place / f"{module}.py", FAMILY.format(side=64))
    monkeypatch.setattr("tests.preprocess.run.runs.config", lambda: config(family="rounded"))
    begin(cord_parquet, tmp_path / "out", finished)
    rewrite(place / f"{module}.py", FAMILY.format(side=96))
    with pytest.raises(ConfigMismatchError) as caught:
        preprocess(cord_parquet, tmp_path / "out", config=config(family="rounded"))
    assert "config.fingerprints.family_source: " in str(caught.value)
    assert "Restore the code of the family's rules to continue it" in str(caught.value)


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
def test_other_code_of_a_codec_is_refused(
    cord_parquet: Path, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    module = write_named_file("codec.md", "zlib_patches.py", place)
    monkeypatch.setitem(codecs.REGISTRY, "zlib", f"{module}:CODEC")
    monkeypatch.setattr("tests.preprocess.run.runs.config", lambda: config(pixels="zlib"))
    begin(cord_parquet, tmp_path / "out", finished)
    file = place / f"{module}.py"
    rewrite(file, file.read_text().replace("level=1", "level=9"))
    with pytest.raises(ConfigMismatchError) as caught:
        preprocess(cord_parquet, tmp_path / "out", config=config(pixels="zlib"))
    assert "config.fingerprints.codec_source: " in str(caught.value)
    assert "Restore the codec's code to continue it" in str(caught.value)


def test_a_dataset_that_does_not_record_such_code_is_continued(cord_parquet: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    preprocess(cord_parquet, out, config=config(pixels="zstd"))
    fields = json.loads((out / "manifest.json").read_text())
    for name in ("family_source", "codec_source"):
        del fields["config"]["fingerprints"][name]
    fields["config_hash"] = canonical_hash(fields["config"])
    (out / "manifest.json").write_text(json.dumps(fields))
    before = Manifest.read(out)
    assert verify_dataset(out).faults == []
    result = preprocess(cord_parquet, out, config=config(pixels="zstd"))
    assert (result.made, result.kept, result.manifest) == (0, 7, before)


def chats(path: Path, number: int) -> Path:
    return write_jsonl(path, [{"messages": [turn("user", f"{n}?"), turn("assistant", "Yes.")]} for n in range(number)])


class TestRemedies:
    def test_an_unfinished_run_takes_no_other_rows(self, tmp_path: Path) -> None:
        source = chats(tmp_path / "rows.jsonl", 12)
        with pytest.raises(StopRun):
            preprocess(source, tmp_path / "out", config=config(recipe="chat"), watcher=stopping(1))
        chats(source, 14)
        with pytest.raises(ConfigMismatchError) as caught:
            preprocess(source, tmp_path / "out", config=config(recipe="chat"))
        message = str(caught.value)
        assert "a finished dataset takes added, changed and removed rows of its source as a new version" in message
        assert "Restore the source to continue it" in message
        assert "--hash-source" not in message
        assert "options" not in message

    def test_files_known_by_other_marks_may_be_the_same(self) -> None:
        file = {"name": "a.parquet", "bytes": 7}
        assert said([file | {"xxh3_128": "a"}], [file | {"metadata_xxh3_128": "b"}]).count("give --hash-source") == 1
        assert "--hash-source" not in said([file | {"xxh3_128": "a"}], [file | {"xxh3_128": "b"}])
        assert "--hash-source" not in said([file | {"xxh3_128": "a"}], [{**file, "bytes": 8, "etag": "b"}])

    def test_options_come_first(self, tmp_path: Path) -> None:
        source = write_cord_parquet(tmp_path / "source" / "train.parquet", [cord_row(n) for n in range(6)])
        preprocess(source, tmp_path / "out", config=config(pixels="zstd"))
        with pytest.raises(ConfigMismatchError, match=r"\nRepeat the earlier options to continue it, or give another"):
            preprocess(source, tmp_path / "out")


def said(before: list[dict[str, object]], now: list[dict[str, object]]) -> str:
    from vlmdata.preprocess.shards.fingerprints import refusal

    config: dict[str, object] = {"config": {"options": {}, "fingerprints": {}}, "tokenizer": {}}
    one, other = ({**config, "source": {"files": files}} for files in (before, now))
    return refusal("out", False, identity_changes(one, other), one, other)
