"""Positions of patches in their images: attention segments, rotation angles, rows of the position table.

Mirrors transformers' ``Qwen3_5VisionRotaryEmbedding`` and its interpolation of learned positions. Patches: P.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from vlmdata.model.architecture import VisionArchitecture
from vlmdata.model.parallel.packed import to_device

Grid = tuple[int, int, int]


class PatchGeometry:
    """Tensors that follow from the grids of some images, on the device.

    Attributes:
        bounds: Attention segments, on the host; each frame of each image is one segment.
        cu_seqlens: ``bounds`` as int32 on the device.
        longest: Length of the longest segment.
        angles: float32 (P, 1, d), rotation angles of each patch; both halves are equal.
        table_rows: int64 (P, 4), rows of the position table around each patch.
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
        """Computes the geometry of images with these grids."""
        self = cls()
        lengths = [h * w for t, h, w in grids for _ in range(t)]
        self.bounds = [0, *itertools.accumulate(lengths)]
        self.longest = max(lengths)
        places, sizes = patch_places(grids, architecture.spatial_merge_size, device)
        side = round(architecture.num_position_embeddings**0.5)
        self.table_rows, self.table_weights = position_table_rows(places, sizes, side)
        self.angles = rotary_angles(places, architecture.head_dim, architecture.rope_theta).unsqueeze(1)
        self.cu_seqlens = to_device(torch.tensor(self.bounds, dtype=torch.int32), device)
        return self

    @functools.cached_property
    def turns(self) -> Tensor:
        """The angles as the rotation's kernel takes them: float32 (P, d), d / 2 cosines and then d / 2 sines."""
        half = self.angles.squeeze(1).chunk(2, -1)[0]
        return torch.cat([half.cos(), half.sin()], -1)

    def packed(self) -> PackedSeqParams:
        """The segments in the form that megatron-core's attention takes."""
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
            pad_between_seqs=False,
        )


def patch_places(grids: Sequence[Grid], merge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the row and column of each patch, in merge order: ``get_vision_position_ids``.

    Computed on the device from a row per image: on the host, it would take milliseconds in which the device has nothing
    to do, and the result would be copied.

    Args:
        grids: Patches of each image along t, h, w.
        merge: Side of a merge block.
        device: Device of the results.

    Returns:
        int64 (P, 2) rows and columns, and int64 (P, 2) the heights and widths of their images.
    """
    counts = [t * h * w for t, h, w in grids]
    firsts = itertools.accumulate(counts, initial=0)
    table = [[first, h, w, count] for first, (_, h, w), count in zip(firsts, grids, counts, strict=False)]
    images = to_device(torch.tensor(table), device)
    of_patch = images.repeat_interleave(images[:, 3], 0, output_size=sum(counts))
    first, height, width, _ = of_patch.unbind(1)
    within = (torch.arange(sum(counts), device=device) - first) % (height * width)
    band = merge * width  # patches of a row of blocks
    block, inner = (within % band) // merge**2, within % merge**2
    row = within // band * merge + inner // merge
    return torch.stack([row, block * merge + inner % merge], 1), of_patch[:, 1:3]


def position_table_rows(places: Tensor, sizes: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Interpolates the learned table bilinearly: ``get_vision_interpolation_indices_and_weights``, corners aligned.

    Args:
        places: int64 (P, 2), row and column of each patch.
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
    """``Qwen3_5VisionRotaryEmbedding``: a quarter of the head rotates with the row, a quarter with the column, twice.

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
