"""Runs Transformer Engine's kernels of cross-entropy on tensors without content, so that they can be compiled ahead."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from model.kernels.hollow import hollow

#: Packages of the kernels. Their own ``__init__`` loads libraries for CUDA.
_PACKAGES = (
    "transformer_engine",
    "transformer_engine.common",
    "transformer_engine.common.triton",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.triton",
)


def run_cross_entropy(vocabulary: int, device: str) -> None:
    """Runs the kernels as megatron-core does without tensor parallelism. Device ``meta``: tensors without content."""
    import torch

    kernels = _without_the_package()
    logits = torch.empty(2, 1, vocabulary, dtype=torch.bfloat16, device=device)
    labels = torch.zeros(2, 1, dtype=torch.int64, device=device)
    options = {"label_smoothing": 0.0, "reduce_loss": False, "ignore_idx": -100}
    _, saved, stats, target, count, rank, world = kernels.cross_entropy_forward(
        logits, labels, dist_process_group=None, overwrite_input=False, **options
    )
    gradient = torch.empty(2, 1, device=device)
    kernels.cross_entropy_backward(saved, stats, target, count, gradient, rank=rank, world_size=world, **options)


@cache
def _without_the_package() -> Any:
    with hollow(*_PACKAGES):
        return importlib.import_module("transformer_engine.pytorch.triton.cross_entropy")
