"""Files that are not read as images: the message names what they are, and what to do."""

from __future__ import annotations

import gzip
import io
import struct
import wave
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.conftest import encoded_image
from vlmdata.media.decode import decode_image
from vlmdata.media.error import MediaError
from vlmdata.media.signatures import recognise
from vlmdata.reasons import Reason


def iso_media(major: bytes, *compatible: bytes) -> bytes:
    """The first box of an ISO media file, as ISO/IEC 14496-12 has it, and the beginning of another."""
    body = major + b"\0\0\0\0" + b"".join(compatible)
    return struct.pack(">I", 8 + len(body)) + b"ftyp" + body + struct.pack(">I", 4096) + b"meta" + b"\0" * 40


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.png", encoded_image())
    return buffer.getvalue()


def sound() -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(b"\0" * 100)
    return buffer.getvalue()


def postscript() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "EPS")
    return buffer.getvalue()


def pdf() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PDF")
    return buffer.getvalue()


#: The first bytes of files made with libheif (through pillow-heif 1.8), libjxl and FFmpeg (through PyAV).
HEIC = bytes.fromhex("0000001c6674797068656963000000006d696631686569636d696166000001566d65746100000000")
JPEG_XL = bytes.fromhex("ff0a4f40240800010018004b188b158201")
JPEG_XL_BOX = bytes.fromhex("0000000c4a584c200d0a870a00000014667479706a786c20000000006a786c20000000196a786c63")
MP4 = bytes.fromhex("0000001c6674797069736f6d0000020069736f6d69736f326d703431000000086672656500000091")
QUICKTIME = bytes.fromhex("00000014667479707174202000000200717420200000000877696465000000916d646174000001b3")
MATROSKA = bytes.fromhex("1a45dfa3a34286810142f7810142f2810442f381084282886d6174726f736b61428781044285")
MPEG = bytes.fromhex("000001ba2100010001c33367000001bb0009c333670021ffe0e0e6000001e000ec3100037bb11100")
AVI = bytes.fromhex("5249464662170000415649204c495354ec1100006864726c6176696838000000409c000000000000")
FLASH = bytes.fromhex("464c5601010000000900000000120000b70000000000000002000a6f6e4d65746144617461080000")
TRANSPORT = (b"\x47\x40\x11\x10\x00\x42\xf0\x25" + b"\xff" * 180) * 3

PICTURE, OTHER = Reason.UNSUPPORTED_IMAGE, Reason.NOT_AN_IMAGE


@pytest.mark.parametrize(
    ("data", "reason", "words"),
    [
        (HEIC, PICTURE, "a HEIC image (40 bytes), which is not supported. Convert it to JPEG or PNG: magick a.heic"),
        (iso_media(b"heix", b"mif1"), PICTURE, "a HEIC image"),
        (iso_media(b"mif1", b"mif1", b"heic"), PICTURE, "a HEIC image"),
        (iso_media(b"mif1", b"mif1", b"miaf"), PICTURE, "a HEIF image"),
        (iso_media(b"avif", b"avif", b"mif1"), PICTURE, "an AVIF image that does not open"),
        (iso_media(b"mif1", b"avis"), PICTURE, "an AVIF image that does not open"),
        (iso_media(b"crx ", b"isom"), PICTURE, "a camera's raw image"),
        (JPEG_XL, PICTURE, "a JPEG XL image (17 bytes), which is not supported. Convert it to PNG: djxl"),
        (JPEG_XL_BOX, PICTURE, "a JPEG XL image"),
        (pdf(), PICTURE, "supported. Render its pages to images"),
        (b"\n" * 20 + pdf(), PICTURE, "a PDF document"),
        (postscript(), PICTURE, "a PostScript (EPS) drawing"),
        (
            b'<svg xmlns="http://www.w3.org/2000/svg"/>',
            PICTURE,
            "an SVG drawing (41 bytes), which is not supported. Render it to PNG",
        ),
        (b"\xef\xbb\xbf<?xml version='1.0'?>\n<!-- drawn -->\n<svg/>", PICTURE, "an SVG drawing"),
        *[
            (data, OTHER, f"a video ({len(data)} bytes), not an image. Extract its frames")
            for data in (MP4, QUICKTIME, MATROSKA, MPEG, AVI, FLASH, TRANSPORT)
        ],
        (b"\x00\x00\x01\xb3\x16\x01\x20\x13" + b"\xff" * 60, OTHER, "a video"),  # Pillow identifies this one
        (sound(), OTHER, "a sound file"),
        (b"<!DOCTYPE html>\n<html><head><title>404</title>", OTHER, "a web page (HTML)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", OTHER, "a Git LFS pointer"),
        (gzip.compress(encoded_image()), OTHER, "a compressed file or archive"),
        (zipped(), OTHER, "a compressed file or archive"),
        (b"images/7.png", OTHER, "text: 'images/7.png' (12 bytes), not an image. Store the file itself"),
        (b"\x89PNG\r\n\x1a\n", OTHER, "8 bytes, not an image that can be opened; they begin with 89 50 4e 47"),
        (b"\xfe", OTHER, "1 byte, not an image that can be opened; they begin with fe"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_format_and_the_remedy_are_named(data: bytes, reason: Reason, words: str) -> None:
    with pytest.raises(MediaError) as raised:
        decode_image(data, 1_000_000, "images[3]")
    assert raised.value.reason is reason
    assert raised.value.message.startswith("images[3]: ")
    assert words in raised.value.message


def test_avif_that_opens_is_an_image() -> None:
    assert decode_image(encoded_image(format="AVIF"), 1_000_000).file_format == "AVIF"


@given(st.binary(max_size=64), st.sampled_from([b"", b"\0\0\0\x18ftyp", b"RIFF", b"<", b"\xff\x0a"]))
def test_any_bytes_are_named_or_not_without_an_error(data: bytes, start: bytes) -> None:
    found = recognise(start + data)
    assert found is None or (found.name and found.remedy)
