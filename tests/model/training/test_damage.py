"""Damaged samples under ``data.on_damage = "mask"``: ranks agree on them, or the run ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core")

from tests.model.training.conftest import steps_of, train_here
from tests.model.training.processes.test_failures import sample_of
from tests.model.training.ranks import Ranks, arguments_of
from vlmdata import VlmDataset

MASK = ("--set", "data.on_damage=mask")


def flip_pixels(data: Path, image: int) -> int:
    """Changes a byte of an image and returns its sample."""
    dataset = VlmDataset(data)
    sample = int(np.searchsorted(dataset.index.grid_offsets, image, side="right")) - 1
    with open(dataset.shard_path(int(dataset.index.shard[sample])), "r+b") as file:
        file.seek(int(dataset.index.item_offsets[image]))
        value = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([value ^ 1]))
    return sample


@pytest.fixture
def damaged(chats: Path, tmp_path: Path) -> tuple[Path, int]:
    """The chats with a damaged image in the first step, and its sample."""
    data = Path(shutil.copytree(chats, tmp_path / "damaged" / "data"))
    index = VlmDataset(chats).index
    for rank in range(2):
        first = sample_of(chats, rank, 0)
        if index.item_counts[first]:
            return data, flip_pixels(data, int(index.grid_offsets[first]))
    raise AssertionError("the first samples have no images")


@pytest.mark.parametrize("options", [("--cp", "2"), ("--set", "parallel.vision_gpus=1")], ids=["context", "vision"])
def test_ranks_of_a_pack_mask_what_one_rank_masks(
    one_process: None, damaged: tuple[Path, int], chats: Path, tmp_path: Path, options: tuple[str, str]
) -> None:
    data, sample = damaged
    # Only one of the ranks reads the image.
    ranks = Ranks(arguments_of(data, tmp_path / "two", *options, *MASK, steps=2), tmp_path / "said", 2)
    assert ranks.wait() == [0, 0]
    train_here(tmp_path / "one", data, run__steps=2, data__on_damage="mask")
    one, two = steps_of(tmp_path / "one"), steps_of(tmp_path / "two")
    assert [step["targets"] for step in two] == [step["targets"] for step in one]
    # A tower of its own begins with other weights.
    error = 1e-4 if options[0] == "--cp" else 1e-2
    assert [step["loss"] for step in two] == pytest.approx([step["loss"] for step in one], rel=error)
    index = VlmDataset(data).index
    if options[0] == "--cp":
        train_here(tmp_path / "sound", chats, run__steps=1)
        assert steps_of(tmp_path / "sound")[0]["targets"] - one[0]["targets"] == index.num_targets[sample]
    for run in ("one", "two"):
        state = json.loads((tmp_path / run / "checkpoints" / "step-00000002" / "run.json").read_text())["loader"]
        assert state["damaged"] == [[0, sample]]
    name = f"row {index.source_row[sample]} key {index.key(sample)} patches of image 0"
    speaker = 0 if options[0] == "--cp" else 1  # the language model's
    assert [ranks.said(rank).count(name) for rank in range(2)] == [1 - speaker, speaker]


@pytest.mark.parametrize("options", [("--cp", "2"), ("--set", "parallel.vision_gpus=1")], ids=["context", "vision"])
def test_ranks_with_different_copies_end_together(
    damaged: tuple[Path, int], chats: Path, tmp_path: Path, options: tuple[str, str]
) -> None:
    data, sample = damaged
    sound = Path(shutil.copytree(chats, tmp_path / "sound" / "data"))
    ranks = Ranks(
        arguments_of("data", tmp_path / "run", *options, *MASK, steps=2),
        tmp_path / "said",
        2,
        folders=[sound.parent, data.parent],
    )
    assert ranks.wait() == [2, 2]
    said = ranks.said(0) + ranks.said(1)
    assert said.count("ranks 0 and 1 read the same packs, but only one of them finds damage") == 1
    assert f"key {VlmDataset(data).index.key(sample)}" in said
    assert not (tmp_path / "run" / "checkpoints" / "step-00000001").exists()
