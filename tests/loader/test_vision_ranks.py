"""Ranks of a vision tower read the packs of all data-parallel ranks, each with its own images and no others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.loader.helpers import epoch_of, stream
from vlmdata.batch import PackedBatch
from vlmdata.errors import UsageError
from vlmdata.packing.item_runs import BREAK_EVEN_PATCHES, pack_runs, step_runs


def identity(batch: PackedBatch) -> tuple[object, ...]:
    return batch.epoch, batch.step, batch.pack, batch.sample_keys, batch.image_grid_thw.tolist()


@pytest.mark.parametrize(("dp_size", "ranks", "num_workers"), [(1, 2, 0), (2, 3, 1), (4, 1, 0)])
def test_each_image_is_read_once_in_the_order_of_the_packs(
    chat: Path, dp_size: int, ranks: int, num_workers: int
) -> None:
    sizes = {"global_batch": 4, "dp_size": dp_size}
    by_rank = [epoch_of(chat, **sizes, dp_rank=rank) for rank in range(dp_size)]
    # Micro-batch by micro-batch, and in each the packs of the ranks in order.
    wholes = [batch for micro_batch in zip(*by_rank, strict=True) for batch in micro_batch]
    apart = {**sizes, "vision_ranks": ranks, "parts": ("pixels",), "num_workers": num_workers}
    shares = [epoch_of(chat, **apart, vision_rank=rank) for rank in range(ranks)]
    assert all([identity(batch) for batch in share] == [identity(batch) for batch in wholes] for share in shares)
    loads = np.zeros(ranks, np.int64)
    for number, whole in enumerate(wholes):
        ends = np.cumsum(whole.host.image_grid_thw.prod(1))
        found: list[int] = []
        for rank, share in enumerate(shares):
            mine = share[number].host.image_indices
            found += mine.tolist()
            pieces = [whole.patches[ends[i] - whole.host.image_grid_thw[i].prod() : ends[i]] for i in mine]  # type: ignore[index]
            assert torch.equal(share[number].patches, torch.cat([whole.patches[:0], *pieces]))  # type: ignore[arg-type, index]
            assert share[number].input_ids is share[number].labels is None
            assert share[number].position_ids.shape == (3, 1, 0)
            loads[rank] += sum(map(len, pieces))
        assert sorted(found) == list(range(len(ends)))
    assert loads.max() <= loads.min() + 2 * 160  # of the whole epoch: no rank has more than a few images more


def test_both_sides_know_who_encodes_what_and_are_at_the_same_place(chat: Path) -> None:
    sizes = {"global_batch": 4, "dp_size": 2, "vision_ranks": 2, "context_parallel": 2}
    with (
        stream(chat, **sizes, dp_rank=1, context_parallel_rank=1, parts=("tokens",)) as language,
        stream(chat, **sizes, vision_rank=1, parts=("pixels",)) as tower,
    ):
        assert len(tower) == 2 * len(language)
        for step in range(language.steps()):
            known = language.images(0, step)
            packs = [pack for packs in known for pack in packs]
            assert [len(packs) for packs in known] == [2, 2]
            for theirs, ours in zip(packs, [pack for packs in tower.images(0, step) for pack in packs], strict=True):
                assert theirs.runs.owners.tolist() == ours.runs.owners.tolist()
            for pack in packs:
                batch = next(iter(tower))
                assert batch.host.image_indices.tolist() == pack.runs.of(1).items.tolist()
                assert batch.host.cu_seqlens_padded.tolist() == pack.cu_seqlens_padded.tolist()
                assert batch.host.items.starts.tolist() == pack.starts.tolist()
            for _ in known:
                next(iter(language))
            assert tower.position == language.position
            assert tower.state_dict() == language.state_dict()


def test_resume_goes_on_where_the_tower_was(chat: Path) -> None:
    options = {"global_batch": 4, "dp_size": 2, "vision_ranks": 1, "vision_rank": 0, "parts": ("pixels",)}
    whole = epoch_of(chat, **options)
    with stream(chat, **options) as tower:
        assert tower.stats.bytes_read == 0
        for batch in tower:
            assert batch.patches is not None
        assert tower.stats.bytes_read == sum(batch.patches.numel() for batch in whole)  # type: ignore[union-attr]
    with stream(chat, **options) as first, stream(chat, **options) as second:
        for _ in range(3):
            next(iter(first))
        second.load_state_dict(first.state_dict())
        rest = list(second)
    assert [identity(batch) for batch in rest] == [identity(batch) for batch in whole[3:]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vision_ranks": 2, "vision_rank": 2, "dp_size": 1}, "vision_rank 2 of vision_ranks 2"),
        ({"vision_rank": 0, "dp_size": 1}, "vision_rank 0 of vision_ranks 0"),
        ({"vision_ranks": 1, "vision_rank": 0}, "give dp_size, and no context_parallel_rank"),
    ],
)
def test_impossible_ranks_are_refused(chat: Path, options: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        stream(chat, **options)


grids = st.lists(st.tuples(st.just(1), st.sampled_from([2, 16, 64]), st.sampled_from([2, 32])), max_size=5)


@given(step=st.lists(st.lists(grids, min_size=1, max_size=3), max_size=4), size=st.integers(1, 5))
def test_the_work_of_a_step_is_even(step: list[list[list[tuple[int, int, int]]]], size: int) -> None:
    owners = [[runs.owners for runs in packs] for packs in step_runs(step, size)]
    assert [[len(pack) for pack in packs] for packs in owners] == [[len(pack) for pack in packs] for packs in step]
    loads = [0] * size
    for packs, of_packs in zip(step, owners, strict=True):
        for pack, of_pack in zip(packs, of_packs, strict=True):
            for (_, h, w), owner in zip(pack, of_pack.tolist(), strict=True):
                loads[owner] += h * w * (BREAK_EVEN_PATCHES + h * w)
    spans = [h * w for packs in step for pack in packs for _, h, w in pack]
    most = max((span * (BREAK_EVEN_PATCHES + span) for span in spans), default=0)
    assert max(loads) - min(loads) <= most, "as of any assignment to the least loaded rank"
    if step:
        together = [grid for pack in step[0] for grid in pack]
        assert [owner for pack in owners[0] for owner in pack.tolist()] == pack_runs(together, size).owners.tolist()
