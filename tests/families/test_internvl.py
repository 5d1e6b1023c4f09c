"""InternVL's tiles: as many as its processor cuts, in their places, and numbers of them that are refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vlmdata
from tests.chat_rows import image_item, turn, write_jsonl
from tests.conftest import build_dataset, encoded_image
from tests.families.internvl_files import write_tokenizer
from tests.families.reference import TILE, internvl_images
from vlmdata.errors import UsageError
from vlmdata.families.internvl import FAMILY
from vlmdata.inspect.page.payload import sample_payload
from vlmdata.inspect.sample import describe_sample, rebuild_image
from vlmdata.media.decode import decode_image
from vlmdata.media.resize import resize_image
from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.conversation import Conversation, ImagePart, Message, TextPart
from vlmdata.preprocess.encode import Encoder
from vlmdata.preprocess.encode.image import encode_image, image_tokens
from vlmdata.preprocess.reject import RowRejected

sides = st.integers(1, 5_000) | st.sampled_from([448, 896, 1_344, 1_792, 2_240])


@given(height=sides, width=sides, most=st.integers(1, 40), least=st.integers(1, 12))
def test_as_many_tiles_as_the_processor_cuts(height: int, width: int, most: int, least: int) -> None:
    """Equal ratios and extreme sides among them."""
    least = min(least, most)
    size = FAMILY.image_size(height, width, least * TILE**2, most * TILE**2)
    views = FAMILY.views(height, width, size)
    assert len(views) == internvl_images(most, least).get_number_of_image_patches(height, width)
    assert len(views) <= FAMILY.most_views
    assert all(view.shape == (TILE, TILE) for view in views)
    assert views[-1].is_whole


def test_a_token_is_four_patches_beside_each_other() -> None:
    """The order of the model's pixel shuffle, so the inspector may show which pixels a token has."""
    from transformers.models.internvl.modeling_internvl import InternVLModel

    side = TILE // FAMILY.patch_size
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    places = torch.stack([rows, columns], dim=-1)[None]
    found = InternVLModel.pixel_shuffle(None, places, 0.5).reshape(side // 2, side // 2, 4, 2)
    for token in ((0, 0), (3, 5), (15, 2)):
        assert set(map(tuple, (found[token] // 2).tolist())) == {token}


def test_bounds_are_those_of_the_run_or_of_the_data() -> None:
    data = encoded_image(300, 300)

    def tiles(least: int, most: int, **asked: int) -> int:
        config = ImageConfig(least * TILE**2, most * TILE**2)
        return len(encode_image(ImagePart(data, **asked), config, FAMILY, "image"))

    assert tiles(1, 12) == 1
    assert tiles(4, 12) == tiles(1, 12, min_pixels=4 * TILE**2) == 5
    assert image_tokens([ImagePart(data)], PreprocessConfig(family="internvl"), 0) == 256


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((TILE**2, 41 * TILE**2), r"max_pixels 8,228,864 allows 41 tiles .* takes at most 40: 8028160"),
        (
            (300_000, 350_000),
            r"min_pixels 300,000 needs 2 tiles .* max_pixels 350,000 allows 1; give multiples of 200704",
        ),
        ((1_024, 65_536), r"min_pixels is 1024; it must be at least 200704, the smallest image of family internvl"),
    ],
)
def test_impossible_numbers_of_tiles_are_refused(bounds: tuple[int, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ImageConfig(*bounds).bounds(FAMILY)


def test_more_tiles_than_allowed_are_refused_in_the_data() -> None:
    part = ImagePart(encoded_image(), max_pixels=41 * TILE**2)
    message = (
        r"image: max_pixels is 8,228,864; at most 8,028,160 is possible in the family internvl\. Lower it, or drop"
    )
    with pytest.raises(RowRejected, match=message):
        encode_image(part, ImageConfig(), FAMILY, "image")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = write_tokenizer(tmp_path_factory.mktemp("internvl") / "tokenizer")
    return Encoder(PreprocessConfig(family="internvl"), load_tokenizer(folder, None, "internvl"))


@pytest.mark.parametrize("asked", ["?", "Can you look?"])
def test_tools_that_the_template_leaves_out_are_refused(encoder: Encoder, asked: str) -> None:
    """Also where a message names the tool."""
    tool = {"type": "function", "function": {"name": "look", "description": "Looks."}}
    talk = (Message("user", (TextPart(asked),)), Message("assistant", (TextPart("b"),)))
    with pytest.raises(
        RowRejected, match=r"left out the definition of the tool 'look'\. Drop the tools of the row, or"
    ):
        encoder.encode(Conversation(talk, tools=(tool,)))


def test_calls_that_the_template_leaves_out_are_refused(encoder: Encoder) -> None:
    calls = ({"name": "look", "arguments": {}},)
    talk = Conversation((Message("user", (TextPart("?"),)), Message("assistant", (), tool_calls=calls)))
    with pytest.raises(RowRejected, match=r"left out the call of the tool 'look' in assistant turn 1\. Drop rows"):
        encoder.encode(talk)


def test_tiles_are_shown_in_their_places(tmp_path: Path) -> None:
    row = {"messages": [turn("user", image_item(width=120, height=70), "?"), turn("assistant", "Noise.")]}
    made = build_dataset(
        write_jsonl(tmp_path / "rows.jsonl", [row]), tmp_path / "out", recipe="chat", family="internvl",
        tokenizer=write_tokenizer(tmp_path / "tokenizer"), image=ImageConfig(4 * TILE**2, 6 * TILE**2),
    )  # fmt: skip
    dataset = vlmdata.open_dataset(made)
    shown = describe_sample(dataset, 0)
    assert [image.tile for image in shown.images] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), None]
    assert [image["tile"] for image in sample_payload(shown)["images"]][4:] == [[1, 1], [1, 2], None]
    pixels = decode_image(encoded_image(width=120, height=70), 1 << 20).pixels
    canvas = resize_image(np.ascontiguousarray(pixels), 2 * TILE, 3 * TILE).transpose(1, 2, 0)
    for image in shown.images[:-1]:
        assert image.tile is not None
        (row_at, column), found = image.tile, rebuild_image(dataset[0], image.number, FAMILY)
        top, left = row_at * TILE, column * TILE
        assert np.array_equal(found, canvas[top : top + TILE, left : left + TILE])
        assert image.scale == pytest.approx(math.sqrt(3 * TILE / 120 * 2 * TILE / 70))  # of both sides
    assert shown.images[-1].scale == pytest.approx(math.sqrt(TILE / 120 * TILE / 70))
