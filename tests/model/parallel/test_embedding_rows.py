"""Embeddings land on their tokens, however the images and videos of a pack are spread over ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.helpers import IMAGE, VIDEO, make_sample, pack
from vlmdata.batch import PackedBatch

pytest.importorskip("megatron.core")

from vlmdata.model.parallel.embedding_rows import EmbeddingRows, ItemEmbeddings
from vlmdata.model.parallel.item_blocks import ItemBlocks
from vlmdata.model.parallel.packed import PackIndex

MERGE = 4
CPU = torch.device("cpu")


def encoded(rows: EmbeddingRows, batch: PackedBatch) -> torch.Tensor:
    """Stands for the tower: of every four patches the first bytes, which are random."""
    images, videos = rows.images.of(batch.patches), batch.video_patches
    made = [images.reshape(-1, MERGE, images.shape[-1])[:, 0, :8]]
    if videos is not None:
        made.append(rows.videos.of(videos).reshape(-1, 2 * MERGE, images.shape[-1])[:, 0, :8])
    return torch.cat(made)


def placed(batch: PackedBatch, context: int, parts: int, ahead: bool) -> torch.Tensor:
    """What stands at each token of the pack, text zero, after all ranks have encoded and exchanged their parts.

    Args:
        batch: The pack.
        context: Context-parallel size.
        parts: Parts that encode a rank's images and videos.
        ahead: Whether a rank needs the items of its following tokens too.
    """
    shares = [batch.context_parallel_shard(rank, context) if context > 1 else batch for rank in range(context)]
    gathered, rows_by_rank = [], []
    for rank, share in enumerate(shares):
        blocks = ItemBlocks.of(share, MERGE)
        rows = [EmbeddingRows.of(share, blocks, context, rank, parts, part) for part in range(parts)]
        made = [encoded(each, share) for each in rows]
        assert [len(each) for each in made] == list(rows[0].part_counts)
        grids = [(*each.images.grids, *each.videos.grids) for each in rows]
        assert [sum(t * h * w // MERGE for t, h, w in each) for each in grids] == list(rows[0].part_counts)
        gathered.append(torch.cat(made))
        assert len({(each.counts, each.part_counts, each.row_of_token.tobytes()) for each in rows}) == 1
        assert rows[0].counts[rank] == len(gathered[-1])
        rows_by_rank.append(rows[0])
    index = PackIndex.of(shares[0], context, 0).of_all_ranks(context)
    tokens = [np.concatenate([each.local, each.following]) if ahead else each.local for each in index]
    routes = [rows.routes(tokens) for rows in rows_by_rank]
    whole = torch.zeros(batch.total_tokens, 8, dtype=torch.uint8)
    for rank, each in enumerate(index):
        sent = [gathered[other][torch.from_numpy(routes[other].outgoing)] for other in range(context)]
        pieces = [sent[other].split(routes[other].sent)[rank] for other in range(context)]
        assert tuple(map(len, pieces)) == routes[rank].received
        needed = {int(row) for row in rows_by_rank[rank].row_of_token[tokens[rank][tokens[rank] >= 0]] if row >= 0}
        assert routes[rank].wanted.tolist() == sorted(needed), "each row once, and none that no token needs"
        arrived = torch.cat(pieces)
        embeddings = ItemEmbeddings(arrived, routes[rank].wanted, rows_by_rank[rank].row_of_token)
        where, which = embeddings.places(each.local)
        assert where.tolist() == ItemBlocks.of(batch, MERGE).among(each.local).tolist()
        whole[torch.from_numpy(each.local)[where]] = arrived[which]
        if ahead:
            after, which = embeddings.places(each.following)
            assert torch.equal(arrived[which], placed_alone(batch)[torch.from_numpy(each.following)[after]])
    return whole


def placed_alone(batch: PackedBatch) -> torch.Tensor:
    return placed(batch, 1, 1, ahead=False)


image_grids = st.tuples(st.sampled_from([2, 4, 8]), st.sampled_from([2, 4, 6]))
video_grids = st.tuples(st.sampled_from([1, 2, 3, 5]), st.sampled_from([2, 4]), st.sampled_from([2, 6]))
grids = st.lists(image_grids | video_grids, max_size=4)


@given(
    samples=st.lists(grids, min_size=1, max_size=4),
    context=st.sampled_from([1, 2, 4]),
    parts=st.sampled_from([1, 2, 3, 4]),
    ahead=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_rows_do_not_depend_on_who_encodes_what(
    samples: list[list[tuple[int, ...]]], context: int, parts: int, ahead: bool
) -> None:
    batch = pack([make_sample(seed, each, 10 + seed) for seed, each in enumerate(samples)], alignment=16)
    found = placed_alone(batch)
    assert torch.equal(placed(batch, context, parts, ahead), found)
    for token, patches in ((IMAGE, batch.patches), (VIDEO, batch.video_patches)):
        if patches is not None:
            frames = 1 if token == IMAGE else 2
            assert torch.equal(found[batch.input_ids[0] == token], patches[:: frames * MERGE, :8]), "in their order"


def test_parts_share_the_work() -> None:
    batch = pack([make_sample(1, [(8, 8), (4, 4), (4, 4), (4, 4), (4, 4)], 20)])
    blocks = ItemBlocks.of(batch, MERGE)
    rows = [EmbeddingRows.of(batch, blocks, 1, 0, 2, part) for part in range(2)]
    assert rows[0].part_counts == (16, 16)
    assert rows[0].images.grids == ((1, 8, 8),)
    assert rows[1].images.held == ((64, 128),), "neighbours are one slice"
    alone = EmbeddingRows.of(batch, blocks, 1, 0)
    assert alone.images.of(batch.patches) is batch.patches, "nothing is copied without parts"


@pytest.mark.parametrize(
    ("field", "grid"), [("image_indices", (4, 4)), ("video_runs", (1, 4, 4)), ("video_runs", (4, 4, 4))]
)
def test_patches_of_others_are_refused(field: str, grid: tuple[int, ...]) -> None:
    """Images of equal size in the wrong hands would pass for each other, and so would videos and parts of them."""
    batch = pack([make_sample(1, [grid, grid] if grid != (4, 4, 4) else [grid], 20)])
    mine, theirs = (batch.context_parallel_shard(rank, 2) for rank in range(2))
    other = dataclasses.replace(mine, host=None, **{field: getattr(theirs, field)})
    kind = field.partition("_")[0]
    message = rf"holds the patches of {kind}s \[.*\].*, but this rank encodes {kind}s \[.*\]: cut it with"
    with pytest.raises(ValueError, match=message):
        EmbeddingRows.of(other, ItemBlocks.of(other, MERGE), 2, 0)


def test_blocks_of_other_videos_are_refused() -> None:
    batch = pack([make_sample(1, [(3, 4, 4)], 20)])
    few = dataclasses.replace(batch, video_block_starts=batch.video_block_starts[1:], host=None)
    with pytest.raises(ValueError, match="has the starts of 2 blocks of videos, but the grids of its videos have 3"):
        ItemBlocks.of(few, MERGE)
    far = dataclasses.replace(batch, video_block_starts=batch.video_block_starts + 30, host=None)
    with pytest.raises(ValueError, match=r"video 0 of pack 0 spans tokens \d+ to \d+, outside the pack's \d+"):
        ItemBlocks.of(far, MERGE)
