"""Rotation of queries and keys and attention within images, in plain torch and with faster kernels.

The layer before returns its bias instead of adding it. Mirrors transformers' ``Qwen3_5VisionAttention`` between
its two linear layers. Shapes: patches P, heads on this rank n, head width d.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from vlmdata.model.kernels.flash_cache import flash_attention_4_is_installed, flash_attention_4_takes
from vlmdata.model.network.patch_geometry import PatchGeometry


class TorchAttention(nn.Module):
    """Rotation and attention within images, in plain torch."""

    def forward(self, mixed_pn3d: Tensor, bias: Tensor, images: PatchGeometry) -> Tensor:
        """Maps a product (P, n, 3, d) and its bias (3 * n * d,) to (P, n * d)."""
        query, key, value = (mixed_pn3d + bias.view(mixed_pn3d.shape[1:])).unbind(-2)
        return _attend(rotate_patches(query, images.angles), rotate_patches(key, images.angles), value, images.bounds)


class EngineAttention(nn.Module):
    """Rotation and attention in two kernels: one splits and rotates, then Transformer Engine's attention runs."""

    def __init__(self, config: TransformerConfig, pg_collection: Any) -> None:
        super().__init__()
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        self.attention = TEDotProductAttention(
            config=config,
            layer_number=1,
            attn_mask_type=AttnMaskType.no_mask,
            attention_type="self",
            pg_collection=pg_collection,
        )

    def forward(self, mixed_pn3d: Tensor, bias: Tensor, images: PatchGeometry) -> Tensor:
        """Maps a product (P, n, 3, d) and its bias (3 * n * d,) to (P, n * d)."""
        query, key, value = _split_and_rotate(mixed_pn3d, bias, images)
        out: Tensor = self.attention(query, key, value, None, AttnMaskType.no_mask, packed_seq_params=images.packed())
        return out.reshape(out.shape[0], -1)


class FlashAttention(nn.Module):
    """Rotation and attention with FlashAttention 4 (package ``flash-attn-4``), which is faster on Hopper."""

    def __init__(self) -> None:
        super().__init__()
        try:
            from flash_attn.cute.interface import flash_attn_varlen_func
        except ImportError as error:
            raise ImportError(
                f"FlashAttention 4 cannot be loaded ({error}): pip install 'vlmdata[gpu]', or run without it: "
                "--set model.vision_attention=transformer_engine"
            ) from error
        self._attend = flash_attn_varlen_func

    @staticmethod
    def is_usable(config: TransformerConfig) -> bool:
        """True if FlashAttention 4 is installed and supports this GPU, data type and width of heads."""
        if not (flash_attention_4_is_installed() and config.bf16 and torch.cuda.is_available()):
            return False
        return flash_attention_4_takes(config.kv_channels) and torch.cuda.get_device_capability() >= (9, 0)

    def forward(self, mixed_pn3d: Tensor, bias: Tensor, images: PatchGeometry) -> Tensor:
        """Maps a product (P, n, 3, d) and its bias (3 * n * d,) to (P, n * d)."""
        query, key, value = _split_and_rotate(mixed_pn3d, bias, images)
        bounds, longest = images.cu_seqlens, images.longest
        sizes = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
        out = self._attend(query, key, value, **sizes)
        values: Tensor = out[0] if isinstance(out, tuple) else out
        return values.flatten(1)


def core_attention(kind: str, config: TransformerConfig, pg_collection: Any) -> nn.Module:
    """Returns the attention that ``ModelSettings.vision_attention`` names; ``auto`` picks the fastest available."""
    if config.transformer_impl != "transformer_engine":
        return TorchAttention()
    if kind == "flash_attention_4" or (kind == "auto" and FlashAttention.is_usable(config)):
        return FlashAttention()
    return EngineAttention(config, pg_collection)


def _split_and_rotate(mixed_pn3d: Tensor, bias: Tensor, images: PatchGeometry) -> tuple[Tensor, Tensor, Tensor]:
    from vlmdata.model.kernels.rotation import SplitAndRotate  # Triton is only available with CUDA

    parts: tuple[Tensor, Tensor, Tensor] = SplitAndRotate.apply(mixed_pn3d, bias, images.turns)
    return parts


def rotate_patches(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates (P, n, d) in float32: ``apply_rotary_pos_emb_vision``."""
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * angles.cos() + torch.cat([-second, first], -1) * angles.sin()).to(x.dtype)


def _attend(query: Tensor, key: Tensor, value: Tensor, bounds: Sequence[int]) -> Tensor:
    """Full attention within segments; (P, n, d) to (P, n * d)."""
    pieces = []
    for start, stop in itertools.pairwise(bounds):
        q_1npd, k_1npd, v_1npd = (x[start:stop].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        pieces.append(F.scaled_dot_product_attention(q_1npd, k_1npd, v_1npd)[0].transpose(0, 1))
    return torch.cat(pieces).flatten(1)
