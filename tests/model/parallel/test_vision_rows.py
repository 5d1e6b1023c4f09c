"""Rows of images and videos reach the ranks that place them, whoever encodes them and however the model is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.helpers import make_sample, pack

pytest.importorskip("megatron.core")

from vlmdata.loader.request.pack_request import PackImages
from vlmdata.model.parallel.item_blocks import ItemBlocks
from vlmdata.model.parallel.layout import require_layout
from vlmdata.model.parallel.packed import PackIndex
from vlmdata.model.parallel.separation import Separation
from vlmdata.model.parallel.vision_rows import MicroBatchRows, even_parts
from vlmdata.packing.item_runs import step_runs

MERGE = 4
image_grids = st.tuples(st.sampled_from([2, 4, 8]), st.sampled_from([2, 4, 6]))
video_grids = st.tuples(st.sampled_from([1, 2, 5]), st.sampled_from([2, 4]), st.sampled_from([2, 6]))
items = st.lists(image_grids | video_grids, max_size=4)
SIZES = st.builds(
    Separation,
    vision=st.sampled_from([2, 4, 6]),
    vision_tensor=st.sampled_from([1, 2]),
    data=st.just(2),
    context=st.sampled_from([1, 2]),
    tensor=st.sampled_from([1, 2, 3]),
    pipeline=st.just(1),
)


@given(
    packs=st.lists(st.lists(items, min_size=1, max_size=3), min_size=2, max_size=2), ranks=SIZES, ahead=st.booleans()
)
@settings(deadline=None, max_examples=30)
def test_each_token_gets_its_row(packs: list[list[list[tuple[int, ...]]]], ranks: Separation, ahead: bool) -> None:
    batches = [pack([make_sample(n, each, 10 + n) for n, each in enumerate(samples)], 16) for samples in packs]
    blocks = [ItemBlocks.of(batch, MERGE) for batch in batches]
    (runs,) = step_runs([[each.items.grids for each in blocks]], ranks.replicas)
    known = [
        PackImages(b.host.cu_seqlens, b.host.cu_seqlens_padded, i.grids, i.starts, i.are_videos, r)
        for b, i, r in zip(batches, [each.items for each in blocks], runs, strict=True)
    ]
    rows = MicroBatchRows.of(known, ranks, MERGE, following=ahead)
    # What the tower's data-parallel ranks compute, images and then videos: which pack, item and row of it.
    made: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks.replicas)]
    for videos in (False, True):
        for number, each in enumerate(known):
            for item, begin, count, owner in zip(
                *(column.tolist() for column in vars(each.runs).values()), strict=True
            ):
                frame = int(each.grids[item, 1:].prod()) // MERGE
                if each.are_videos[item] == videos:
                    made[owner] += [(number, item, row) for row in range(begin * frame, (begin + count) * frame)]
    sent: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for rank in range(ranks.vision):
        transfer = rows.to_send(rank)
        assert not any(transfer.received)
        chosen = [made[rank // ranks.vision_tensor][row] for row in transfer.outgoing.tolist()]
        ends = np.cumsum([0, *transfer.sent])
        sent |= {(rank, other): chosen[ends[other] : ends[other + 1]] for other in ranks.exchanging}
    for data, each in enumerate(known):
        for context in range(ranks.context):
            wanted, arrived = rows.wanted(data, context), []
            for tensor in range(ranks.tensor):
                rank = ranks.vision + tensor + ranks.tensor * (context + ranks.context * data)
                assert ranks.place(rank) == (data, context, tensor)
                transfer = rows.to_receive(rank)
                assert [len(sent[other, rank]) for other in range(ranks.vision)] == list(
                    transfer.received[: ranks.vision]
                )
                part = [row for other in range(ranks.vision) for row in sent[other, rank]]
                assert len(part) == even_parts(len(wanted), ranks.tensor)[tensor]
                arrived += part
            index = PackIndex.of_boundaries(each.cu_seqlens, each.cu_seqlens_padded, ranks.context, context)
            tokens = np.concatenate([index.local, index.following]) if ahead else index.local
            needed, row_of_token = set(), rows.row_of_token(data, blocks[data])
            for token in tokens[tokens >= 0].tolist():
                number = int(row_of_token[token])
                if number < 0:
                    continue
                pack_number, item, row = arrived[int(np.searchsorted(wanted, number))]
                assert pack_number == data
                assert token_of(blocks[data], item, row) == token
                needed.add(number)
            of_videos = {
                int(first) + row
                for first, count, item in zip(rows.firsts[data], rows.counts[data], each.runs.items, strict=True)
                for row in range(each.are_videos[item] * int(count))
            }
            assert wanted.tolist() == sorted(needed | of_videos), "each row once, of images none that no token needs"


def token_of(blocks: ItemBlocks, item: int, row: int) -> int:
    """The token of a row of an item."""
    own = blocks.owners == item
    tokens = [start + i for start, n in zip(blocks.starts[own], blocks.counts[own], strict=True) for i in range(n)]
    return int(tokens[row])


@pytest.mark.parametrize(
    ("world", "sizes", "words"),
    [
        (
            4,
            {"vision": 1, "tensor": 2},
            "vision_gpus 1 does not fit world size 4.* a multiple of .* = 2; sizes that do: 2$",
        ),
        (8, {"vision": 3, "vision_tensor": 2}, "a multiple of parallel.vision_tp 2 and .* sizes that do: 2, 4, 6$"),
        (2, {"vision": 2}, "does not fit world size 2.* sizes that do: 1$"),
        (2, {"vision": 1, "tensor": 2}, "= 2; start at least 3 processes"),
        (5, {"vision": 1, "expert": 3}, "expert-parallel size 3 does not divide the 4 processes"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(world: int, sizes: dict[str, int], words: str) -> None:
    one = {"tensor": 1, "context": 1, "pipeline": 1, "expert": 1}
    with pytest.raises(ValueError, match=words):
        require_layout(world, **(one | sizes))
    require_layout(7, **one, vision=3)
