"""What packs in transformers' models are compared with: their samples one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.integrations.tiny_models import MODELS, losses_of_sample, tiny_model
from vlmdata.batch import PackedBatch
from vlmdata.format.dataset import VlmDataset

#: Some 20 units in the last place of a loss of 8 in float32.
TOLERANCE = 2e-5
Packs = Callable[[str], list[PackedBatch]]
Samples = Callable[[str], VlmDataset]
every_model = pytest.mark.parametrize("model_type", MODELS)
linear_models = pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])

model_of = cache(tiny_model)


def expected_losses(model: Any, batch: PackedBatch, dataset: VlmDataset) -> torch.Tensor:
    """The losses of a pack, from its samples one by one."""
    losses = torch.zeros(batch.total_tokens)
    for origin, begin in zip(batch.origins, batch.cu_seqlens_padded.tolist(), strict=False):
        alone = losses_of_sample(model, dataset[origin.index])
        losses = torch.cat([losses[:begin], alone, losses[begin + len(alone) :]])
    return losses


def difference(losses: torch.Tensor, batch: PackedBatch, model: Any, dataset: VlmDataset) -> float:
    with torch.no_grad():
        return float((losses.detach() - expected_losses(model, batch, dataset)).abs().max())


def assert_same_gradients(one: Any, other: Any, at_least: int) -> None:
    compared = 0
    for (name, together), alone in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (together.grad is None) == (alone.grad is None), name
        if alone.grad is not None:
            scale = float(alone.grad.abs().max())
            # The decay of a delta net is a sum over all tokens that cancels: float32 alone gives 1e-4.
            most = 4e-4 if name.endswith(("A_log", "dt_bias")) else 1e-4
            assert float((together.grad - alone.grad).abs().max()) <= most * scale + 1e-6, name
            compared += scale > 0
    assert compared >= at_least


def with_images(batches: list[PackedBatch]) -> PackedBatch:
    """A pack of several samples and images, with unequal weights."""
    return next(each for each in batches if each.num_samples > 2 and len(each.image_grid_thw) > 2)


def state_of(model: Any) -> list[tuple[int, ...]]:
    """How many hooks each module has, and what else stands in its attributes."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs")
    return [(len(vars(each)), *(len(getattr(each, hook)) for hook in hooks)) for each in model.modules()]
