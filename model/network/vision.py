"""The vision tower: maps patches of images and videos to one embedding per 2 x 2 patches.

Mirrors transformers' ``Qwen3VLVisionModel``, ``Qwen3VLVisionBlock``, ``Qwen3VLVisionMLP`` and
``Qwen3VLVisionPatchMerger``; Qwen3.5 has the same without deepstack. Attention and positions are in
``vision_attention.py`` and ``patch_geometry.py``.

Deepstack merges the outputs of some earlier blocks too, each with a merger of its own. Their embeddings are further
columns of the result.

With tensor parallelism, each rank holds some heads and some feed-forward columns, and the whole residual stream (the
number of patches is arbitrary, so there is no sequence parallelism). Alternatively each rank holds the whole tower and
encodes different images: layers then send nothing, matrix products are whole, and gradients are summed once per step.

A patch of a video has two different frames, one of an image two equal ones. Beyond the patch embedding both are alike:
attention is within an image, or within a temporal patch of a video.

Shapes: patches P, hidden c, heads on this rank n, head width d, tokens M = P / 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vlmdata.families import Family
from vlmdata.model.architecture import VisionArchitecture
from vlmdata.model.network.patch_embed import PatchEmbed
from vlmdata.model.network.patch_geometry import Grid, PatchGeometry
from vlmdata.model.network.provider import Provider
from vlmdata.model.network.residual import residual
from vlmdata.model.network.vision_attention import core_attention


class VisionTower(MegatronModule):
    """``Qwen3VLVisionModel``.

    Args:
        config: Configuration of the tower, without sequence and context parallelism.
        architecture: Sizes of the tower.
        family: Family of the data.
        provider: The back end.
        pg_collection: Process groups; ``tp`` is the tower's.
        sharing_group: Ranks that hold the same weights and encode different images of a common set.
        recompute: Whether the backward pass computes blocks again instead of storing them.
        attention: Attention kernel, as in :class:`~vlmdata.model.network.settings.ModelSettings`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        architecture: VisionArchitecture,
        family: Family,
        provider: Provider,
        pg_collection: Any,
        sharing_group: dist.ProcessGroup,
        *,
        recompute: bool = False,
        attention: str = "auto",
    ) -> None:
        super().__init__(config=config)
        self.architecture, self.recompute, self.tp_group = architecture, recompute, pg_collection.tp
        self.sharing_group = sharing_group
        device = torch.get_default_device() if config.use_cpu_initialization else torch.device("cuda")
        dtype = config.params_dtype
        self.patch_embed = PatchEmbed(architecture, family, dtype, device)
        self.pos_embed = nn.Embedding(
            architecture.num_position_embeddings, architecture.hidden_size, device=device, dtype=dtype
        )
        nn.init.trunc_normal_(self.pos_embed.weight, std=architecture.initializer_range)
        self.blocks = nn.ModuleList(
            VisionBlock(config, architecture, provider, pg_collection, attention) for _ in range(architecture.depth)
        )
        self.merger = PatchMerger(config, architecture, provider, pg_collection)
        self.deepstack_mergers = nn.ModuleList(
            PatchMerger(config, architecture, provider, pg_collection, norm_joined=True)
            for _ in architecture.deepstack_layers
        )
        if dist.get_world_size(sharing_group) > 1:
            for parameter in self.parameters():  # so the gradient norm counts it once
                parameter.tensor_model_parallel = False

    def forward(
        self,
        patches: Tensor,
        grids: Sequence[Grid],
        video_patches: Tensor | None = None,
        video_grids: Sequence[Grid] = (),
    ) -> Tensor:
        """Encodes images and videos together.

        With neither, the tower encodes one black token and drops it from the result, so that all parameters take part
        in the backward pass on every rank and get zero gradients.

        Args:
            patches: uint8 (P, 768) or floating point (P, 1536), one image after another, in merge order.
            grids: Patches of each image along t, h, w, on the host.
            video_patches: uint8 (P * 2, 768), the two frames of a patch adjacent, or floating point (P, 1536), one
                video after another; None without videos.
            video_grids: Patches of each video along t, h, w, on the host.

        Returns:
            (M, (1 + D) * out_hidden): the embedding of each token, of images and then of videos, and after it those of
            the D deepstack blocks.
        """
        if not grids and not video_grids:
            return self._nothing(patches)
        images = PatchGeometry.of(self.architecture, (*grids, *video_grids), patches.device)
        x_pc = self._embed(patches, video_patches if video_grids else None)
        table = self.pos_embed(images.table_rows) * images.table_weights[:, :, None]
        x_pc = x_pc + table.sum(1).to(x_pc.dtype)
        deepstack: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            if self.recompute and self.training and torch.is_grad_enabled():
                x_pc = checkpoint(block, x_pc, images, use_reentrant=False)
            else:
                x_pc = block(x_pc, images)
            if number in self.architecture.deepstack_layers:
                deepstack.append(self.deepstack_mergers[len(deepstack)](x_pc))
        merged: Tensor = self.merger(x_pc)
        return torch.cat([merged, *deepstack], -1) if deepstack else merged

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the sharded state. megatron-core's would take lists of modules as replicated and ignore copies."""
        state: dict[str, Any] = {}
        for name, module in self.named_children():
            parts = module.named_children() if isinstance(module, nn.ModuleList) else [("", module)]
            for number, part in parts:
                place = f"{prefix}{name}.{number}." if number else f"{prefix}{name}."
                state |= sharded_state_dict_default(part, place, sharded_offsets, metadata, tp_group=self.tp_group)
        copy = dist.get_rank(self.sharing_group)
        for entry in state.values():
            # If several ranks hold a tensor, the checkpoint stores that of rank 0 in (pipeline, tensor, data).
            pipeline, tensor, data = entry.replica_id
            entry.replica_id = (pipeline, tensor or copy, data)
        return state

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sums ``main_grad`` over the ranks that share images. Call it once per step, on complete gradients."""
        gradients = [each.main_grad for each in self.parameters() if each.requires_grad]
        if dist.get_world_size(self.sharing_group) == 1 or not gradients:
            return
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat, group=self.sharing_group)
            for gradient, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    @torch.no_grad()
    def take_first_weights(self) -> None:
        """Copies the first rank's weights to all ranks that share images. Call it before training."""
        if dist.get_world_size(self.sharing_group) > 1:
            for parameter in self.parameters():
                dist.broadcast(parameter, group=self.sharing_group, group_src=0)

    def _embed(self, patches: Tensor, video_patches: Tensor | None) -> Tensor:
        """Embeds patches of images, then those of videos, (P, c)."""
        if video_patches is None:
            return cast(Tensor, self.patch_embed(patches))
        of_videos: Tensor = self.patch_embed(video_patches, self.architecture.temporal_patch_size)
        return torch.cat([self.patch_embed(patches), of_videos]) if len(patches) else of_videos

    def _nothing(self, patches: Tensor) -> Tensor:
        side = self.architecture.spatial_merge_size
        black = patches.new_zeros(side * side, patches.shape[1])
        token = self.forward(black, [(1, side, side)])
        return token[:0] + 0.0 * token.sum()


