"""The vision tower's part of a weight name table, shared by the families with this tower.

The Hugging Face names are those of ``Qwen3VLVisionModel``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from vlmdata.model.architecture import VisionArchitecture
from vlmdata.model.weight_names.table import ParameterMap, SourceTensor, only, same

#: Name prefix of the tower's tensors.
VISUAL = "model.visual."


def vision_maps(vision: VisionArchitecture) -> list[ParameterMap]:
    """Returns the entries of the vision tower, from embedding to mergers."""
    width, wide, merged = vision.hidden_size, vision.intermediate_size, vision.hidden_size * vision.merge_unit
    kernel = (width, vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    flat = (width, vision.patch_values)
    source = SourceTensor(f"{VISUAL}patch_embed.proj.weight", kernel)
    maps = [
        ParameterMap(
            "vision.patch_embed.weight", flat, (source,), lambda x: only(x).reshape(flat), lambda x: [x.reshape(kernel)]
        ),
        same("vision.patch_embed.bias", f"{VISUAL}patch_embed.proj.bias", (width,)),
        same("vision.pos_embed.weight", f"{VISUAL}pos_embed.weight", (vision.num_position_embeddings, width)),
    ]
    for number in range(vision.depth):
        ours, theirs = f"vision.blocks.{number}.", f"{VISUAL}blocks.{number}."
        maps += _affine_pair(ours + "norm1", theirs + "norm1", width)
        maps += _affine_pair(ours + "norm2", theirs + "norm2", width)
        for kind, shape in (("weight", (3 * width, width)), ("bias", (3 * width,))):
            source = SourceTensor(f"{theirs}attn.qkv.{kind}", shape)
            to_mcore, to_hf = partial(_by_head, vision.num_heads), partial(_by_head_back, vision.num_heads)
            maps.append(ParameterMap(f"{ours}qkv.{kind}", shape, (source,), to_mcore, to_hf, 0))
        maps += _linear(ours + "proj", theirs + "attn.proj", (width, width), 1)
        maps += _linear(ours + "linear_fc1", theirs + "mlp.linear_fc1", (wide, width), 0)
        maps += _linear(ours + "linear_fc2", theirs + "mlp.linear_fc2", (width, wide), 1)
    maps += _merger_maps("vision.merger.", f"{VISUAL}merger.", vision, width)
    for number in range(len(vision.deepstack_layers)):
        theirs = f"{VISUAL}deepstack_merger_list.{number}."
        maps += _merger_maps(f"vision.deepstack_mergers.{number}.", theirs, vision, merged)
    return maps


def _merger_maps(ours: str, theirs: str, vision: VisionArchitecture, normed: int) -> list[ParameterMap]:
    merged = vision.hidden_size * vision.merge_unit
    return [
        *_affine_pair(ours + "norm", theirs + "norm", normed),
        *_linear(ours + "linear_fc1", theirs + "linear_fc1", (merged, merged), 0),
        *_linear(ours + "linear_fc2", theirs + "linear_fc2", (vision.out_hidden_size, merged), 1),
    ]


def _affine_pair(ours: str, theirs: str, width: int) -> list[ParameterMap]:
    return [same(f"{ours}.{kind}", f"{theirs}.{kind}", (width,)) for kind in ("weight", "bias")]


def _linear(ours: str, theirs: str, shape: tuple[int, int], shard_dim: int) -> list[ParameterMap]:
    """Returns weight and bias of a column-parallel layer (axis 0) or a row-parallel one, whose bias is whole."""
    weight = same(f"{ours}.weight", f"{theirs}.weight", shape, shard_dim)
    return [weight, same(f"{ours}.bias", f"{theirs}.bias", shape[:1], None if shard_dim else 0)]


def _by_head(heads: int, tensors: Sequence[Tensor]) -> Tensor:
    """Reorders rows from [queries, keys, values] to [query, key, value] per head."""
    joined: Tensor = only(tensors).unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
    return joined


def _by_head_back(heads: int, parameter: Tensor) -> list[Tensor]:
    return [parameter.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)]
