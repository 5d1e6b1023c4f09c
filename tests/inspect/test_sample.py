"""Descriptions of samples, worked out again from the tar members and against the loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chat_rows import turn, write_jsonl
from tests.inspect.raw import RawSample
from vlmdata import StreamingLoader
from vlmdata.batch import IGNORE_INDEX
from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect import describe_sample
from vlmdata.inspect import sample as module
from vlmdata.inspect.sample import SampleDescription, SpanKind, position_of, rebuild_image
from vlmdata.media.image_file import image_file


@pytest.fixture(scope="module", params=["demo", "mixed"])
def both(request: pytest.FixtureRequest) -> list[tuple[RawSample, SampleDescription]]:
    dataset = request.getfixturevalue(f"{request.param}_dataset")
    raw = request.getfixturevalue(f"{request.param}_raw")
    return [(sample, describe_sample(dataset, i)) for i, sample in enumerate(raw)]


Both = list[tuple[RawSample, SampleDescription]]


def test_numbers_are_those_of_the_members(both: Both) -> None:
    for i, (raw, found) in enumerate(both):
        assert (found.key, found.index, found.shard) == (raw.key, i, raw.shard)
        assert found.source_row == raw.metadata["source_row"]
        assert (found.length, found.padded_length) == (raw.length, len(raw.arrays["input_ids"]))
        assert found.num_targets == int(raw.mask.sum())
        assert found.target_share == pytest.approx(raw.mask.mean())
        assert (found.target_turns, found.truncated) == (raw.metadata["target_turns"], raw.metadata["truncated"])


def test_bytes_are_where_the_sample_lies(mixed: Path, mixed_dataset: VlmDataset, mixed_raw: list[RawSample]) -> None:
    for i, raw in enumerate(mixed_raw):
        found = describe_sample(mixed_dataset, i)
        data = (mixed / found.shard).read_bytes()[found.offset : found.offset + found.size]
        assert data.startswith(f"{raw.key}.json\0".encode())
        assert raw.arrays["patches"].tobytes() in data


def test_tokens_are_those_of_the_members(both: Both) -> None:
    for raw, found in both:
        tokens = found.tokens
        assert np.array_equal(tokens.ids, raw.ids)
        assert np.array_equal(tokens.mask, raw.mask)
        assert np.array_equal(np.stack(list(tokens.positions.values())), raw.positions)
        assert len(tokens.texts) == raw.length


def test_labels_are_the_loaders(demo: Path, demo_dataset: VlmDataset) -> None:
    assert module.IGNORE_INDEX == IGNORE_INDEX
    loader = StreamingLoader(demo, capacity=2048, global_batch=1)
    seen = 0
    for batch in loader:
        assert batch.labels is not None
        for i, key in enumerate(batch.sample_keys):
            start = int(batch.cu_seqlens_padded[i])
            found = describe_sample(demo_dataset, key)
            labels = batch.labels[0, start : start + found.length].numpy()
            assert np.array_equal(found.tokens.labels, labels)
            seen += 1
    assert seen == len(demo_dataset)


def test_spans_cover_the_tokens_and_are_of_one_kind(both: Both) -> None:
    for raw, found in both:
        assert [span.start for span in found.spans] == [0, *(span.stop for span in found.spans[:-1])]
        assert found.spans[-1].stop == raw.length
        for number, span in enumerate(found.spans):
            assert set(raw.mask[span.start : span.stop].tolist()) == {int(span.target)}
            assert set(found.tokens.spans[span.start : span.stop].tolist()) == {number}
            if span.kind is not SpanKind.IMAGE:
                assert "".join(found.tokens.texts[span.start : span.stop]) == span.text


def test_text_is_what_the_tokenizer_decodes(both: Both, tokenizer: Any) -> None:
    for raw, found in both:
        whole = tokenizer.hf.decode(raw.ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert "".join(found.tokens.texts) == whole


def test_turns_are_those_of_the_text(both: Both, tokenizer: Any) -> None:
    for raw, found in both:
        whole = tokenizer.hf.decode(raw.ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        roles = [part.split("\n")[0] for part in whole.split("<|im_start|>")[1:]]
        assert [turn.role for turn in found.turns] == roles
        assert sum(turn.targets for turn in found.turns) == int(raw.mask.sum())


def test_images_stand_where_their_tokens_are(both: Both, tokenizer: Any) -> None:
    for raw, found in both:
        assert [list(image.grid) for image in found.images] == raw.grids.tolist()
        places = [i for image in found.images for i in range(image.start, image.start + image.tokens)]
        assert places == np.flatnonzero(raw.ids == tokenizer.info.image).tolist()
        for image, recorded in zip(found.images, raw.metadata["images"], strict=True):
            assert image.source == recorded
            assert (image.height, image.width) == raw.picture(image.number).shape[:2]
            area = recorded["width"] * recorded["height"]
            assert image.scale == pytest.approx((image.width * image.height / area) ** 0.5)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_picture_that_its_file_turns_is_not_enlarged(
    orientation: int, tmp_path: Path, make_dataset: Callable[..., Path]
) -> None:
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.zeros((96, 64, 3), np.uint8)).save(tmp_path / "a.jpg", exif=exif)
    row = {"messages": [turn("user", {"type": "image", "image": "a.jpg"}, "?"), turn("assistant", "Black.")]}
    dataset = VlmDataset(make_dataset(write_jsonl(tmp_path / "rows.jsonl", [row]), recipe="chat"))
    (image,) = describe_sample(dataset, 0).images
    assert (image.width, image.height) == ((64, 96) if orientation < 5 else (96, 64))
    assert image.scale == 1.0


def test_pictures_are_rebuilt_exactly(demo_dataset: VlmDataset, mixed_dataset: VlmDataset, both: Both) -> None:
    import io

    from PIL import Image

    dataset = demo_dataset if len(both) == len(demo_dataset) else mixed_dataset
    for i, (raw, found) in enumerate(both):
        for image in found.images:
            expected = raw.picture(image.number)
            pixels = rebuild_image(dataset[i], image.number, dataset.family)
            assert np.array_equal(pixels, expected)
            assert np.array_equal(np.asarray(Image.open(io.BytesIO(image_file(pixels, "png")))), expected)
            small = Image.open(io.BytesIO(image_file(pixels, "webp", 48)))
            assert max(small.size) <= 48
    with pytest.raises(IndexError, match="no image 7"):
        rebuild_image(dataset[0], 7, dataset.family)


def test_a_sample_is_named_by_key_or_number(mixed_dataset: VlmDataset) -> None:
    keys = [mixed_dataset.index.key(i) for i in range(len(mixed_dataset))]
    for i, key in enumerate(keys):
        assert (
            position_of(mixed_dataset, key) == position_of(mixed_dataset, str(i)) == position_of(mixed_dataset, i) == i
        )
    assert position_of(mixed_dataset, "-1") == len(keys) - 1
    # Row 3 was rejected: its key must not be taken for the fourth sample.
    with pytest.raises(KeyError, match="no sample '000000003'"):
        position_of(mixed_dataset, "000000003")
    with pytest.raises(IndexError, match=f"no sample {len(keys)}"):
        position_of(mixed_dataset, str(len(keys)))
    for wrong in ("", "x", "1.5", "--1", "٣", "1_0", " 1"):
        with pytest.raises(KeyError):
            position_of(mixed_dataset, wrong)
