"""What image files hold, brought to upright 8-bit RGB; and what is refused, by name."""

from __future__ import annotations

import io
import os
import re
import struct
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import encoded_image
from vlmdata.families import REGISTRY, family
from vlmdata.media.decode import DecodedImage, _pillow_limit, decode_image
from vlmdata.media.error import MediaError
from vlmdata.media.resize import resize_image, resize_to_patches
from vlmdata.reasons import Reason

LIMIT = 1_000_000

every_family = pytest.mark.parametrize("name", sorted(REGISTRY))


def save(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


def decode(data: bytes, limit: int = LIMIT) -> DecodedImage:
    return decode_image(data, limit)


def rejection(data: bytes, limit: int = LIMIT) -> MediaError:
    with pytest.raises(MediaError) as raised:
        decode_image(data, limit, "images[3]")
    assert raised.value.message.startswith("images[3]: ")
    return raised.value


def gradient(height: int = 40, width: int = 60) -> np.ndarray:
    ramp = np.linspace(0, 255, height * width).reshape(height, width)
    return np.stack([ramp, ramp[::-1], ramp[:, ::-1]], axis=2).round().astype(np.uint8)


# --- normalisation ----------------------------------------------------------------------------------------------


def test_rgb_is_left_as_it_is() -> None:
    decoded = decode(save(Image.fromarray(gradient()), "PNG"))
    assert np.array_equal(decoded.pixels, gradient())
    assert (decoded.steps, decoded.mode, decoded.file_format, decoded.file_size) == ((), "RGB", "PNG", (60, 40))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    """The eight orientations, against numpy's own turns."""
    stored = gradient()
    upright = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: np.rot90(stored, -1),
        7: stored[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(stored),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = decode(save(Image.fromarray(stored), "PNG", exif=exif))
    assert np.array_equal(decoded.pixels, upright)
    assert decoded.file_size == (60, 40)
    assert ("exif" in decoded.steps) == (orientation != 1)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_a_senseless_orientation_is_ignored(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert decode(save(Image.fromarray(gradient()), "PNG", exif=exif)).pixels.shape == (40, 60, 3)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_composited_on_white(mode: str) -> None:
    image = Image.new(mode, (4, 1), (200, 100, 50, 0) if mode == "RGBA" else (80, 0))
    image.putpixel((1, 0), (200, 100, 50, 255) if mode == "RGBA" else (80, 255))
    image.putpixel((2, 0), (0, 0, 0, 128) if mode == "RGBA" else (0, 128))
    decoded = decode(save(image, "PNG"))
    opaque = [200, 100, 50] if mode == "RGBA" else [80, 80, 80]
    assert decoded.pixels[0, :3].tolist() == [[255] * 3, opaque, [127] * 3]
    assert "alpha" in decoded.steps


def test_palette_with_and_without_transparency() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 0])
    image.putpixel((1, 0), 1)
    assert decode(save(image, "PNG")).pixels[0].tolist() == [[10, 20, 30], [200, 100, 0]]
    assert decode(save(image, "PNG", transparency=1)).pixels[0].tolist() == [[10, 20, 30], [255, 255, 255]]


def test_a_transparent_colour_key_is_white() -> None:
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (9, 9, 9))
    assert decode(save(image, "PNG", transparency=(1, 2, 3))).pixels[0].tolist() == [[255] * 3, [9] * 3]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = Image.fromarray(gradient()).convert(mode)
    data = save(
        image, "PNG" if mode in "1LP" else "JPEG", **({} if mode in "1LP" else {"quality": 100, "subsampling": 0})
    )
    decoded = decode(data)
    expected = np.asarray(image.convert("RGB")).astype(int)
    assert decoded.pixels.shape == (40, 60, 3)
    assert np.abs(decoded.pixels.astype(int) - expected).mean() < 2


