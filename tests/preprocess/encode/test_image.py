"""From an image file to stored patches, and refusals as rejected rows."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tests.conftest import encoded_image
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.media.image_file import image_file
from vlmdata.preprocess.config import ImageConfig
from vlmdata.preprocess.conversation import ImagePart
from vlmdata.preprocess.encode import encode_image
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason


def test_what_media_refuses_rejects_the_row() -> None:
    with pytest.raises(RowRejected) as raised:
        encode_image(ImagePart(b"\0" * 500), ImageConfig(), FAMILY, "images[3]")
    assert raised.value.reason is Reason.NOT_AN_IMAGE
    assert raised.value.message.startswith("images[3]: 500 bytes, not an image")


@pytest.mark.parametrize(("width", "height"), [(402, 2), (2, 402), (603, 3)])
def test_aspect_ratio_over_200(width: int, height: int) -> None:
    with pytest.raises(RowRejected) as raised:
        encode_image(ImagePart(encoded_image(width, height)), ImageConfig(), FAMILY, "images[3]")
    assert raised.value.message == f"images[3]: {width}x{height} pixels: aspect ratio 201.0, over 200"
    assert raised.value.reason is Reason.ASPECT_RATIO


def test_aspect_ratio_of_200_is_allowed() -> None:
    (encoded,) = encode_image(ImagePart(encoded_image(400, 2)), ImageConfig(1024, 65536), FAMILY, "image")
    assert encoded.grid[2] > encoded.grid[1]


def test_an_image_of_the_right_size_is_stored_exactly() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    (encoded,) = encode_image(ImagePart(image_file(pixels, "png")), ImageConfig(1024, 65536), FAMILY, "image")
    assert encoded.grid == (1, 4, 6)
    assert np.array_equal(FAMILY.unpatchify(encoded.patches, 4, 6).transpose(1, 2, 0), pixels)


def test_origin_tells_what_the_file_held() -> None:
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (60, 40)).save(buffer, "JPEG", exif=exif)
    (encoded,) = encode_image(ImagePart(buffer.getvalue()), ImageConfig(1024, 65536), FAMILY, "image")
    assert encoded.origin == {"format": "JPEG", "mode": "L", "width": 60, "height": 40, "normalised": ["exif", "mode"]}
    assert encoded.grid[1] > encoded.grid[2]
