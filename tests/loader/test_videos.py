"""Batches of samples with images and videos: both apart, each in order, wherever they are read and sliced."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.loader.helpers import assert_same, epoch_of
from tests.loader.synthetic import IMAGE_TOKEN, PAD, VIDEO_TOKEN, write_dataset
from tests.service.servers import serving
from vlmdata.batch import PackedBatch
from vlmdata.families.chat import IMAGE, VIDEO
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.loader import StreamingLoader
from vlmdata.packing.item_runs import pack_runs

FAMILIES = ("qwen3_5", "qwen2_5_vl")
#: Of qwen3_5 each temporal patch is a block; of qwen2_5_vl each video.
OPTIONS: dict[str, Any] = {"capacity": 1536, "max_patches": None, "global_batch": 2, "pad_multiple": 4}
FIELDS = {"video_grid_thw", "video_starts", "video_block_starts", "video_runs", "video_patches"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The dataset of a family: 24 samples with no to three items, images and videos."""

    @cache
    def of(family: str) -> Path:
        return write_dataset(tmp_path_factory.mktemp(family) / "data", 2, 12, family=family, weighted=True, videos=True)

    return of


def batches_of(folder: Path, **options: Any) -> list[PackedBatch]:
    return [batch.clone() for batch in epoch_of(folder, **OPTIONS | options)]


def items_of(batch: PackedBatch, dataset: VlmDataset, kind: str) -> list[tuple[tuple[int, ...], np.ndarray, int]]:
    """Grid, stored rows and segment of the items of a kind, from the samples."""
    found = []
    for number, origin in enumerate(batch.origins):
        sample, at = dataset[origin.index], 0
        for item in sample.items:
            if item.kind == kind:
                found.append((item.grid, sample.patches[at : at + item.rows], number))
            at += item.rows
    return found


def part_of(item: tuple[tuple[int, ...], np.ndarray, int], begin: int, count: int) -> Any:
    """Some temporal patches of a video."""
    grid, stored, number = item
    frame = len(stored) // grid[0]
    return (count, *grid[1:]), stored[begin * frame : (begin + count) * frame], number


