"""Identifies files that Pillow cannot open, by their first bytes, with a remedy."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vlmdata.reasons import Reason
from vlmdata.wording import excerpt

#: Brands of ISO media files with images; those of videos are too many to list.
_HEIC = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"})
_AVIF = frozenset({b"avif", b"avis"})
_HEIF = frozenset({b"mif1", b"mif2", b"msf1", b"miaf"})
#: An SVG or HTML tag may come after a declaration, comments and white space.
_TEXT_HEAD = 1024
#: Bytes of a packet in an MPEG transport stream; each begins with the same byte.
_MPEG_PACKET = 188


@dataclass(frozen=True)
class Found:
    """The kind of a file."""

    reason: Reason  # UNSUPPORTED_IMAGE for images in unsupported formats, NOT_AN_IMAGE for everything else
    name: str  # the format, with its article
    remedy: str  # what the user can do, as a sentence


def _picture(name: str, remedy: str) -> Found:
    return Found(Reason.UNSUPPORTED_IMAGE, name, remedy)


def _other(name: str, remedy: str) -> Found:
    return Found(Reason.NOT_AN_IMAGE, name, remedy)


HEIC = _picture("a HEIC image", "Convert it to JPEG or PNG: magick a.heic a.jpg")
HEIF = _picture("a HEIF image", "Convert it to JPEG or PNG: magick a.heif a.jpg")
AVIF = _picture(
    "an AVIF image that does not open",
    "It is damaged, or the installed Pillow cannot read AVIF. Convert it to JPEG or PNG: magick a.avif a.png",
)
JPEG_XL = _picture("a JPEG XL image", "Convert it to PNG: djxl a.jxl a.png")
RAW = _picture("a camera's raw image", "Convert it to JPEG or PNG with a raw developer")
SVG = _picture("an SVG drawing", "Render it to PNG: rsvg-convert a.svg -o a.png")
PDF = _picture("a PDF document", "Render its pages to images: pdftoppm -png a.pdf a")
POSTSCRIPT = _picture("a PostScript (EPS) drawing", "Render it to PNG: gs -o a.png -sDEVICE=png16m -r150 a.eps")
METAFILE = _picture("a Windows metafile (WMF or EMF)", "Render it to PNG")
TEXTURE = _picture("a texture (DDS or BLP) that does not open", "Convert it to PNG: magick a.dds a.png")
PHOTOSHOP = _picture("a Photoshop file that does not open", "Convert it to 8-bit PNG: magick 'a.psd[0]' a.png")
VIDEO = _other("a video", "Extract its frames: ffmpeg -i a.mp4 a-%04d.png")
AUDIO = _other("a sound file", "Remove it from the data")
HTML = _other("a web page (HTML)", "It is probably an error page saved in place of the file; download the file again")
GIT_LFS = _other("a Git LFS pointer", "Get the file itself: git lfs pull")
ARCHIVE = _other("a compressed file or archive", "Unpack it first")
DATA = _other("a file of scientific data", "Convert what it shows to PNG")

#: Formats that Pillow identifies but cannot decode itself: some have no decoder, and others start a program that
#: another machine may lack.
IDENTIFIED_ONLY: Mapping[str, Found] = {
    "EPS": POSTSCRIPT,
    "WMF": METAFILE,
    "MPEG": VIDEO,
    "BUFR": DATA,
    "GRIB": DATA,
    "HDF5": DATA,
}
_STARTS: Mapping[bytes, Found] = {
    b"\xff\x0a": JPEG_XL,
    b"\x00\x00\x00\x0cJXL \r\n\x87\n": JPEG_XL,
    b"%!PS": POSTSCRIPT,
    b"DDS ": TEXTURE,
    b"BLP1": TEXTURE,
    b"BLP2": TEXTURE,
    b"8BPS": PHOTOSHOP,
    b"8BPB": PHOTOSHOP,
    b"\xc5\xd0\xd3\xc6": POSTSCRIPT,
    b"\x1a\x45\xdf\xa3": VIDEO,  # Matroska and WebM
    b"FLV\x01": VIDEO,
    b"\x00\x00\x01\xba": VIDEO,
    b"\x00\x00\x01\xb3": VIDEO,
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": VIDEO,  # Windows Media
    b"OggS": AUDIO,
    b"ID3": AUDIO,
    b"fLaC": AUDIO,
    b"version https://git-lfs.github.com/spec/": GIT_LFS,
    b"\x1f\x8b": ARCHIVE,
    b"PK\x03\x04": ARCHIVE,
    b"7z\xbc\xaf\x27\x1c": ARCHIVE,
    b"\x28\xb5\x2f\xfd": ARCHIVE,
}
_RIFF: Mapping[bytes, Found] = {b"AVI ": VIDEO, b"WAVE": AUDIO}


def recognise(data: bytes) -> Found | None:
    """Identifies bytes by their signature; None if unknown."""
    for start, found in _STARTS.items():
        if data.startswith(start):
            return found
    if data[4:8] == b"ftyp":
        return _iso_media(data)
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12])
    if data[:1] == data[_MPEG_PACKET : _MPEG_PACKET + 1] == b"\x47":  # MPEG transport stream
        return VIDEO
    head = data[:_TEXT_HEAD].lower()
    if b"%pdf-" in head:
        return PDF
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        if b"<svg" in head:
            return SVG
        if b"<html" in head or b"<!doctype html" in head:
            return HTML
    return _text(data)


def _iso_media(data: bytes) -> Found:
    brands = list(_brands(data))
    if _AVIF.intersection(brands):
        return AVIF
    if _HEIC.intersection(brands):
        return HEIC
    if _HEIF.intersection(brands):
        return HEIF
    return RAW if brands[0] == b"crx " else VIDEO


def _brands(data: bytes) -> Iterator[bytes]:
    """Yields the major brand, then the compatible ones."""
    yield data[8:12]
    end = min(struct.unpack(">I", data[:4])[0], len(data))
    for at in range(16, end - 3, 4):
        yield data[at : at + 4]


def _text(data: bytes) -> Found | None:
    try:
        text = data[:_TEXT_HEAD].decode("ascii")
    except UnicodeDecodeError:
        return None
    if not text.replace("\n", "").replace("\r", "").replace("\t", "").isprintable():
        return None
    return _other(f"text: {excerpt(text)!r}", "Store the file itself, or its path as text instead of bytes")
