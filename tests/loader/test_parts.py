"""Each rank reads only its part: of the fields, of the tokens, of the images."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.loader.helpers import assert_same, differences, epoch_of, stream
from vlmdata.batch import PackedBatch, Slice
from vlmdata.format.dataset import VlmDataset
from vlmdata.packing.item_runs import BREAK_EVEN_PATCHES, ItemRuns, pack_runs, step_runs

PARTS: list[tuple[str, ...]] = [
    (),
    ("tokens",),
    ("labels",),
    ("pixels",),
    ("tokens", "labels"),
    ("tokens", "pixels"),
    ("labels", "pixels"),
    ("tokens", "labels", "pixels"),
]
#: Bytes of a stored token: positions, ids, and the mask.
POSITION_BYTES, ID_BYTES, MASK_BYTES = 12, 4, 1


@pytest.mark.parametrize("parts", PARTS, ids="+".join)
def test_what_is_asked_for_is_there_and_equal_and_nothing_else(chat: Path, parts: tuple[str, ...]) -> None:
    fields = {"tokens": ["input_ids"], "labels": ["labels", "loss_mask", "loss_weights"], "pixels": ["patches"]}
    present = {field for part in parts for field in fields[part]}
    absent = {field for names in fields.values() for field in names} - present
    for batch, whole in zip(epoch_of(chat, parts=parts), epoch_of(chat), strict=True):
        assert {name for name in fields_of(batch) if getattr(batch, name) is None} == absent
        assert set(differences(batch, whole)) == absent


def fields_of(batch: PackedBatch) -> list[str]:
    assert not any(name.startswith("video") for name in batch.tensors())  # there are none in this data
    others = ("context_parallel", "headers")  # of slices, and of processors' tensors
    return [name for name in batch.__dataclass_fields__ if name not in others and not name.startswith("video")]


def bytes_read(data: Path, **options: Any) -> int:
    with stream(data, **options) as loader:
        list(loader)
        return loader.stats.bytes_read


def bytes_asked_for(dataset: VlmDataset, parts: tuple[str, ...]) -> int:
    """Of the stored arrays that the parts are made of."""
    tokens = int(dataset.index.padded_lengths.sum())
    a_token = POSITION_BYTES
    a_token += ID_BYTES * bool({"tokens", "labels"} & set(parts))
    a_token += MASK_BYTES * ("labels" in parts)
    return a_token * tokens + 768 * int(dataset.index.num_patches.sum()) * ("pixels" in parts)


@pytest.mark.parametrize("parts", PARTS, ids="+".join)
def test_only_what_is_asked_for_is_read(chat: Path, chats: VlmDataset, parts: tuple[str, ...]) -> None:
    least, read = bytes_asked_for(chats, parts), bytes_read(chat, parts=parts)
    # Headers and filling between the arrays of a sample may be read along; tar blocks are 512 bytes.
    between = 0 if set(parts) <= {"pixels"} else len(chats) * 2 * 4096
    assert least <= read <= least + between


def test_no_byte_of_patches_is_read_without_pixels(chat: Path, chats: VlmDataset) -> None:
    with_pixels, without = bytes_read(chat), bytes_read(chat, parts=("tokens", "labels"))
    assert with_pixels - without == int(chats.index.num_patches.sum()) * 768


def test_the_counts_do_not_depend_on_workers(chat: Path, chats: VlmDataset) -> None:
    with stream(chat, num_workers=2) as loader:
        batches = list(loader)
        stats = loader.stats
    assert stats.bytes_read == bytes_read(chat)
    assert stats.batches == len(batches)
    assert stats.tokens == int(chats.index.lengths.sum()) == sum(batch.true_tokens for batch in batches)
    assert stats.wait_seconds > 0


def test_without_pixels_there_are_no_pixel_values(chat: Path) -> None:
    batch = epoch_of(chat, parts=("tokens",))[0]
    with pytest.raises(ValueError, match="without the part 'pixels'"):
        batch.pixel_values()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_ranks_slice_is_the_slice_of_the_whole(chat: Path, size: int, num_workers: int) -> None:
    wholes = epoch_of(chat, context_parallel=size)
    for rank in range(size):
        slices = epoch_of(chat, context_parallel=size, context_parallel_rank=rank, num_workers=num_workers)
        assert_same(slices, [whole.context_parallel_shard(rank, size) for whole in wholes])
        assert {batch.context_parallel for batch in slices} == {Slice(rank, size)}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("options", [{}, {"pad_to_capacity": True}, {"tensor_parallel": 3, "capacity": 840}])
def test_the_slices_are_the_zigzag_and_cover_the_pack_once(chat: Path, size: int, options: dict[str, int]) -> None:
    wholes = epoch_of(chat, context_parallel=size, **options)
    for rank in range(size):
        mine = epoch_of(chat, context_parallel=size, context_parallel_rank=rank, **options)
        for batch, whole in zip(mine, wholes, strict=True):
            owned = zigzag(whole.cu_seqlens_padded.tolist(), size, rank)
            assert len(owned) == whole.total_tokens // size
            for name in ("input_ids", "labels", "loss_mask", "padding_mask"):
                assert torch.equal(getattr(batch, name), getattr(whole, name)[:, owned])
            for name in ("position_ids", "cu_seqlens", "cu_seqlens_padded", "image_grid_thw", "image_starts"):
                assert torch.equal(getattr(batch, name), getattr(whole, name))
    everything = sorted(t for rank in range(size) for t in zigzag(wholes[0].cu_seqlens_padded.tolist(), size, rank))
    assert everything == list(range(wholes[0].total_tokens))


def zigzag(bounds: list[int], size: int, rank: int) -> list[int]:
    """Token by token: each sample in 2 * size chunks, of which a rank has the rank-th from either end."""
    owned = []
    for begin, end in pairwise(bounds):
        chunk = (end - begin) // (2 * size)
        owned += [t for t in range(begin, end) if (t - begin) // chunk in (rank, 2 * size - 1 - rank)]
    return owned


@pytest.mark.parametrize("size", [2, 4])
def test_every_image_is_read_and_encoded_by_one_rank(chat: Path, chats: VlmDataset, size: int) -> None:
    wholes = epoch_of(chat, context_parallel=size)
    seen = [torch.zeros(len(whole.image_grid_thw), dtype=torch.int64) for whole in wholes]
    patch_bytes = 0
    for rank in range(size):
        with stream(chat, context_parallel=size, context_parallel_rank=rank, parts=("pixels",)) as loader:
            for number, (batch, whole) in enumerate(zip(loader, wholes, strict=True)):
                assert batch.patches is not None
                assert whole.patches is not None
                seen[number][batch.image_indices] += 1
                assert torch.equal(batch.patches, patches_of(whole, batch.image_indices.tolist()))
                assert batch.pixel_values().shape == (len(batch.patches), 1536)
                patch_bytes += batch.patches.nbytes
            assert loader.stats.bytes_read == POSITION_BYTES * int(chats.index.padded_lengths.sum()) + sum(
                batch_bytes(whole, rank, size) for whole in wholes
            )
    assert all((counts == 1).all() for counts in seen)
    assert patch_bytes == int(chats.index.num_patches.sum()) * 768


def batch_bytes(whole: PackedBatch, rank: int, size: int) -> int:
    patches = whole.context_parallel_shard(rank, size).patches
    assert patches is not None
    return patches.nbytes


def patches_of(whole: PackedBatch, images: list[int]) -> torch.Tensor:
    assert whole.patches is not None
    pieces = whole.patches.split(whole.image_grid_thw.prod(1).tolist())
    return torch.cat([whole.patches[:0], *[pieces[image] for image in images]])


def test_a_slice_is_not_sliced_again_and_uneven_samples_are_refused(chat: Path) -> None:
    whole = epoch_of(chat, context_parallel=2)[0]
    with pytest.raises(ValueError, match="already slice 0 of 2"):
        whole.context_parallel_shard(0, 2).context_parallel_shard(1, 2)
    uneven = next(batch for batch in epoch_of(chat) if (batch.cu_seqlens_padded % 4).any())
    with pytest.raises(ValueError, match="plan with alignment 4"):
        uneven.context_parallel_shard(0, 2)


class TestRuns:
    grids = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40)), max_size=12)

    @given(grids, st.integers(1, 5))
    def test_each_temporal_patch_is_on_one_rank_and_no_rank_has_much_more(
        self, grids: list[tuple[int, int, int]], size: int
    ) -> None:
        runs = pack_runs(grids, size)
        places = [(item, begin + i) for item, begin, count, _ in rows(runs) for i in range(count)]
        assert places == [(item, place) for item, grid in enumerate(grids) for place in range(grid[0])], "in order"
        loads, costs = [0] * size, [h * w * (BREAK_EVEN_PATCHES + h * w) for _, h, w in grids]
        for item, _, count, owner in rows(runs):
            loads[owner] += count * costs[item]
        images = max((cost for cost, grid in zip(costs, grids, strict=True) if grid[0] == 1), default=0)
        videos = max((cost for cost, grid in zip(costs, grids, strict=True) if grid[0] > 1), default=0)
        assert max(loads) <= min(loads) + max(images + videos, 2 * videos)

    @given(grids, st.integers(1, 5))
    def test_few_videos_are_split_and_no_image(self, grids: list[tuple[int, int, int]], size: int) -> None:
        runs = pack_runs(grids, size)
        assert len(runs.items) <= len(grids) + size - 1
        assert len({(item, owner) for item, _, _, owner in rows(runs)}) == len(runs.items), "a rank has one run of each"

    @given(st.lists(grids, max_size=3), st.integers(1, 4))
    def test_packs_of_a_step_share_the_loads(self, packs: list[list[tuple[int, int, int]]], size: int) -> None:
        together = pack_runs([grid for pack in packs for grid in pack], size)
        (of_packs,) = step_runs([packs], size)
        firsts = [sum(map(len, packs[:number])) for number in range(len(packs))]
        assert rows(together) == [
            (item + first, *rest) for first, each in zip(firsts, of_packs, strict=True) for item, *rest in rows(each)
        ]

    def test_micro_batches_continue_with_the_loads_of_videos(self) -> None:
        # Three patches leave one of two ranks behind, which gets two of the next three.
        first, second = (packs[0] for packs in step_runs([[[(3, 8, 8)]], [[(3, 8, 8)]]], 2))
        patches = [np.bincount(runs.owners, weights=runs.counts, minlength=2).tolist() for runs in (first, second)]
        assert patches in ([[1, 2], [2, 1]], [[2, 1], [1, 2]])

    @given(grids, st.integers(1, 3), st.integers(1, 3))
    def test_a_split_of_runs_covers_each_once(self, grids: list[tuple[int, int, int]], size: int, parts: int) -> None:
        array = np.array(grids, np.int64).reshape(-1, 3)
        pieces = [pack_runs(grids, size).of(rank).split(array, parts) for rank in range(size)]
        found = sorted((item, begin + i) for each in pieces for item, begin, n, _ in rows(each) for i in range(n))
        assert found == [(item, place) for item, grid in enumerate(grids) for place in range(grid[0])]

    def test_the_largest_images_are_dealt_out_first(self) -> None:
        small, large = (1, 4, 4), (1, 40, 40)
        assert pack_runs([small, large, large, small, small], 2).owners.tolist() == [0, 0, 1, 1, 0]

    def test_videos_fill_up_what_images_leave(self) -> None:
        frame = (1, 8, 8)
        assert rows(pack_runs([(8, 8, 8)], 2)) == [(0, 0, 4, 0), (0, 4, 4, 1)]
        assert rows(pack_runs([frame, (7, 8, 8)], 2)) == [(0, 0, 1, 0), (1, 0, 3, 0), (1, 3, 4, 1)]
        # Rank 0 has more than its share by an image: the video goes to the others.
        assert rows(pack_runs([(1, 64, 64), (4, 8, 8)], 3)) == [(0, 0, 1, 0), (1, 0, 2, 1), (1, 2, 2, 2)]
        assert rows(pack_runs([(4, 8, 8), (4, 8, 8)], 2)) == [(0, 0, 4, 0), (1, 0, 4, 1)], "none is split in vain"

    def test_torch_and_numpy_and_no_images(self) -> None:
        tensor = torch.tensor([[1, 4, 4], [1, 8, 8]])
        assert pack_runs(tensor, 2).owners.tolist() == pack_runs(tensor.numpy(), 2).owners.tolist() == [1, 0]
        assert rows(pack_runs(torch.zeros(0, 3, dtype=torch.int64), 2)) == []


def rows(runs: ItemRuns) -> list[tuple[int, int, int, int]]:
    """Item, first temporal patch, temporal patches and owner of each run."""
    return list(zip(*(column.tolist() for column in vars(runs).values()), strict=True))


def test_a_middle_stage_takes_no_part_and_still_knows_the_layout(chat: Path) -> None:
    check: Callable[[PackedBatch], bool] = lambda batch: bool((batch.position_ids > 0).any())  # noqa: E731
    batches = epoch_of(chat, parts=())
    assert any(check(batch) for batch in batches)
    for batch in batches:
        assert batch.input_ids is batch.labels is batch.loss_mask is batch.patches is None
        assert batch.total_tokens == batch.position_ids.shape[-1] == batch.padding_mask.shape[-1]
