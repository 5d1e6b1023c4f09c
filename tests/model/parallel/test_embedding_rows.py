"""Image embeddings land on their tokens, however the images of a pack are spread over ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.helpers import make_sample, pack
from vlmdata.batch import PackedBatch

pytest.importorskip("megatron.core")

from model.parallel.image_rows import ImageEmbeddings, ImageRows, image_tokens
from model.parallel.packed import PackIndex

MERGE = 4
CPU = torch.device("cpu")


def encoded(patches: torch.Tensor) -> torch.Tensor:
    """Stands for the tower: of every four patches the first bytes, which are random."""
    return patches.reshape(-1, MERGE, patches.shape[-1])[:, 0, :8]


def placed(batch: PackedBatch, context: int, parts: int, ahead: bool) -> torch.Tensor:
    """What stands at each token of the pack, text zero, after all ranks have encoded and exchanged their parts.

    Args:
        batch: The pack.
        context: Context-parallel size.
        parts: Parts that encode a rank's images.
        ahead: Whether a rank needs the images of its following tokens too.
    """
    shares = [batch.context_parallel_shard(rank, context) if context > 1 else batch for rank in range(context)]
    gathered, rows_by_rank = [], []
    for rank, share in enumerate(shares):
        rows = [ImageRows.of(share, MERGE, context, rank, parts, part) for part in range(parts)]
        made = [encoded(each.patches_of(share.patches)) for each in rows]
        assert [len(each) for each in made] == list(rows[0].part_counts)
        assert [sum(t * h * w // MERGE for t, h, w in each.grids) for each in rows] == list(rows[0].part_counts)
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
        embeddings = ImageEmbeddings(arrived, routes[rank].wanted, rows_by_rank[rank].row_of_token)
        where, which = embeddings.places(each.local)
        assert where.tolist() == image_tokens(batch, MERGE, each.local).tolist()
        whole[torch.from_numpy(each.local)[where]] = arrived[which]
        if ahead:
            after, which = embeddings.places(each.following)
            assert torch.equal(arrived[which], placed_alone(batch)[torch.from_numpy(each.following)[after]])
    return whole


def placed_alone(batch: PackedBatch) -> torch.Tensor:
    return placed(batch, 1, 1, ahead=False)


grids = st.lists(st.tuples(st.sampled_from([2, 4, 8]), st.sampled_from([2, 4, 6])), max_size=4)


@given(
    samples=st.lists(grids, min_size=1, max_size=4),
    context=st.sampled_from([1, 2, 4]),
    parts=st.sampled_from([1, 2, 3, 4]),
    ahead=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_rows_do_not_depend_on_who_encodes_what(
    samples: list[list[tuple[int, int]]], context: int, parts: int, ahead: bool
) -> None:
    batch = pack([make_sample(seed, each, 10 + seed) for seed, each in enumerate(samples)], alignment=16)
    assert torch.equal(placed(batch, context, parts, ahead), placed_alone(batch))


def test_parts_share_the_work() -> None:
    batch = pack([make_sample(1, [(8, 8), (4, 4), (4, 4), (4, 4), (4, 4)], 20)])
    rows = [ImageRows.of(batch, MERGE, 1, 0, 2, part) for part in range(2)]
    assert rows[0].part_counts == (16, 16)
    assert rows[0].grids == ((1, 8, 8),)
    assert rows[1].held == ((64, 128),), "neighbours are one slice"
    alone = ImageRows.of(batch, MERGE, 1, 0)
    assert alone.patches_of(batch.patches) is batch.patches, "nothing is copied without parts"


def test_patches_of_other_images_are_refused() -> None:
    """Images of equal size in the wrong hands would pass for each other."""
    batch = pack([make_sample(1, [(4, 4), (4, 4)], 20)])
    mine = batch.context_parallel_shard(0, 2)
    other = dataclasses.replace(mine, image_indices=1 - mine.image_indices, host=None)
    with pytest.raises(ValueError, match=r"holds the patches of images \[\d\], but this rank encodes images \[\d\]"):
        ImageRows.of(other, MERGE, 2, 0)
