"""Runs the kernels of the gated delta net on tensors without content, so that they can be compiled without a GPU.

Shapes: batch 1, tokens T, channels c, value heads h, key width k, value width v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Modules of flash-linear-attention with the kernels of a gated delta net.
_MODULES = (
    "fla.modules.conv.triton.kernels",
    "fla.modules.l2norm",
    "fla.ops.common.chunk_delta_h",
    "fla.ops.common.chunk_o",
    "fla.ops.common.chunk_scaled_dot_kkt",
    "fla.ops.gated_delta_rule.wy_fast",
    "fla.ops.utils.cumsum",
    "fla.ops.utils.solve_tril",
)


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

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
            return torch.empty(shape, dtype=dtype, device=device, requires_grad=True)

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


def autotuners() -> dict[str, Any]:
    """Returns Triton's autotuners of these kernels, by the name of the kernel."""
    from importlib import import_module

    from triton.runtime.autotuner import Autotuner

    found: dict[str, Any] = {}
    for each in (each for name in _MODULES for each in vars(import_module(name)).values() if hasattr(each, "fn")):
        while each is not None and not isinstance(each, Autotuner):
            each = getattr(each, "fn", None)
        if each is not None:
            found[each.base_fn.__name__] = each
    return found