def _buckets(tensors: Sequence[Tensor], elements: int = 2**25) -> Iterator[list[Tensor]]:
    """Groups tensors into buckets of about ``elements`` elements, which bounds the memory for sending each together."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(each.numel() for each in bucket) >= elements:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


class VisionBlock(MegatronModule):
    """``Qwen3VLVisionBlock``."""

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
        linear = partial(_linear, provider, config, group, skip_bias_add=True)
        self.qkv, self.proj = linear(width, 3 * width, columns=True), linear(width, width, columns=False)
        self.linear_fc1, self.linear_fc2 = linear(width, wide, columns=True), linear(wide, width, columns=False)
        self.residual = residual(config, architecture.layer_norm_eps)
        self.core_attention = core_attention(attention, config, pg_collection)
        self.head_dim = architecture.head_dim

    def forward(self, x_pc: Tensor, images: PatchGeometry) -> Tensor:
        """Attends within images and temporal patches of videos, then transforms each patch; (P, c) to (P, c)."""
        x_pc, normed = self.residual.keep_and_norm(x_pc, self.norm1)
        product, bias = self.qkv(normed)
        # Per head [query, key, value], so a tensor-parallel rank's rows are whole heads.
        mixed_pn3d = product.unflatten(-1, (-1, 3, self.head_dim))
        attended = self.proj(self.core_attention(mixed_pn3d, bias, images))
        x_pc, normed = self.residual.sum_and_norm(x_pc, attended, self.norm2)
        return self.residual.sum(x_pc, self.linear_fc2(self.residual.gelu(*self.linear_fc1(normed))))


class PatchMerger(MegatronModule):
    """``Qwen3VLVisionPatchMerger``: norm, join 2 x 2 patches, two layers with exact GELU.

    Args:
        config: Configuration of the tower.
        architecture: Sizes of the tower.
        provider: The back end.
        pg_collection: Process groups.
        norm_joined: Whether the norm comes after the join and spans the four patches, as in deepstack.
    """

    def __init__(
        self,
        config: TransformerConfig,
        architecture: VisionArchitecture,
        provider: Provider,
        pg_collection: Any,
        *,
        norm_joined: bool = False,
    ) -> None:
        super().__init__(config=config)
        self.width, self.norm_joined = architecture.hidden_size * architecture.merge_unit, norm_joined
        norm = provider.layer_norm(rms_norm=False)
        normed = self.width if norm_joined else architecture.hidden_size
        self.norm = norm(config, normed, eps=architecture.layer_norm_eps)
        linear = partial(_linear, provider, config, pg_collection.tp, skip_bias_add=False)
        self.linear_fc1 = linear(self.width, self.width, columns=True)
        self.linear_fc2 = linear(self.width, architecture.out_hidden_size, columns=False)

    def forward(self, x_pc: Tensor) -> Tensor:
        """Maps (P, c) to (M, out_hidden)."""
        joined = self.norm(x_pc.view(-1, self.width) if self.norm_joined else x_pc).view(-1, self.width)
        hidden, _ = self.linear_fc1(joined)
        out: Tensor = self.linear_fc2(F.gelu(hidden))[0]
        return out


def _linear(
    provider: Provider,
    config: TransformerConfig,
    tp_group: Any,
    width: int,
    out: int,
    *,
    columns: bool,
    skip_bias_add: bool,
) -> nn.Module:
    kind = provider.column_parallel_linear() if columns else provider.row_parallel_linear()
    own: dict[str, Any] = {"gather_output": False} if columns else {"input_is_parallel": True}
    common = {"config": config, "init_method": config.init_method, "bias": True, "is_expert": False}
    layer: nn.Module = kind(width, out, tp_group=tp_group, skip_bias_add=skip_bias_add, **common, **own)
    return layer