def test_sixteen_bit_gray_is_scaled_not_clipped() -> None:
    """Pillow's own convert("L") clips at 255, which turns a document white."""
    deep = np.array([[0, 128, 257, 32768, 65535]], dtype=np.uint16)
    decoded = decode(save(Image.fromarray(deep), "PNG"))
    assert decoded.pixels[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    assert "depth" in decoded.steps


@pytest.mark.parametrize(("top", "scale"), [(1.0, 255.0), (255.0, 1.0), (65535.0, 255 / 65535)])
def test_float_images_are_scaled_by_their_range(top: float, scale: float) -> None:
    values = np.linspace(0, top, 64, dtype=np.float32).reshape(8, 8)
    decoded = decode(save(Image.fromarray(values), "TIFF"))
    assert np.array_equal(decoded.pixels[..., 0], np.rint(values.astype(np.float64) * scale).astype(np.uint8))


@pytest.mark.parametrize("value", [-5.0, 1e9, float("nan"), float("inf")])
def test_float_values_without_a_meaning_are_rejected(value: float) -> None:
    values = np.full((8, 8), 0.5, dtype=np.float32)
    values[3, 3] = value
    assert rejection(save(Image.fromarray(values), "TIFF")).reason is Reason.PIXEL_RANGE


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_of_an_animation(format: str) -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if format == "WEBP" else {}
    decoded = decode(save(frames[0], format, save_all=True, append_images=frames[1:], **options))
    assert decoded.pixels[8, 8].tolist() == [255, 0, 0]
    assert "first_frame" in decoded.steps


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_truncated_files(format: str, share: float) -> None:
    data = save(Image.fromarray(gradient(200, 200)), format)
    error = rejection(data[: int(len(data) * share)])
    assert error.reason in (Reason.TRUNCATED_IMAGE, Reason.NOT_AN_IMAGE)


@pytest.mark.parametrize("data", [b"not an image at all", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"\0" * 500])
def test_bytes_that_are_no_image(data: bytes) -> None:
    assert rejection(data).reason in (Reason.NOT_AN_IMAGE, Reason.TRUNCATED_IMAGE)


def psd(depth: int = 8, layers: bytes = b"") -> bytes:
    """A Photoshop file of 5x4 grey pixels in three planes, with a section of layers."""
    header = struct.pack(">4sH6xHIIHH", b"8BPS", 1, 3, 4, 5, depth, 3)
    section = struct.pack(">I", len(layers)) + layers if layers else b""
    return header + bytes(8) + struct.pack(">I", len(section)) + section + bytes(2) + b"\x80" * 60


def test_the_picture_of_a_psd_whose_layers_cannot_be_read() -> None:
    for data in (psd(), psd(layers=struct.pack(">h", 1000) + bytes(50))):
        image = decode(data)
        assert (image.file_format, image.file_size, image.pixels.shape) == ("PSD", (5, 4), (4, 5, 3))
        assert (image.pixels == 0x80).all()


@pytest.mark.parametrize("form", ["dds", "psd"])
def test_forms_that_pillow_does_not_read_are_named(form: str) -> None:
    dds = bytearray(save(Image.new("RGB", (8, 8)), "DDS"))
    dds[80:88] = struct.pack("<I4s", 4, b"ABCD")
    error = rejection(bytes(dds) if form == "dds" else psd(depth=32))
    assert error.reason is Reason.UNSUPPORTED_IMAGE
    assert re.search(r"(a texture .*|a Photoshop file) that does not open .*Convert it to", str(error))


def test_no_bytes() -> None:
    assert rejection(b"").reason is Reason.EMPTY_IMAGE


def png_claiming(width: int, height: int) -> bytes:
    """A PNG whose header claims a size its few bytes cannot have."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [1001, 1300, 1500, 60_000])
def test_decompression_bombs_are_refused_before_decoding(side: int) -> None:
    """Both below and above twice the limit, where Pillow itself starts to raise."""
    error = rejection(png_claiming(side, side))
    assert error.reason is Reason.IMAGE_TOO_LARGE
    assert f"{side * side} pixels, over the limit of {LIMIT} (--max-source-pixels)" in error.message


def test_the_limit_is_inclusive_and_pillows_own_setting_is_put_back() -> None:
    before = Image.MAX_IMAGE_PIXELS
    assert decode(encoded_image(50, 50), limit=2500).pixels.shape == (50, 50, 3)
    assert rejection(encoded_image(50, 51), limit=2500).reason is Reason.IMAGE_TOO_LARGE
    assert before == Image.MAX_IMAGE_PIXELS


def test_zero_size() -> None:
    assert rejection(png_claiming(0, 10)).reason in (Reason.EMPTY_IMAGE, Reason.TRUNCATED_IMAGE, Reason.NOT_AN_IMAGE)


# --- resizing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(40, 60), (333, 517), (1296, 864), (33, 1200)])
def test_resize_equals_torchvision_on_a_plain_tensor(size: tuple[int, int]) -> None:
    """We hand the kernel channels-last memory to spare a copy; the bytes must not change for it."""
    import torch
    from torchvision.transforms.v2 import InterpolationMode, functional

    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    plain = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
    expected = functional.resize(plain, [96, 160], interpolation=InterpolationMode.BICUBIC, antialias=True)
    assert np.array_equal(resize_image(pixels, 96, 160), expected.numpy())


@every_family
@pytest.mark.parametrize("same_size", [False, True])
def test_patches_of_four_bytes_a_pixel_are_those_of_the_resized_image(name: str, same_size: bool) -> None:
    made = family(name)
    height, width = 3 * made.factor, 5 * made.factor
    pixels = np.random.default_rng(1).integers(
        0, 256, (height, width, 3) if same_size else (333, 517, 3), dtype=np.uint8
    )
    expected = made.patchify(resize_image(pixels, height, width))
    fourth = np.random.default_rng(2).integers(0, 256, (*pixels.shape[:2], 1), dtype=np.uint8)
    for memory in (pixels, np.concatenate([pixels, fourth], axis=2)):
        assert np.array_equal(resize_to_patches(memory, height, width, made), expected)
        out = np.empty_like(expected)
        assert resize_to_patches(memory, height, width, made, out) is out
        assert np.array_equal(out, expected)


def test_patches_of_four_bytes_a_pixel_without_vector_instructions() -> None:
    code = """
import numpy as np
from tests.media.test_decode import test_patches_of_four_bytes_a_pixel_are_those_of_the_resized_image as check
check("qwen3_5", False)
import torch
print(torch.backends.cpu.get_cpu_capability())
"""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["DEFAULT"]


@pytest.mark.parametrize("size", [(60, 40), (4096, 1025)])
def test_memory_is_pillows_own_unless_it_is_in_blocks(size: tuple[int, int]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    decoded = decode(save(Image.fromarray(noise), "PPM"), limit=10**7)
    assert np.array_equal(decoded.pixels, noise)
    assert decoded.memory.shape[2] == (4 if size == (60, 40) else 3)
    assert not decoded.memory.flags.writeable


def test_pillows_limit_stays_until_the_last_thread_has_decoded() -> None:
    before = Image.MAX_IMAGE_PIXELS
    with _pillow_limit(7):
        with _pillow_limit(7):
            pass
        assert Image.MAX_IMAGE_PIXELS == 7
    assert before == Image.MAX_IMAGE_PIXELS
