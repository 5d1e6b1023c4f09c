"""A dataset of each family, end to end: preprocessed, verified, loaded; and which family a tokenizer belongs to."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.chat_rows import image_item, turn, write_jsonl
from tests.conftest import build_dataset, encoded_image
from tests.families.reference import FAMILIES, image_processor
from tests.preprocess.command_line import Ended
from vlmdata import StreamingLoader, open_dataset
from vlmdata.errors import ConfigMismatchError
from vlmdata.families import REGISTRY, family
from vlmdata.inspect.sample import rebuild_image
from vlmdata.media.resize import resize_image
from vlmdata.preprocess.assets import EMBEDDED_TOKENIZER
from vlmdata.preprocess.chat.tokenizer import family_of
from vlmdata.preprocess.config import ImageConfig
from vlmdata.verify.dataset import verify_dataset

BOUNDS = ImageConfig(4096, 16_384)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same rows as a dataset of each family that the embedded tokenizer fits."""
    folder = tmp_path_factory.mktemp("families")
    rows = [
        {"messages": [turn("user", image_item(seed=n, width=70 + 30 * n), "?"), turn("assistant", "Noise.")]}
        for n in range(3)
    ]
    source = write_jsonl(folder / "rows.jsonl", rows)
    return {
        name: build_dataset(source, folder / name, recipe="chat", image=BOUNDS, family=name, pad_multiple=4)
        for name in FAMILIES
    }


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_dataset_of_each_family_is_sound_and_loads(built: dict[str, Path], name: str) -> None:
    assert verify_dataset(built[name]).faults == []
    dataset, made = open_dataset(built[name]), family(name)
    assert dataset.manifest.family == name
    assert dataset[0].patches.shape[1] == made.patch_bytes
    with StreamingLoader(built[name], capacity=256, global_batch=1) as loader:
        batches = list(loader)
    assert sum(batch.num_samples for batch in batches) == len(dataset)
    for batch in batches:
        stored = np.concatenate([dataset.sample(key).patches for key in batch.sample_keys])
        expected = made.pixel_values(torch.from_numpy(stored))
        assert torch.equal(batch.pixel_values(), expected)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_pixels_equal_those_of_the_familys_processor(built: dict[str, Path], name: str) -> None:
    sample, made = open_dataset(built[name])[1], family(name)
    stored = rebuild_image(sample, 0, made)
    pixels = np.asarray(Image.open(io.BytesIO(encoded_image(seed=1, width=100))))
    height, width = stored.shape[:2]
    assert np.array_equal(stored.transpose(2, 0, 1), resize_image(pixels, height, width))
    processor = image_processor(name, BOUNDS.min_pixels, BOUNDS.max_pixels)
    theirs = processor(torch.from_numpy(pixels.transpose(2, 0, 1).copy()), return_tensors="pt")
    assert torch.equal(made.pixel_values(torch.from_numpy(sample.patches.copy())), theirs["pixel_values"])


def test_families_are_not_mixed(built: dict[str, Path]) -> None:
    with pytest.raises(ConfigMismatchError, match=r"is for qwen3_5, .* is for qwen2_5_vl"):
        StreamingLoader([built["qwen3_5"], built["qwen2_5_vl"]], capacity=256, global_batch=1)


@pytest.mark.parametrize(
    ("file", "fields", "expected"),
    [
        ("config.json", {"model_type": "qwen2_5_vl"}, "qwen2_5_vl"),
        ("config.json", {"model_type": "qwen3_vl_moe"}, "qwen3_vl"),
        ("config.json", {"model_type": "qwen3_5_moe_text"}, "qwen3_5"),
        ("config.json", {"model_type": "qwen2_5_vl_text"}, "qwen2_5_vl"),
        ("config.json", {"architectures": ["Other"]}, "qwen3_5"),
        ("preprocessor_config.json", {"processor_class": "Qwen2_5_VLProcessor"}, "qwen2_5_vl"),
        ("preprocessor_config.json", {"processor_class": "Qwen3VLProcessor"}, "qwen3_5"),
        ("preprocessor_config.json", ["no object"], "qwen3_5"),
    ],
)
def test_the_tokenizers_files_tell_its_family(tmp_path: Path, file: str, fields: object, expected: str) -> None:
    folder = shutil.copytree(EMBEDDED_TOKENIZER, tmp_path / "tokenizer")
    (folder / file).write_text(json.dumps(fields))
    assert family_of(str(folder)) == expected


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [("config.json", "model_type", "qwen2_vl"), ("preprocessor_config.json", "processor_class", "Qwen2VLProcessor")],
)
def test_a_model_of_no_family_needs_a_familys_name(
    tmp_path: Path, vlmdata: Callable[..., Ended], file: str, field: str, value: str
) -> None:
    folder = shutil.copytree(EMBEDDED_TOKENIZER, tmp_path / "tokenizer")
    (folder / file).write_text(json.dumps({field: value}))
    options = ("demo", "--limit", 2, "--tokenizer", folder, "--out", tmp_path / "out", "--max-pixels", 204_800)
    refused = vlmdata("preprocess", *options)
    assert refused.code == 2
    assert f"its {file} says {field} '{value}', which is of none of the families {', '.join(REGISTRY)}" in refused.said
    assert "give it as --family" in refused.said
    assert not (tmp_path / "out").exists()
    assert vlmdata("preprocess", *options, "--family", "qwen2_5_vl").code == 0


def test_a_tokenizer_that_is_not_there_has_the_default_family(tmp_path: Path) -> None:
    assert family_of(str(tmp_path / "nowhere")) == "qwen3_5"
    assert family_of("nobody/nothing") == "qwen3_5"
