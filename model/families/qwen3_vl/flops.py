"""FLOP formula of Qwen3-VL: full attention in all layers, and the terms of :mod:`model.flops` that all models share.

Adding image features to hidden states is not counted, like other sums.
"""

from __future__ import annotations

from model import flops
from model.families.qwen3_vl.architecture import Qwen3VLArchitecture


def step_flops(model: Qwen3VLArchitecture, mtp: bool = False, frozen: tuple[str, ...] = ()) -> flops.StepFlops:
    """Returns the FLOP coefficients of an architecture; see :class:`model.families.base.ModelSpec`."""
    layers = model.language.layers
    return flops.step_flops(model, frozen, full_layers=layers, gate=False, feed_forward_layers=layers)
