"""The vision tower's part of a table of weight names; families that have this tower share it.

Names on the Hugging Face side are those of ``Qwen3_5VisionModel``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from model.architecture import VisionArchitecture
from model.weights.mapping import ParameterMap, Source, only, reshape, reshape_back, same

_VISUAL = "model.visual."


def vision_maps(vision: VisionArchitecture) -> list[ParameterMap]:
    """Entries of the vision tower, embedding first and merger last."""
    width, wide, merged = vision.hidden_size, vision.intermediate_size, vision.hidden_size * vision.merge_unit
    kernel = (width, vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    flat = (width, vision.patch_values)
    maps = [
        ParameterMap(
            "vision.patch_embed.weight",
            flat,
            (Source(f"{_VISUAL}patch_embed.proj.weight", kernel),),
            partial(reshape, flat),
            partial(reshape_back, kernel),
        ),
        same("vision.patch_embed.bias", f"{_VISUAL}patch_embed.proj.bias", (width,)),
        same("vision.pos_embed.weight", f"{_VISUAL}pos_embed.weight", (vision.num_position_embeddings, width)),
    ]
    for number in range(vision.depth):
        ours, theirs = f"vision.blocks.{number}.", f"{_VISUAL}blocks.{number}."
        maps += _affine_pair(ours + "norm1", theirs + "norm1", width)
        maps += _affine_pair(ours + "norm2", theirs + "norm2", width)
        for kind, shape in (("weight", (3 * width, width)), ("bias", (3 * width,))):
            maps.append(
                ParameterMap(
                    f"{ours}qkv.{kind}",
                    shape,
                    (Source(f"{theirs}attn.qkv.{kind}", shape),),
                    partial(_by_head, vision.num_heads),
                    partial(_by_head_back, vision.num_heads),
                    0,
                )
            )
        maps += _row_parallel(ours + "proj", theirs + "attn.proj", width, width)
        maps += _column_parallel(ours + "linear_fc1", theirs + "mlp.linear_fc1", width, wide)
        maps += _row_parallel(ours + "linear_fc2", theirs + "mlp.linear_fc2", wide, width)
    ours, theirs = "vision.merger.", f"{_VISUAL}merger."
    maps += _affine_pair(ours + "norm", theirs + "norm", width)
    maps += _column_parallel(ours + "linear_fc1", theirs + "linear_fc1", merged, merged)
    maps += _row_parallel(ours + "linear_fc2", theirs + "linear_fc2", merged, vision.out_hidden_size)
    return maps


def _affine_pair(ours: str, theirs: str, width: int) -> list[ParameterMap]:
    return [same(f"{ours}.{kind}", f"{theirs}.{kind}", (width,)) for kind in ("weight", "bias")]


def _column_parallel(ours: str, theirs: str, width: int, out: int) -> list[ParameterMap]:
    return [
        same(f"{ours}.weight", f"{theirs}.weight", (out, width), 0),
        same(f"{ours}.bias", f"{theirs}.bias", (out,), 0),
    ]


def _row_parallel(ours: str, theirs: str, width: int, out: int) -> list[ParameterMap]:
    return [
        same(f"{ours}.weight", f"{theirs}.weight", (out, width), 1),
        same(f"{ours}.bias", f"{theirs}.bias", (out,)),
    ]


def _by_head(heads: int, tensors: Sequence[Tensor]) -> Tensor:
    """Qkv's rows are [queries, keys, values]; ours per head [query, key, value]."""
    joined: Tensor = only(tensors).unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
    return joined


def _by_head_back(heads: int, parameter: Tensor) -> list[Tensor]:
    return [parameter.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)]
