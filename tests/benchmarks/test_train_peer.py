"""The peer's benchmark: its batches give the loss of each sample by itself, and its search finds the largest batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.train_peer import PeerStep, largest, padded, peer_of
from model.families import preset
from preprocess.config import ImageConfig
from tests.chat_rows import write_jsonl
from tests.conftest import build_dataset
from tests.loader.rows import chat_rows
from tests.model.training.plain import plain_losses
from vlmdata import open_dataset


@given(st.integers(0, 70), st.integers(1, 64))
def test_the_largest_batch_is_found(most: int, limit: int) -> None:
    tried: list[int] = []
    assert largest(lambda count: tried.append(count) or count <= most, limit) == min(most, limit)
    assert max(tried) <= limit
    assert len(tried) <= 14


@pytest.mark.parametrize(("family", "name"), [("qwen3_5", "tiny"), ("qwen3_vl", "qwen3-vl-tiny")])
def test_a_padded_batch_has_the_loss_of_its_samples(tmp_path: Path, family: str, name: str) -> None:
    source = write_jsonl(tmp_path / "chat.jsonl", chat_rows(8))
    build_dataset(source, tmp_path / "chat", recipe="chat", family=family, image=ImageConfig(1024, 16384))
    dataset = open_dataset(tmp_path / "chat")
    architecture = preset(name).with_vocabulary(dataset.manifest.tokenizer)
    model = peer_of(architecture, checkpointing=True)
    with torch.no_grad():
        alone = torch.cat([plain_losses(model, dataset[number])[0] for number in range(8)])
        targets = sum(int(dataset[number].num_targets) for number in range(8))
    step = PeerStep(model)
    batch = padded(dataset, list(range(8)))
    assert "pixel_values" in batch
    assert step(batch) == pytest.approx(float(alone.sum()) / targets, rel=1e-4)
    assert step(batch) < float(alone.sum()) / targets
