"""Weights that a kernel reads without a call of their module."""

from __future__ import annotations

from torch import nn


def await_weight(module: nn.Module) -> None:
    """Waits for a module's new weight if the distributed optimizer is still gathering it.

    megatron-core waits when a module that owns a weight is called.
    """
    for hook in module._forward_pre_hooks.values():
        hook(module, ())
