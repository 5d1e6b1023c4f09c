"""Optimizer steps without and with a process group: groups of batches, and the mean loss over all targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.loader.helpers import stream
from vlmdata.batch import PackedBatch
from vlmdata.integrations.steps import optimizer_steps, step_loss, step_weight

Packs = Callable[[str], list[PackedBatch]]
SETTINGS = {"capacity": 1024, "max_patches": None, "global_batch": 2}


@pytest.fixture
def data(random_data: Callable[[str], Path]) -> Path:
    return random_data("qwen3_5")


def test_steps_go_from_epoch_to_epoch(data: Path) -> None:
    with stream(data, **SETTINGS) as loader:
        found = [[(each.epoch, each.step) for each in step] for step in islice(optimizer_steps(loader), 5)]
        per_epoch = loader.steps(0)
    expected = [(epoch, step) for epoch in range(3) for step in range(per_epoch)][:5]
    assert found == [[each] * 2 for each in expected]


def test_a_run_continues_within_a_step(data: Path) -> None:
    with stream(data, **SETTINGS) as loader:
        next(iter(loader))
        assert [len(step) for step in islice(optimizer_steps(loader), 2)] == [1, 2]


def test_without_a_process_group_the_loss_is_the_weighted_mean(packs: Packs) -> None:
    batches = packs("qwen3_5")[:2]
    losses = [torch.rand(each.total_tokens) for each in batches]
    weights = [each.loss_weights[0] for each in batches if each.loss_weights is not None]
    weight = step_weight(batches)
    found = sum(step_loss(loss, batch, weight) for loss, batch in zip(losses, batches, strict=True))
    mean = sum((a * b).sum() for a, b in zip(losses, weights, strict=True)) / sum(each.sum() for each in weights)
    assert torch.allclose(torch.as_tensor(found), torch.as_tensor(mean))


def test_with_a_process_group_the_weight_is_the_sum_over_it(packs: Packs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``test_frameworks.py`` does with processes, here with a sum that stands for another's part."""
    batch = packs("qwen3_5")[0]
    alone = step_weight([batch])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "gloo")
    monkeypatch.setattr(dist, "all_reduce", lambda weight, group=None: weight.add_(5.0))
    assert float(step_weight([batch])) == float(alone) + 5.0
    ones = torch.ones(batch.total_tokens)
    assert float(step_loss(ones, batch, alone)) == pytest.approx(2.0)  # DDP divides by 2


def test_a_step_without_targets_has_no_loss(packs: Packs) -> None:
    batch = packs("qwen3_5")[0]
    nothing = torch.zeros_like(batch.padding_mask, dtype=torch.float32)
    empty = dataclasses.replace(batch, loss_weights=nothing, loss_mask=nothing)
    assert float(step_loss(torch.zeros(batch.total_tokens), empty, step_weight([empty]))) == 0.0
