"""The stored patch layout, against transformers' own patchify."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.patches import patchify, pixel_values, unpatchify


def an_image(height: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (3, height, width), dtype=np.uint8)


sides = st.integers(1, 4).map(lambda n: 32 * n)


@given(sides, sides, st.integers(0, 5))
def test_patchify_is_transformers_without_the_temporal_copy(height: int, width: int, seed: int) -> None:
    from transformers import Qwen2VLImageProcessor

    image = an_image(height, width, seed)
    theirs, grid_h, grid_w = Qwen2VLImageProcessor(patch_size=16).patchify(
        torch.from_numpy(image)[None], patch_size=16, merge_size=2, temporal_patch_size=2
    )
    ours = patchify(image)
    assert (grid_h * grid_w, 768) == ours.shape
    halves = theirs[0].reshape(-1, 3, 2, 16, 16)
    assert np.array_equal(ours.reshape(-1, 3, 16, 16), halves[:, :, 0].numpy())
    assert torch.equal(halves[:, :, 0], halves[:, :, 1])


@given(sides, sides, st.integers(0, 5))
def test_unpatchify_gives_the_image_back(height: int, width: int, seed: int) -> None:
    image = an_image(height, width, seed)
    assert np.array_equal(unpatchify(patchify(image), height // 16, width // 16), image)


def test_pixel_values_have_both_temporal_halves() -> None:
    patches = torch.from_numpy(patchify(an_image(32, 64, 0)))
    values = pixel_values(patches)
    assert values.shape == (8, 1536)
    assert values.dtype == torch.float32
    halves = values.reshape(8, 3, 2, 256)
    assert torch.equal(halves[:, :, 0], halves[:, :, 1])
    assert torch.equal(halves[:, :, 0].reshape(8, 768), (patches.float() - 127.5) / 127.5)


def test_pixel_values_of_no_patches() -> None:
    assert pixel_values(torch.zeros(0, 768, dtype=torch.uint8), torch.bfloat16).shape == (0, 1536)
