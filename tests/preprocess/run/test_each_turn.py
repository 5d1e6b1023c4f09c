"""Datasets with a sample for each turn: pixels are stored once, and everything that reads datasets copes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chat_rows import image_item, turn, write_jsonl
from tests.conftest import tree_bytes
from tests.preprocess.command_line import TOKENIZER, Ended
from vlmdata import StreamingLoader, open_dataset
from vlmdata.format.ledger import read_ledger
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import INDEX_NAME, shard_name
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig, TrainTurns
from vlmdata.preprocess.conversation import Conversation
from vlmdata.preprocess.recipes.chat import Chat
from vlmdata.preprocess.recode.run import recode_dataset
from vlmdata.preprocess.run.dataset import RunResult, Watcher, preprocess_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.storage import open_store
from vlmdata.storage.join import join_datasets
from vlmdata.verify.dataset import verify_dataset

KEYS = ["000000000-000", "000000000-001", "000000000-002", "000000001", "000000002-000", "000000002-002", "000000003"]


def rows() -> list[dict[str, Any]]:
    """Three turns with two images, one turn, an empty answer between two, and the first image again."""
    first, second = image_item(seed=1, width=96), image_item(seed=2, height=128)
    return [
        {
            "messages": [
                turn("user", first, "What is this?"),
                turn("assistant", "Noise."),
                turn("user", "Sure?"),
                turn("assistant", "Yes."),
                turn("user", second, "And this?"),
                turn("assistant", "More noise."),
            ]
        },
        {"messages": [turn("user", "Hello?"), turn("assistant", "Good day.")]},
        {
            "messages": [
                turn("user", image_item(seed=3), "Count."),
                turn("assistant", "One."),
                turn("user", "Go on."),
                turn("assistant", ""),
                turn("user", "Stop."),
                turn("assistant", "Stopped."),
            ]
        },
        {"messages": [turn("user", first, "Again?"), turn("assistant", "Noise again.")]},
    ]


def run(source: Path, out: Any, watcher: Watcher | None = None, **options: Any) -> RunResult:
    options.setdefault("rows_per_shard", 2)
    image = ImageConfig(min_pixels=1024, max_pixels=65_536)
    config = PreprocessConfig(recipe="chat", image=image, train_turns=TrainTurns.EACH, **options)
    return preprocess_dataset(open_source(str(source), recipe="chat"), out, config, watcher=watcher)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("each") / "rows.jsonl", rows())


@pytest.fixture(scope="module")
def datasets(source: Path) -> dict[str, Path]:
    """The rows in one shard, under two codecs."""
    places = {pixels: source.with_name(pixels) for pixels in ("raw", "zstd")}
    for pixels, place in places.items():
        run(source, place, pixels=pixels, rows_per_shard=4)
    return places


@pytest.mark.parametrize("pixels", ["raw", "zstd"])
def test_every_turn_is_a_sample_and_pixels_are_stored_once(datasets: dict[str, Path], pixels: str) -> None:
    dataset = open_dataset(datasets[pixels])
    assert dataset.index.keys.to_pylist() == KEYS
    assert dataset.index.target_turns.tolist() == [1] * 7
    assert dataset.index.item_counts.tolist() == [1, 1, 2, 0, 1, 1, 1]
    assert [(r.row, r.sample, r.reason.value) for r in read_ledger(datasets[pixels] / "rejected.jsonl")] == [
        (2, 1, "empty_answer")
    ]
    index, totals = dataset.index, dataset.manifest.totals
    assert (totals.samples, totals.rejected, totals.rows, totals.candidates) == (7, 1, 4, 8)
    assert len(set(index.item_offsets.tolist())) == 3  # of 7 images in samples, also over rows
    assert totals.item_bytes == sum(dict(zip(index.item_offsets, index.item_bytes, strict=True)).values())
    assert dataset.manifest.features == ("images", f"patches-{pixels}")
    plain = [name for name in members(datasets[pixels]) if name.endswith("patches.npy")]
    assert plain == ["000000001.patches.npy"]  # the sample without images
    assert verify_dataset(datasets[pixels]).faults == []


def members(directory: Path) -> list[str]:
    import tarfile

    with tarfile.open(directory / shard_name(0)) as archive:
        return archive.getnames()


def test_files_count_once_for_a_row(datasets: dict[str, Path]) -> None:
    import base64

    files = [
        len(base64.b64decode(item["image"].partition(",")[2]))
        for row in rows()
        for message in row["messages"]
        for item in message["content"]
        if isinstance(item, dict) and "image" in item
    ]
    assert Manifest.read(datasets["raw"]).totals.file_bytes == sum(files)


def test_samples_have_the_pixels_of_one_sample_of_the_whole_row(
    source: Path, datasets: dict[str, Path], tmp_path: Path
) -> None:
    config = PreprocessConfig(
        recipe="chat", image=ImageConfig(min_pixels=1024, max_pixels=65_536), train_turns=TrainTurns.LAST
    )
    preprocess_dataset(open_source(str(source), recipe="chat"), tmp_path / "last", config)
    last = open_dataset(tmp_path / "last")
    for each in map(open_dataset, datasets.values()):
        for one, key in ((0, KEYS[2]), (1, KEYS[3]), (2, KEYS[5]), (3, KEYS[6])):
            whole, sample = last[one], each.sample(key)
            for name, array in whole.arrays().items():
                assert np.array_equal(array, sample.arrays()[name]), name


@pytest.mark.parametrize("pixels", ["raw", "zstd"])
def test_a_lost_index_is_made_again_and_an_interrupted_run_goes_on(
    source: Path, datasets: dict[str, Path], tmp_path: Path, pixels: str
) -> None:
    whole = tmp_path / "whole"
    run(source, whole, pixels=pixels)

    def stop(record: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "stopped", Watcher(shard_done=stop), pixels=pixels)
    assert run(source, tmp_path / "stopped", pixels=pixels).kept == 1
    assert tree_bytes(tmp_path / "stopped") == tree_bytes(whole)
    (whole / INDEX_NAME).unlink()
    (whole / shard_name(1)).unlink()
    assert set(run(source, whole, pixels=pixels).repaired) == {INDEX_NAME, shard_name(1)}
    assert tree_bytes(tmp_path / "stopped") == tree_bytes(whole)


@pytest.mark.parametrize(("was", "pixels"), [("raw", "zstd"), ("zstd", "raw")])
def test_a_recoded_one_is_what_preprocessing_makes(
    datasets: dict[str, Path], tmp_path: Path, was: str, pixels: str
) -> None:
    recode_dataset(datasets[was], tmp_path / "out", pixels)
    assert tree_bytes(tmp_path / "out") == tree_bytes(datasets[pixels])


def test_joined_ones_are_sound(datasets: dict[str, Path], source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "other", rows_per_shard=2)
    out = open_store(tmp_path / "joined")
    join_datasets([open_store(datasets["raw"]), open_store(tmp_path / "other")], out)
    assert verify_dataset(tmp_path / "joined").faults == []
    assert len(open_dataset(tmp_path / "joined")) == 14


@pytest.mark.parametrize("how", ["folder", "ranges"])
@pytest.mark.parametrize("pixels", ["raw", "zstd"])
def test_the_loader_gives_every_sample_its_images(
    datasets: dict[str, Path], tmp_path: Path, pixels: str, how: str
) -> None:
    dataset, place = open_dataset(datasets[pixels]), str(datasets[pixels])
    options: dict[str, Any] = {}
    if how == "ranges":
        import fsspec

        place, options = f"memory://{tmp_path}", {"fetch": "ranges"}
        files = fsspec.filesystem("memory")
        files.put(f"{datasets[pixels]}/", f"{tmp_path}/", recursive=True)
    expected = {dataset.index.key(i): dataset[i] for i in range(len(dataset))}
    seen = set()
    with StreamingLoader([place], capacity=1024, global_batch=1, num_workers=0, **options) as loader:
        for batch in loader:
            begin = 0
            patches = batch.patches.numpy()
            for key, start in zip(batch.sample_keys, batch.cu_seqlens_padded.tolist(), strict=False):
                sample = expected[key]
                assert (
                    batch.input_ids[0, start : start + sample.length].tolist()
                    == sample.input_ids[: sample.length].tolist()
                )
                assert np.array_equal(patches[begin : begin + len(sample.patches)], sample.patches)
                begin += len(sample.patches)
                seen.add(key)
    assert seen == set(KEYS)


def test_a_changed_byte_of_a_shared_image_is_found(datasets: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(datasets["raw"], tmp_path / "copy"))
    offset = int(open_dataset(copy).index.item_offsets[0])
    with open(copy / shard_name(0), "r+b") as file:
        file.seek(offset + 5)
        byte = file.read(1)[0]
        file.seek(offset + 5)
        file.write(bytes([byte ^ 1]))
    found = {fault.key for fault in verify_dataset(copy).faults if fault.key}
    assert found >= {KEYS[0], KEYS[1], KEYS[2], KEYS[6]}


def test_all_samples_of_a_row_are_on_one_side_of_a_holdout(tmp_path: Path, vlmdata: Callable[..., Ended]) -> None:
    made = [
        {"messages": [m for t in range(3) for m in (turn("user", f"{n} {t}?"), turn("assistant", f"{n} {t}."))]}
        for n in range(12)
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", made)
    options = ("--holdout", 0.3, "--train-turns", "each", "--json", "-j", 1, *TOKENIZER)
    vlmdata("preprocess", path, "--out", tmp_path / "out", *options)
    sides = [set(open_dataset(tmp_path / "out" / side).index.source_row.tolist()) for side in ("train", "validation")]
    assert all(sides)
    assert sides[0] | sides[1] == set(range(12))
    assert not sides[0] & sides[1]
    for side in ("train", "validation"):
        assert verify_dataset(tmp_path / "out" / side).faults == []
        assert len(open_dataset(tmp_path / "out" / side)) % 3 == 0


def test_metadata_says_what_is_shared(datasets: dict[str, Path]) -> None:
    dataset = open_dataset(datasets["raw"])
    items = [dataset.metadata(i).get("items", []) for i in range(len(dataset))]
    assert [[item.get("same_as") for item in of] for of in items] == [
        [None],
        [{"key": KEYS[0], "image": 0}],
        [{"key": KEYS[0], "image": 0}, None],
        [],
        [None],
        [{"key": KEYS[4], "image": 0}],
        [{"key": KEYS[0], "image": 0}],
    ]
    assert json.dumps(items)


class Twice:
    """A recipe that gives every conversation two times, with its image files opened anew, and an empty one between."""

    def __init__(self, media: Any) -> None:
        self._chat = Chat(Chat.Options(), media)

    def __call__(self, row: Any) -> list[Conversation]:
        """A list of three."""
        return [self._chat(row), Conversation(()), self._chat(row)]


@pytest.mark.parametrize("pixels", ["raw", "zstd"])
def test_the_turns_of_listed_conversations_are_numbered_through(source: Path, tmp_path: Path, pixels: str) -> None:
    config = PreprocessConfig(
        recipe=f"{__name__}:Twice", image=ImageConfig(1024, 65_536), train_turns=TrainTurns.EACH, pixels=pixels
    )
    preprocess_dataset(open_source(str(source), recipe="chat"), tmp_path / "out", config)
    dataset = open_dataset(tmp_path / "out")
    row_keys = [key for key in dataset.index.keys.to_pylist() if key.startswith("000000000")]
    assert row_keys == [f"000000000-{n:03}" for n in (0, 1, 2, 4, 5, 6)]
    rejected = [(r.row, r.sample, r.reason.value) for r in read_ledger(tmp_path / "out" / "rejected.jsonl")]
    assert rejected[:2] == [(0, 3, "no_assistant_turn"), (1, 1, "no_assistant_turn")]
    assert len(set(dataset.index.item_offsets.tolist())) == 3
    assert verify_dataset(tmp_path / "out").faults == []
