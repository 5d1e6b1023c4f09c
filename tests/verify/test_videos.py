"""The audit of samples with videos finds what is wrong with their tokens, positions, grids and times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.chat_rows import write_jsonl
from tests.conftest import encoded_image
from tests.media.video.clips import clip
from vlmdata import open_dataset
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.schema import Sample
from vlmdata.inspect.sample import describe_sample
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig, VideoConfig
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.verify.sample import SampleRules, audit_sample
from vlmdata.verify.video import steps_of

FAMILIES = ("qwen3_5", "qwen2_5_vl")


@pytest.fixture(scope="module", params=FAMILIES)
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VlmDataset:
    """One sample with a picture and a clip of 6 seconds, sampled twice a second."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "a.mp4").write_bytes(clip("libx264", 30, 5))
    (folder / "a.png").write_bytes(encoded_image(64, 64))
    row = {"query": "<image><video>?", "response": "Yes.", "videos": ["a.mp4"], "images": ["a.png"]}
    rows = write_jsonl(folder / "rows.jsonl", [row])
    bounds = (3136, 9000)
    config = PreprocessConfig(
        recipe="chat",
        family=request.param,
        image=ImageConfig(*bounds),
        video=VideoConfig(min_pixels=bounds[0], max_pixels=90_000 if request.param == "qwen3_5" else 9000),
    )
    preprocess_dataset(open_source(str(rows)), folder / "out", config)
    return open_dataset(folder / "out")


def findings(dataset: VlmDataset, sample: Sample, steps: tuple[float, ...] | None = None) -> list[tuple[str, str]]:
    row = dataset.index.row(0)
    rules = SampleRules.of(dataset.manifest)
    steps = steps_of(dataset.metadata(0), row, rules.family, rules.fractions) if steps is None else steps
    return audit_sample(sample, row, rules, (), steps)


def with_ids(sample: Sample, change: Callable[[np.ndarray], None]) -> Sample:
    ids = sample.input_ids.copy()
    change(ids)
    return dataclasses.replace(sample, input_ids=ids)


def test_a_sound_sample(dataset: VlmDataset) -> None:
    assert findings(dataset, dataset[0]) == []


def test_inspect_finds_what_the_audit_finds(dataset: VlmDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def faults() -> list[tuple[str, str]]:
        return [(each.kind, each.message) for each in describe_sample(dataset, 0).findings if each.severity == "fault"]

    assert faults() == []
    metadata = dataset.metadata(0)
    images = [{**each, "seconds_per_patch": 5.0} for each in metadata["images"]]
    monkeypatch.setattr(type(dataset), "metadata", lambda *_: {**metadata, "images": images})
    # Only in qwen2_5_vl do positions follow from the seconds.
    assert [kind for kind, _ in faults()] == ["positions"] * (dataset.family.name == "qwen2_5_vl")
    images[1]["seconds_per_patch"] = 0
    assert faults()[0] == ("metadata", "video 1 has the seconds_per_patch 0; it must be a positive number")


def test_a_lost_placeholder(dataset: VlmDataset) -> None:
    token = dataset.manifest.tokenizer.items["video"].token

    def change(ids: np.ndarray) -> None:
        ids[np.flatnonzero(ids == token)[0]] = ids[0]

    (found,) = findings(dataset, with_ids(dataset[0], change))
    assert found[0] == "image_block"


def test_a_placeholder_of_the_other_kind(dataset: VlmDataset) -> None:
    items = dataset.manifest.tokenizer.items

    def change(ids: np.ndarray) -> None:
        ids[ids == items["video"].token] = items["image"].token

    (found,) = findings(dataset, with_ids(dataset[0], change))
    assert found[0] == "image_block"
    assert "has id" in found[1]


def test_a_lost_mark_of_a_temporal_patch_and_of_the_template(dataset: VlmDataset) -> None:
    end = dataset.manifest.tokenizer.items["video"].after[0]
    sample = dataset[0]
    for place in np.flatnonzero(sample.input_ids == end)[1:].tolist():
        ids = sample.input_ids.copy()
        ids[place] = ids[0]
        found = findings(dataset, dataclasses.replace(sample, input_ids=ids))
        assert any("<|vision_end|>" in message for check, message in found if check == "image_block"), place


def test_positions_follow_from_the_seconds(dataset: VlmDataset) -> None:
    wrong = [] if dataset.family.name == "qwen3_5" else ["positions"]  # a block there is one temporal patch
    assert [check for check, _ in findings(dataset, dataset[0], (1, 7))] == wrong
    positions = dataset[0].position_ids.copy()
    positions[0, dataset.index.item_starts[1]] += 1
    moved = dataclasses.replace(dataset[0], position_ids=positions)
    assert [check for check, _ in findings(dataset, moved)] == ["positions"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frames": [0, 1]}, r"video 1 has the frames \[0, 1\], but its grid has 6 temporal patches"),
        ({"frames": None}, "has the frames None"),
        ({"patch_seconds": [0.5]}, "but 6 ascending ones are needed"),
        ({"patch_seconds": ["a"] * 6}, "ascending ones are needed"),
        ({"patch_seconds": [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]}, "ascending ones are needed"),
        ({"seconds_per_patch": 0}, "has the seconds_per_patch 0; it must be a positive number"),
        ({"seconds_per_patch": None}, "has the seconds_per_patch None"),
    ],
)
def test_metadata_that_contradict_the_grid(dataset: VlmDataset, change: dict[str, Any], message: str) -> None:
    metadata, row = dataset.metadata(0), dataset.index.row(0)
    assert steps_of(metadata, row, dataset.family) == (1, 2 if dataset.family.name == "qwen2_5_vl" else 1)
    metadata["images"][1] |= change
    with pytest.raises(ValueError, match=message):
        steps_of(metadata, row, dataset.family)


def test_metadata_without_a_video(dataset: VlmDataset) -> None:
    metadata, row = dataset.metadata(0), dataset.index.row(0)
    del metadata["images"][1]
    with pytest.raises(ValueError, match="images is not a list of 2 objects, one per image and video"):
        steps_of(metadata, row, dataset.family)


def test_grids_in_order(dataset: VlmDataset) -> None:
    sample = dataset[0]
    assert sample.grid_thw.tolist() == [list(item.grid) for item in sample.items]
    tensors = sample.to_torch()
    assert tensors["video_grid_thw"].tolist() == [list(sample.items[1].grid)]
    assert tensors["image_grid_thw"].tolist() == [list(sample.items[0].grid)]
