"""A tokenizer whose files were edited between two runs, or while one is under way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tree_bytes
from tests.verify.rewriting import edit_manifest_json, rewrite_manifest
from vlmdata.errors import ConfigMismatchError, SourceError
from vlmdata.format.manifest import Manifest
from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.run.dataset import RunResult, Watcher, preprocess_dataset
from vlmdata.preprocess.sources.open import open_source


class _Stop(Exception):
    pass


def _stop(record: Any) -> None:
    raise _Stop


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Any) -> Path:
    tokenizer.hf.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def run(cord_parquet: Path, tmp_path: Path, folder: Path) -> Callable[..., RunResult]:
    """Makes or continues a dataset of two shards with the tokenizer of ``folder``."""
    config = PreprocessConfig(tokenizer=str(folder), image=ImageConfig(1024, 65_536), rows_per_shard=2)

    def run(watcher: Watcher | None = None, workers: int = 1) -> RunResult:
        source = open_source(str(cord_parquet), limit=4)
        return preprocess_dataset(source, tmp_path / "out", config, watcher=watcher, workers=workers)

    return run


def set_token(folder: Path, name: str, text: str) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: text}))


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
def test_another_pad_token_is_refused(run: Any, folder: Path, tmp_path: Path, finished: bool) -> None:
    if finished:
        run()
    else:
        with pytest.raises(_Stop):
            run(Watcher(shard_done=_stop))
    before = tree_bytes(tmp_path / "out")
    set_token(folder, "pad_token", "<|vision_pad|>")
    ids = load_tokenizer(str(folder)).hf.convert_tokens_to_ids(["<|endoftext|>", "<|vision_pad|>"])
    with pytest.raises(ConfigMismatchError) as caught:
        run()
    assert f"tokenizer.pad: {ids[0]} there, {ids[1]} now" in str(caught.value)
    assert tree_bytes(tmp_path / "out") == before


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
def test_another_named_token_is_refused_as_templates_may_write_it(run: Any, folder: Path, finished: bool) -> None:
    if finished:
        run()
    else:
        with pytest.raises(_Stop):
            run(Watcher(shard_done=_stop))
    set_token(folder, "bos_token", "<|endoftext|>")
    with pytest.raises(ConfigMismatchError, match=r'special_tokens\.bos_token: null there, "<\|endoftext\|>" now'):
        run()


def test_a_finished_dataset_of_format_1_0_is_still_finished(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run()
    rewrite_manifest(out, tokenizer_files={})
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["tokenizer"]["special_tokens"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    result = run()
    assert (result.made, result.kept) == (0, 2)
    edit_manifest_json(out, "tokenizer.pad", 1)
    with pytest.raises(ConfigMismatchError, match=r"tokenizer\.pad: 1 there"):
        run()


def test_an_unfinished_run_that_did_not_record_the_tokenizer_is_continued(run: Any, tmp_path: Path) -> None:
    with pytest.raises(_Stop):
        run(Watcher(shard_done=_stop))
    path = tmp_path / "out" / ".progress" / "run.json"
    fields = json.loads(path.read_text())
    del fields["tokenizer"]
    path.write_text(json.dumps(fields))
    assert run().kept == 1


def test_reading_a_manifest_of_format_1_0_keeps_its_fingerprint(run: Any, tmp_path: Path) -> None:
    run()
    rewrite_manifest(tmp_path / "out", tokenizer_files={})
    manifest = Manifest.read(tmp_path / "out")
    assert (tmp_path / "out" / "manifest.json").read_bytes() == manifest.to_json()


def test_an_edit_while_the_run_is_under_way_ends_it(run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker process loads the tokenizer, also one that takes the place of one that died."""

    def edit(rows: int, shards: int, done: int, counters: Any) -> None:
        set_token(folder, "pad_token", "<|vision_pad|>")

    with pytest.raises(SourceError, match=r"changed during the run.*pad: .*Restore its files"):
        run(Watcher(started=edit), workers=2)


def test_one_worker_loads_it_once(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []

    def load(*named: Any) -> Any:
        loaded.append(load_tokenizer(*named))
        return loaded[-1]

    for module in ("vlmdata.preprocess.run.making", "vlmdata.preprocess.shards.job"):
        monkeypatch.setattr(f"{module}.load_tokenizer", load)
    run()
    assert len(loaded) == 1
