"""The peer's benchmark: its batches give the loss of each sample by itself, and its search finds the largest batch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import train_peer
from benchmarks.train_peer import PeerStep, largest, largest_batch, padded, peer_of
from tests.chat_rows import write_jsonl
from tests.conftest import build_dataset
from tests.loader.rows import chat_rows
from tests.model.training.plain import plain_losses
from vlmdata import open_dataset
from vlmdata.model.families import preset
from vlmdata.model.training.settings.config_loading import load_config
from vlmdata.preprocess.config import ImageConfig


@given(st.integers(0, 70), st.integers(1, 64), st.integers(1, 80))
def test_the_largest_batch_is_found(most: int, limit: int, start: int) -> None:
    tried: list[int] = []
    assert largest(lambda count: tried.append(count) or count <= most, limit, start) == min(most, limit)
    assert tried[0] == min(start, limit)
    assert max(tried) <= limit
    assert len(tried) <= 14


@pytest.fixture
def _no_memory_to_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is the GPU's. On a CPU, collecting garbage among all that pytest has imported takes 0.5 s each time."""
    monkeypatch.setattr(train_peer, "emptied", lambda: None)


@pytest.mark.usefixtures("_no_memory_to_give_back")
def test_the_search_for_the_largest_batch_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    """Batches of three run out of memory, in the backward pass; the step after the search is the first one."""
    source = write_jsonl(tmp_path / "chat.jsonl", chat_rows(8))
    build_dataset(source, tmp_path / "chat", recipe="chat", image=ImageConfig(1024, 16384))
    dataset = open_dataset(tmp_path / "chat")
    model = peer_of(preset("tiny").with_vocabulary(dataset.manifest.tokenizer), checkpointing=False)
    before = {name: each.clone() for name, each in model.named_parameters()}

    class Small(PeerStep):
        def __call__(self, batch: dict[str, torch.Tensor]) -> float:
            loss = super().__call__(batch)
            if len(batch["input_ids"]) > 2:
                raise torch.OutOfMemoryError
            return loss

    step = Small(model)
    assert largest_batch(step, dataset, argparse.Namespace(largest=6, start=4)) == 2
    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())
    assert all(each.grad is None for each in model.parameters())
    assert not step.optimizer.state
    step(padded(dataset, [0]))
    assert not all(torch.equal(each, before[name]) for name, each in model.named_parameters())


@pytest.mark.usefixtures("_no_memory_to_give_back")
def test_a_batch_that_runs_out_of_memory_while_timed_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fresh model each time, so that its first loss is that of untrained weights."""
    tried: list[tuple[int, int]] = []
    made: list[str] = []

    def time_batches(step: Any, _: Any, __: Any, count: int, ___: Any) -> dict[str, Any]:
        tried.append((step, count))
        if count > 3:
            raise torch.OutOfMemoryError
        return {"batch": count}

    monkeypatch.setattr(train_peer, "peer_of", lambda *_: made.append("model"))
    monkeypatch.setattr(train_peer, "PeerStep", lambda _: len(made))
    monkeypatch.setattr(train_peer, "largest_batch", lambda *_: 5)
    monkeypatch.setattr(train_peer, "time_batches", time_batches)
    architecture: Any = None
    dataset: Any = None
    assert train_peer.time_peer(architecture, dataset, False, argparse.Namespace(batch=None)) == {"batch": 3}
    assert tried == [(1, 5), (2, 4), (3, 3)]


def test_ours_takes_the_first_recomputation_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_packs(_: Any, config: Any, *__: Any) -> dict[str, Any]:
        if config.model.recompute == "none":
            raise torch.OutOfMemoryError
        return {"batch": "packs"}

    monkeypatch.setattr(train_peer, "time_packs", time_packs)
    configs = [load_config(None, [("model.recompute", each)]) for each in ("none", "selective", "full")]
    architecture, nothing = preset("tiny"), argparse.Namespace()
    found = train_peer.time_ours(architecture, configs, None, nothing)  # type: ignore[arg-type]
    assert found == {"batch": "packs", "recompute": "selective", "vision_recompute": False}
    assert train_peer.time_ours(architecture, configs[:1], None, nothing) == {"batch": 0}  # type: ignore[arg-type]


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
