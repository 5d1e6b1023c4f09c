"""Parts that networks are put together from, for either back end.

A *provider* says which linear layers, norms and attention a model consists of. Both providers give parameters the same
checkpoint keys.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from model.network.attention import SegmentAttention


class RMSNorm(nn.Module):
    """``Qwen3_5RMSNorm``: computed in float32, scaled by 1 + weight."""

    zero_centered = True

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = torch.get_default_device() if config.use_cpu_initialization else torch.cuda.current_device()
        fresh = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(fresh(hidden_size, dtype=config.params_dtype, device=device))
        # Under sequence parallelism each tensor-parallel rank sees some tokens only; megatron-core then sums the
        # gradient.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last axis."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.zero_centered:
            return (wide * (1.0 + self.weight.float())).type_as(x)
        return self.weight * wide.type_as(x)


class PlainRMSNorm(RMSNorm):
    """The norm inside ``Qwen3_5RMSNormGated``: scaled by the weight itself.

    megatron-core's delta net would have it zero-centred; ``w - 1`` of a small w does not come back exactly, so a
    checkpoint would change by being converted.
    """

    zero_centered = False


class LayerNorm(nn.LayerNorm):
    """torch's, in the vision tower; built as megatron-core builds norms."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        device = torch.get_default_device() if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)


class Provider(Protocol):
    """Which parts a back end uses: megatron-core's ``BackendSpecProvider`` and what it lacks."""

    def column_parallel_linear(self) -> type: ...  # noqa: D102

    def column_parallel_layer_norm_linear(self) -> type | None: ...  # noqa: D102

    def row_parallel_linear(self) -> type: ...  # noqa: D102

    def fuse_layernorm_and_linear(self) -> bool: ...  # noqa: D102

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any: ...  # noqa: D102

    def core_attention(self) -> type: ...  # noqa: D102

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any: ...  # noqa: D102

    def plain_rms_norm(self) -> Any:
        """An RMS norm whose scale is the weight itself, for a delta net's output."""
        ...


class TorchProvider(LocalSpecProvider):
    """Plain torch: runs on CPU and GPU."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """Zero-centred RMS norm, or a layer norm."""
        return RMSNorm if rms_norm else LayerNorm

    def plain_rms_norm(self) -> Any:
        """RMS norm with a plain scale."""
        return PlainRMSNorm

    def core_attention(self) -> type:
        """Scaled dot product over segments."""
        return SegmentAttention


def transformer_engine_provider(*packages: str) -> Provider:
    """The Transformer Engine back end; CUDA only.

    Args:
        packages: What else a family's layers need: "flash-linear-attention".

    Raises:
        ImportError: If Transformer Engine or one of them is missing.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
    from megatron.core.ssm.gated_delta_net.common import HAVE_FLA

    missing = [
        name
        for name, have in (("transformer-engine", HAVE_TE), ("flash-linear-attention", HAVE_FLA))
        if not have and name in ("transformer-engine", *packages)
    ]
    if missing:
        raise ImportError(
            f"backend 'transformer_engine' needs {' and '.join(missing)}: install the extra 'gpu' on a CUDA machine, "
            "or choose backend 'torch'"
        )
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    class PlainNorm:
        """Transformer Engine's RMS norm, scaled by the weight itself."""

        def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> Any:
            plain = copy.copy(config)
            plain.layernorm_zero_centered_gamma = False
            return TENorm(plain, hidden_size, eps)

    class TransformerEngineProvider(TESpecProvider):
        """Transformer Engine's linear layers, norms and attention."""

        def plain_rms_norm(self) -> Any:
            return PlainNorm

    return TransformerEngineProvider()
