"""The vision tower: patches of images in, one embedding per 2 x 2 patches out.

Mirrors transformers' ``Qwen3_5VisionModel``, ``Qwen3_5VisionBlock``, ``Qwen3_5VisionAttention``, ``Qwen3_5VisionMLP``,
``Qwen3_5VisionPatchMerger`` and ``Qwen3_5VisionRotaryEmbedding``.

Tensor-parallel ranks hold some heads and some feed-forward columns each, and the whole residual stream (no sequence
parallelism: patches are fewer than the decoder's work by far, and their number is any).

Shapes: patches P, hidden c, heads of this rank n, head width d, image tokens M = P / 4.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.architecture import VisionArchitecture
from model.kernels.flash_cache import keep_compiled
from model.network.decoder_layer import Provider
from model.network.patch_embed import PatchEmbed
from model.parallel.packed import to_device

Grid = tuple[int, int, int]


class VisionTower(MegatronModule):
    """``Qwen3_5VisionModel``.

    Args:
        config: Of the tower, without sequence and context parallelism.
        architecture: Its sizes.
        provider: The back end.
        pg_collection: Process groups.
        recompute: Whether blocks are computed again in the backward pass instead of kept.
        attention: Which attention, as in :class:`~model.network.build.ModelSettings`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        architecture: VisionArchitecture,
        provider: Provider,
        pg_collection: Any,
        *,
        recompute: bool = False,
        attention: str = "auto",
    ) -> None:
        super().__init__(config=config)
        self.architecture, self.recompute, self.tp_group = architecture, recompute, pg_collection.tp
        device = torch.get_default_device() if config.use_cpu_initialization else torch.device("cuda")
        dtype = config.params_dtype
        self.patch_embed = PatchEmbed(architecture, dtype, device)
        self.pos_embed = nn.Embedding(
            architecture.num_position_embeddings, architecture.hidden_size, device=device, dtype=dtype
        )
        nn.init.trunc_normal_(self.pos_embed.weight, std=architecture.initializer_range)
        self.blocks = nn.ModuleList(
            VisionBlock(config, architecture, provider, pg_collection, attention) for _ in range(architecture.depth)
        )
        self.merger = PatchMerger(config, architecture, provider, pg_collection)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encodes images.

        Without images one black token is encoded in their place and left out of the result, so that all parameters take
        part in the backward pass on every rank and get the gradient zero.

        Args:
            patches: uint8 (P, 768) or floating point (P, 1536), images one after another in merge order.
            grids: Patches along t, h, w of every image, on the host.

        Returns:
            (M, out_hidden).
        """
        if not grids:
            return self._nothing(patches)
        images = PatchGeometry.of(self.architecture, grids, patches.device)
        x_pc = self.patch_embed(patches)
        table = self.pos_embed(images.table_rows) * images.table_weights[:, :, None]
        x_pc = x_pc + table.sum(1).to(x_pc.dtype)
        for block in self.blocks:
            if self.recompute and self.training and torch.is_grad_enabled():
                x_pc = checkpoint(block, x_pc, images, use_reentrant=False)
            else:
                x_pc = block(x_pc, images)
        merged: Tensor = self.merger(x_pc)
        return merged

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As megatron-core's, which would take a list of modules for replicated."""
        state: dict[str, Any] = {}
        for name, module in self.named_children():
            parts = module.named_children() if module is self.blocks else [("", module)]
            for number, part in parts:
                place = f"{prefix}{name}.{number}." if number else f"{prefix}{name}."
                state |= sharded_state_dict_default(part, place, sharded_offsets, metadata, tp_group=self.tp_group)
        return state

    def _nothing(self, patches: Tensor) -> Tensor:
        side = self.architecture.spatial_merge_size
        black = patches.new_zeros(side * side, patches.shape[1])
        token = self.forward(black, [(1, side, side)])
        return token[:0] + 0.0 * token.sum()


class PatchGeometry:
    """What follows from the grids of some images, on the device.

    Attributes:
        bounds: Attention segments, on the host: every frame of every image by itself.
        cu_seqlens: The same, int32, on the device.
        longest: Longest segment.
        angles: float32 (P, 1, d), rotation angles of every patch, both halves equal.
        table_rows: int64 (P, 4), rows of the position table around every patch.
        table_weights: float32 (P, 4), their bilinear weights.
    """

    bounds: list[int]
    cu_seqlens: Tensor
    longest: int
    angles: Tensor
    table_rows: Tensor
    table_weights: Tensor

    @classmethod
    def of(cls, architecture: VisionArchitecture, grids: Sequence[Grid], device: torch.device) -> PatchGeometry:
        """Works it out."""
        self = cls()
        lengths = [h * w for t, h, w in grids for _ in range(t)]
        self.bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        self.longest = max(lengths)
        places, sizes = (to_device(x, device) for x in patch_places(grids, architecture.spatial_merge_size))
        side = round(architecture.num_position_embeddings**0.5)
        self.table_rows, self.table_weights = position_table_rows(places, sizes, side)
        self.angles = rotary_angles(places, architecture.head_dim, architecture.rope_theta).unsqueeze(1)
        self.cu_seqlens = to_device(torch.tensor(self.bounds, dtype=torch.int32), device)
        return self

    def packed(self) -> PackedSeqParams:
        """The segments as megatron-core's attention takes them."""
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
            pad_between_seqs=False,
        )


