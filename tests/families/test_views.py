"""An image that becomes several items: tiles and a thumbnail between one pair of marks, as InternVL has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vlmdata
from tests.chat_rows import mixed_rows, write_jsonl
from tests.conftest import build_dataset, encoded_image
from tests.families.tiled import FAMILY, MOST, SIDE
from vlmdata import families
from vlmdata.families import View
from vlmdata.format.ledger import read_ledger
from vlmdata.format.schema import LEDGER_NAME
from vlmdata.inspect.sample import SpanKind, describe_sample
from vlmdata.media.decode import decode_image
from vlmdata.media.resize import resize_image, resize_to_patches
from vlmdata.preprocess.config import ImageConfig, Overlong, PreprocessConfig
from vlmdata.preprocess.conversation import Document, ImagePart, TextPart
from vlmdata.preprocess.encode import EncodedSample, Encoder, encode_image
from vlmdata.preprocess.encode.image import image_tokens
from vlmdata.reasons import Reason
from vlmdata.verify.dataset import verify_dataset
from vlmdata.verify.sample import SampleRules, audit_sample

PER_TILE = (SIDE // FAMILY.factor) ** 2
sides = st.integers(40, 300)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.REGISTRY, FAMILY.name, "tests.families.tiled:FAMILY")
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiled")
    return build_dataset(write_jsonl(place / "rows.jsonl", mixed_rows()), place / "out", **options())


def options(**more: Any) -> dict[str, Any]:
    return {"recipe": "chat", "family": FAMILY.name, "image": ImageConfig(4096, 65_536), "rows_per_shard": 3, **more}


@settings(max_examples=30)
@given(height=sides, width=sides, seed=st.integers(0, 3))
def test_tiles_equal_those_of_transformers_processor(height: int, width: int, seed: int) -> None:
    from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor

    data = encoded_image(width, height, seed)
    pixels = torch.from_numpy(decode_image(data, 1 << 20).pixels.copy()).permute(2, 0, 1)
    processor = GotOcr2ImageProcessor(
        size={"height": SIDE, "width": SIDE}, image_mean=[0.5] * 3, image_std=[0.5] * 3, do_rescale=False,
        do_normalize=False,
    )  # fmt: skip
    wanted = processor(pixels, crop_to_patches=True, min_patches=1, max_patches=MOST, return_tensors="pt")
    views = encode_image(ImagePart(data), ImageConfig(4096, 65_536), FAMILY, "image")
    patches_per_side = SIDE // FAMILY.patch_size
    mine = [FAMILY.unpatchify(view.patches, patches_per_side, patches_per_side) for view in views]
    assert np.array_equal(np.stack(mine), wanted["pixel_values"].numpy())
    assert [view.view for view in views] == list(range(len(mine)))
    config = PreprocessConfig(family=FAMILY.name)
    assert image_tokens([ImagePart(data)], config, 0) == PER_TILE * len(views)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 80), st.integers(1, 80), st.sampled_from([3, 4]))
def test_a_crop_is_resized_alone(top: int, left: int, height: int, width: int, channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (120, 120, channels), np.uint8)
    crop = np.ascontiguousarray(image[top : top + height, left : left + width])
    wanted = FAMILY.patchify(resize_image(np.ascontiguousarray(crop[..., :3]), SIDE, SIDE))
    assert np.array_equal(resize_to_patches(crop, SIDE, SIDE, FAMILY), wanted)
    whole = resize_image(np.ascontiguousarray(image[..., :3]), 2 * SIDE, 2 * SIDE)
    part = resize_to_patches(image, 2 * SIDE, 2 * SIDE, FAMILY, part=(SIDE, 0, SIDE, SIDE))
    assert np.array_equal(part, FAMILY.patchify(np.ascontiguousarray(whole[:, SIDE:, :SIDE])))


def test_crops_of_a_family_are_taken_before_they_are_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded_image(120, 80)
    views = (View((SIDE, SIDE), crop=(10, 20, 50, 60)), View((2 * SIDE, SIDE)))
    monkeypatch.setattr(type(FAMILY), "views", lambda *_: views)
    first, second = encode_image(ImagePart(data), ImageConfig(4096, 65_536), FAMILY, "image")
    pixels = decode_image(data, 1 << 20).pixels
    crop = np.ascontiguousarray(pixels[10:60, 20:80])
    assert np.array_equal(first.patches, FAMILY.patchify(resize_image(crop, SIDE, SIDE)))
    assert np.array_equal(second.patches, FAMILY.patchify(resize_image(pixels, 2 * SIDE, SIDE)))
    assert (first.whole, second.whole) == (False, True)
    assert (first.grid, second.grid) == ((1, 4, 4), (1, 8, 4))


def test_a_dataset_is_sound_and_loads(built: Path) -> None:
    report = verify_dataset(built)
    assert report.faults == []
    dataset = vlmdata.open_dataset(built)
    counts = dataset.index.item_counts.tolist()
    assert max(counts) > 3
    with vlmdata.StreamingLoader(built, capacity=256, global_batch=1, num_workers=0) as loader:
        batches = list(loader)
    assert sum(len(batch.image_grid_thw) for batch in batches) == sum(counts)
    for batch in batches:
        stored = np.concatenate([dataset.sample(key).patches for key in batch.sample_keys])
        assert torch.equal(batch.pixel_values(), FAMILY.pixel_values(torch.from_numpy(stored)))


def test_views_stand_between_one_pair_of_marks(built: Path) -> None:
    dataset = vlmdata.open_dataset(built)
    i = int(np.argmax(dataset.index.item_counts))
    marks, sample, row = dataset.manifest.tokenizer.items["image"], dataset[i], dataset.index.row(i)
    views = len(sample.image_grid_thw)
    ids = sample.input_ids
    assert 0 < (ids == marks.before[0]).sum() == (ids == marks.after[0]).sum() < views
    assert (ids == marks.token).sum() == PER_TILE * views
    shown = describe_sample(dataset, i)
    assert len(shown.images) == len([span for span in shown.spans if span.kind is SpanKind.IMAGE]) == views
    rules = SampleRules.of(dataset.manifest)
    assert audit_sample(sample, row, rules) == []
    for mark in (marks.before[0], marks.after[0]):
        changed = ids.copy()
        changed[np.flatnonzero(ids == mark)[0]] = 0
        found = audit_sample(dataclasses.replace(sample, input_ids=changed), row, rules)
        assert {check for check, _ in found} == {"image_block"}


def test_a_document_is_not_cut_between_views(tokenizer: Any) -> None:
    picture = ImagePart(encoded_image(128, 64))
    config = PreprocessConfig(
        family=FAMILY.name, image=ImageConfig(4096, 65_536), max_length=24, overlong=Overlong.SPLIT, pad_multiple=1
    )
    made = Encoder(config, tokenizer).encode_all(Document((TextPart("word " * 20), picture, TextPart("word " * 9))))
    pieces = [piece for piece in made if isinstance(piece, EncodedSample)]
    assert len(pieces) == len(made) > 1
    assert sorted(len(piece.items) for piece in pieces)[-2:] == [0, 3]


def test_a_codec_that_stores_files_refuses_parts_of_an_image(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", mixed_rows())
    refused = build_dataset(source, tmp_path / "out", **options(pixels="source"))
    assert {line.reason for line in read_ledger(refused / LEDGER_NAME)} >= {Reason.UNSUITABLE_ITEM}
    made = build_dataset(source, tmp_path / "zstd", **options(pixels="zstd"))
    assert verify_dataset(made).faults == []
