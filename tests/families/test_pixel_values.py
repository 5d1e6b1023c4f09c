"""``pixel_values`` of every family against the plain formula, and against any order of expansion."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmdata.families import REGISTRY, Family, family, pixel_values

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
@pytest.mark.parametrize("name", sorted({*REGISTRY} - {"processor"}))  # whose rows are no pixels
def test_all_values_of_all_channels(name: str, dtype: torch.dtype) -> None:
    made = family(name)
    patches = all_values(made)
    for channel in patches.view(2, 3, -1).unbind(1):
        assert len(channel.unique()) == 256
    found = made.pixel_values(patches, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, plain(made, patches, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("name", sorted(set(REGISTRY) - SCALED))
def test_all_pairs_of_neighbours_in_all_channels(name: str, copies: int, dtype: torch.dtype) -> None:
    made = family(name)
    copies = min(copies, made.temporal_patch_size)
    side = made.patch_size**2
    rows = 2 * -(-65_536 // side)
    pairs = torch.arange(rows * side // 2).remainder(65_536)
    found = torch.stack([pairs % 256, pairs // 256], 1).to(torch.uint8).view(rows, 1, side)
    # Each channel has them in another order, so the values of another channel are wrong.
    patches = torch.cat([found, found.flip(0), found.roll(5, 0)], 1).flatten(1)
    values = made.pixel_values(patches, dtype, copies=copies)
    one_frame = dataclasses.replace(made, temporal_patch_size=1)
    frames = plain(one_frame, patches, dtype).view(-1, copies, 3, side).transpose(1, 2)
    wanted = frames.expand(-1, -1, made.temporal_patch_size, -1).flatten(1)
    assert torch.equal(values, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "tables"), [("qwen3_5", 1), ("qwen2_5_vl", 3)])
def test_one_thread_looks_pairs_up(name: str, tables: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made = family(name)
    patches = all_values(made).repeat(200, 1)
    wanted = made.pixel_values(patches, dtype)
    table = pixel_values._values_of_pairs(made.image_mean, made.image_std, dtype)
    assert len(table) == tables * 65_536
    monkeypatch.setattr(pixel_values, "_values_of_pairs", lambda *_: torch.zeros_like(table))
    found = made.pixel_values(patches, dtype)
    assert torch.equal(found, torch.zeros_like(wanted) if torch.get_num_threads() == 1 else wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_patches_of_an_odd_number_of_pixels(dtype: torch.dtype) -> None:
    made = dataclasses.replace(family("qwen2_5_vl"), patch_size=7)
    patches = torch.arange(300 * 147).remainder(251).to(torch.uint8).view(300, 147)
    assert torch.equal(made.pixel_values(patches, dtype), plain(made, patches, dtype))


@pytest.mark.parametrize("patches_moved", [0, 1])
@pytest.mark.parametrize("out_moved", [0, 1])
def test_odd_addresses(patches_moved: int, out_moved: int) -> None:
    made = family("qwen3_5")
    drawn = torch.randint(0, 256, (300 * 768 + 1,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    patches = drawn[patches_moved:][: 300 * 768].view(300, 768)
    out = torch.empty(300 * 1536 + 1, dtype=torch.bfloat16)[out_moved:][: 300 * 1536].view(300, 1536)
    assert made.pixel_values(patches, out=out) is out
    assert torch.equal(out, plain(made, patches, torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inference_mode_leaves_nothing_behind(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixel_values, "_memory", threading.local())
    for kept in (pixel_values._values_of_pairs, pixel_values._of_pixels):
        kept.cache_clear()
    made = family("qwen2_5_vl")
    patches = all_values(made).repeat(200, 1)
    with torch.inference_mode():
        first = made.pixel_values(patches, dtype)
    found = made.pixel_values(patches, dtype)
    assert torch.equal(found, first)
    assert not found.is_inference()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(REGISTRY)),
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([0, 1, 2, 63, 255, 256, 257, 511, 512, 513, 600]),
    layout=st.sampled_from(
        ["contiguous", "every other row", "part of the columns", "transposed", "read-only", "odd address"]
    ),
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
    if layout == "odd address":
        patches = torch.cat([drawn.flatten()[:1], drawn.flatten()])[1:].view(rows, width)
    before = patches.clone()
    columns = width * made.temporal_patch_size
    room = torch.full((rows * columns + 1,), 7.0, dtype=dtype)[seed % 2 :]
    out = room[: rows * columns].view(rows, columns) if given_out else None
    found = made.pixel_values(patches, None if given_out else dtype, out)
    assert torch.equal(found, plain(made, patches, dtype))
    assert (found is out) == given_out
    assert torch.equal(patches, before)
