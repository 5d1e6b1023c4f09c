"""Users of packs that take images alone refuse videos."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.loader.helpers import epoch_of
from vlmdata.errors import UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.integrations.megatron_bridge import bridge_batch
from vlmdata.integrations.prompts import Prompts


def test_packs_for_megatron_bridge(random_videos: Callable[[str], Path]) -> None:
    batches = epoch_of(random_videos("qwen3_5"), capacity=1024, max_patches=None)
    with pytest.raises(UsageError, match=r"pack \d+ of epoch 0 has videos.*images alone"):
        bridge_batch(next(batch for batch in batches if batch.video_grid_thw is not None))


def test_prompts(random_videos: Callable[[str], Path]) -> None:
    dataset, prompts = VlmDataset(random_videos("qwen3_5")), Prompts(random_videos("qwen3_5"), longest=1024)
    refused = 0
    for number in range(len(dataset)):
        sample, index = dataset[number], dataset.index
        length = int(sample.loss_mask[1:].argmax()) + 1 if sample.loss_mask[1:].any() else sample.length
        begin = index.grid_offsets[number]
        starts = index.item_starts[begin : begin + len(sample.items)].tolist()
        if any(item.kind == "video" and start < length for item, start in zip(sample.items, starts, strict=True)):
            refused += 1
            with pytest.raises(UsageError, match=f"sample {sample.key} has a video"):
                prompts.get(sample.key)
        else:
            prompts.get(sample.key)
    prompts.close()
    assert refused > 0
