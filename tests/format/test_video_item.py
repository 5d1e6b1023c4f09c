"""An item of another kind, with frames and two temporal copies, from the writer to batch, audit and picture."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import xxhash

import vlmdata
from tests.loader.synthetic import IMAGE_TOKEN, PAD, write_dataset
from vlmdata.families.blocks import Blocks
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.format.index import DatasetIndex
from vlmdata.format.index_row import IndexRow, index_table, used_features
from vlmdata.format.manifest import Manifest
from vlmdata.format.reindex import index_rows_of
from vlmdata.format.schema import INDEX_NAME, MANIFEST_NAME, shard_name
from vlmdata.format.shard import EncodedItem, ShardWriter
from vlmdata.inspect.sample import rebuild_image
from vlmdata.media.codecs import IMAGE, VIDEO, Item, ItemShape, codec
from vlmdata.verify.items import audit_items, owners_of
from vlmdata.verify.sample import SampleRules

SHAPES = (ItemShape(IMAGE, (1, 4, 2)), ItemShape(VIDEO, (3, 2, 4), 2))
LENGTH = 24
VIDEO_TOKEN = 5


def pixels() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (shape.rows, FAMILY.patch_bytes), np.uint8) for shape in SHAPES]


@pytest.fixture(params=["raw", "zstd"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A dataset whose only sample has an image and a video."""
    folder = write_dataset(tmp_path / "dataset", shards=1, samples_per_shard=1)
    ids, starts, tokens = np.full(LENGTH, 7, np.int32), (2, 8), {IMAGE: (IMAGE_TOKEN,), VIDEO: (VIDEO_TOKEN,)}
    ids[2:4] = IMAGE_TOKEN
    for start in (8, 11, 14):  # a block per temporal patch
        ids[start : start + 2] = VIDEO_TOKEN
    blocks = Blocks.of(FAMILY, [(shape.kind, shape.grid) for shape in SHAPES], tokens)
    positions = FAMILY.position_ids(LENGTH, blocks.locate(ids), blocks.grids)
    arrays = {
        "input_ids": [np.append(ids, np.full(32 - LENGTH, PAD, np.int32))],
        "loss_mask": [np.zeros(32, np.uint8)],
        "position_ids": [np.pad(positions, ((0, 0), (0, 32 - LENGTH)))],
        **{f"{shape.kind}_grid_thw": [np.array([shape.grid], np.int32)] for shape in SHAPES},
    }
    items = [
        EncodedItem(codec(request.param).encode(Item(rows, shape, FAMILY)), shape, request.param, digest(rows))
        for shape, rows in zip(SHAPES, pixels(), strict=True)
    ]
    metadata = {"key": "000000000", "source_row": 0, "length": LENGTH, "target_turns": 1, "truncated": False}
    with ShardWriter(folder / shard_name(0)) as writer:
        placement = writer.add("000000000", metadata, arrays, items)
        size, sha256 = writer.close()
    row = IndexRow("000000000", 0, 0, placement, LENGTH, 32, 0, 1, False, starts)
    assert row.num_patches == 8 + 24
    pq.write_table(index_table([row]), folder / INDEX_NAME)
    manifest = Manifest.read(folder)
    manifest = dataclasses.replace(
        manifest,
        shards=(dataclasses.replace(manifest.shards[0], bytes=size, sha256=sha256),),
        index_sha256=hashlib.sha256((folder / INDEX_NAME).read_bytes()).hexdigest(),
        features=tuple(sorted(used_features([row]))),
        config={"options": {"pad_multiple": 32, "train_turns": "all"}},
    )
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())
    return folder


def digest(rows: np.ndarray) -> int:
    return int(xxhash.xxh3_64_intdigest(rows))


def test_index_and_sample(directory: Path) -> None:
    dataset = vlmdata.open_dataset(directory)
    assert {"images", "videos"} < set(dataset.manifest.features)
    assert dataset.index.item_copies.tolist() == [1, 2]
    sample = dataset[0]
    assert sample.items == dataset.index.shapes(0) == SHAPES
    assert sample.image_grid_thw.tolist() == [[1, 4, 2]]
    assert sample.video_grid_thw is not None
    assert sample.video_grid_thw.tolist() == [[3, 2, 4]]
    assert sample.grid_thw.tolist() == [[1, 4, 2], [3, 2, 4]]
    np.testing.assert_array_equal(dataset[0].patches, np.concatenate(pixels()))


def test_the_index_is_rebuilt_from_the_shard(directory: Path) -> None:
    info = Manifest.read(directory).shards[0]
    tokens = {IMAGE: (IMAGE_TOKEN,), VIDEO: (VIDEO_TOKEN,)}
    assert index_rows_of(directory, 0, info, tokens, FAMILY) == [DatasetIndex.read(directory / INDEX_NAME).row(0)]


def test_the_batch_holds_its_pixel_rows(directory: Path) -> None:
    images, videos = pixels()
    with vlmdata.StreamingLoader(directory, capacity=64, global_batch=1, num_workers=0) as loader:
        (batch,) = loader
    assert batch.patches is not None
    assert batch.video_patches is not None
    np.testing.assert_array_equal(batch.patches.numpy(), images)
    np.testing.assert_array_equal(batch.video_patches.numpy(), videos)
    with vlmdata.StreamingLoader(directory, capacity=64, global_batch=1, num_workers=0, pixels="float32") as loader:
        (batch,) = loader
    expanded = [
        FAMILY.pixel_values(torch.from_numpy(rows), copies=s.copies) for s, rows in zip(SHAPES, pixels(), strict=True)
    ]
    for found, wanted in zip((batch.patches, batch.video_patches), expanded, strict=True):
        assert found is not None
        assert torch.equal(found, wanted)


def test_stored_copies_are_the_frames_of_expanded_patches() -> None:
    rows = pixels()[1]
    values = FAMILY.pixel_values(torch.from_numpy(rows), copies=2)
    values = values.view(SHAPES[1].patches, 3, 2, FAMILY.patch_size**2)
    for frame in range(2):
        alone = FAMILY.pixel_values(torch.from_numpy(rows[frame::2].copy()))
        assert torch.equal(values[:, :, frame], alone.view(-1, 3, 2, FAMILY.patch_size**2)[:, :, 0])


def test_the_audit_decodes_it(directory: Path) -> None:
    dataset = vlmdata.open_dataset(directory)
    row, data = dataset.index.row(0), dataset._map(0)
    start, rules = row.items[0].offset, SampleRules.of(dataset.manifest)
    found = (start, sum(item.bytes for item in row.items))
    patches = audit_items(data, found, row, rules, owners_of([row]), pixels=True)
    assert not isinstance(patches, str), patches
    np.testing.assert_array_equal(patches, np.concatenate(pixels()))
    items = (row.items[0], dataclasses.replace(row.items[1], shape=ItemShape(VIDEO, (3, 2, 4), 3)))
    wrong = dataclasses.replace(row, placement=dataclasses.replace(row.placement, items=items))
    assert audit_items(data, found, wrong, rules, owners_of([wrong]), pixels=True) == (
        "video 1 stores 3 temporal copies of each patch"
    )


def test_its_first_frame_is_shown(directory: Path) -> None:
    picture = rebuild_image(vlmdata.open_dataset(directory)[0], 1, FAMILY)
    first = pixels()[1][:16:2]
    np.testing.assert_array_equal(picture, FAMILY.unpatchify(first, 2, 4).transpose(1, 2, 0))