def patch_places(grids: Sequence[Grid], merge: int) -> tuple[Tensor, Tensor]:
    """Row and column of every patch, in merge order: ``get_vision_position_ids``.

    Args:
        grids: Patches along t, h, w.
        merge: Side of a merge block.

    Returns:
        int64 (P, 2) rows and columns, and int64 (P, 2) the heights and widths of their images.
    """
    places, sizes = [], []
    for t, h, w in grids:
        rows = torch.arange(h).view(h // merge, 1, merge, 1)
        columns = torch.arange(w).view(1, w // merge, 1, merge)
        frame = torch.stack([x.expand(h // merge, w // merge, merge, merge).flatten() for x in (rows, columns)], 1)
        places.append(frame.repeat(t, 1))
        sizes.append(torch.tensor([[h, w]]).expand(t * h * w, 2))
    return torch.cat(places), torch.cat(sizes)


def position_table_rows(places: Tensor, sizes: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Bilinear interpolation of the learned table: ``get_vision_interpolation_indices_and_weights``, corners aligned.

    Args:
        places: int64 (P, 2), row and column of every patch.
        sizes: int64 (P, 2), height and width of its image.
        side: Side of the table.

    Returns:
        int64 (P, 4) table rows, and float32 (P, 4) weights.
    """
    source = places.float() * (side - 1) / (sizes - 1).clamp(min=1)
    floor = source.floor()
    near = torch.arange(2, device=places.device)
    taps = (floor.long().unsqueeze(-1) + near).clamp(0, side - 1)
    weights = (1 - (source.unsqueeze(-1) - floor.unsqueeze(-1) - near).abs()).clamp(min=0)
    rows = taps[:, 0, :, None] * side + taps[:, 1, None, :]
    products = weights[:, 0, :, None] * weights[:, 1, None, :]
    return rows.flatten(1), products.flatten(1)


def rotary_angles(places: Tensor, head_dim: int, base: float) -> Tensor:
    """``Qwen3_5VisionRotaryEmbedding``: a quarter of the head turns with the row, a quarter with the column, twice.

    Args:
        places: int64 (P, 2), row and column.
        head_dim: Width of a head.
        base: Base of the frequencies.

    Returns:
        float32 (P, head_dim), in radians.
    """
    half = head_dim // 2
    inv_freq = 1.0 / (base ** (torch.arange(0, half, 2, dtype=torch.float32, device=places.device) / half))
    angles = (places.float().unsqueeze(-1) * inv_freq).flatten(1)
    return torch.cat([angles, angles], -1)


class VisionBlock(MegatronModule):
    """``Qwen3_5VisionBlock``."""

    def __init__(
        self,
        config: TransformerConfig,
        architecture: VisionArchitecture,
        provider: Provider,
        pg_collection: Any,
        attention: str,
    ) -> None:
        super().__init__(config=config)
        width, wide, group = architecture.hidden_size, architecture.intermediate_size, pg_collection.tp
        norm = provider.layer_norm(rms_norm=False)
        self.norm1 = norm(config, width, eps=architecture.layer_norm_eps)
        self.norm2 = norm(config, width, eps=architecture.layer_norm_eps)
        self.qkv = _column(provider, config, width, 3 * width, group)
        self.proj = _row(provider, config, width, width, group)
        self.linear_fc1 = _column(provider, config, width, wide, group)
        self.linear_fc2 = _row(provider, config, wide, width, group)
        self.core_attention = _core_attention(attention, config, pg_collection)
        self.head_dim = architecture.head_dim

    def forward(self, x_pc: Tensor, images: PatchGeometry) -> Tensor:
        """Attends within images, then transforms every patch; (P, c) to (P, c)."""
        # Per head [query, key, value], so that a tensor-parallel rank's rows are whole heads.
        mixed_pn3d = self.qkv(self.norm1(x_pc))[0].unflatten(-1, (-1, 3, self.head_dim))
        x_pc = x_pc + self.proj(self.core_attention(mixed_pn3d, images))[0]
        hidden, _ = self.linear_fc1(self.norm2(x_pc))
        out, _ = self.linear_fc2(F.gelu(hidden, approximate="tanh"))
        return x_pc + out


class PatchMerger(MegatronModule):
    """``Qwen3_5VisionPatchMerger``: norm, join 2 x 2 patches, two layers with exact GELU."""

    def __init__(
        self, config: TransformerConfig, architecture: VisionArchitecture, provider: Provider, pg_collection: Any
    ) -> None:
        super().__init__(config=config)
        self.width = architecture.hidden_size * architecture.merge_unit
        norm = provider.layer_norm(rms_norm=False)
        self.norm = norm(config, architecture.hidden_size, eps=architecture.layer_norm_eps)
        self.linear_fc1 = _column(provider, config, self.width, self.width, pg_collection.tp)
        self.linear_fc2 = _row(provider, config, self.width, architecture.out_hidden_size, pg_collection.tp)

    def forward(self, x_pc: Tensor) -> Tensor:
        """(P, c) to (M, out_hidden)."""
        hidden, _ = self.linear_fc1(self.norm(x_pc).view(-1, self.width))
        out, _ = self.linear_fc2(F.gelu(hidden))
        return out


class TorchAttention(nn.Module):
    """Rotation and attention within images, in plain torch."""

    def forward(self, mixed_pn3d: Tensor, images: PatchGeometry) -> Tensor:
        """(P, n, 3, d) to (P, n * d)."""
        query, key, value = mixed_pn3d.unbind(-2)
        return _attend(_rotate(query, images.angles), _rotate(key, images.angles), value, images.bounds)


class EngineAttention(nn.Module):
    """The same in two kernels: one that splits and rotates, and Transformer Engine's attention."""

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

    def forward(self, mixed_pn3d: Tensor, images: PatchGeometry) -> Tensor:
        """(P, n, 3, d) to (P, n * d)."""
        query, key, value = _split_and_rotate(mixed_pn3d, images.angles)
        out = self.attention(query, key, value, None, AttnMaskType.no_mask, packed_seq_params=images.packed())
        return out.reshape(out.shape[0], -1)


class FlashAttention(nn.Module):
    """The same with FlashAttention 4, of the package ``flash-attn-4``: on Hopper its kernels are the faster ones."""

    def __init__(self) -> None:
        super().__init__()
        keep_compiled()
        try:
            from flash_attn.cute.interface import flash_attn_varlen_func
        except ImportError as error:
            raise ImportError(
                f"FlashAttention 4 cannot be loaded ({error}): pip install 'vlmdata[flash]', or go on without it, "
                "--set model.vision_attention=transformer_engine"
            ) from error
        self._attend = flash_attn_varlen_func

    @staticmethod
    def is_usable(config: TransformerConfig) -> bool:
        """Whether it is installed, and made for this card and data type."""
        try:
            importlib.metadata.version("flash-attn-4")
        except importlib.metadata.PackageNotFoundError:
            return False
        return config.bf16 and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)

    def forward(self, mixed_pn3d: Tensor, images: PatchGeometry) -> Tensor:
        """(P, n, 3, d) to (P, n * d)."""
        query, key, value = _split_and_rotate(mixed_pn3d, images.angles)
        bounds, longest = images.cu_seqlens, images.longest
        sizes = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
        out = self._attend(query, key, value, **sizes)
        out = out[0] if isinstance(out, tuple) else out
        return out.flatten(1)


def _core_attention(kind: str, config: TransformerConfig, pg_collection: Any) -> nn.Module:
    """The attention of that name in :class:`~model.network.build.ModelSettings`, or the fastest there is."""
    if config.transformer_impl != "transformer_engine":
        return TorchAttention()
    if kind == "flash_attention_4" or (kind == "auto" and FlashAttention.is_usable(config)):
        return FlashAttention()
    return EngineAttention(config, pg_collection)


def _split_and_rotate(mixed_pn3d: Tensor, angles_p1d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from model.kernels.rotation import SplitAndRotate  # Triton is there with CUDA only

    parts: tuple[Tensor, Tensor, Tensor] = SplitAndRotate.apply(mixed_pn3d, angles_p1d.squeeze(1))
    return parts


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """``apply_rotary_pos_emb_vision``: (P, n, d), in float32."""
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


def _column(provider: Provider, config: TransformerConfig, width: int, out: int, tp_group: Any) -> nn.Module:
    return _linear(provider.column_parallel_linear(), config, width, out, tp_group, gather_output=False)


def _row(provider: Provider, config: TransformerConfig, width: int, out: int, tp_group: Any) -> nn.Module:
    return _linear(provider.row_parallel_linear(), config, width, out, tp_group, input_is_parallel=True)


def _linear(kind: type, config: TransformerConfig, width: int, out: int, tp_group: Any, **cut: bool) -> nn.Module:
    own = {"init_method": config.init_method, "bias": True, "skip_bias_add": False, "is_expert": False}
    layer: nn.Module = kind(width, out, config=config, tp_group=tp_group, **own, **cut)
    return layer
