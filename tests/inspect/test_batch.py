"""Descriptions of packs, steps and rows, against what the loader yields."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.inspect.raw import RawSample, read_rejects
from vlmdata import StreamingLoader
from vlmdata.batch import PackedBatch
from vlmdata.context_parallel import partition_indices
from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect import BatchDescription, describe_batch, describe_row, describe_step
from vlmdata.inspect.batch import batch_at, num_batches
from vlmdata.loader.request.index_rows import default_capacity
from vlmdata.storage.open import open_dataset

LAYOUTS: list[dict[str, Any]] = [
    {"capacity": 1536, "global_batch": 2, "context_parallel": 2, "tensor_parallel": 2},
    {"capacity": 1400, "global_batch": 4, "dp_size": 2, "dp_rank": 1, "last": "keep"},
    {"capacity": 1536, "global_batch": 4, "dp_size": 4, "dp_rank": 3, "pad_to_capacity": True, "context_parallel": 4},
    {"capacity": 1400, "global_batch": 2, "max_patches": 300, "balance": False, "seed": 5, "last": "drop"},
]


def planning(data: Any, **layout: Any) -> StreamingLoader:
    """A loader as ``inspect`` makes it: of one rank, without pixels."""
    return StreamingLoader(data, **{"dp_rank": 0, "dp_size": 1, "parts": ("tokens", "labels"), **layout})


@pytest.fixture(scope="module", params=range(len(LAYOUTS)))
def described(request: pytest.FixtureRequest, demo: Path) -> list[tuple[PackedBatch, BatchDescription]]:
    layout = LAYOUTS[request.param]
    capacity = layout["capacity"]
    loader = planning([demo], **layout)
    epoch = list(StreamingLoader(demo, **layout))
    found = []
    for number in reversed(range(num_batches(loader))):  # out of order: each is found by itself
        batch = batch_at(loader, number)
        cp = layout.get("context_parallel", 1)
        found.append(describe_batch(batch, cost=loader.plan_config.cost, context_parallel=cp, capacity=capacity))
    assert len(found) == len(epoch)
    return list(zip(epoch, reversed(found), strict=True))


Described = list[tuple[PackedBatch, BatchDescription]]


def test_the_batches_are_the_loaders(described: Described) -> None:
    for batch, found in described:
        place = (batch.epoch, batch.step, batch.micro_batch, batch.pack)
        assert (found.epoch, found.step, found.micro_batch, found.pack) == place
        assert list(found.cu_seqlens) == batch.cu_seqlens.tolist()
        assert list(found.cu_seqlens_padded) == batch.cu_seqlens_padded.tolist()
        assert (found.total_tokens, found.true_tokens) == (batch.total_tokens, int((~batch.padding_mask).sum()))
        assert found.padding == int(batch.padding_mask.sum())
        assert batch.labels is not None
        assert found.targets == int((batch.labels != -100).sum())
        assert tuple(s.key for s in found.segments if s.key) == batch.sample_keys
        assert tuple(s.source_row for s in found.segments if s.key) == tuple(origin.row for origin in batch.origins)


def test_segments_add_up_and_cost_is_the_plans(described: Described, demo: Path) -> None:
    for batch, found in described:
        assert batch.labels is not None
        for segment in found.segments:
            inside = slice(segment.start, segment.stop)
            assert segment.length + segment.padding == segment.stop - segment.start
            assert segment.padding == int(batch.padding_mask[0, inside].sum())
            assert segment.targets == int((batch.labels[0, inside] != -100).sum())
        assert sum(segment.patches for segment in found.segments) == int(batch.image_grid_thw.prod(dim=1).sum())
        if batch.pack >= 0:
            assert sum(segment.cost_share for segment in found.segments) == pytest.approx(1)


def test_cost_is_the_plans(demo: Path) -> None:
    loader = planning([demo], **LAYOUTS[0])
    for number in range(num_batches(loader)):
        batch = batch_at(loader, number)
        found = describe_batch(batch, cost=loader.plan_config.cost)
        expected = 0 if batch.pack < 0 else int(loader.plan(0).pack_costs(np.array([batch.pack]))[0])
        assert found.cost == expected


def test_ranks_get_what_context_parallel_ranks_are_given(described: Described) -> None:
    for batch, found in described:
        size = found.context_parallel
        assert len(found.ranks) == size
        owned: list[int] = []
        for share in found.ranks:
            tokens = [i for start, stop in share.ranges for i in range(start, stop)]
            bounds = batch.cu_seqlens_padded.numpy()
            assert tokens == partition_indices(bounds, batch.total_tokens, size, share.rank).tolist()
            part = batch.context_parallel_shard(share.rank, size)
            assert part.labels is not None
            assert part.patches is not None
            assert share.tokens == part.padding_mask.numel()
            assert share.true_tokens == int((~part.padding_mask).sum())
            assert share.targets == int((part.labels != -100).sum())
            assert (share.images, share.patches) == (len(part.image_indices), len(part.patches))
            mine = [i for i, image in enumerate(found.images) if share.rank in image.ranks]
            assert mine == part.image_indices.tolist()
            owned += tokens
        assert sorted(owned) == list(range(batch.total_tokens))


def test_images_are_the_batchs(described: Described) -> None:
    for batch, found in described:
        assert [list(image.grid) for image in found.images] == batch.image_grid_thw.tolist()
        assert [image.start for image in found.images] == batch.image_starts.tolist()
        for image in found.images:
            segment = found.segments[image.segment]
            assert segment.start <= image.start
            assert image.start + image.tokens <= segment.start + segment.length


def test_a_slice_or_a_batch_without_labels_is_refused(demo: Path) -> None:
    loader = planning([demo], **LAYOUTS[0])
    batch = batch_at(loader, 0)
    with pytest.raises(ValueError, match="whole pack"):
        describe_batch(batch.context_parallel_shard(0, 2), cost=loader.plan_config.cost)


def test_batches_outside_the_epoch_are_refused(demo: Path) -> None:
    loader = planning([demo], **LAYOUTS[1])
    total = num_batches(loader)
    for number in (-1, total):
        with pytest.raises(IndexError, match=f"no batch {number}: rank 1 gets {total}"):
            batch_at(loader, number)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_lists_what_every_rank_gets(demo: Path, mixed: Path, layout: dict[str, Any]) -> None:
    data = [demo, mixed]
    planner = planning(data, **layout)
    for epoch in (0, 1):
        for rank in range(planner.dp_size):
            with StreamingLoader(data, **{**layout, "dp_rank": rank}) as loader:
                batches: list[PackedBatch] = []
                while loader.position.epoch <= epoch:
                    batches += [batch for batch in loader if batch.epoch == epoch]
            steps = {batch.step for batch in batches}
            found = [pack for step in sorted(steps) for pack in describe_step(planner, epoch, step, rank).packs]
            for batch, pack in zip(batches, found, strict=True):
                assert (pack.dp_rank, pack.micro_batch, pack.pack) == (rank, batch.micro_batch, batch.pack)
                assert (pack.tokens, tuple(s.key for s in pack.samples)) == (batch.total_tokens, batch.sample_keys)
                origins = [(origin.dataset, origin.index, origin.row) for origin in batch.origins]
                assert [(s.dataset, s.index, s.source_row) for s in pack.samples] == origins
                lengths = torch.diff(batch.cu_seqlens)[: batch.num_samples].tolist()
                assert [s.length for s in pack.samples] == lengths
                assert pack.patches == int(batch.image_grid_thw.prod(dim=1).sum())


def test_all_ranks_of_a_step_are_listed_unless_one_is_asked_for(demo: Path) -> None:
    loader = planning([demo], **LAYOUTS[2])
    every = describe_step(loader, 0, 0)
    assert [pack.dp_rank for pack in every.packs] == [0, 1, 2, 3]
    assert describe_step(loader, 0, 0, 2).packs == every.packs[2:3]
    for step, rank, words in ((99, None, "no step 99"), (0, 4, "no data-parallel rank 4"), (-1, None, "no step -1")):
        with pytest.raises(IndexError, match=words):
            describe_step(loader, 0, step, rank)


def test_rows_lead_to_samples_and_to_where_they_are_used(mixed: Path, mixed_dataset: VlmDataset) -> None:
    loader = planning([mixed], capacity=1024, global_batch=2, dp_size=2)
    for i in range(len(mixed_dataset)):
        row = int(mixed_dataset.index.source_row[i])
        trace = describe_row(mixed_dataset, row, loader, epoch=1)
        (found,) = trace.candidates
        assert (found.status, found.index, found.key) == ("sample", i, mixed_dataset.index.key(i))
        assert len(found.uses) == 1
        use = found.uses[0]
        assert use.step is not None
        packs = describe_step(loader, 1, use.step, use.dp_rank).packs
        assert row in [sample.source_row for sample in packs[use.micro_batch or 0].samples]


def test_rejected_rows_say_why(mixed: Path, mixed_dataset: VlmDataset) -> None:
    rejects = read_rejects(mixed)
    assert rejects
    for line in rejects:
        trace = describe_row(mixed_dataset, line["row"])
        (found,) = trace.candidates
        assert (found.status, found.reason, found.message) == ("rejected", line["reason"], line["message"])
        assert found.index is None
    for row in (-1, 10):
        with pytest.raises(IndexError, match=f"no source row {row}: the source has 10"):
            describe_row(mixed_dataset, row)


def test_a_row_of_several_samples_leads_to_each_of_them(lists: Path) -> None:
    dataset = open_dataset(lists)
    loader = planning([lists], capacity=1024, global_batch=1)
    trace = describe_row(dataset, 1, loader)
    assert [(each.sample, each.status, each.key or each.reason) for each in trace.candidates] == [
        (0, "sample", "000000001-000"),
        (1, "rejected", "empty_answer"),
        (2, "sample", "000000001-002"),
        (3, "rejected", "missing_column"),
    ]
    assert [len(each.uses) for each in trace.candidates] == [1, 0, 1, 0]
    assert [each.reason for each in describe_row(dataset, 2).candidates] == ["no_samples"]
    batches = [origin for batch in loader for origin in zip(batch.origins, batch.sample_keys, strict=True)]
    assert sorted(key for origin, key in batches if origin.row == 1) == ["000000001-000", "000000001-002"]


def test_the_default_capacity_holds_the_longest_sample(demo_dataset: VlmDataset, demo_raw: list[RawSample]) -> None:
    assert default_capacity([demo_dataset]) == 8192
    assert max(sample.length for sample in demo_raw) < 8192


def test_the_python_code_of_the_page_runs(demo: Path) -> None:
    """``docs/inspect.md``, with a dataset of eight receipts."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "inspect.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert blocks
    for block in blocks:
        code = block.replace("data/cord", str(demo)).replace("000000017", "000000007")
        code = code.replace("dataset, 17", "dataset, 7")
        exec(compile(code, "docs/inspect.md", "exec"), {})
