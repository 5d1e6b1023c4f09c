"""Kernels of flash-linear-attention in a check: compiled once each, and left out where exact numbers are wanted.

Triton compiles and times up to 48 configurations of each kernel, and again for another dtype and for packs: minutes for
a model that computes for a second. A check takes one configuration of each.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

#: Functions of transformers' delta nets that kernels replace.
_REPLACED = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


@contextmanager
def one_configuration(device: torch.device) -> Iterator[None]:
    """Leaves one configuration of each kernel of flash-linear-attention to Triton, if it is installed.

    Samples alone and packs are then computed by the same configuration, too.
    """
    with ExitStack() as undo:
        if device.type == "cuda":
            for tuner in _autotuners():
                undo.enter_context(mock.patch.object(tuner, "configs", [min(tuner.configs, key=_size)]))
        yield


def _autotuners() -> list[Any]:
    try:
        import fla.modules.conv
        import fla.modules.l2norm
        import fla.ops.gated_delta_rule  # noqa: F401  # all must be loaded, so that their autotuners are found
    except ImportError:
        return []
    found: dict[int, Any] = {}
    for module in [module for name, module in sys.modules.items() if name.startswith("fla.")]:
        for each in list(vars(module).values()):
            while each is not None and type(each).__name__ != "Autotuner":
                each = getattr(each, "fn", None)
            if each is not None:
                found[id(each)] = each
    return list(found.values())


def _size(config: Any) -> tuple[int, int, int]:
    """Small blocks and few stages fit into the shared memory of every GPU, in float32, too. Four warps are usual."""
    blocks = sum(value for value in config.kwargs.values() if isinstance(value, int))
    return abs(config.num_warps - 4), config.num_stages, blocks


@contextmanager
def without_kernels(model: Any) -> Iterator[None]:
    """Makes the delta nets of transformers' models compute with its own code, which is exact in float32.

    Args:
        model: A model of transformers, or None.
    """
    with ExitStack() as undo:
        for name in {type(each).__module__ for each in model.modules()} if model is not None else ():
            module = sys.modules[name]
            own = {each: inspect.unwrap(vars(module)[each]) for each in _REPLACED if each in vars(module)}
            if name.startswith("transformers.models.") and own:
                undo.enter_context(mock.patch.multiple(module, **own))
        yield
