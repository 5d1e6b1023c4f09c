"""Building blocks of networks, for both back ends.

A *provider* selects the linear layers, norms and attention of a model. Both providers give parameters the same
checkpoint keys.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from vlmdata.model.network.attention import SegmentAttention
from vlmdata.model.network.linear import ShortLinear, ShortNormLinear, functions_are_known, with_short_way
from vlmdata.model.network.settings import Storage
from vlmdata.model.network.wrapping import wrappable, wrappable_experts, wrappable_group


class RMSNorm(nn.Module):
    """An RMS norm, computed in float32.

    Its scale is 1 + weight (``Qwen3_5RMSNorm``) or the weight itself (``Qwen3VLTextRMSNorm``), as
    ``layernorm_zero_centered_gamma`` of the configuration says.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, self._zero_centered(config)
        device = torch.get_default_device() if config.use_cpu_initialization else torch.cuda.current_device()
        fresh = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(fresh(hidden_size, dtype=config.params_dtype, device=device))
        # Under sequence parallelism each tensor-parallel rank sees only some tokens. megatron-core then sums the
        # gradient.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def _zero_centered(self, config: TransformerConfig) -> bool:
        return bool(config.layernorm_zero_centered_gamma)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last axis."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.zero_centered:
            return (wide * (1.0 + self.weight.float())).type_as(x)
        return self.weight * wide.type_as(x)


class PlainRMSNorm(RMSNorm):
    """The norm inside ``Qwen3_5RMSNormGated``, scaled by the weight itself.

    megatron-core's delta net uses a zero-centred weight. For a small w, ``w - 1`` does not convert back exactly, so
    conversion would change a checkpoint.
    """

    def _zero_centered(self, config: TransformerConfig) -> bool:
        return False


class LayerNorm(nn.LayerNorm):
    """torch's layer norm with the constructor of megatron-core's norms, for the vision tower."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        device = torch.get_default_device() if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)


class Provider(BackendSpecProvider, Protocol):
    """Building blocks of a back end: megatron-core's, with additions.

    Attributes:
        compiled: Whether gates, activation and residual sums are megatron-core's, which torch compiles on GPUs.
        storage: How the weights of linear layers are stored.
    """

    compiled: bool
    storage: Storage

    def plain_rms_norm(self) -> Any:
        """Returns an RMS norm whose scale is the weight itself, for a delta net's output."""
        ...


class TorchProvider(LocalSpecProvider):
    """The torch back end; runs on CPU and GPU."""

    compiled = True

    def __init__(self, storage: Storage = "plain") -> None:
        self.storage = storage

    def column_parallel_linear(self) -> type:
        """Returns megatron-core's layer, with a place for a wrapper."""
        return wrappable(super().column_parallel_linear(), columns=True, storage=self.storage)

    def row_parallel_linear(self) -> type:
        """Returns megatron-core's layer, with a place for a wrapper."""
        return wrappable(super().row_parallel_linear(), columns=False, storage=self.storage)

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """Returns megatron-core's experts, with a place for a wrapper."""
        return _wrappable(super().grouped_mlp_modules(moe_use_grouped_gemm), self.storage)

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """Returns an RMS norm or a layer norm."""
        return RMSNorm if rms_norm else LayerNorm

    def plain_rms_norm(self) -> Any:
        """Returns an RMS norm whose scale is the weight itself."""
        return PlainRMSNorm

    def core_attention(self) -> type:
        """Returns scaled dot-product attention over segments."""
        return SegmentAttention


def transformer_engine_provider(*packages: str, compiled: bool = False, storage: Storage = "plain") -> Provider:
    """Returns the Transformer Engine back end; CUDA only.

    Args:
        compiled: See :class:`Provider`.
        storage: The same.
        packages: Further packages that a family's layers need, such as "flash-linear-attention".

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
            f"backend 'transformer_engine' needs {' and '.join(missing)}: install the extra 'gpu' on a CUDA machine "
            "or choose backend 'torch'"
        )
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    def shorter(layer: type, way: type = ShortLinear) -> type:
        return with_short_way(layer, way) if functions_are_known() else layer

    class PlainNorm:
        """Transformer Engine's RMS norm, scaled by the weight itself."""

        def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> Any:
            plain = copy.copy(config)
            plain.layernorm_zero_centered_gamma = False
            return TENorm(plain, hidden_size, eps)

    class TransformerEngineProvider(TESpecProvider):
        """Transformer Engine's linear layers, norms and attention."""

        compiled: bool
        storage: Storage

        def column_parallel_linear(self) -> type:
            return wrappable(shorter(super().column_parallel_linear()), columns=True, storage=self.storage)

        def row_parallel_linear(self) -> type:
            return wrappable(shorter(super().row_parallel_linear()), columns=False, storage=self.storage)

        def column_parallel_layer_norm_linear(self) -> type:
            layer = shorter(super().column_parallel_layer_norm_linear(), ShortNormLinear)
            return wrappable(layer, columns=True, storage=self.storage)

        def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
            return _wrappable(super().grouped_mlp_modules(moe_use_grouped_gemm), self.storage)

        def plain_rms_norm(self) -> Any:
            return PlainNorm

    provider = TransformerEngineProvider()
    provider.compiled, provider.storage = compiled, storage
    return provider


def _wrappable(experts: partial[Any], storage: Storage) -> partial[Any]:
    """Gives megatron-core's experts, whose layers are grouped or single, a place for a wrapper."""
    layers = experts.keywords["submodules"]
    if isinstance(layers, GroupedMLPSubmodules):
        first, second = (wrappable_group(each, storage) for each in (layers.linear_fc1, layers.linear_fc2))
    else:
        first = wrappable(layers.linear_fc1, columns=True, storage=storage)
        second = wrappable(layers.linear_fc2, columns=False, storage=storage)
    return partial(wrappable_experts(experts.func), submodules=replace(layers, linear_fc1=first, linear_fc2=second))
