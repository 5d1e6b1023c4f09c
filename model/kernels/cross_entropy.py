"""Runs Transformer Engine's kernels of cross-entropy on tensors without content, so that they can be compiled ahead."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

#: Packages of the kernels. Their own ``__init__`` loads libraries for CUDA.
_PACKAGES = ("transformer_engine", *(f"transformer_engine.{name}" for name in ("common", "pytorch")))


def run_cross_entropy(vocabulary: int, device: str) -> None:
    """Runs the kernels forward and backward on a few tokens, as megatron-core does without tensor parallelism.

    Args:
        vocabulary: Rows of the output layer.
        device: ``meta`` for tensors without content.
    """
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
    """Imports the module of the kernels with empty modules in place of its packages."""
    found = importlib.util.find_spec("transformer_engine")
    if found is None or not found.submodule_search_locations:
        raise ImportError("Transformer Engine is not installed")
    root = Path(found.submodule_search_locations[0]).parent
    for name in (*_PACKAGES, *(f"{package}.triton" for package in _PACKAGES[1:])):
        empty = types.ModuleType(name)
        empty.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = empty
    return importlib.import_module("transformer_engine.pytorch.triton.cross_entropy")
