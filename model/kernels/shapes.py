"""Runs the Triton kernels of a run on tensors without content, so that they can be compiled without a GPU.

Shapes: batch 1, tokens T, channels c, value heads h, key width k, value width v.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from vlmdata.model.kernels.hollow import hollow

#: Packages of Transformer Engine's kernels of cross-entropy. Their own ``__init__`` loads libraries for CUDA.
_PACKAGES = (
    "transformer_engine",
    "transformer_engine.common",
    "transformer_engine.common.triton",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.triton",
)


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
class DeltaNetShape:
    """What the kernels of a gated delta net are compiled for."""

    tokens: int  # tokens of a pack
    key_heads: int  # query and key heads on a rank
    value_heads: int  # value heads on a rank
    key_width: int  # width of a query or key head
    value_width: int  # width of a value head
    taps: int  # taps of the convolution

    def run(self, device: str, segments: int = 1, *, rule_only: bool = False) -> None:
        """Runs convolution, norm and delta rule, forward and backward, as megatron-core's ``GatedDeltaNet`` does.

        Device ``meta`` gives tensors without content. The pack has samples of equal length, ``segments`` of them. With
        ``rule_only``, kernels of our own compute all but the delta rule.
        """
        import torch
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        empty = _tensors(device)
        bounds = torch.linspace(0, self.tokens, segments + 1).to("cpu" if device == "meta" else device, torch.int32)
        if not rule_only:
            self._run_convolution(empty, bounds)
        heads = (1, self.tokens, self.value_heads)
        out, _ = chunk_gated_delta_rule(
            empty(*heads, self.key_width),
            empty(*heads, self.key_width),
            empty(*heads, self.value_width),
            g=empty(*heads, dtype=torch.float32),
            beta=empty(*heads),
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=False,
            cu_seqlens=bounds,
        )
        out.sum().backward()

    def _run_convolution(self, empty: Callable[..., Any], bounds: Any) -> None:
        import torch
        from fla.modules.convolution import causal_conv1d
        from fla.modules.l2norm import l2norm

        values = self.value_heads * self.value_width
        mixed = 2 * self.key_heads * self.key_width + values
        # A part of the input projection's output, so that the kernels see its strides.
        projected = empty(self.tokens, 1, mixed + values + 2 * self.value_heads)
        out, _ = causal_conv1d(
            x=projected.transpose(0, 1)[..., :mixed],
            weight=empty(mixed, 1, self.taps).squeeze(1),
            bias=None,
            activation="silu",
            initial_state=None,
            output_final_state=False,
            cu_seqlens=bounds,
        )
        # A gradient with a value for each output: that of a sum is one value, which the kernel would read beyond.
        out.backward(torch.ones_like(out))
        l2norm(empty(1, self.tokens, self.key_heads, self.key_width)).sum().backward()


@dataclass(frozen=True)
class DecoderKernels:
    """Kernels of a decoder on a rank."""

    delta_net: DeltaNetShape  # shape of the gated delta nets
    attention: AttentionShape | None  # shape of the other layers; None if torch compiles megatron-core's functions

    def run(self, device: str) -> None:
        """Runs all, forward and backward. Device ``meta`` gives tensors without content."""
        if self.attention is not None:
            run_layers(self.delta_net, self.attention, device)
        self.delta_net.run(device, rule_only=self.attention is not None)


@dataclass(frozen=True)
class TowerKernels:
    """What the kernels of a vision tower's blocks are compiled for."""

    heads: int  # heads on a rank
    head_width: int  # width of a head
    width: int  # width of the residual stream
    feed_forward: int  # columns of the feed-forward part on a rank

    def run(self, device: str) -> None:
        """Runs all, forward and backward, on one row. Device ``meta`` gives tensors without content."""
        import torch

        from vlmdata.model.kernels.biased_gelu import gelu_with_bias
        from vlmdata.model.kernels.residual_norm import keep_and_norm, sum_and_norm, sum_with_bias
        from vlmdata.model.kernels.rotation import SplitAndRotate

        empty = _tensors(device)
        mixed, bias = empty(1, self.heads, 3, self.head_width), empty(3 * self.heads * self.head_width)
        made = [*SplitAndRotate.apply(mixed, bias, torch.empty(1, self.head_width, device=device))]
        x, y = empty(1, self.width), empty(1, self.width)
        bias, weight, shift = (empty(self.width) for _ in range(3))
        made += [*keep_and_norm(x, weight, shift, 1e-6), *sum_and_norm(x, y, bias, weight, shift, 1e-6)]
        made += [sum_with_bias(x, y, bias), gelu_with_bias(empty(1, self.feed_forward), empty(self.feed_forward))]
        torch.autograd.backward(made, [torch.ones_like(each) for each in made])


@dataclass(frozen=True)
class Kernels:
    """Kernels of a run to compile ahead."""

    decoder: DecoderKernels  # those of the decoder
    tower: TowerKernels | None  # those of the vision tower; None without a tower
    vocabulary: int | None  # rows of the output layer; None where cross-entropy is computed by others
    every: bool  # whether Triton's autotuner chooses among all configurations, instead of those of the table

    def command(self) -> list[str]:
        """Returns the command of the process that compiles them: :mod:`vlmdata.model.kernels.compile_ahead`."""
        return [
            sys.executable,
            "-P",
            "-W",
            "ignore",
            "-m",
            "vlmdata.model.kernels.compile_ahead",
            pickle.dumps(self).hex(),
        ]

    def run(self, device: str) -> None:
        """Runs all, forward and backward. Device ``meta`` gives tensors without content."""
        if self.tower is not None:
            self.tower.run(device)
        if self.vocabulary is not None:
            run_cross_entropy(self.vocabulary, device)
        self.decoder.run(device)


def run_layers(delta_net: DeltaNetShape, attention: AttentionShape, device: str) -> None:
    """Runs the kernels that take the place of megatron-core's functions, forward and backward."""
    import torch

    from vlmdata.model.kernels.attention_inputs import AttentionHeads, AttentionInputs
    from vlmdata.model.kernels.delta_inputs import DeltaInputs
    from vlmdata.model.kernels.gated_norm import gated_norm
    from vlmdata.model.kernels.gating import SwiGLUActivation, gated
    from vlmdata.model.kernels.short_convolution import DeltaHeads

    empty = _tensors(device)
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


def run_cross_entropy(vocabulary: int, device: str) -> None:
    """Runs Transformer Engine's kernels as megatron-core does without tensor parallelism, forward and backward."""
    import torch

    kernels = _cross_entropy()
    logits = torch.empty(2, 1, vocabulary, dtype=torch.bfloat16, device=device)
    labels = torch.zeros(2, 1, dtype=torch.int64, device=device)
    options = {"label_smoothing": 0.0, "reduce_loss": False, "ignore_idx": -100}
    _, saved, stats, target, count, rank, world = kernels.cross_entropy_forward(
        logits, labels, dist_process_group=None, overwrite_input=False, **options
    )
    gradient = torch.empty(2, 1, device=device)
    kernels.cross_entropy_backward(saved, stats, target, count, gradient, rank=rank, world_size=world, **options)


@cache
def _cross_entropy() -> Any:
    with hollow(*_PACKAGES):
        return importlib.import_module("transformer_engine.pytorch.triton.cross_entropy")


def _tensors(device: str) -> Callable[..., Any]:
    """Returns a function that makes trained tensors of a shape, in bfloat16 or another ``dtype``, without content."""
    import torch

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device, requires_grad=True)

    return empty