def rows(items: list[tuple[tuple[int, ...], np.ndarray, int]], width: int) -> np.ndarray:
    return np.concatenate([np.zeros((0, width), np.uint8), *(pixels for _, pixels, _ in items)])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_images_and_videos_are_those_of_the_samples(family: str, num_workers: int, data: Callable[[str], Path]) -> None:
    dataset, batches = VlmDataset(data(family)), batches_of(data(family), num_workers=num_workers)
    assert sum(len(batch.host.video_starts) > 1 and len(batch.host.image_starts) > 1 for batch in batches) > 1
    for batch in batches:
        images, videos = (items_of(batch, dataset, kind) for kind in (IMAGE, VIDEO))
        assert batch.image_grid_thw.tolist() == [list(grid) for grid, _, _ in images]
        np.testing.assert_array_equal(batch.patches, rows(images, batch.family.patch_bytes))
        if not videos:
            assert not FIELDS & batch.tensors().keys()
            continue
        assert batch.tensors().keys() >= FIELDS
        assert batch.video_grid_thw.tolist() == [list(grid) for grid, _, _ in videos]
        np.testing.assert_array_equal(batch.video_patches, rows(videos, batch.family.patch_bytes))
        assert batch.video_runs.tolist() == [[number, 0, grid[0]] for number, (grid, _, _) in enumerate(videos)]
        for name in FIELDS - {"video_patches"}:
            assert getattr(batch, name).tolist() == getattr(batch.host, name).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_items_and_their_blocks_are_where_the_tokens_are(family: str, data: Callable[[str], Path]) -> None:
    for batch in batches_of(data(family)):
        ids, places, host = batch.input_ids[0].numpy(), np.zeros(batch.total_tokens, np.int64), batch.host
        for start, count in zip(host.image_starts, batch.family.token_counts(host.image_grid_thw), strict=True):
            places[start : start + count] = IMAGE_TOKEN
        starts = iter(host.video_block_starts.tolist())
        for first, grid in zip(host.video_starts.tolist(), host.video_grid_thw.tolist(), strict=True):
            blocks = batch.family.expansion(VIDEO).blocks(tuple(grid))
            assert len(blocks) == (grid[0] if family == "qwen3_5" else 1)
            for number, block in enumerate(blocks):
                start = next(starts)
                assert number or start == first
                places[start : start + np.prod(block) // 4] = VIDEO_TOKEN
        assert next(starts, None) is None
        np.testing.assert_array_equal(np.where(np.isin(ids, (IMAGE_TOKEN, VIDEO_TOKEN)), ids, 0), places)
        # In order of their tokens, with their numbers among images and among videos.
        items = host.items
        assert items.starts.tolist() == sorted([*host.image_starts.tolist(), *host.video_starts.tolist()])
        for grid, start, is_video, number in zip(*vars(items).values(), strict=True):
            kind = "video" if is_video else "image"
            assert getattr(host, f"{kind}_starts")[number] == start
            assert getattr(host, f"{kind}_grid_thw")[number].tolist() == grid.tolist()


@pytest.mark.parametrize("pixels", ["uint8", "bfloat16", "float32"])
def test_pixel_values_of_videos_have_their_own_frames(pixels: str, data: Callable[[str], Path]) -> None:
    dataset = VlmDataset(data("qwen3_5"))
    dtype = torch.float32 if pixels == "uint8" else getattr(torch, pixels)
    for batch in batches_of(data("qwen3_5"), pixels=pixels):
        videos = items_of(batch, dataset, VIDEO)
        if not videos:
            with pytest.raises(ValueError, match="the pack has no videos"):
                batch.pixel_values_videos()
            continue
        stored = torch.from_numpy(rows(videos, 768)).view(-1, 2, 3, 256).transpose(1, 2).float()
        wanted = ((stored - 127.5) / 127.5).reshape(len(stored), -1).to(dtype)
        assert torch.equal(batch.pixel_values_videos(), wanted)
        assert batch.pixel_values().shape[1] == wanted.shape[1]


@pytest.mark.parametrize("pixels", ["uint8", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_slice_of_the_loader_is_the_slice_of_the_pack(family: str, pixels: str, data: Callable[[str], Path]) -> None:
    whole = batches_of(data(family), context_parallel=2, pixels=pixels)
    shards = [batches_of(data(family), context_parallel=2, context_parallel_rank=r, pixels=pixels) for r in range(2)]
    split = 0
    for number, batch in enumerate(whole):
        parts = [each[number] for each in shards]
        assert_same(parts, [batch.context_parallel_shard(rank, 2) for rank in range(2)])
        if batch.video_grid_thw is None:
            continue
        # Together the ranks hold each temporal patch of each video once, evenly.
        frames = 2 if pixels == "uint8" else 1
        pieces = {}
        for part in parts:
            lengths = (frames * part.host.video_grids_held.prod(axis=1)).tolist()
            assert sum(lengths) == len(part.video_patches)
            pieces |= dict(
                zip(map(tuple, part.host.video_runs.tolist()), part.video_patches.split(lengths), strict=True)
            )
        assert torch.equal(torch.cat([pieces[key] for key in sorted(pieces)]), batch.video_patches)
        split += len(pieces) > len(batch.host.video_starts)
        assert sorted((video, begin + i) for video, begin, count in pieces for i in range(count)) == [
            (video, place) for video, grid in enumerate(batch.host.video_grid_thw.tolist()) for place in range(grid[0])
        ]
        items = batch.host.items
        runs = pack_runs(items.grids, 2)
        assert [items.held(runs.of(rank)).videos.tolist() for rank in range(2)] == [
            part.host.video_runs.tolist() for part in parts
        ]
    assert split > 2


@pytest.mark.parametrize("parts", [(), ("labels",), ("pixels",)])
def test_boundaries_of_videos_need_no_part(parts: tuple[str, ...], data: Callable[[str], Path]) -> None:
    for batch, whole in zip(batches_of(data("qwen3_5"), parts=parts), batches_of(data("qwen3_5")), strict=True):
        assert batch.input_ids is None
        np.testing.assert_array_equal(batch.host.video_block_starts, whole.host.video_block_starts)
        np.testing.assert_array_equal(batch.host.video_starts, whole.host.video_starts)
        assert (batch.video_patches is None) == ("pixels" not in parts or whole.video_patches is None)


def test_towers_of_their_own_hold_each_temporal_patch_once(data: Callable[[str], Path]) -> None:
    dataset, whole = VlmDataset(data("qwen3_5")), batches_of(data("qwen3_5"))
    options = {"vision_ranks": 2, "parts": ("pixels",), "dp_size": 1}
    towers = [batches_of(data("qwen3_5"), vision_rank=rank, **options) for rank in range(2)]
    for number, batch in enumerate(whole):
        parts = [tower[number] for tower in towers]
        held = [(video, begin + i) for part in parts for video, begin, n in part.host.video_runs for i in range(n)]
        assert sorted(held) == [
            (video, i) for video, grid in enumerate(batch.host.video_grid_thw) for i in range(grid[0])
        ]
        videos = items_of(batch, dataset, VIDEO)
        for part in parts:
            if part.video_patches is not None:
                mine = [part_of(videos[video], begin, count) for video, begin, count in part.host.video_runs.tolist()]
                np.testing.assert_array_equal(part.video_patches, rows(mine, 768))


def test_a_damaged_sample_is_masked_with_its_videos(data: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(data("qwen3_5"), folder)
    dataset = VlmDataset(folder)
    kinds = {number: [item.kind for item in dataset[number].items] for number in range(len(dataset))}
    sample = next(number for number, each in kinds.items() if set(each) == {IMAGE, VIDEO})
    offset = int(dataset.index.item_offsets[dataset.index.grid_offsets[sample + 1] - 1])
    with open(dataset.shard_path(int(dataset.index.shard[sample])), "r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 1]))
    sound = batches_of(data("qwen3_5"), context_parallel=2)
    for rank in (None, 0, 1):
        damaged = batches_of(folder, on_damage="mask", context_parallel=2, context_parallel_rank=rank)
        for batch, before in zip(damaged, sound, strict=True):
            assert batch.masked == tuple(n for n, each in enumerate(before.origins) if each.index == sample)
            if not batch.masked:
                continue
            begin = int(before.cu_seqlens_padded[batch.masked[0]])
            stop = begin + dataset.index.lengths[sample]
            before = masked(before, begin, stop)
            assert_same([batch], [before if rank is None else before.context_parallel_shard(rank, 2)])


def masked(batch: PackedBatch, begin: int, stop: int) -> PackedBatch:
    """A whole batch whose sample at these tokens is masked: its items stand at their first tokens, without times."""
    host, family = batch.host, batch.family
    batch.input_ids[0, begin:stop] = PAD
    batch.labels[0, begin:stop] = -100
    batch.loss_mask[0, begin:stop] = 0
    batch.loss_weights[0, begin:stop] = 0
    starts, grids, blocks = [], [], host.video_block_starts.copy()
    at = 0
    for grid, start, is_video, number in zip(*vars(host.items).values(), strict=True):
        count = int(family.token_counts(grid)[0])
        inside = begin <= start < stop
        if inside:
            pixels = batch.video_patches if is_video else batch.patches
            copies, of_kind = (2, host.video_grid_thw) if is_video else (1, host.image_grid_thw)
            first = copies * int(of_kind[:number].prod(axis=1).sum())
            pixels[first : first + copies * int(grid.prod())] = 0
            batch.input_ids[0, start : start + count] = VIDEO_TOKEN if is_video else IMAGE_TOKEN
        here = range(int(grid[0]) if is_video else 1)
        for t in here:
            if inside:
                starts.append(int(start) - begin + t * count // int(grid[0]))
                grids.append((1, *grid[1:].tolist()))
            if is_video and inside:
                blocks[at] = starts[-1] + begin
            at += is_video
    batch.position_ids[:, 0, begin:stop] = torch.from_numpy(
        family.position_ids(stop - begin, np.array(starts), np.array(grids))
    ).long()
    batch.video_block_starts[:] = torch.from_numpy(blocks)
    host.video_block_starts[:] = blocks
    number = host.cu_seqlens_padded.tolist().index(begin)
    object.__setattr__(batch, "masked", (number,))
    return batch


def test_a_video_whose_frames_are_equal_may_be_stored_once(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "data", 1, 8, videos=True, video_copies=1)
    dataset = VlmDataset(folder)
    for pixels in ("uint8", "float32"):
        batches = [batch for batch in batches_of(folder, pixels=pixels) if batch.video_patches is not None]
        assert batches
        for batch in batches:
            stored = torch.from_numpy(rows(items_of(batch, dataset, VIDEO), 768))
            assert torch.equal(batch.pixel_values_videos(), batch.family.pixel_values(stored))
        # A slice may hold half of a video: as many rows as are stored of all of it.
        wholes = batches_of(folder, pixels=pixels, context_parallel=2)
        for rank in range(2):
            parts = batches_of(folder, pixels=pixels, context_parallel=2, context_parallel_rank=rank)
            assert_same(parts, [batch.context_parallel_shard(rank, 2) for batch in wholes])


def test_served_batches_are_those_of_a_local_loader(data: Callable[[str], Path]) -> None:
    ranks: list[dict[str, Any]] = [
        {},
        {"shared_memory": False, "context_parallel": 2, "context_parallel_rank": 0},
        {"context_parallel": 2, "context_parallel_rank": 1, "pixels": "bfloat16"},
        {"parts": ("labels",)},
    ]
    with serving(data("qwen3_5"), "-j", 1, "--memory", "64M") as server:
        for options in ranks:
            with (
                StreamingLoader([data("qwen3_5")], **OPTIONS | options) as local,
                StreamingLoader(server.url, **OPTIONS | options) as served,
            ):
                assert_same(local, served)
