"""``pixel_values`` of every family against the plain formula, and against any order of expansion."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmdata.families import REGISTRY, Family, family

#: Families whose values are scaled and not normalised.
SCALED = {"gemma4"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(params=[1, 2], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def plain(made: Family, patches: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Subtract, divide (or scale), round, and repeat for each frame: all patches at once."""
    mean, std = (torch.tensor(each).mul(255.0).view(1, 3, 1, 1) for each in (made.image_mean, made.image_std))
    values = patches.reshape(len(patches), 3, 1, made.patch_size**2).float()
    values = values * (1 / 255) if made.name in SCALED else (values - mean) / std
    return values.to(dtype).expand(-1, -1, made.temporal_patch_size, -1).flatten(1)


def all_values(made: Family) -> torch.Tensor:
    """Each of the 256 values in each channel."""
    side = made.patch_size**2
    return torch.arange(2 * side).remainder(256).to(torch.uint8).view(2, 1, side).expand(2, 3, side).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_all_values_of_all_channels(name: str, dtype: torch.dtype) -> None:
    made = family(name)
    patches = all_values(made)
    for channel in patches.view(2, 3, -1).unbind(1):
        assert len(channel.unique()) == 256
    found = made.pixel_values(patches, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, plain(made, patches, dtype))


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(REGISTRY)),
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([0, 1, 2, 63, 255, 256, 257, 511, 512, 513, 600]),
    layout=st.sampled_from(["contiguous", "every other row", "part of the columns", "transposed", "read-only"]),
    given_out=st.booleans(),
    seed=st.integers(0, 9),
)
def test_odd_sizes_and_layouts(
    name: str, dtype: torch.dtype, rows: int, layout: str, given_out: bool, seed: int
) -> None:
    made = family(name)
    width = made.patch_bytes
    shape = {
        "every other row": (2 * rows, width),
        "part of the columns": (rows, width + 5),
        "transposed": (width, rows),
    }
    drawn = torch.randint(
        0, 256, shape.get(layout, (rows, width)), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    patches = {"every other row": drawn[::2], "part of the columns": drawn[:, 3:-2], "transposed": drawn.T}.get(
        layout, drawn
    )
    if layout == "read-only":
        patches = torch.frombuffer(bytes(drawn.numpy().tobytes()) or b" ", dtype=torch.uint8)[: drawn.numel()]
        patches = patches.view(rows, width)
    before = patches.clone()
    out = torch.full((rows, width * made.temporal_patch_size), 7.0, dtype=dtype) if given_out else None
    found = made.pixel_values(patches, None if given_out else dtype, out)
    assert torch.equal(found, plain(made, patches, dtype))
    assert (found is out) == given_out
    assert torch.equal(patches, before)
