"""Every family of the registry against transformers: sizes, patches, pixels and positions."""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.conftest import SHARED_DATA
from tests.families.reference import FAMILIES, OTHERS, bounds, image_inputs, rope_index
from vlmdata.families import REGISTRY, Family, family
from vlmdata.families.base import AspectRatioError
from vlmdata.families.positions import locate_blocks
from vlmdata.media.decode import decode_image
from vlmdata.media.resize import resize_to_patches

IMAGE = 9

#: The general family is compared with processors in tests/preprocess/processor.
every_family = pytest.mark.parametrize("name", sorted({*REGISTRY} - {"processor"}))
sides = st.integers(1, 400)


def test_every_family_has_a_reference() -> None:
    assert FAMILIES.keys() | OTHERS.keys() == {*REGISTRY} - {"processor"}


def stored(made: Family, pixels: np.ndarray, min_pixels: int, max_pixels: int) -> tuple[np.ndarray, np.ndarray]:
    """Patches and grids of an image, as preprocessing makes them."""
    height, width = pixels.shape[:2]
    views = made.views(height, width, made.image_size(height, width, min_pixels, max_pixels))
    assert len(views) <= made.most_views
    patches = [resize_to_patches(pixels, *view.size, made, part=view.part) for view in views]
    grids = [[1, rows // made.patch_size, columns // made.patch_size] for rows, columns in (v.shape for v in views)]
    return np.concatenate(patches), np.array(grids)


def assert_equals_the_processor(name: str, image: Image.Image, min_pixels: int, max_pixels: int) -> None:
    theirs = image_inputs(name, image, min_pixels, max_pixels)
    made = family(name)
    patches, grids = stored(made, np.asarray(image), min_pixels, max_pixels)
    ours = made.image_inputs(made.pixel_values(torch.from_numpy(patches)), torch.from_numpy(grids))
    assert ours.keys() == theirs.keys()
    for argument, value in ours.items():
        assert torch.equal(value, theirs[argument]), argument


@every_family
@settings(max_examples=25)
@given(height=sides, width=sides, seed=st.integers(0, 3))
def test_images_equal_those_of_the_processor_bit_for_bit(name: str, height: int, width: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    if max(height, width) / min(height, width) > family(name).max_aspect_ratio:
        with pytest.raises(AspectRatioError, match="aspect ratio"):
            stored(family(name), pixels, *bounds(name))
        return
    assert_equals_the_processor(name, Image.fromarray(pixels), *bounds(name))


def puts_on_white() -> bool:
    """Whether image processors of the installed transformers put opened images with transparency on white."""
    clear = image_inputs("qwen3_5", Image.new("RGBA", (64, 64), (9, 9, 9, 0)), *bounds("qwen3_5"))
    return bool((clear["pixel_values"] == 1).all())


@pytest.mark.skipif(not puts_on_white(), reason="this transformers drops transparency")
@every_family
@pytest.mark.parametrize(("mode", "keywords"), [("RGBA", {}), ("LA", {}), ("P", {"transparency": 3})])
def test_transparency_is_that_of_the_processor(name: str, mode: str, keywords: dict[str, int]) -> None:
    drawn = np.random.default_rng(0).integers(0, 256, (90, 70, 4), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(drawn, "RGBA").convert(mode).save(file, "PNG", **keywords)
    theirs = image_inputs(name, Image.open(file), *bounds(name))
    ours = image_inputs(name, Image.fromarray(decode_image(file.getvalue(), 1 << 20).pixels), *bounds(name))
    assert all(torch.equal(value, theirs[argument]) for argument, value in ours.items())


@every_family
def test_real_receipts_equal_those_of_the_processor(name: str) -> None:
    if not SHARED_DATA.exists():
        pytest.skip("the shared receipts are not here")
    import pyarrow.parquet as pq

    table = pq.read_table(SHARED_DATA / "receipts_real/data/train-00000-of-00001.parquet", columns=["image"])
    for row in table.slice(0, 2).to_pylist():
        image = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")
        assert_equals_the_processor(name, image, *(bounds(name) if name in OTHERS else (200_704, 401_408)))


@every_family
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 6)),
        max_size=4,
    ),
    st.integers(1, 5),
)
def test_positions_equal_the_models(name: str, images: list[tuple[int, int, int]], tail: int) -> None:
    """Images with one text token or more between them: the reference joins two that touch."""
    made, ids, grids = family(name), [], []
    for text, rows, columns in images:
        grids.append([1, rows * made.merge_size, columns * made.merge_size])
        ids += [1] * (text + 1) + [IMAGE] * (rows * columns)
    ids += [1] * tail
    array, grid = np.array(ids), np.array(grids, np.int64).reshape(-1, 3)
    counts = made.token_counts(grid)
    starts = locate_blocks(array, counts, np.full(counts.sum(), IMAGE), (IMAGE,))
    ours = made.position_ids(len(ids), starts, grid)
    tokens = torch.from_numpy(array)[None]
    if name in OTHERS:
        theirs = torch.arange(len(ids))[None, None]  # the models count tokens
    else:
        theirs = rope_index(name, tokens, (tokens == IMAGE).long(), torch.from_numpy(grid) if grids else None)
    assert np.array_equal(ours, theirs[:, 0].numpy())


@every_family
@given(height=st.integers(1, 4), width=st.integers(1, 4), seed=st.integers(0, 3))
def test_unpatchify_gives_the_image_back(name: str, height: int, width: int, seed: int) -> None:
    made = family(name)
    shape = (3, height * made.factor, width * made.factor)
    image = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    patches = made.patchify(image)
    assert patches.shape == (math.prod(shape[1:]) // made.patch_size**2, made.patch_bytes)
    assert np.array_equal(made.unpatchify(patches, shape[1] // made.patch_size, shape[2] // made.patch_size), image)


@every_family
def test_pixels_of_no_patches(name: str) -> None:
    made = family(name)
    values = made.pixel_values(torch.zeros(0, made.patch_bytes, dtype=torch.uint8), torch.bfloat16)
    assert values.shape == (0, made.patch_bytes * made.temporal_patch_size)


def test_an_unknown_family_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=f"--family llava: unknown family. Known: {', '.join(REGISTRY)}"):
        family("llava")


@every_family
def test_a_family_comes_back_from_its_pickle_equal_and_once(name: str) -> None:
    made = family(name)
    sent = pickle.dumps([made, replace(made, min_pixels=2 * made.min_pixels)])
    same, other = pickle.loads(sent)
    assert (type(same), same) == (type(made), made)
    assert other == replace(made, min_pixels=2 * made.min_pixels)
    assert pickle.loads(sent)[0] is same  # workers get one with each request
