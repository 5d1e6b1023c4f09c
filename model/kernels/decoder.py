"""Runs a decoder's Triton kernels on tensors without content, so that they can be compiled without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model.kernels.delta_net import DeltaNetShape


@dataclass(frozen=True)
class AttentionShape:
    """What the kernels around attention are compiled for, and that of the feed-forward part."""

    groups: int  # key and value heads on a rank; 0 if ranks share them
    queries: int  # query heads of each
    width: int  # width of a head
    rotated: int  # columns of a head that are rotated
    gated: bool  # whether a gate is multiplied onto attention's output
    zero_centered: bool  # whether a norm's scale is 1 + its weight
    feed_forward: int | None  # width of the dense feed-forward part's inner activation on a rank; None with experts


@dataclass(frozen=True)
class DecoderKernels:
    """Kernels of a decoder on a rank."""

    delta_net: DeltaNetShape  # shape of the gated delta nets
    attention: AttentionShape | None  # shape of the other layers; None if torch compiles megatron-core's functions

    @classmethod
    def of(cls, found: dict[str, Any]) -> DecoderKernels:
        """Reads them from ``dataclasses.asdict``."""
        attention = None if found["attention"] is None else AttentionShape(**found["attention"])
        return cls(DeltaNetShape(**found["delta_net"]), attention)

    def run(self, device: str) -> None:
        """Runs all, forward and backward. Device ``meta`` gives tensors without content."""
        if self.attention is not None:
            run_layers(self.delta_net, self.attention, device)
        self.delta_net.run(device, rule_only=self.attention is not None)


def run_layers(delta_net: DeltaNetShape, attention: AttentionShape, device: str) -> None:
    """Runs the kernels that take the place of megatron-core's functions, forward and backward."""
    import torch

    from model.kernels.attention_inputs import AttentionHeads, AttentionInputs
    from model.kernels.delta_inputs import DeltaInputs
    from model.kernels.gated_norm import gated_norm
    from model.kernels.gating import SwiGLUActivation, gated
    from model.kernels.short_convolution import DeltaHeads

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device, requires_grad=True)

    keys, values = delta_net.key_heads * delta_net.key_width, delta_net.value_heads * delta_net.value_width
    # The gate is a part of a projection, whose columns are queries, keys, values, gates and two for each head.
    projected = empty(2, 2 * (keys + values + delta_net.value_heads))
    by_head = empty(2, delta_net.value_heads, delta_net.value_width)
    made = [gated_norm(by_head, projected[:, :values], empty(delta_net.value_width), 1e-6)]
    if attention.groups:
        heads = AttentionHeads(
            attention.groups, attention.queries, attention.width, attention.gated, attention.zero_centered, 1e-6
        )
        angles = torch.empty(2, attention.rotated, device=device)
        weights = empty(attention.width), empty(attention.width)
        made += AttentionInputs.apply(empty(2, heads.columns), angles, *weights, heads)
    if attention.gated:
        both = empty(2, max(1, attention.groups) * attention.queries * attention.width)
        made.append(gated(both, both))
    if attention.feed_forward is not None:
        made.append(SwiGLUActivation(None)(empty(2, 2 * attention.feed_forward)))
    delta_heads = DeltaHeads(delta_net.key_heads, delta_net.value_heads, delta_net.key_width, delta_net.value_width)
    inputs = empty(delta_net.tokens, delta_heads.channels + values + 2 * delta_heads.values)
    parameters = empty(delta_heads.channels, 1, delta_net.taps), *(empty(delta_heads.values) for _ in range(2))
    first = torch.zeros(delta_net.tokens, dtype=torch.int32, device=device)
    made += DeltaInputs.apply(inputs, *parameters, first, delta_heads)
    torch.autograd.backward(made, [torch.ones_like(each) for each in made])
