"""The tower's geometry equals transformers' functions, and uint8 patches enter exactly."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.model.helpers import relative, small_architecture
from vlmdata import families
from vlmdata.families.qwen3_5 import FAMILY

pytest.importorskip("megatron.core")

from vlmdata.model.network.patch_embed import PatchEmbed
from vlmdata.model.network.patch_geometry import patch_places, position_table_rows, rotary_angles

CPU = torch.device("cpu")

blocks_of_images = st.lists(
    st.tuples(st.integers(1, 2), st.integers(1, 13), st.integers(1, 13)), min_size=1, max_size=4
)


@given(blocks_of_images, st.sampled_from([2, 1, 3]), st.integers(2, 50))
def test_positions_equal_transformers(blocks: list[tuple[int, int, int]], merge: int, side: int) -> None:
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

    grids = [(t, merge * h, merge * w) for t, h, w in blocks]
    tensor = torch.tensor(grids)
    places, sizes = patch_places(grids, merge, CPU)
    assert torch.equal(places, get_vision_position_ids(tensor, merge))
    rows, weights = position_table_rows(places, sizes, side)
    their_rows, their_weights = get_vision_interpolation_indices_and_weights(
        tensor, side, mode="bilinear", align_corners=True, spatial_merge_size=merge
    )
    assert torch.equal(rows, their_rows)
    assert torch.equal(weights, their_weights)


def expanded(patches: torch.Tensor) -> torch.Tensor:
    """``pixel_values`` in float64, which vlmdata's function computes in float32."""
    frames = ((patches.double() - 127.5) / 127.5).view(-1, 3, 1, 256).expand(-1, 3, 2, 256).flatten(1)
    torch.testing.assert_close(frames.float(), FAMILY.pixel_values(patches, torch.float32), rtol=1e-6, atol=1e-7)
    return frames


def test_angles_equal_transformers() -> None:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionRotaryEmbedding

    config = Qwen3_5VisionConfig(hidden_size=144, num_heads=2)
    module = Qwen3_5VisionRotaryEmbedding(config)
    places, _ = patch_places([(1, 6, 8), (1, 2, 2)], 2, CPU)
    cos, sin = module(torch.zeros(1), places)
    angles = rotary_angles(places, 72, 10_000.0)
    assert torch.equal(angles.cos(), cos)
    assert torch.equal(angles.sin(), sin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_folded_patches_equal_the_convolution(dtype: torch.dtype) -> None:
    """All 256 values in all places. The tolerance is a few units in the last place of the dtype."""
    architecture = small_architecture().vision
    embed = PatchEmbed(architecture, FAMILY, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        embed.weight.copy_(torch.randn(embed.weight.shape, generator=generator) * 0.03)
        embed.bias.copy_(torch.randn(embed.bias.shape, generator=generator))
    patches = torch.randint(0, 256, (64, 768), dtype=torch.uint8, generator=generator)
    patches[0], patches[1], patches[2, :256] = 255, 0, torch.arange(256)
    values = expanded(patches)
    kernel = embed.weight.double().view(-1, 3, 2, 16, 16)
    convolved = torch.nn.functional.conv3d(
        values.view(-1, 3, 2, 16, 16), kernel, embed.bias.double(), stride=(2, 16, 16)
    )
    wanted = convolved.flatten(1)
    tolerance = 16 * torch.finfo(dtype).eps
    assert relative(embed(patches), wanted) < tolerance
    assert relative(embed(values.to(dtype)), wanted) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_another_family_brings_its_mean_and_deviation(dtype: torch.dtype) -> None:
    """Those of Qwen2.5-VL differ between channels."""
    family = families.family("qwen2_5_vl")
    vision = dataclasses.replace(small_architecture().vision, patch_size=family.patch_size)
    embed = PatchEmbed(vision, family, dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        embed.weight.copy_(torch.randn(embed.weight.shape, generator=generator) * 0.03)
        embed.bias.copy_(torch.randn(embed.bias.shape, generator=generator))
    patches = torch.randint(0, 256, (64, family.patch_bytes), dtype=torch.uint8, generator=generator)
    values = family.pixel_values(patches, torch.float32).double()
    wanted = torch.nn.functional.linear(values, embed.weight.double(), embed.bias.double())
    # float64 is compared with constants and values in float32
    tolerance = 16 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    assert relative(embed(patches), wanted) < tolerance


@pytest.mark.parametrize("name", ["qwen3_5", "qwen2_5_vl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_two_frames_equal_the_convolution(dtype: torch.dtype, name: str) -> None:
    """Rows of videos, whose frames differ; of a family with one mean and deviation and of one with three."""
    family = families.family(name)
    vision = dataclasses.replace(small_architecture().vision, patch_size=family.patch_size)
    embed = PatchEmbed(vision, family, dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        embed.weight.copy_(torch.randn(embed.weight.shape, generator=generator) * 0.03)
        embed.bias.copy_(torch.randn(embed.bias.shape, generator=generator))
    frames = torch.randint(0, 256, (2 * 48, family.patch_bytes), dtype=torch.uint8, generator=generator)
    values = family.pixel_values(frames, torch.float32, copies=2).double()
    wanted = torch.nn.functional.linear(values, embed.weight.double(), embed.bias.double())
    tolerance = 16 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    assert relative(embed(frames, 2), wanted) < tolerance
    if dtype == torch.float64:
        gradients = []
        for given in ((frames, 2), (values,)):
            embed.zero_grad()
            embed(*given).square().sum().backward()
            gradients.append(embed.weight.grad.clone())
        assert relative(gradients[0], gradients[1]) < 1e-6


def test_gradients_of_folded_patches_equal_the_unfolded_ones() -> None:
    architecture = small_architecture().vision
    embed = PatchEmbed(architecture, FAMILY, torch.float64, torch.device("cpu"))
    patches = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (32, 768), dtype=np.uint8))
    gradients = []
    for rows in (patches, expanded(patches)):
        embed.zero_grad()
        embed(rows).square().sum().backward()
        gradients.append((embed.weight.grad.clone(), embed.bias.grad.clone()))
    for mine, theirs in zip(*gradients, strict=True):
        assert relative(mine, theirs) < 1e-13


@pytest.mark.parametrize("rows", [torch.zeros(4, 768), torch.zeros(4, 1536, dtype=torch.uint8), torch.zeros(4, 100)])
def test_other_patches_are_refused(rows: torch.Tensor) -> None:
    embed = PatchEmbed(small_architecture().vision, FAMILY, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"uint8 \(P, 768\) or floating point \(P, 1536\)"):
        embed(rows)


def test_recompute_changes_nothing(make_pair: Any) -> None:
    from tests.model.helpers import mixed_samples, pack

    batch = pack(mixed_samples())
    gradients = []
    for recompute in (False, True):
        pair = make_pair(vision_recompute=recompute)
        pair.ours(batch).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in pair.ours.vision.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
