"""Plain JPEG files have Pillow's pixels, whichever library decodes them; damaged and unusual ones go to Pillow."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vlmdata.media.decode import decode_image
from vlmdata.media.error import MediaError
from vlmdata.media.jpeg import decode_plain_jpeg


def jpeg(height: int = 45, width: int = 67, mode: str = "RGB", smooth: bool = False, **options: Any) -> bytes:
    random, shape = np.random.default_rng(height * width), (height, width, 3)
    noise = np.cumsum(random.normal(0, 3, shape), 1) + 128 if smooth else random.integers(0, 256, shape)
    buffer = io.BytesIO()
    Image.fromarray(noise.clip(0, 255).astype(np.uint8)).convert(mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def plain(data: bytes) -> npt.NDArray[np.uint8] | None:
    return decode_plain_jpeg(data, Image.open(io.BytesIO(data)))


files = st.builds(
    jpeg,
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    smooth=st.booleans(),
    quality=st.sampled_from([1, 10, 50, 75, 90, 100]),
    subsampling=st.sampled_from([0, 1, 2]),
    optimize=st.booleans(),
    restart_marker_blocks=st.sampled_from([0, 1, 5]),
)


@given(files)
def test_plain_files_have_the_pixels_of_pillow(data: bytes) -> None:
    found = plain(data)
    assert found is not None
    assert np.array_equal(found, np.asarray(Image.open(io.BytesIO(data))))
    decoded = decode_image(data, 10_000)
    assert np.array_equal(decoded.memory, found)
    assert (decoded.file_format, decoded.mode, decoded.steps) == ("JPEG", "RGB", ())


@given(files, st.data())
def test_damaged_files_have_the_pixels_of_pillow_or_none(data: bytes, draw: st.DataObject) -> None:
    """Bytes changed, left out and cut off anywhere after the first two."""
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        place = draw.draw(st.integers(2, len(damaged) - 3))
        if draw.draw(st.booleans()):
            damaged[place] = draw.draw(st.integers(0, 255))
        else:
            del damaged[place : place + draw.draw(st.integers(0, 20))]
        damaged += b"\xff\xd9" * (not damaged.endswith(b"\xff\xd9"))
        if len(damaged) < 8:
            return
    try:
        image = Image.open(io.BytesIO(damaged))
    except (OSError, SyntaxError):
        return
    found = decode_plain_jpeg(bytes(damaged), image)
    assert found is None or np.array_equal(found, np.asarray(image))


@pytest.mark.parametrize(
    "data",
    [
        jpeg(mode="L"),
        jpeg(mode="CMYK"),
        jpeg(progressive=True),
        jpeg()[:-2],
        jpeg() + b"more",
    ],
    ids=["gray", "cmyk", "progressive", "truncated", "trailing"],
)
def test_other_files_are_left_to_pillow(data: bytes) -> None:
    assert plain(data) is None


def test_a_colour_profile_is_not_applied() -> None:
    assert np.array_equal(decode_image(jpeg(icc_profile=b"\0" * 200), 10_000).pixels, plain(jpeg()))


def test_the_orientation_of_a_plain_file_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    upright, decoded = plain(jpeg()), decode_image(jpeg(exif=exif), 10_000)
    assert upright is not None
    assert decoded.steps == ("exif",)
    assert np.array_equal(decoded.pixels, np.rot90(upright, -1))


def test_a_truncated_file_is_rejected_in_the_words_of_pillow() -> None:
    with pytest.raises(MediaError, match="does not decode: OSError"):
        decode_image(jpeg()[:-400], 10_000)


def test_warnings_of_libjpeg_are_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """Damage that Pillow reads past: half of the pixels are missing."""
    damaged = jpeg()
    damaged = damaged[: len(damaged) // 2] + b"\xff\xd9"
    assert plain(damaged) is None
    assert np.array_equal(decode_image(damaged, 10_000).pixels, np.asarray(Image.open(io.BytesIO(damaged))))
    os.write(2, b"the file beneath")
    assert capfd.readouterr().err == "the file beneath"
